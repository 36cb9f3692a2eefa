"""Recordings in and out: read, resample, trim, level, write.

First and last step of the data flow; the only importer of the audio I/O library for users' files.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

from tts_stack.errors import DataError

# What libsndfile reads, in the order preferred when one recording exists in several formats.
AUDIO_EXTENSIONS = (
    ".wav", ".flac", ".ogg", ".opus", ".mp3", ".aiff", ".aif", ".w64", ".rf64", ".caf", ".au",
)  # fmt: skip
_WRITE_FORMATS = {  # extension -> container and sample format
    ".wav": ("WAV", "PCM_16"),
    ".flac": ("FLAC", "PCM_16"),
    ".ogg": ("OGG", "VORBIS"),
    ".mp3": ("MP3", "MPEG_LAYER_III"),
}
_BLOCK = 1 << 16  # samples read or written at once; libsndfile overflows its stack on long Vorbis
_FRAME_S = 0.02  # level is measured in frames of this length
_SILENCE_DB = -70.0  # a recording whose loudest frame is below this holds no speech
_ACTIVE_RANGE_DB = 20.0  # frames at most this much below the loudest one count as speech
_PEAK_LIMIT = 10 ** (-1 / 20)  # -1 dBFS


class Recording(NamedTuple):
    """Mono audio as it stands in a file."""

    audio: NDArray[np.float32]  # [T], full scale is -1..1
    sample_rate: int  # Hz

    @property
    def seconds(self) -> float:
        return len(self.audio) / self.sample_rate


def read_audio(path: Path) -> Recording:
    """Read a recording of any rate, channel count, sample format and container; mix it to mono.

    Raises:
        DataError: the file is missing, is no audio that libsndfile reads, holds no samples, or
            holds values that are not finite.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file; check the path")
    try:
        with soundfile.SoundFile(path) as file:
            blocks = list(_read_blocks(file))
            sample_rate = int(file.samplerate)
    except (soundfile.SoundFileError, OSError) as error:
        raise DataError(
            f"{path}: cannot be read as audio ({str(error).rsplit(': ', 1)[-1]}); "
            "convert it to WAV or FLAC, or record it again"
        ) from error
    audio = np.concatenate(blocks) if blocks else np.zeros(0, np.float32)
    _check_samples(audio, str(path))
    return Recording(audio, sample_rate)


def audio_seconds(path: Path) -> float:
    """Length of a recording by its header, without decoding it; 0 when the header is unreadable."""
    try:
        return float(soundfile.info(path).duration)
    except (soundfile.SoundFileError, OSError):
        return 0.0


def resample(audio: NDArray[np.float32], from_rate: int, to_rate: int) -> NDArray[np.float32]:
    """Change the sample rate with a linear-phase band-limited filter (SoX resampler, HQ).

    Args:
        audio: samples [T].
        from_rate: Hz of `audio`.
        to_rate: Hz wanted.

    Returns:
        Samples [T * to_rate / from_rate], rounded; `audio` itself when the rates are equal.
    """
    if from_rate == to_rate:
        return audio
    return np.asarray(soxr.resample(audio, from_rate, to_rate, quality="HQ"), dtype=np.float32)


def trim_silence(
    audio: NDArray[np.float32],
    sample_rate: int,
    *,
    threshold_db: float,
    keep_before_s: float,
    keep_after_s: float,
) -> NDArray[np.float32]:
    """Cut silence at both ends, keeping a margin so that soft onsets and decays survive.

    Args:
        audio: samples [T].
        sample_rate: Hz.
        threshold_db: a frame is silence when this many dB below the loudest one.
        keep_before_s: seconds kept before the first frame of sound, where they exist.
        keep_after_s: seconds kept after the last frame of sound, where they exist.

    Returns:
        A view of `audio`.

    Raises:
        DataError: the recording is silent throughout.
    """
    frame = max(1, round(_FRAME_S * sample_rate))
    levels = _frame_levels_db(audio, frame)  # [F]
    sounding = np.flatnonzero(levels >= levels.max() - threshold_db)
    start = sounding[0] * frame - round(keep_before_s * sample_rate)
    stop = (sounding[-1] + 1) * frame + round(keep_after_s * sample_rate)
    return audio[max(0, start) : stop]


