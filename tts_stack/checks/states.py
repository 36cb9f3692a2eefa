"""`check states`: what the vocoder learns on against what it will be given.

It learns on states of true tokens from one parallel pass, and is given states of the LLM's own
tokens from a cache. The first difference must be none; the second is a gap, measured here.
"""

import dataclasses
from collections.abc import Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stage1_llm.checkpoint import LoadedLLM
from stage1_llm.checks.report import Claim, Report, close
from stage1_llm.dataset import make_sample
from stage1_llm.generate import TOO_LONG, GeneratedToken, SamplingSettings, TokenStream
from stage1_llm.hidden_states import teacher_forced_states
from stage2_vocoder.states import STATES_FILE, StateStore
from stage2_vocoder.train import states_folder
from tts_stack.contract import PromptSpec
from tts_stack.errors import DataError
from tts_stack.records import TokenizedUtterance
from tts_stack.runtime import step_generator
from tts_stack.shards import Corpus
from tts_stack.states import describe_reading, load_frozen_llm, open_recordings

NUM_UTTERANCES = 8
TOLERANCE = 1e-4  # of the largest state: products taken in another order, layer after layer
NUM_TAKES = 2  # of each text: what two takes differ by is no gap
MIN_NOISE = 0.01  # below it noise is not worth a word
ROUNDING = {"float16": 2**-11 + TOLERANCE, "bfloat16": 2**-8 + TOLERANCE}
NUM_QUANTILES = 101
SHOWN_SHARE = 0.95  # quantile of the dimensions that is shown beside the mean
_SEED = 0


class Said(NamedTuple):
    """One text as the LLM says it."""

    utterance: TokenizedUtterance  # the LLM's own tokens, as far as they can be read back
    states: Tensor  # [S, W] of them, from generation


class Gap(NamedTuple):
    """Distance of two sets of states, in standard deviations of the first, by dimension."""

    distance: NDArray[np.float64]  # [W], mean difference of quantiles (Wasserstein-1)
    shift: NDArray[np.float64]  # [W], absolute difference of means
    spread: NDArray[np.float64]  # [W], standard deviation over that of the first


def check_states(run: Path, corpus_path: Path, device: torch.device) -> Report:
    """Prove that teacher-forced states are those of generation, and measure the gap.

    Args:
        run: run folder with `llm/model`.
        corpus_path: the tokenised corpus; its first validation texts are spoken.
        device: where the LLM runs.

    Raises:
        CheckpointError: the run holds no LLM, or one of another codec.
        DataError: the corpus is missing or not tokenised, or the LLM can read no text of it.
    """
    corpus = open_recordings(corpus_path)
    llm = load_frozen_llm(run, corpus, device)
    recorded = _texts(corpus, llm)
    takes = [_speak_all(llm, recorded, take) for take in range(NUM_TAKES)]
    prompt, sampling = llm.contract.prompt, llm.contract.sampling
    settings = (
        f"LLM {llm.contract.llm_sha256[:12]}, {describe_reading(prompt)}; {len(recorded)} "
        f"validation texts, temperature {sampling.temperature:g}, top_p {sampling.top_p:g}"
    )
    if not all(takes):
        claim = Claim("the LLM says something", False, "it ended every utterance at once")
        return Report((settings,), (claim,))
    said = [*chain(*takes)]
    claim = close(
        "teacher-forced states are those of cached generation for the same tokens",
        _teacher_forced(llm, [item.utterance for item in said]),
        [item.states for item in said],
        tolerance=TOLERANCE,
    )
    claims = (claim, *_stored(run, corpus, llm))
    true = torch.cat(_teacher_forced(llm, recorded))
    own, again = (torch.cat([item.states for item in take]) for take in takes)
    return Report((settings, *_describe_gap(true, own, again)), claims)


def state_gap(true: NDArray[np.floating], other: NDArray[np.floating]) -> Gap:
    """Compare two sets of states [N, W] and [M, W], each dimension for itself."""
    true, other = true.astype(np.float64), other.astype(np.float64)
    spread = np.maximum(true.std(0), np.finfo(np.float32).tiny)
    places = np.linspace(0, 1, NUM_QUANTILES)
    difference = np.quantile(true, places, axis=0) - np.quantile(other, places, axis=0)
    return Gap(
        np.abs(difference).mean(0) / spread,
        np.abs(true.mean(0) - other.mean(0)) / spread,
        other.std(0) / spread,
    )


