"""What the codec trains on: cached log-mels and transcripts, in batches that depend on the step."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from tts_stack.contract import AudioSpec
from tts_stack.mel import LogMel
from tts_stack.runtime import step_generator
from tts_stack.semantic.losses import BLANK
from tts_stack.shards import SplitAudio

_POOL_BATCHES = 32  # batches that are sorted by length together: little padding, still random
_PLAN_STREAM = 1  # random stream of the epoch plans


class CodecBatch(NamedTuple):
    """What the codec reads in one training step."""

    mel: Tensor  # [B, K, F] float32, natural log; 0 past a clip's end
    num_tokens: Tensor  # [B] int64
    symbols: Tensor  # [B, longest transcript] int64, BLANK past its end
    num_symbols: Tensor  # [B] int64


class CodecDataset:
    """One split as log-mels (kept in memory once computed) and transcript classes.

    Args:
        paths: shards of the split.
        symbols: symbols of the corpus; symbol i is class i + 1, others are dropped.
        log_mel: the codec's spectrogram.
        spec: the codec's rates.
        max_cache_bytes: memory for spectrograms; clips beyond it are read and computed again.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        symbols: Sequence[str],
        log_mel: LogMel,
        spec: AudioSpec,
        *,
        max_cache_bytes: int,
    ) -> None:
        classes = {symbol: index + 1 for index, symbol in enumerate(symbols)}
        self._audio = SplitAudio(paths)
        self._log_mel, self._spec = log_mel, spec
        self._free_bytes = max_cache_bytes
        self._cache: dict[int, Tensor] = {}
        self.transcripts: list[Tensor] = []
        self.num_tokens: list[int] = []
        for path in paths:
            table = pq.read_table(path, columns=["model_text", "num_samples"])
            for row in table.to_pylist():
                known = [classes[symbol] for symbol in row["model_text"] if symbol in classes]
                self.transcripts.append(torch.tensor(known, dtype=torch.long))
                self.num_tokens.append(spec.num_tokens(row["num_samples"]))

    def __len__(self) -> int:
        return len(self._audio)

    def mel(self, index: int) -> Tensor:
        """Log-mel [F, K] of a clip, rounded to float16 whether it comes from memory or not."""
        if index not in self._cache:
            mel = clip_mel(self._audio[index], self._log_mel, self._spec).half()
            if mel.nbytes > self._free_bytes:
                return mel.float()
            self._free_bytes -= mel.nbytes
            self._cache[index] = mel
        return self._cache[index].float()

    def batch(self, indices: Sequence[int]) -> CodecBatch:
        """Clips padded to the longest one."""
        mels = [self.mel(index) for index in indices]
        transcripts = [self.transcripts[index] for index in indices]
        return CodecBatch(
            mel=pad_sequence(mels, batch_first=True).transpose(1, 2),  # [B, F, K] -> [B, K, F]
            num_tokens=torch.tensor([self.num_tokens[index] for index in indices]),
            symbols=pad_sequence(transcripts, batch_first=True, padding_value=BLANK),
            num_symbols=torch.tensor([len(transcript) for transcript in transcripts]),
        )

    def statistics(self, num_clips: int) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation [K] of the log-mel over clips spread over the split."""
        chosen = np.linspace(0, len(self) - 1, min(num_clips, len(self))).round().astype(int)
        frames = torch.cat([self.mel(int(index)) for index in chosen])  # [F, K]
        return frames.mean(0), frames.std(0).clamp(min=0.1)


def clip_mel(audio: np.ndarray, log_mel: LogMel, spec: AudioSpec) -> Tensor:
    """Samples [T] -> log-mel [F, K] with exactly num_tokens * frames_per_token frames."""
    samples = torch.from_numpy(audio)
    missing = spec.num_tokens(len(audio)) * spec.samples_per_token - len(audio)
    with torch.inference_mode():
        mel = log_mel(functional.pad(samples, (0, missing))[None])[0].T
    return mel.clone()


def plan_batches(
    num_tokens: Sequence[int], max_tokens: int, *, seed: int, start_step: int
) -> Iterator[list[int]]:
    """Clip numbers of step `start_step`, `start_step` + 1, … without end.

    Each epoch visits every clip once, in batches of similar lengths.

    Args:
        num_tokens: length of each clip.
        max_tokens: most tokens in a batch, padding included; a longer clip is a batch of its own.
        seed: of the run.
        start_step: first step wanted; the plan of a step depends on (seed, step) alone.
    """
    epoch = step = 0
    while True:
        batches = _plan_epoch(num_tokens, max_tokens, step_generator(seed, epoch, _PLAN_STREAM))
        if step + len(batches) > start_step:
            yield from batches[max(0, start_step - step) :]
        step += len(batches)
        epoch += 1


def _plan_epoch(
    num_tokens: Sequence[int], max_tokens: int, generator: torch.Generator
) -> list[list[int]]:
    order = torch.randperm(len(num_tokens), generator=generator).tolist()
    mean_tokens = max(1.0, sum(num_tokens) / len(num_tokens))
    pool = max(1, round(_POOL_BATCHES * max_tokens / mean_tokens))
    batches: list[list[int]] = []
    for start in range(0, len(order), pool):
        clips = sorted(order[start : start + pool], key=lambda clip: num_tokens[clip])
        batches += pack_sorted(clips, num_tokens, max_tokens)
    shuffled = torch.randperm(len(batches), generator=generator).tolist()
    return [batches[index] for index in shuffled]


def pack_sorted(
    clips: Sequence[int], num_tokens: Sequence[int], max_tokens: int
) -> list[list[int]]:
    """Cut clips sorted by rising length into batches of at most `max_tokens`, padding included."""
    batches: list[list[int]] = []
    for clip in clips:
        if batches and (len(batches[-1]) + 1) * num_tokens[clip] <= max_tokens:
            batches[-1].append(clip)
        else:
            batches.append([clip])
    return batches