def normalize_loudness(
    audio: NDArray[np.float32], sample_rate: int, target_db: float
) -> NDArray[np.float32]:
    """Scale a recording by one gain so that its speech has a given level.

    The level is the RMS of the frames at most 20 dB below the loudest one, so pauses do not
    count. The gain is lowered where a peak would pass -1 dBFS; nothing is compressed or clipped.

    Args:
        audio: samples [T].
        sample_rate: Hz.
        target_db: RMS level of speech, dB relative to full scale.

    Raises:
        DataError: the recording is silent throughout.
    """
    levels = _frame_levels_db(audio, max(1, round(_FRAME_S * sample_rate)))
    active = levels[levels >= levels.max() - _ACTIVE_RANGE_DB]
    level_db = 10 * np.log10(np.mean(10 ** (active / 10)))
    gain = 10 ** ((target_db - level_db) / 20)
    peak = float(np.abs(audio).max())
    return np.asarray(audio * min(gain, _PEAK_LIMIT / peak), dtype=np.float32)


def write_audio(path: Path, audio: NDArray[np.float32], sample_rate: int) -> None:
    """Write mono audio; the extension chooses WAV, FLAC (16 bits), Ogg Vorbis or MP3.

    The file appears whole or not at all. Samples outside -1..1 are clipped.

    Args:
        path: file to write; its folder must exist.
        audio: samples [T].
        sample_rate: Hz.

    Raises:
        DataError: the extension is unknown, the folder is missing, the file cannot be written,
            the format does not know the rate, or `audio` is empty or not finite.
    """
    container, subtype = _write_format(path)
    _check_samples(audio, str(path))
    partial = path.with_name(path.name + ".partial")
    try:
        with soundfile.SoundFile(partial, "w", sample_rate, 1, subtype, None, container) as file:
            for start in range(0, len(audio), _BLOCK):
                file.write(np.clip(audio[start : start + _BLOCK], -1.0, 1.0))
        os.replace(partial, path)
    except (soundfile.SoundFileError, OSError) as error:
        partial.unlink(missing_ok=True)
        reason = str(error).rsplit(": ", 1)[-1]
        raise DataError(
            f"{path}: cannot be written as {container} at {sample_rate} Hz ({reason}); "
            "check that the place is writable"
        ) from error


def check_writable(path: Path) -> None:
    """Check an output path before work starts that would be lost without it.

    Raises:
        DataError: the extension is unknown, the folder is missing or not writable, or the path
            is a folder.
    """
    _write_format(path)
    if not os.access(path.parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise DataError(f"{path}: no permission to write here; choose another place")


def _write_format(path: Path) -> tuple[str, str]:
    if path.is_dir():
        raise DataError(f"{path}: is a folder, expected a file name such as {path / 'out.wav'}")
    if path.suffix.lower() not in _WRITE_FORMATS:
        raise DataError(
            f"{path}: the extension is {path.suffix or '(none)'}, "
            f"expected one of {' '.join(_WRITE_FORMATS)}"
        )
    if not path.parent.is_dir():
        raise DataError(f"{path}: there is no folder {path.parent}; create it first")
    return _WRITE_FORMATS[path.suffix.lower()]


def _read_blocks(file: soundfile.SoundFile) -> Iterator[NDArray[np.float32]]:
    """Mono blocks; reading in blocks also suits streams whose header does not know their length."""
    while len(block := file.read(_BLOCK, dtype="float32", always_2d=True)):  # [T, C]
        yield block.mean(axis=1, dtype=np.float32)


def _check_samples(audio: NDArray[np.float32], place: str) -> None:
    if not len(audio):
        raise DataError(f"{place}: holds no samples, expected at least one; record it again")
    if not np.isfinite(audio).all():
        bad = int(np.count_nonzero(~np.isfinite(audio)))
        raise DataError(
            f"{place}: {bad} of {len(audio)} samples are not finite (NaN or infinite), expected "
            "numbers; record or export it again"
        )


def _frame_levels_db(audio: NDArray[np.float32], frame: int) -> NDArray[np.float64]:
    """RMS of consecutive frames [F] in dBFS; the last frame may be shorter."""
    starts = np.arange(0, len(audio), frame)
    sums = np.add.reduceat(np.square(audio, dtype=np.float64), starts)
    counts = np.minimum(frame, len(audio) - starts)
    levels = 10 * np.log10(np.maximum(sums / counts, 1e-20))
    loudest = float(levels.max())
    if loudest < _SILENCE_DB:
        raise DataError(
            f"the recording is silent: its loudest frame is at {loudest:.0f} dBFS, expected at "
            f"least {_SILENCE_DB:.0f}; record it again"
        )
    return levels
