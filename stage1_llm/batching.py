"""The deterministic planner: which samples make up which step, from (seed, epoch, step) alone.

An epoch's micro-batches stand one after the other in an endless row; a step takes the next
`num_micro` of them, over the border of an epoch too. With a length curriculum an epoch holds the
samples under the present limit, and ends early where the limit grows.
"""

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stage1_llm.config import BatchingConfig, CurriculumConfig
from tts_stack.errors import ConfigError, DataError
from tts_stack.training import TrainerConfig

LENGTH_JITTER = 0.05  # share of a length by which sorting may err, so that batches differ by epoch
PACKING_WINDOW = 1024  # samples among which packing looks for one that fills a row
NUM_STAGES = 8  # limits of a length curriculum before the last, which is none
_BALANCE_WINDOW = 16  # steps whose micro-batches are sorted by size, so that processes do not wait
_PLAN_STREAM = 1

Batch = tuple[int, ...]  # sample indices
Lengths = Sequence[int] | NDArray[np.integer]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class EpochPlan:
    """Sample indices of every batch of one epoch, in training order."""

    batches: tuple[Batch, ...]
    padding_share: float  # of all positions; of packed rows, the unused share of max_tokens
    largest: tuple[int, int]  # rows and length of the batch with most positions


class Stage(NamedTuple):
    """A stretch of steps with one limit on the length of a sample."""

    stop_step: float  # the first step after it, or infinity
    max_length: int


def plan_epoch(
    lengths: Lengths, *, max_tokens: int, seed: int, epoch: int, kind: str = "dynamic"
) -> EpochPlan:
    """Put every sample into one batch of at most `max_tokens` positions, padding included.

    Args:
        lengths: of each sample, in tokens.
        max_tokens: positions of a batch.
        seed: of the run.
        epoch: 0, 1, ...
        kind: "dynamic" puts samples of similar length together, one a row; "packing" puts samples
            of any length one after the other into one row.

    Returns:
        Batches in shuffled order; none is empty.

    Raises:
        DataError: there is no sample, or one is longer than `max_tokens`.
    """
    sizes = _check(lengths, max_tokens)
    random = _random(seed, epoch)
    batches = _cut(sizes, kind, max_tokens, random)
    shuffled = [batches[i] for i in random.permutation(len(batches))]
    shapes = _shapes(shuffled, sizes, kind)
    positions = len(shuffled) * max_tokens if kind == "packing" else int(shapes.prod(1).sum())
    rows, length = shapes[shapes.prod(1).argmax()].tolist()
    share = 1 - int(sizes.sum()) / positions
    return EpochPlan(tuple(_batch(batch) for batch in shuffled), share, (rows, length))


