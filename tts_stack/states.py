"""Hidden states of a run's frozen LLM over its corpus: stage 1 computes, stage 2 reads them."""

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stage1_llm.checkpoint import LoadedLLM, load_llm
from stage1_llm.dataset import make_sample
from stage1_llm.hidden_states import teacher_forced_states
from stage1_llm.merge import require_fresh_merge
from stage2_vocoder.config import VocoderTrainConfig
from stage2_vocoder.live_states import LiveStates
from stage2_vocoder.state_folder import clear_store, found_identity, store_bytes
from stage2_vocoder.states import (
    ROWS_PER_SHARD,
    STATE_DTYPES,
    STATES_FILE,
    SplitStates,
    StateIdentity,
    StatesInfo,
    StatesReader,
    StateStore,
    StateWriter,
    corpus_hash,
)
from stage2_vocoder.train import states_folder
from tts_stack.contract import PromptSpec
from tts_stack.errors import CheckpointError, DataError
from tts_stack.processes import is_main_process
from tts_stack.records import TokenizedUtterance
from tts_stack.shards import Corpus

logger = logging.getLogger(__name__)
SHARD_BYTES = 128_000_000  # of states in memory at once, about
SHOWN_IDS = 5  # of left-out utterances in a log line
POLL_S = 0.5  # between looks at what another process writes
SPARE_SHARE = 1.05  # of the disk space wanted
Progress = Callable[[int, int], None]


def no_progress(done: int, total: int) -> None:
    """Show nothing."""


@dataclass(frozen=True)
class StatesReport:
    """What an extraction left on disk."""

    folder: Path
    llm_sha256: str
    num_rows: int  # of all splits
    num_new: int  # written by this call
    num_tokens: int
    width: int  # values a token
    num_bytes: int
    left_out: tuple[str, ...]  # ids of utterances without a symbol that the voice knows

    def describe(self) -> str:
        """One line for the terminal."""
        size = self.num_bytes / 1e6
        left = f", {len(self.left_out)} utterances left out" if self.left_out else ""
        return (
            f"{self.folder}: hidden states of {self.num_rows - len(self.left_out)} utterances, "
            f"{self.num_tokens} tokens x {self.width} values, {size:.1f} MB "
            f"({self.num_new} utterances new{left}); LLM {self.llm_sha256[:12]}"
        )


def ensure_states(
    run: Path,
    corpus_path: Path,
    *,
    device: torch.device,
    dtype: str = "float16",
    on_progress: Progress = no_progress,
) -> str:
    """`extract_states` for whoever only needs the SHA-256 of the LLM."""
    found = extract_states(run, corpus_path, device=device, dtype=dtype, on_progress=on_progress)
    return found.llm_sha256


def extract_states(
    run: Path,
    corpus_path: Path,
    *,
    device: torch.device,
    dtype: str = "float16",
    on_progress: Progress = no_progress,
) -> StatesReport:
    """Extract the hidden states that stage 2 trains on, as far as they are not there yet.

    A store of an older LLM of the same run is replaced: its states mean nothing any more. One
    shard of states is in memory at a time. Of several processes the main one works.

    Args:
        run: run folder with `llm/model`.
        corpus_path: the tokenised corpus the LLM was trained on.
        device: where the LLM runs.
        dtype: on disk, float16 or bfloat16.
        on_progress: called with (utterances done, utterances in all).

    Raises:
        CheckpointError: the run holds no LLM, or it belongs to another codec than the corpus.
        DataError: the corpus is missing, not tokenised, or holds no recordings, or the disk is
            too small.
    """
    corpus = open_recordings(corpus_path)
    llm = load_frozen_llm(run, corpus, device)
    info = _info(llm, corpus, dtype)
    folder = states_folder(run)
    if not is_main_process():
        wait_for_store(folder, info.identity)
        return _report(StateStore.open(folder, corpus), corpus, num_new=0)
    found = found_identity(folder)
    if found != info.identity:
        if found is not None:
            logger.info("%s: states of another LLM or corpus are replaced", folder)
        clear_store(folder)
    writer = StateWriter(
        folder,
        info.identity,
        hidden_size=info.hidden_size,
        num_rows=info.num_rows,
        rows_per_shard=info.rows_per_shard,
        num_mixed_layers=info.num_mixed_layers,
    )
    num_new = _write_missing(writer, llm, corpus, on_progress)
    writer.finish()
    return _report(StateStore.open(folder, corpus), corpus, num_new)


