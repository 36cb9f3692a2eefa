"""Recordings and hidden states by corpus row -> `VocoderBatch`.

What a batch holds depends on the seed and its number alone, so resuming needs no saved position
and any number of processes reads the same batches.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from stage2_vocoder.segment import Segment, with_margin
from stage2_vocoder.states import SplitReader, StatesReader
from tts_stack.contract import AudioSpec
from tts_stack.errors import DataError
from tts_stack.shards import Corpus

logger = logging.getLogger(__name__)
INT16_SCALE = 32768


class VocoderBatch(NamedTuple):
    """What the vocoder reads in one step, and the audio it should give.

    In a batch of crops `hidden_states` is wider than `audio`: it holds the margin. What the
    discriminators judge is the crop inside `audio`, all of it unless whole utterances are decoded.
    """

    hidden_states: Tensor  # [B, W, S] float32, right-padded
    lengths: Tensor  # [B] int64, tokens of hidden_states that are real
    audio: Tensor  # [B, T], zero on padding
    starts: Tensor  # [B] int64, token of hidden_states at which audio begins
    num_tokens: Tensor  # [B] int64, tokens of audio that are real
    crop_starts: Tensor  # [B] int64, token of audio at which the judged crop begins
    crop_tokens: Tensor  # [B] int64, tokens of the judged crop that are real

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
        """Samples start .. stop - 1 of a row; what lies past its end is silence.

        Raises:
            DataError: the row holds samples that are no numbers.
        """
        found = self._row(row)[start:stop]
        audio = np.zeros(stop - start, dtype=np.float32)
        audio[: len(found)] = found.astype(np.float32) / INT16_SCALE
        return audio

    def num_samples(self, row: int) -> int:
        """Length of a row.

        Raises:
            DataError: the row holds samples that are no numbers.
        """
        return len(self._row(row))

    def _row(self, row: int) -> NDArray[np.int16]:
        if row in self._cache:
            return self._cache[row]
        audio = self._rows[row]
        num_bad = int(np.count_nonzero(~np.isfinite(audio)))
        if num_bad:
            raise DataError(
                f"row {row}: {num_bad} of its {len(audio)} samples are NaN or infinite, expected "
                "numbers in -1 .. 1; re-run tts-stack prepare, which leaves such clips out"
            )
        # The corpus stores 16 bits, so nothing is lost.
        rounded = np.rint(audio * INT16_SCALE).clip(-INT16_SCALE, INT16_SCALE - 1).astype(np.int16)
        if rounded.nbytes <= self._bytes_left:
            self._cache[row] = rounded
            self._bytes_left -= rounded.nbytes
        return rounded


@dataclass(frozen=True)
class VocoderData:
    """States and audio of one split."""

    states: SplitReader
    audio: CachedAudio
    spec: AudioSpec
    width: int  # W of the states

    @classmethod
    def open(
        cls, corpus: Corpus, store: StatesReader, split: str, cache_bytes: int
    ) -> "VocoderData":
        """Open a split.

        Raises:
            DataError: the store and the corpus hold different numbers of rows, or none, or a
                recording is not as long as its states say.
            CheckpointError: the store is damaged.
        """
        states, audio = store.split(split), corpus.audio(split)
        if not len(audio):
            raise DataError(
                f"{corpus.path}: the {split} split is empty, expected at least one clip; re-run "
                "tts-stack prepare with more recordings"
            )
        if len(states) != len(audio):
            raise DataError(
                f"{store.folder}: hidden states of {len(states)} {split} utterances, {corpus.path} "
                f"has {len(audio)}; extract the states again"
            )
        if not any(states.num_tokens(row) for row in range(len(states))):
            raise DataError(
                f"{store.folder}: no {split} utterance has hidden states, expected at least one; "
                "check that the LLM knows the symbols of this corpus"
            )
        _check_lengths(corpus.shard_paths(split), states, corpus.audio_spec)
        return cls(states, CachedAudio(audio, cache_bytes), corpus.audio_spec, store.info.width)

    def __len__(self) -> int:
        return len(self.states)

    def num_tokens(self) -> NDArray[np.int64]:
        """S of every row; 0 for one without states, which no batch ever holds."""
        counts = [self.states.num_tokens(row) for row in range(len(self))]
        return np.asarray(counts, dtype=np.int64)

    def whole(self, rows: Sequence[int]) -> VocoderBatch:
        """Whole utterances as a batch."""
        counts = [self.states.num_tokens(row) for row in rows]
        return self.segments(rows, [with_margin(0, count, 0, count) for count in counts])

    def segments(self, rows: Sequence[int], segments: Sequence[Segment]) -> VocoderBatch:
        """One segment of each row as a batch, right-padded to the longest.

        Raises:
            DataError: a row's audio does not have the length its states say, or its states have
                another width than the others'.
        """
        hidden_states = [self._states(row, part) for row, part in zip(rows, segments, strict=True)]
        audio = [
            torch.from_numpy(self._crop(row, part))
            for row, part in zip(rows, segments, strict=True)
        ]
        padded = torch.nn.utils.rnn.pad_sequence(hidden_states, batch_first=True)  # [B, S, W]
        return VocoderBatch(
            hidden_states=padded.transpose(1, 2).contiguous(),
            lengths=torch.tensor([part.window_stop - part.window_start for part in segments]),
            audio=torch.nn.utils.rnn.pad_sequence(audio, batch_first=True),
            starts=torch.tensor([part.offset for part in segments]),
            num_tokens=torch.tensor([part.num_tokens for part in segments]),
            crop_starts=torch.zeros(len(segments), dtype=torch.int64),
            crop_tokens=torch.tensor([part.num_tokens for part in segments]),
        )

    def _states(self, row: int, part: Segment) -> Tensor:
        found = self.states.read(row, part.window_start, part.window_stop)
        if found.shape[1] != self.width:
            raise DataError(
                f"row {row}: its hidden states are {found.shape[1]} wide, expected {self.width}; "
                "extract the states again"
            )
        return torch.from_numpy(found).float()

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


def pad_audio(batch: VocoderBatch, num_samples: int) -> VocoderBatch:
    """Right-pad a batch's audio to a fixed length."""
    missing = num_samples - batch.audio.shape[1]
    return batch._replace(audio=torch.nn.functional.pad(batch.audio, (0, missing)))


def _check_lengths(paths: Sequence[Path], states: SplitReader, spec: AudioSpec) -> None:
    """Compare what the shards say of their recordings with the states, before anything is read."""
    row = 0
    for path in paths:
        table = pq.read_table(path, columns=["id", "num_samples"])
        for id, num_samples in zip(*(column.to_pylist() for column in table.columns), strict=True):
            found, wanted = spec.num_tokens(num_samples), states.num_tokens(row)
            if wanted and found != wanted:
                raise DataError(
                    f"{path}: {id} is {num_samples} samples long, which is {found} tokens, and has "
                    f"hidden states for {wanted}; run tts-stack tokenize and extract the states "
                    "again"
                )
            row += 1
