"""The deterministic planner: which samples make up which step, from (seed, epoch, step) alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LENGTH_JITTER = 0.05  # share of a length by which sorting may err, so that batches differ by epoch
_PLAN_STREAM = 1


@dataclass(frozen=True)
class EpochPlan:
    """Sample indices of every batch of one epoch, in training order."""

    batches: tuple[tuple[int, ...], ...]
    padding_share: float  # of all positions
    largest: tuple[int, int]  # rows and length of the batch with most positions


def plan_epoch(lengths: Sequence[int], *, max_tokens: int, seed: int, epoch: int) -> EpochPlan:
    """Put every sample into one batch of similar lengths, rows x longest <= max_tokens.

    Args:
        lengths: prompt lengths, each at most `max_tokens`.
        max_tokens: positions of a batch, padding included.
        seed: of the run.
        epoch: 0, 1, ...

    Returns:
        Batches in shuffled order; none is empty.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    random = np.random.default_rng(np.random.SeedSequence((seed, epoch, _PLAN_STREAM)))
    order = np.argsort(sizes * (1 + LENGTH_JITTER * random.random(len(sizes))), kind="stable")
    batches = _cut(order, sizes, max_tokens)
    shuffled = [batches[i] for i in random.permutation(len(batches))]
    shapes = [(len(batch), int(sizes[list(batch)].max())) for batch in shuffled]
    positions = sum(rows * length for rows, length in shapes)
    largest = max(shapes, key=lambda shape: shape[0] * shape[1])
    return EpochPlan(tuple(shuffled), 1 - float(sizes.sum()) / positions, largest)


def iterate_batches(
    lengths: Sequence[int], *, max_tokens: int, seed: int, start_step: int
) -> Iterator[tuple[int, ...]]:
    """Batches of steps start_step, start_step + 1, ... over endless epochs."""
    epoch, skip = 0, start_step
    while True:
        batches = plan_epoch(lengths, max_tokens=max_tokens, seed=seed, epoch=epoch).batches
        yield from batches[skip:]
        skip = max(0, skip - len(batches))
        epoch += 1


def _cut(
    order: NDArray[np.int64], sizes: NDArray[np.int64], max_tokens: int
) -> list[tuple[int, ...]]:
    batches: list[tuple[int, ...]] = []
    current: list[int] = []
    longest = 0
    for index in order.tolist():
        size = int(sizes[index])
        if current and max(longest, size) * (len(current) + 1) > max_tokens:
            batches.append(tuple(current))
            current, longest = [], 0
        current.append(index)
        longest = max(longest, size)
    batches.append(tuple(current))
    return batches
