"""Which part of which row stands in which batch: plans, made before anything is read.

A plan is endless and its batch number n depends on (seed, n) alone. Several processes, and steps
of several micro-batches, share one plan.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stage2_vocoder.dataset import VocoderBatch, VocoderData, pad_audio
from stage2_vocoder.segment import Segment, random_segment, with_margin
from tts_stack.runtime import step_generator
from tts_stack.training import Share

LENGTH_JITTER = 0.1  # relative; batches of similar lengths differ from epoch to epoch
SPREAD_ROWS = 256  # enough for the spread of each dimension of the states
# Streams of runtime.step_generator: each kind of choice has its own.
ORDER_STREAM, CROP_STREAM, LENGTH_STREAM, NOISE_STREAM = 20, 21, 22, 23


@dataclass(frozen=True)
class PlannedBatch:
    """A batch that is not read yet."""

    number: int  # batches of the plan before it
    rows: list[int]
    segments: list[Segment]  # one a row
    num_samples: int | None = None  # width of the audio; None takes the longest segment's
    crops: list[Segment] | None = None  # judged, of whole utterances; None judges all of the audio

    def read(self, data: VocoderData) -> VocoderBatch:
        """Read it from the disk or from memory."""
        batch = data.segments(self.rows, self.segments)
        if self.num_samples is not None:
            batch = pad_audio(batch, self.num_samples)
        if self.crops is None:
            return batch
        return batch._replace(
            crop_starts=torch.tensor([crop.crop_start for crop in self.crops]),
            crop_tokens=torch.tensor([crop.num_tokens for crop in self.crops]),
        )


@dataclass(frozen=True)
class StateNoise:
    """Gaussian noise on the states of a batch; on padding there is none."""

    spread: Tensor  # [W], standard deviation of each dimension
    level: float  # relative to the spread
    seed: int

    @classmethod
    def of(cls, data: VocoderData, level: float, seed: int) -> "StateNoise | None":
        """Noise for the states of a split; None for level 0."""
        return cls(state_spread(data), level, seed) if level else None

    def add(self, batch: VocoderBatch, number: int) -> VocoderBatch:
        """The batch with the noise of its number."""
        states = batch.hidden_states
        generator = step_generator(self.seed, number, NOISE_STREAM)
        noise = torch.randn(states.shape, generator=generator) * (self.level * self.spread[:, None])
        is_real = torch.arange(states.shape[-1]) < batch.lengths[:, None]  # [B, S]
        return batch._replace(hidden_states=states + noise * is_real[:, None])


@dataclass(frozen=True)
class BatchReader:
    """Reads one process's share of a plan."""

    data: VocoderData
    share: Share
    noise: StateNoise | None = None

    def steps(self, plan: Iterator[PlannedBatch], num_steps: int) -> Iterator[list[VocoderBatch]]:
        """The micro-batches of each step, of a plan that begins where a step does."""
        for step in islice(self.share.steps(plan), num_steps):
            yield [self._read(planned) for planned in step]

    def _read(self, planned: PlannedBatch) -> VocoderBatch:
        batch = planned.read(self.data)
        return batch if self.noise is None else self.noise.add(batch, planned.number)


def plan_whole(
    counts: NDArray[np.int64], *, batch_tokens: int, seed: int, start: int
) -> Iterator[PlannedBatch]:
    """Whole utterances of similar length, at most `batch_tokens` a batch with padding counted.

    Args:
        counts: tokens of each row; one of 0 is left out.
        batch_tokens: budget of a batch.
        seed: of the order.
        start: number of the first batch.
    """
    first = 0  # number of the epoch's first batch
    for epoch in count():
        batches = length_batches(counts, batch_tokens, seed, epoch)
        for place in range(max(0, start - first), len(batches)):
            rows = batches[place]
            sizes = [int(counts[row]) for row in rows]
            yield PlannedBatch(
                first + place, rows, [with_margin(0, size, 0, size) for size in sizes]
            )
        first += len(batches)


def plan_crops(
    counts: NDArray[np.int64],
    *,
    batch_size: int,
    crop: int,
    margin: int | None,
    samples_per_token: int,
    seed: int,
    start: int,
) -> Iterator[PlannedBatch]:
    """Random crops; each utterance comes once an epoch.

    Args:
        counts: tokens of each row; one of 0 is left out.
        batch_size: crops a batch.
        crop: tokens of a crop; a shorter utterance is taken whole and padded.
        margin: tokens decoded on either side; None decodes the whole utterance, so that the
            spectral losses hear all of it and the discriminators its crop.
        samples_per_token: of the audio.
        seed: of order and places.
        start: number of the first batch.
    """
    readable = np.flatnonzero(counts)
    for number in count(start):
        generator = step_generator(seed, number, CROP_STREAM)
        rows = [int(readable[row]) for row in crop_rows(len(readable), batch_size, seed, number)]
        sizes = [int(counts[row]) for row in rows]
        crops = [random_segment(size, crop, margin or 0, generator) for size in sizes]
        if margin is None:
            whole = [with_margin(0, size, 0, size) for size in sizes]
            yield PlannedBatch(number, rows, whole, crops=crops)
        else:
            yield PlannedBatch(number, rows, crops, crop * samples_per_token)


def crop_rows(num_rows: int, batch_size: int, seed: int, number: int) -> list[int]:
    """Rows of one batch: consecutive places in an endless run of shuffled epochs."""
    places = range(number * batch_size, (number + 1) * batch_size)
    orders = {
        epoch: torch.randperm(num_rows, generator=step_generator(seed, epoch, ORDER_STREAM))
        for epoch in {place // num_rows for place in places}
    }
    return [int(orders[place // num_rows][place % num_rows]) for place in places]


def length_batches(
    counts: NDArray[np.int64], batch_tokens: int, seed: int, epoch: int
) -> list[list[int]]:
    """Rows of one epoch in batches of similar length, the batches in random order.

    A row longer than the budget is a batch of its own, one of no tokens in no batch.
    """
    generator = step_generator(seed, epoch, LENGTH_STREAM)
    jitter = 1 + LENGTH_JITTER * torch.rand(len(counts), generator=generator).numpy()
    batches: list[list[int]] = []
    longest = 0
    for row in np.argsort(counts * jitter, kind="stable").tolist():
        if not counts[row]:
            continue
        longest = max(longest, int(counts[row]))
        if not batches or longest * (len(batches[-1]) + 1) > batch_tokens:
            batches.append([])
            longest = int(counts[row])
        batches[-1].append(row)
    order = torch.randperm(len(batches), generator=generator)
    return [batches[int(index)] for index in order]


def state_spread(data: VocoderData) -> Tensor:
    """Standard deviation of each dimension of the states over rows spread over the split: [W]."""
    readable = np.flatnonzero(data.num_tokens())
    chosen = np.linspace(0, len(readable) - 1, min(SPREAD_ROWS, len(readable))).round().astype(int)
    total, squares, num_tokens = np.zeros(data.width), np.zeros(data.width), 0
    for row in readable[chosen].tolist():
        states = data.states.read(row, 0, data.states.num_tokens(row)).astype(np.float64)
        total += states.sum(0)
        squares += np.square(states).sum(0)
        num_tokens += len(states)
    mean = total / num_tokens
    variance = np.maximum(squares / num_tokens - np.square(mean), 0)
    return torch.from_numpy(np.sqrt(variance)).float()
