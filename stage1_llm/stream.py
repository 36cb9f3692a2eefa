"""Semantic tokens <-> the audio part of a prompt: several codebooks, collapsed runs, masks."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stage1_llm.runs import Runs, collapse_runs, durations_as_codebook, interleave_durations
from tts_stack.contract import MIN_RUN, PromptSpec, TokenMap
from tts_stack.errors import DataError

IGNORE_INDEX = -100  # no label, no code


@dataclass(frozen=True)
class AudioStream:
    """What the LLM writes for one utterance, M positions without <|audio_end|>."""

    token_ids: NDArray[np.int64]  # [M] semantic, mask and duration ids
    codes: NDArray[np.int64]  # [M, C] other codebooks and run lengths; IGNORE_INDEX without
    run_lengths: NDArray[np.int64]  # [M] tokens of the original it stands for; 0 on durations
    is_masked: NDArray[np.bool_]  # [M] masked tokens are read, never predicted


def encode_stream(
    semantic_tokens: NDArray[np.int64], tokens: TokenMap, spec: PromptSpec
) -> AudioStream:
    """The audio part of a prompt.

    Args:
        semantic_tokens: [S], or [S, K] for K codebooks; 0 .. codebook_size - 1, and codebook_size
            for a masked token where the voice has a mask.
        tokens: the id space.
        spec: whether and how runs are collapsed.

    Raises:
        DataError: there is no token, or one is outside the codebook.
    """
    _check(semantic_tokens, tokens)
    rows = semantic_tokens.reshape(len(semantic_tokens), -1)  # [S, K]
    runs = Runs(rows, np.ones(len(rows), dtype=np.int64))
    if spec.durations != "none":
        runs = collapse_runs(rows, spec.max_run)
    codes = durations_as_codebook(runs) if spec.durations == "codebook" else runs.tokens
    is_masked = codes[:, 0] == tokens.codebook_size
    stream = AudioStream(
        np.where(is_masked, tokens.mask, codes[:, 0] + tokens.semantic_offset),
        np.where(is_masked[:, None], IGNORE_INDEX, codes[:, 1:]),
        runs.lengths,
        is_masked,
    )
    return _with_durations(stream, runs, tokens) if spec.durations == "tokens" else stream


def _with_durations(stream: AudioStream, runs: Runs, tokens: TokenMap) -> AudioStream:
    """A duration token before every semantic token that stands for more than one."""
    found = interleave_durations(runs)
    durations, run = found.durations, found.run  # [M] each
    is_duration = durations > 0
    return AudioStream(
        np.where(is_duration, durations - MIN_RUN + tokens.duration_offset, stream.token_ids[run]),
        np.where(is_duration[:, None], IGNORE_INDEX, stream.codes[run]),
        np.where(is_duration, 0, stream.run_lengths[run]),
        stream.is_masked[run],
    )


def _check(semantic_tokens: NDArray[np.int64], tokens: TokenMap) -> None:
    if semantic_tokens.ndim not in (1, 2) or not semantic_tokens.size:
        raise DataError(
            f"prompt: semantic tokens of shape {list(semantic_tokens.shape)}, expected [S] or "
            "[S, K], S >= 1"
        )
    size = tokens.codebook_size
    highest = size if tokens.mask >= 0 else size - 1  # the mask stands one past the codebook
    if semantic_tokens.min() < 0 or semantic_tokens.max() > highest:
        raise DataError(
            f"prompt: semantic tokens {semantic_tokens.min()} .. {semantic_tokens.max()}, "
            f"expected 0 .. {size - 1}; tokenize with the voice's own codec"
        )