def wait_for_store(folder: Path, identity: StateIdentity) -> None:
    """Return when another process has finished a store of this identity."""
    while not (folder / STATES_FILE).exists() or found_identity(folder) != identity:
        time.sleep(POLL_S)


def live_states(
    run: Path,
    corpus_path: Path,
    *,
    device: torch.device,
    dtype: str = "float16",
    max_bytes: int = 200_000_000,
) -> LiveStates:
    """The same states computed when a batch asks for them, with nothing on disk.

    Args:
        run: run folder with `llm/model`.
        corpus_path: the tokenised corpus the LLM was trained on.
        device: where the LLM runs.
        dtype: states are rounded to it, as those on disk are.
        max_bytes: of states kept in memory, for each split.

    Raises:
        CheckpointError: the run holds no LLM or one older than its adapter, or it belongs to
            another codec than the corpus.
        DataError: the corpus is missing, not tokenised, or holds no recordings.
    """
    corpus = open_recordings(corpus_path)
    llm = load_frozen_llm(run, corpus, device)
    rows = {split: corpus.token_rows(split) for split in corpus.info.num_utterances}
    left_out: list[str] = []
    counts = {split: _count_tokens(corpus, split, llm, left_out) for split in rows}
    _warn_of_left_out(corpus, left_out)

    def compute(split: str, row: int) -> Tensor:
        network, contract, encode = llm
        return teacher_forced_states(network, contract, encode, [rows[split][row]])[0]

    info = _info(llm, corpus, dtype)
    return LiveStates(run / "llm" / "model", info, counts, compute, max_bytes)


def open_states(
    config: VocoderTrainConfig, *, device: torch.device, on_progress: Progress = no_progress
) -> StatesReader:
    """The hidden states that a configuration asks for: on disk, extracted first, or on the fly.

    Raises:
        CheckpointError: the run holds no LLM, or it belongs to another codec than the corpus.
        DataError: the corpus is missing, not tokenised, or holds no recordings.
    """
    run, corpus_path, dtype = Path(config.run), Path(config.corpus), config.data.states_dtype
    if config.data.states == "on_the_fly":
        return live_states(run, corpus_path, device=device, dtype=dtype)
    report = extract_states(run, corpus_path, device=device, dtype=dtype, on_progress=on_progress)
    return StateStore.open(report.folder, Corpus.open(corpus_path), llm_sha256=report.llm_sha256)


def open_recordings(corpus_path: Path) -> Corpus:
    """A tokenised corpus with recordings.

    Raises:
        DataError: the corpus is missing, not tokenised, or holds no recordings.
    """
    corpus = Corpus.open(corpus_path)
    corpus.require_codec()
    corpus.require_audio()
    return corpus


def load_frozen_llm(run: Path, corpus: Corpus, device: torch.device) -> LoadedLLM:
    """The LLM of a run, for reading alone: evaluation mode, no gradients.

    Raises:
        CheckpointError: the run holds no LLM, or it belongs to another codec than the corpus.
    """
    folder = run / "llm" / "model"
    require_fresh_merge(run / "llm")
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: no LLM in this run; run tts-stack train-llm corpus={corpus.path} run={run}"
        )
    llm = load_llm(folder, device=device)
    codec = corpus.require_codec()
    if llm.contract.codec != codec:
        raise CheckpointError(
            f"{folder}: trained on tokens of codec {llm.contract.codec.describe()}, {corpus.path} "
            f"holds tokens of {codec.describe()}; train the LLM on this corpus"
        )
    llm.network.eval().requires_grad_(False)
    return llm


def describe_reading(prompt: PromptSpec) -> str:
    """Which states a voice's vocoder reads."""
    mixed = f" and {prompt.num_mixed_layers - 1} below" if prompt.num_mixed_layers > 1 else ""
    return f"layer {prompt.hidden_layer}{mixed}, {prompt.state_position}"


def _info(llm: LoadedLLM, corpus: Corpus, dtype: str) -> StatesInfo:
    prompt = llm.contract.prompt
    identity = StateIdentity(
        llm.contract.llm_sha256, corpus_hash(corpus), describe_reading(prompt), dtype
    )
    hidden_size = int(llm.network.llm.config.hidden_size)
    info = corpus.info
    num_rows = sum(info.num_utterances.values())
    mean_tokens = sum(info.seconds.values()) * corpus.audio_spec.token_rate / max(1, num_rows)
    row_bytes = mean_tokens * hidden_size * prompt.num_mixed_layers * _itemsize(dtype)
    rows_per_shard = max(1, min(ROWS_PER_SHARD, int(SHARD_BYTES / max(1.0, row_bytes))))
    return StatesInfo(
        identity, hidden_size, dict(info.num_utterances), rows_per_shard, prompt.num_mixed_layers
    )


