"""Hidden states of a run's frozen LLM over its corpus: stage 1 computes, stage 2 stores them."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from stage1_llm.checkpoint import load_llm
from stage1_llm.hidden_states import teacher_forced_states
from stage1_llm.merge import require_fresh_merge
from stage2_vocoder.states import STATES_FILE, StateIdentity, StateWriter, corpus_hash, read_info
from stage2_vocoder.train import states_folder
from tts_stack.contract import PromptSpec, VoiceContract
from tts_stack.errors import CheckpointError
from tts_stack.records import TokenizedUtterance
from tts_stack.shards import Corpus


def ensure_states(
    run: Path,
    corpus_path: Path,
    *,
    device: torch.device,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> str:
    """Extract the hidden states that stage 2 trains on, as far as they are not there yet.

    A store of an older LLM of the same run is replaced: its states mean nothing any more.

    Args:
        run: run folder with `llm/model`.
        corpus_path: the tokenised corpus the LLM was trained on.
        device: where the LLM runs.
        on_progress: called with (utterances done, utterances in all).

    Returns:
        SHA-256 of the LLM.

    Raises:
        CheckpointError: the run holds no LLM or one older than its adapter, or it belongs to
            another codec than the corpus.
        DataError: the corpus is missing, not tokenised, or holds no recordings.
    """
    folder = run / "llm" / "model"
    require_fresh_merge(run / "llm")
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: no LLM in this run; run tts-stack train-llm corpus={corpus_path} run={run}"
        )
    corpus = Corpus.open(corpus_path)
    corpus.require_audio()
    network, contract, encode = load_llm(folder, device=device)
    _check_codec(contract, corpus, folder)
    identity = StateIdentity(contract.llm_sha256, corpus_hash(corpus), _reading(contract.prompt))
    store = states_folder(run)
    if (store / STATES_FILE).exists() and read_info(store).identity != identity:
        shutil.rmtree(store)
    writer = StateWriter(
        store,
        identity,
        hidden_size=network.llm.config.hidden_size,
        num_rows=corpus.info.num_utterances,
    )
    for split, total in corpus.info.num_utterances.items():
        missing = writer.missing(split)
        utterances: Sequence[TokenizedUtterance] = corpus.tokenized(split) if missing else ()
        for rows in missing:
            chosen = utterances[rows.start : rows.stop]
            states = teacher_forced_states(network, contract, encode, chosen, dtype=torch.float16)
            writer.write(split, rows, [state.numpy() for state in states])
            on_progress(rows.stop, total)
    writer.finish()
    return contract.llm_sha256


def _check_codec(contract: VoiceContract, corpus: Corpus, folder: Path) -> None:
    codec = corpus.require_codec()
    if contract.codec != codec:
        raise CheckpointError(
            f"{folder}: trained on tokens of codec {contract.codec.describe()}, {corpus.path} "
            f"holds tokens of {codec.describe()}; train the LLM on this corpus"
        )


def _reading(prompt: PromptSpec) -> str:
    return f"layer {prompt.hidden_layer}, {prompt.state_position}"
