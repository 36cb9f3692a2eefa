"""Recordings in and out: read, resample, trim, level, write.

First and last step of the data flow; the only importer of the audio I/O library for users' files.
"""

import math
import os
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
_WHOLE = 0.98  # of the samples a header promises; codecs may drop a few at the end
_UNKNOWN_LENGTH = 2.0**60  # samples: libsndfile's answer for streams is about 2**63
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


def read_audio(path: Path, *, max_seconds: float = math.inf) -> Recording:
    """Read a recording of any rate, channel count, sample format and container; mix it to mono.

    Args:
        path: the file.
        max_seconds: stop reading about here, so that a recording of hours does not fill memory.

    Raises:
        DataError: the file is missing, is no audio that libsndfile reads, ends before its time,
            holds no samples, or holds values that are not finite.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file; check the path")
    try:
        with soundfile.SoundFile(path) as file:
            audio = _read_mono(file, max_seconds)
            recording = Recording(audio, int(file.samplerate))
            promised = file.frames / file.samplerate  # seconds
            # The length of an MP3 may be an estimate, that of a stream a huge number.
            is_cut = file.format != "MP3" and len(audio) < _WHOLE * file.frames < _UNKNOWN_LENGTH
    except (soundfile.SoundFileError, OSError) as error:
        raise DataError(
            f"{path}: cannot be read as audio ({_reason(error)}); "
            "convert it to WAV or FLAC, or record it again"
        ) from error
    _check_samples(audio, str(path))
    if is_cut and recording.seconds < max_seconds:
        raise DataError(
            f"{path}: ends after {recording.seconds:.2f} s, expected {promised:.2f} s; the file is "
            "damaged, copy or record it again"
        )
    return recording


def audio_seconds(path: Path) -> float:
    """Length of a recording by its header, an estimate for some MP3s; 0 when it is unreadable."""
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


def speech_level_db(audio: NDArray[np.float32], sample_rate: int) -> float:
    """Level of speech in dBFS: RMS of the frames at most 20 dB below the loudest, without pauses.

    Raises:
        DataError: the recording is silent throughout.
    """
    levels = _frame_levels_db(audio, max(1, round(_FRAME_S * sample_rate)))
    active = levels[levels >= levels.max() - _ACTIVE_RANGE_DB]
    return float(10 * np.log10(np.mean(10 ** (active / 10))))


def normalize_loudness(
    audio: NDArray[np.float32], sample_rate: int, target_db: float
) -> NDArray[np.float32]:
    """Scale a recording by one gain so that its speech has a given level.

    The gain is lowered where a peak would pass -1 dBFS; nothing is compressed or clipped.

    Args:
        audio: samples [T].
        sample_rate: Hz.
        target_db: level of speech wanted, dBFS; see `speech_level_db`.

    Raises:
        DataError: the recording is silent throughout.
    """
    gain = 10 ** ((target_db - speech_level_db(audio, sample_rate)) / 20)
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
        raise DataError(
            f"{path}: cannot be written as {container} at {sample_rate} Hz ({_reason(error)}); "
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


def _read_mono(file: soundfile.SoundFile, max_seconds: float) -> NDArray[np.float32]:
    """Samples [T], read in blocks: a stream whose header gives no length reads like any file."""
    blocks, num_samples = [np.zeros(0, np.float32)], 0
    while num_samples < max_seconds * file.samplerate:
        block = file.read(_BLOCK, dtype="float32", always_2d=True)  # [T, C]
        if not len(block):
            break
        blocks.append(block.mean(axis=1, dtype=np.float32))
        num_samples += len(block)
    return np.concatenate(blocks)


def _reason(error: Exception) -> str:
    """The last part of libsndfile's message, which starts with the path."""
    return str(error).rsplit(": ", 1)[-1].rstrip(".")


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
