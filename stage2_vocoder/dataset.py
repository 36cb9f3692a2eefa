"""Recordings and hidden states by corpus row -> `VocoderBatch`.

Batch s depends on (seed, s) alone, so resuming needs no saved position.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stage2_vocoder.segment import Segment, random_segment, with_margin
from stage2_vocoder.states import SplitStates, StateStore
from tts_stack.contract import AudioSpec
from tts_stack.errors import DataError
from tts_stack.runtime import step_generator
from tts_stack.shards import Corpus

INT16_SCALE = 32768
LENGTH_JITTER = 0.1  # relative; batches of similar lengths differ from epoch to epoch
# Streams of runtime.step_generator: each kind of choice has its own.
ORDER_STREAM, CROP_STREAM, LENGTH_STREAM = 20, 21, 22


class VocoderBatch(NamedTuple):
    """What the vocoder reads in one step, and the audio it should give.

    In a batch of crops `hidden_states` is wider than `audio`: it holds the margin.
    """

    hidden_states: Tensor  # [B, D, S] float32, right-padded
    lengths: Tensor  # [B] int64, tokens of hidden_states that are real
    audio: Tensor  # [B, T], zero on padding
    starts: Tensor  # [B] int64, token of hidden_states at which audio begins
    num_tokens: Tensor  # [B] int64, tokens of audio that are real

    def to(self, device: torch.device) -> "VocoderBatch":
        """The same batch on a device."""
        return VocoderBatch(*(tensor.to(device) for tensor in self))


class CachedAudio:
    """Audio of a split, decoded once and kept as 16-bit samples up to a limit."""

    def __init__(self, rows: Sequence[NDArray[np.float32]], max_bytes: int) -> None:
        self._rows = rows
        self._cache: dict[int, NDArray[np.int16]] = {}
        self._bytes_left = max_bytes

    def read(self, row: int, start: int, stop: int) -> NDArray[np.float32]:
        """Samples start .. stop - 1 of a row; what lies past its end is silence."""
        found = self._row(row)[start:stop]
        audio = np.zeros(stop - start, dtype=np.float32)
        audio[: len(found)] = found.astype(np.float32) / INT16_SCALE
        return audio

    def num_samples(self, row: int) -> int:
        """Length of a row."""
        return len(self._row(row))

    def _row(self, row: int) -> NDArray[np.int16]:
        if row in self._cache:
            return self._cache[row]
        # The corpus stores 16 bits, so nothing is lost.
        samples = np.rint(self._rows[row] * INT16_SCALE).clip(-INT16_SCALE, INT16_SCALE - 1)
        audio = samples.astype(np.int16)
        if audio.nbytes <= self._bytes_left:
            self._cache[row] = audio
            self._bytes_left -= audio.nbytes
        return audio


@dataclass(frozen=True)
class VocoderData:
    """States and audio of one split."""

    states: SplitStates
    audio: CachedAudio
    spec: AudioSpec

    @classmethod
    def open(cls, corpus: Corpus, store: StateStore, split: str, cache_bytes: int) -> "VocoderData":
        """Open a split.

        Raises:
            DataError: the store and the corpus hold different numbers of rows, or none.
            CheckpointError: the store is damaged.
        """
        states, audio = store.split(split), corpus.audio(split)
        if len(states) != len(audio) or not len(audio):
            raise DataError(
                f"{store.folder}: hidden states of {len(states)} {split} utterances, {corpus.path} "
                f"has {len(audio)}, expected as many and at least 1; extract the states again"
            )
        return cls(states, CachedAudio(audio, cache_bytes), corpus.audio_spec)

    def __len__(self) -> int:
        return len(self.states)

    def num_tokens(self) -> NDArray[np.int64]:
        """S of every row."""
        counts = [self.states.num_tokens(row) for row in range(len(self))]
        return np.asarray(counts, dtype=np.int64)

    def whole(self, rows: Sequence[int]) -> VocoderBatch:
        """Whole utterances as a batch."""
        counts = [self.states.num_tokens(row) for row in rows]
        return self.segments(rows, [with_margin(0, count, 0, count) for count in counts])

    def segments(self, rows: Sequence[int], segments: Sequence[Segment]) -> VocoderBatch:
        """One segment of each row as a batch, right-padded to the longest.

        Raises:
            DataError: a row's audio does not have the length its states say.
        """
        hidden_states = [
            torch.from_numpy(self.states.read(row, part.window_start, part.window_stop)).float()
            for row, part in zip(rows, segments, strict=True)
        ]
        audio = [
            torch.from_numpy(self._crop(row, part))
            for row, part in zip(rows, segments, strict=True)
        ]
        padded = torch.nn.utils.rnn.pad_sequence(hidden_states, batch_first=True)  # [B, S, D]
        return VocoderBatch(
            hidden_states=padded.transpose(1, 2).contiguous(),
            lengths=torch.tensor([part.window_stop - part.window_start for part in segments]),
            audio=torch.nn.utils.rnn.pad_sequence(audio, batch_first=True),
            starts=torch.tensor([part.offset for part in segments]),
            num_tokens=torch.tensor([part.num_tokens for part in segments]),
        )

    def _crop(self, row: int, part: Segment) -> NDArray[np.float32]:
        found = self.spec.num_tokens(self.audio.num_samples(row))
        wanted = self.states.num_tokens(row)
        if found != wanted:
            raise DataError(
                f"row {row}: its audio is {found} tokens long, its hidden states {wanted}; "
                "extract the states again"
            )
        size = self.spec.samples_per_token
        return self.audio.read(row, part.crop_start * size, part.crop_stop * size)


def whole_batches(
    data: VocoderData, *, batch_tokens: int, seed: int, start_step: int, stop_step: int
) -> Iterator[VocoderBatch]:
    """Whole utterances of similar length, at most `batch_tokens` a batch with padding counted."""
    counts = data.num_tokens()
    for rows in _from_step(counts, batch_tokens, seed, start_step, stop_step):
        yield data.whole(rows)


def crop_batches(
    data: VocoderData,
    *,
    batch_size: int,
    crop: int,
    margin: int | None,
    seed: int,
    start_step: int,
    stop_step: int,
) -> Iterator[VocoderBatch]:
    """Random crops; each utterance comes once an epoch.

    Args:
        data: states and audio.
        batch_size: crops a batch.
        crop: tokens of a crop; a shorter utterance is taken whole and padded.
        margin: tokens decoded on either side; None decodes the whole utterance.
        seed: of order and places.
        start_step: first step.
        stop_step: one past the last step.
    """
    counts = data.num_tokens()
    for step in range(start_step, stop_step):
        generator = step_generator(seed, step, CROP_STREAM)
        rows = crop_rows(len(data), batch_size, seed, step)
        segments = []
        for row in rows:
            count = int(counts[row])
            reach = count if margin is None else margin
            segments.append(random_segment(count, crop, reach, generator))
        yield pad_audio(data.segments(rows, segments), crop * data.spec.samples_per_token)


def crop_rows(num_rows: int, batch_size: int, seed: int, step: int) -> list[int]:
    """Rows of one step: consecutive places in an endless run of shuffled epochs."""
    places = range(step * batch_size, (step + 1) * batch_size)
    orders = {
        epoch: torch.randperm(num_rows, generator=step_generator(seed, epoch, ORDER_STREAM))
        for epoch in {place // num_rows for place in places}
    }
    return [int(orders[place // num_rows][place % num_rows]) for place in places]


def length_batches(
    counts: NDArray[np.int64], batch_tokens: int, seed: int, epoch: int
) -> list[list[int]]:
    """Rows of one epoch in batches of similar length, the batches in random order.

    A row longer than the budget is a batch of its own.
    """
    generator = step_generator(seed, epoch, LENGTH_STREAM)
    jitter = 1 + LENGTH_JITTER * torch.rand(len(counts), generator=generator).numpy()
    batches: list[list[int]] = []
    longest = 0
    for row in np.argsort(counts * jitter, kind="stable").tolist():
        longest = max(longest, int(counts[row]))
        if not batches or longest * (len(batches[-1]) + 1) > batch_tokens:
            batches.append([])
            longest = int(counts[row])
        batches[-1].append(row)
    order = torch.randperm(len(batches), generator=generator)
    return [batches[int(index)] for index in order]


def pad_audio(batch: VocoderBatch, num_samples: int) -> VocoderBatch:
    """Right-pad a batch's audio to a fixed length."""
    missing = num_samples - batch.audio.shape[1]
    return batch._replace(audio=torch.nn.functional.pad(batch.audio, (0, missing)))


def _from_step(
    counts: NDArray[np.int64], batch_tokens: int, seed: int, start_step: int, stop_step: int
) -> Iterator[list[int]]:
    step, epoch = 0, 0
    while step < stop_step:
        batches = length_batches(counts, batch_tokens, seed, epoch)
        yield from batches[max(0, start_step - step) : stop_step - step]
        step += len(batches)
        epoch += 1