def _stored(run: Path, corpus: Corpus, llm: LoadedLLM) -> tuple[Claim, ...]:
    """The claim that a cache on disk, where there is one, holds this LLM's states."""
    folder = states_folder(run)
    if not (folder / STATES_FILE).exists():
        return ()
    store = StateStore.open(folder, corpus, llm_sha256=llm.contract.llm_sha256)
    rows, utterances = store.split("validation"), corpus.token_rows("validation")
    readable = [row for row in range(len(rows)) if rows.num_tokens(row)][:NUM_UTTERANCES]
    wanted = _teacher_forced(llm, [utterances[row] for row in readable])
    return (
        close(
            f"the states in {folder} are those of the run's LLM, rounded to "
            f"{store.info.identity.dtype}",
            [torch.from_numpy(rows[row]).float() for row in readable],
            wanted,
            tolerance=ROUNDING[store.info.identity.dtype],
        ),
    )


def _texts(corpus: Corpus, llm: LoadedLLM) -> list[TokenizedUtterance]:
    """The first validation utterances that the LLM can read."""
    found: list[TokenizedUtterance] = []
    for utterance in corpus.iter_tokenized("validation"):
        contract = llm.contract
        if make_sample(utterance, llm.encode, contract.tokens, contract.prompt).length:
            found.append(utterance)
        if len(found) == NUM_UTTERANCES:
            return found
    if not found:
        raise DataError(
            f"{corpus.path}: validation: no text with a symbol that the LLM knows; train the LLM "
            "on this corpus"
        )
    return found


def _teacher_forced(llm: LoadedLLM, utterances: Sequence[TokenizedUtterance]) -> list[Tensor]:
    network, contract, encode = llm
    return teacher_forced_states(network, contract, encode, utterances)


def _speak_all(llm: LoadedLLM, texts: Sequence[TokenizedUtterance], take: int) -> list[Said]:
    found = (_speak(llm, text, index, take) for index, text in enumerate(texts))
    return [said for said in found if said is not None]


def _speak(llm: LoadedLLM, utterance: TokenizedUtterance, index: int, take: int) -> Said | None:
    """Say a text; None when nothing of it can be read back."""
    network, contract, encode = llm
    stream = TokenStream(
        network,
        contract,
        encode(utterance.model_text).ids,
        SamplingSettings(contract.sampling.temperature, contract.sampling.top_p),
        step_generator(_SEED, index, take),
        contract.tokens.tag_ids(utterance.speaker, utterance.language),
    )
    steps = list(stream)
    steps = readable_part(steps, contract.prompt, is_cut=stream.finish_reason == TOO_LONG)
    if not steps:
        return None
    repeats = [step.run_length for step in steps]
    rows = np.array([(step.semantic_token, *step.codes) for step in steps], dtype=np.int64)
    tokens = np.repeat(rows[:, 0] if rows.shape[1] == 1 else rows, repeats, axis=0)
    states = torch.stack([step.hidden_state for step in steps]).float().cpu()
    return Said(
        dataclasses.replace(utterance, id=f"{utterance.id} as said", semantic_tokens=tokens),
        states.repeat_interleave(torch.tensor(repeats), dim=0),
    )


def readable_part(
    steps: Sequence[GeneratedToken], prompt: PromptSpec, *, is_cut: bool
) -> list[GeneratedToken]:
    """The steps that reading the same tokens back gives: all of them, unless runs are collapsed.

    Two runs of one token side by side would be read as one, and a run that the length bound cut
    short had been announced as longer.
    """
    if prompt.durations == "none":
        return list(steps)
    kept = list(steps[:-1] if is_cut else steps)
    for place, (step, after) in enumerate(pairwise(kept)):
        is_same = (step.semantic_token, step.codes) == (after.semantic_token, after.codes)
        if is_same and step.run_length < prompt.max_run:
            return kept[:place]
    return kept


def _describe_gap(true: Tensor, own: Tensor, again: Tensor) -> tuple[str, ...]:
    """How far the LLM's own states are from the recordings', and from each other."""
    gap = state_gap(true.numpy(), own.numpy())
    chance = state_gap(own.numpy(), again.numpy())
    excess = float(gap.distance.mean() - chance.distance.mean())
    return (
        "gap between states of recorded tokens and of the LLM's own, in standard deviations of a "
        f"dimension: {_shown(gap.distance)}; mean shifted by {_shown(gap.shift)}, spread "
        f"{gap.spread.mean():.2f} times as wide",
        f"the same between two takes of the LLM: {_shown(chance.distance)}",
        f"beyond what two takes differ by: {max(0.0, excess):.3f}"
        + (f"; noise of that size: data.state_noise={excess:.2f}" if excess >= MIN_NOISE else ""),
    )


def _shown(values: NDArray[np.float64]) -> str:
    return f"{values.mean():.3f} ({np.quantile(values, SHOWN_SHARE):.3f} in the worst of 20)"