def _write_missing(
    writer: StateWriter, llm: LoadedLLM, corpus: Corpus, on_progress: Progress
) -> int:
    """Write the shards that are not there; returns the number of utterances in them."""
    missing = {split: writer.missing(split) for split in writer.info.num_rows}
    num_new = sum(len(rows) for ranges in missing.values() for rows in ranges)
    total = sum(writer.info.num_rows.values())
    _require_space(writer, corpus, num_new / max(1, total))
    done = total - num_new
    on_progress(done, total)
    for split, ranges in missing.items():
        utterances = corpus.token_rows(split)
        for rows in ranges:
            chosen = [utterances[row] for row in rows]
            writer.write(split, rows, _states_of(chosen, llm, writer.info))
            done += len(rows)
            on_progress(done, total)
    return num_new


def _states_of(
    utterances: Sequence[TokenizedUtterance], llm: LoadedLLM, info: StatesInfo
) -> list[Tensor]:
    """States [S, W] of each utterance; [0, W] of one that stage 1 could not be trained on."""
    network, contract, encode = llm
    dtype = STATE_DTYPES[info.identity.dtype]
    readable = [row for row, utterance in enumerate(utterances) if _num_tokens(utterance, llm)]
    chosen = [utterances[row] for row in readable]
    found = teacher_forced_states(network, contract, encode, chosen, dtype=dtype)
    states = [torch.zeros(0, info.width, dtype=dtype)] * len(utterances)
    for row, state in zip(readable, found, strict=True):
        states[row] = state
    return states


def _num_tokens(utterance: TokenizedUtterance, llm: LoadedLLM) -> int:
    """S of an utterance; 0 where stage 1 left it out because it knows no symbol of its text."""
    contract = llm.contract
    sample = make_sample(utterance, llm.encode, contract.tokens, contract.prompt)
    return len(utterance.semantic_tokens) if sample.length else 0


def _count_tokens(
    corpus: Corpus, split: str, llm: LoadedLLM, left_out: list[str]
) -> NDArray[np.int64]:
    """S of each row of a split; ids of rows without states are added to `left_out`."""
    counts = []
    for utterance in corpus.iter_tokenized(split):
        counts.append(_num_tokens(utterance, llm))
        if not counts[-1]:
            left_out.append(utterance.id)
    return np.array(counts, dtype=np.int64)


def _report(store: StateStore, corpus: Corpus, num_new: int) -> StatesReport:
    left_out: list[str] = []
    num_tokens = 0
    for split in store.info.num_rows:
        states: SplitStates = store.split(split)
        counts = [states.num_tokens(row) for row in range(len(states))]
        num_tokens += sum(counts)
        empty = [row for row, count in enumerate(counts) if not count]
        if empty:
            utterances = corpus.token_rows(split)
            left_out += [utterances[row].id for row in empty]
    _warn_of_left_out(corpus, left_out)
    return StatesReport(
        folder=store.folder,
        llm_sha256=store.info.identity.llm_sha256,
        num_rows=sum(store.info.num_rows.values()),
        num_new=num_new,
        num_tokens=num_tokens,
        width=store.info.width,
        num_bytes=store_bytes(store.folder),
        left_out=tuple(left_out),
    )


def _warn_of_left_out(corpus: Corpus, left_out: Sequence[str]) -> None:
    if left_out:
        shown = ", ".join(left_out[:SHOWN_IDS]) + (", …" if len(left_out) > SHOWN_IDS else "")
        logger.warning(
            "%s: %d utterances without a symbol that the voice knows have no hidden states and "
            "are left out: %s",
            corpus.path,
            len(left_out),
            shown,
        )


def _require_space(writer: StateWriter, corpus: Corpus, share: float) -> None:
    """Refuse to begin what cannot end; `share` of the rows is still to be written."""
    info = writer.info
    num_tokens = sum(corpus.info.seconds.values()) * corpus.audio_spec.token_rate * share
    wanted = SPARE_SHARE * num_tokens * info.width * _itemsize(info.identity.dtype)
    free = shutil.disk_usage(writer.folder).free
    if wanted > free:
        raise DataError(
            f"{writer.folder}: the hidden states take about {wanted / 1e9:.1f} GB, "
            f"{free / 1e9:.1f} GB are free; use a run=… on a larger disk, or data.states=on_the_fly"
        )


def _itemsize(dtype: str) -> int:
    return STATE_DTYPES[dtype].itemsize
