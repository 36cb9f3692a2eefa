"""How generated speech compares with the recording: PESQ, STOI, pitch and voicing.

Each figure needs a package of the extra `measure`; one that is missing is said once and its
figure left out.
"""

import importlib
import logging
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import soxr
from numpy.typing import NDArray

from stage2_vocoder.losses import SILENCE
from tts_stack.processes import is_main_process

logger = logging.getLogger(__name__)
SAMPLE_RATE = 16000  # Hz: what wide-band PESQ (ITU-T P.862.2) is defined for
PACKAGES = {"pesq": "PESQ", "pystoi": "STOI", "librosa": "pitch and voicing errors"}
WORST_PESQ = 1.0
SHORTEST_S = 0.3  # seconds; PESQ needs 0.25
F0_LOWEST, F0_HIGHEST = 60.0, 600.0  # Hz
F0_FRAME, F0_HOP = 1024, 256  # samples: 64 ms and 16 ms
F0_RESOLUTION = 0.1  # semitones; finer costs more and changes no figure that is shown
CENTS_PER_OCTAVE = 1200

Audio = NDArray[np.float32]


class Pair(NamedTuple):
    """One utterance, as it was generated and as it was recorded."""

    audio_hat: Audio  # [T]
    audio: Audio  # [T]


class Pitch(NamedTuple):
    """Fundamental frequency by frame."""

    f0: NDArray[np.float64]  # [F] Hz, NaN where there is no voice
    is_voiced: NDArray[np.bool_]  # [F]


class QualityMeter:
    """Measures the same utterances again and again.

    Args:
        sample_rate: of the audio, in Hz.
    """

    def __init__(self, sample_rate: int) -> None:
        self.sample_rate = sample_rate
        self._packages: dict[str, ModuleType] | None = None
        self._pitches: dict[bytes, Pitch] = {}  # of recordings: they are the same each time

    def measure(self, pairs: Sequence[Pair]) -> dict[str, float]:
        """Means over utterances; silent and very short ones do not count.

        Returns:
            `pesq` (wide band, 1.0 to 4.6), `stoi` (0 to 1), `f0_cents` (RMS difference of pitch
            where both are voiced) and `voicing_error` (share of frames voiced in one alone): as
            far as their packages are installed and at least one utterance could be judged.
        """
        packages = self._import()
        resampled = [
            Pair(*(self._resample(audio) for audio in pair))
            for pair in pairs
            if _can_be_judged(pair, self.sample_rate)
        ]
        figures: dict[str, float] = {}
        if "pesq" in packages:
            figures |= _mean("pesq", [_pesq(packages["pesq"], pair) for pair in resampled])
        if "pystoi" in packages:
            figures |= _mean("stoi", [_stoi(packages["pystoi"], pair) for pair in resampled])
        if "librosa" in packages:
            figures |= self._compare_pitch(packages["librosa"], resampled)
        return figures

    def _resample(self, audio: Audio) -> Audio:
        if self.sample_rate == SAMPLE_RATE:
            return audio
        found: Audio = soxr.resample(audio, self.sample_rate, SAMPLE_RATE)
        return found

    def _compare_pitch(self, librosa: ModuleType, pairs: Sequence[Pair]) -> dict[str, float]:
        errors, cents = [], []
        for pair in pairs:
            key = pair.audio.tobytes()
            if key not in self._pitches:
                self._pitches[key] = pitch(librosa, pair.audio)
            both = (pitch(librosa, pair.audio_hat), self._pitches[key])
            errors.append(both[0].is_voiced != both[1].is_voiced)
            cents.append(pitch_difference(*both))
        return _rms("f0_cents", cents) | (
            {"voicing_error": float(np.concatenate(errors).mean())} if errors else {}
        )

    def _import(self) -> dict[str, ModuleType]:
        if self._packages is None:
            self._packages = {}
            for name in PACKAGES:
                try:
                    self._packages[name] = importlib.import_module(name)
                except ImportError:
                    continue
            self._say_what_is_missing()
        return self._packages

    def _say_what_is_missing(self) -> None:
        missing = [name for name in PACKAGES if name not in (self._packages or {})]
        if missing and is_main_process():
            logger.info(
                "validation without %s: pip install %s, or all of tts-stack[measure]",
                ", ".join(PACKAGES[name] for name in missing),
                " ".join(missing),
            )


def pitch(librosa: Any, audio: Audio) -> Pitch:
    """Fundamental frequency and voicing of 16 kHz audio by pYIN."""
    f0, is_voiced, _ = librosa.pyin(
        audio,
        fmin=F0_LOWEST,
        fmax=F0_HIGHEST,
        sr=SAMPLE_RATE,
        frame_length=F0_FRAME,
        hop_length=F0_HOP,
        resolution=F0_RESOLUTION,
    )
    return Pitch(f0, is_voiced)


def pitch_difference(one: Pitch, other: Pitch) -> NDArray[np.float64]:
    """Differences in cents over the frames that are voiced in both."""
    both = one.is_voiced & other.is_voiced
    found: NDArray[np.float64] = CENTS_PER_OCTAVE * np.log2(one.f0[both] / other.f0[both])
    return found


def _can_be_judged(pair: Pair, sample_rate: int) -> bool:
    if len(pair.audio) < SHORTEST_S * sample_rate or not np.isfinite(pair.audio_hat).all():
        return False
    return bool(np.abs(pair.audio).max() >= SILENCE)


def _pesq(package: Any, pair: Pair) -> float | None:
    if np.abs(pair.audio_hat).max() < SILENCE:
        return WORST_PESQ  # the package fails on silence
    try:
        return float(package.pesq(SAMPLE_RATE, pair.audio, pair.audio_hat, "wb"))
    except (package.PesqError, ValueError):  # nothing that it takes for speech
        return None


def _stoi(package: Any, pair: Pair) -> float | None:
    with warnings.catch_warnings():
        # Of less than 0.4 s of speech it warns, and gives a number without sense.
        warnings.filterwarnings("error", category=RuntimeWarning)
        try:
            return float(package.stoi(pair.audio, pair.audio_hat, SAMPLE_RATE))
        except RuntimeWarning:
            return None


def _mean(name: str, values: Sequence[float | None]) -> dict[str, float]:
    known = [value for value in values if value is not None]
    return {name: float(np.mean(known))} if known else {}


def _rms(name: str, parts: Sequence[NDArray[np.float64]]) -> dict[str, float]:
    values = np.concatenate(parts) if parts else np.zeros(0)
    return {name: float(np.sqrt(np.mean(np.square(values))))} if len(values) else {}
