"""Runs of one semantic token: collapsed, their lengths kept, and expanded again.

Without the lengths training suffers (Ichigo, janhq/ichigo#145), so they go into the stream of the
LLM: as duration tokens before the token they stretch, or as one more codebook.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tts_stack.contract import MIN_RUN
from tts_stack.errors import ConfigError


@dataclass(frozen=True)
class Runs:
    """N runs that stand for S tokens."""

    tokens: NDArray[np.int64]  # [N] or [N, K]
    lengths: NDArray[np.int64]  # [N], each at least 1; their sum is S


@dataclass(frozen=True)
class DurationStream:
    """Runs as a sequence of M positions: a duration stands before the token that it stretches."""

    durations: NDArray[np.int64]  # [M] the run's length on a duration, 0 on a token
    run: NDArray[np.int64]  # [M] which run a position belongs to


def collapse_runs(tokens: NDArray[np.int64], max_run: int) -> Runs:
    """Collapse equal neighbours; `expand_runs` is the exact inverse.

    Args:
        tokens: [S], or [S, K]: then neighbours are equal when all K codes are.
        max_run: longest run; a longer one is split, the first parts being full.

    Raises:
        ConfigError: `max_run` is below 1.
    """
    if max_run < 1:
        raise ConfigError(f"prompt.max_run is {max_run}, expected at least 1")
    if not len(tokens):
        return Runs(tokens, np.zeros(0, dtype=np.int64))
    rows = _rows(tokens)
    differs = (rows[1:] != rows[:-1]).any(axis=1)
    starts = np.flatnonzero(np.concatenate([[True], differs]))
    whole = np.diff(np.append(starts, len(tokens)))  # run lengths before splitting
    num_parts = -(-whole // max_run)
    lengths = np.full(num_parts.sum(), max_run, dtype=np.int64)
    lengths[np.cumsum(num_parts) - 1] = whole - (num_parts - 1) * max_run
    return Runs(tokens[np.repeat(starts, num_parts)], lengths)


def expand_runs(runs: Runs) -> NDArray[np.int64]:
    """The tokens [S] or [S, K] that runs stand for."""
    return np.repeat(runs.tokens, runs.lengths, axis=0)


def length_saved(num_tokens: int, num_positions: int) -> float:
    """Share of the sequence that collapsing saves, duration tokens counted as positions."""
    return 1 - num_positions / num_tokens if num_tokens else 0.0


def interleave_durations(runs: Runs) -> DurationStream:
    """Put a duration before every run of MIN_RUN tokens or more; shorter ones go without."""
    run = np.repeat(np.arange(len(runs.lengths)), 1 + (runs.lengths >= MIN_RUN))
    is_duration = np.append(run[1:] == run[:-1], False)[: len(run)]
    return DurationStream(np.where(is_duration, runs.lengths[run], 0), run)


def read_durations(tokens: NDArray[np.int64], durations: NDArray[np.int64]) -> Runs:
    """Runs of a stream with durations, also of one that a model wrote freely.

    A duration holds for the next token alone. Of several in a row the last one counts, and one
    that no token follows is dropped.

    Args:
        tokens: [M] or [M, K], anything on durations.
        durations: [M], the run length on durations, 0 on tokens.
    """
    is_token = durations == 0
    before = np.concatenate([[0], durations])[:-1]  # the value left of each position
    lengths = np.maximum(before[is_token], 1)
    return Runs(tokens[is_token], lengths)


def durations_as_codebook(runs: Runs) -> NDArray[np.int64]:
    """Codes [N, K + 1]: the last column holds length - 1, a codebook of size max_run."""
    return np.concatenate([_rows(runs.tokens), runs.lengths[:, None] - 1], axis=1)


def durations_from_codebook(codes: NDArray[np.int64]) -> Runs:
    """Runs of codes [N, K + 1] as `durations_as_codebook` writes them; K = 1 gives tokens [N]."""
    tokens = codes[:, 0] if codes.shape[1] == 2 else codes[:, :-1]
    return Runs(tokens, codes[:, -1] + 1)


def _rows(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """[S] -> [S, 1]; [S, K] stays."""
    return tokens[:, None] if tokens.ndim == 1 else tokens