def plan_steps(
    lengths: Lengths,
    *,
    kind: str,
    max_tokens: int,
    curriculum: CurriculumConfig | None,
    seed: int,
    num_micro: int,
    start_step: int,
) -> Iterator[tuple[Batch, ...]]:
    """Micro-batches of steps start_step, start_step + 1, ... without end.

    Args:
        lengths: of each sample, in tokens.
        kind: see `plan_epoch`.
        max_tokens: positions of a micro-batch.
        curriculum: growth of the longest sample allowed; None or 0 steps: all from the start.
        seed: of the run.
        num_micro: micro-batches of a step: accumulation x processes. Rank r of R takes
            `step[r::R]`. Those of one step are of similar size.
        start_step: the first step; nothing depends on where a run began.

    Yields:
        `num_micro` batches, none empty, for each step.

    Raises:
        ConfigError: the curriculum starts below the shortest sample.
        DataError: there is no sample, or one is longer than `max_tokens`.
    """
    sizes = _check(lengths, max_tokens)
    step, epoch, waiting = 0, 0, list[Indices]()
    for stage in _stages(curriculum, sizes):
        allowed = np.flatnonzero(sizes <= stage.max_length)
        while step < stage.stop_step:
            random = _random(seed, epoch)
            batches = _cut(sizes[allowed], kind, max_tokens, random)
            order = _arrange(
                _shapes(batches, sizes[allowed], kind).prod(1), num_micro, len(waiting), random
            )
            queue = waiting + [allowed[batches[i]] for i in order]
            num_steps = int(min(len(queue) // num_micro, stage.stop_step - step))
            for index in range(max(0, start_step - step), num_steps):
                yield tuple(map(_batch, queue[index * num_micro : (index + 1) * num_micro]))
            waiting = queue[num_steps * num_micro :]
            step, epoch = step + num_steps, epoch + 1
        waiting = []


def describe_plan(lengths: Lengths, batching: BatchingConfig, trainer: TrainerConfig) -> str:
    """What training will read, in one line: steps of an epoch, padding, largest batch.

    Raises:
        ConfigError: the curriculum starts below the shortest sample.
        DataError: there is no sample, or one is longer than `batching.max_tokens`.
    """
    sizes = _check(lengths, batching.max_tokens)
    plan = plan_epoch(
        sizes, max_tokens=batching.max_tokens, seed=trainer.seed, epoch=0, kind=batching.kind
    )
    rows, length = plan.largest
    num_micro = trainer.num_micro_batches
    text = (
        f"{len(sizes):,} samples, {int(sizes.sum()):,} tokens; {batching.kind} batches of at most "
        f"{batching.max_tokens:,} positions, {num_micro} a step, "
        f"{len(plan.batches) / num_micro:,.1f} steps an epoch; padding {plan.padding_share:.1%}; "
        f"largest batch {rows} x {length} = {rows * length:,} positions"
    )
    first = next(iter(_stages(batching.curriculum, sizes)))
    if first.stop_step == math.inf:
        return text
    num_first = int((sizes <= first.max_length).sum())
    return (
        f"{text}; curriculum: {num_first:,} samples of at most {first.max_length} tokens at first, "
        f"all of them from step {batching.curriculum.steps:,}"
    )


def _check(lengths: Lengths, max_tokens: int) -> Indices:
    sizes = np.asarray(lengths, dtype=np.int64)
    if not len(sizes):
        raise DataError("batching: 0 samples, expected at least one; prepare a larger corpus")
    longest = int(sizes.argmax())
    if sizes[longest] > max_tokens:
        raise DataError(
            f"batching: sample {longest} has {sizes[longest]} tokens, expected at most max_tokens "
            f"({max_tokens}); raise batching.max_tokens or lower batching.max_length"
        )
    return sizes


def _random(seed: int, epoch: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence((seed, epoch, _PLAN_STREAM)))


def _stages(curriculum: CurriculumConfig | None, sizes: Indices) -> list[Stage]:
    longest = int(sizes.max())
    last = Stage(math.inf, longest)
    if curriculum is None or not curriculum.steps or curriculum.start_length >= longest:
        return [last]
    start, steps = curriculum.start_length, curriculum.steps
    if start < sizes.min():
        raise ConfigError(
            f"batching.curriculum.start_length is {start}, expected at least {sizes.min()}, the "
            "length of the shortest sample"
        )
    growing = [
        Stage(
            steps * (index + 1) // NUM_STAGES,
            start + (longest - start) * index // NUM_STAGES,
        )
        for index in range(NUM_STAGES)
    ]
    return [*growing, last]


def _cut(sizes: Indices, kind: str, max_tokens: int, random: np.random.Generator) -> list[Indices]:
    """Batches of all samples, in no particular order."""
    if kind == "packing":
        return _pack(sizes, max_tokens, random)
    order = np.argsort(sizes * (1 + LENGTH_JITTER * random.random(len(sizes))), kind="stable")
    starts, longest, rows = [0], 0, 0
    for place, size in enumerate(sizes[order].tolist()):
        longest, rows = max(longest, size), rows + 1
        if longest * rows > max_tokens:
            starts.append(place)
            longest, rows = size, 1
    return np.split(order, starts[1:])


def _pack(sizes: Indices, max_tokens: int, random: np.random.Generator) -> list[Indices]:
    """Rows of samples in random order, the last ones of a row chosen to fill it.

    A row takes the next samples while the longest of the window surely fits, then again and again
    the longest that still fits.
    """
    order = random.permutation(len(sizes))
    shuffled = sizes[order].tolist()
    count = len(shuffled)
    is_used = bytearray(count)
    window: list[int] = []  # length * count + place, sorted: by length, then by place
    entered = taken = oldest = 0
    rows: list[list[int]] = []
    while taken < count:
        row: list[int] = []
        space = max_tokens
        while True:
            while entered < count and entered - taken < PACKING_WINDOW:
                insort(window, shuffled[entered] * count + entered)
                entered += 1
            if not window:
                break
            if space >= window[-1] // count:
                while is_used[oldest]:
                    oldest += 1
                index = bisect_left(window, shuffled[oldest] * count + oldest)
            else:
                index = bisect_right(window, space * count + count - 1) - 1
            if index < 0:
                break
            size, place = divmod(window.pop(index), count)
            is_used[place] = 1
            row.append(place)
            space, taken = space - size, taken + 1
        rows.append(row)
    flat = order[np.concatenate([np.array(row) for row in rows])]
    return np.split(flat, np.cumsum([len(row) for row in rows])[:-1])


def _shapes(batches: Sequence[Indices], sizes: Indices, kind: str) -> Indices:
    """Rows and length [N, 2] of each batch."""
    counts = np.array([len(batch) for batch in batches])
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    flat = sizes[np.concatenate(batches)]
    if kind == "packing":
        return np.stack([np.ones_like(counts), np.add.reduceat(flat, starts)], axis=1)
    return np.stack([counts, np.maximum.reduceat(flat, starts)], axis=1)


def _arrange(
    positions: Indices, num_micro: int, num_waiting: int, random: np.random.Generator
) -> Indices:
    """A random order in which the batches that share a step have similar numbers of positions.

    `num_waiting` batches of the epoch before already stand in the first step.
    """
    order = random.permutation(len(positions))
    if num_micro == 1:
        return order
    head = -num_waiting % num_micro
    body = order[head:]
    window = num_micro * _BALANCE_WINDOW
    parts = [body[start : start + window] for start in range(0, len(body), window)]
    ordered = [part[np.argsort(positions[part], kind="stable")] for part in parts]
    body = np.concatenate([body[:0], *ordered])
    num_steps = len(body) // num_micro
    steps = body[: num_steps * num_micro].reshape(num_steps, num_micro)
    steps = random.permutation(steps)
    return np.concatenate([order[:head], steps.reshape(-1), body[num_steps * num_micro :]])


def _batch(indices: Indices) -> Batch:
    return tuple(indices.tolist())
