"""One source line -> one prepared utterance, or the reason why not."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tts_stack.audio import (
    audio_seconds,
    normalize_loudness,
    read_audio,
    resample,
    speech_level_db,
    trim_silence,
)
from tts_stack.data.config import PrepareConfig
from tts_stack.data.report import RejectedItem
from tts_stack.errors import DataError
from tts_stack.records import SourceItem, Utterance

# A file this many times longer than max_seconds is rejected without reading the rest of it.
_HOPELESS_LENGTH = 4.0


class _RejectedError(DataError):
    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def prepare_item(
    item: SourceItem, config: PrepareConfig, frontend: Callable[[str], str]
) -> Utterance | RejectedItem:
    """Convert the text, condition the audio, and check both.

    Args:
        item: a line of the source.
        config: bounds and audio settings.
        frontend: raw text -> what the LLM reads; raises DataError for text it cannot speak.
    """
    try:
        model_text = _model_text(item, config, frontend)
        audio = _condition(_read(item, config), config)
        _check_length(len(audio) / config.sample_rate, config)
        _check_pace(len(model_text), len(audio) / config.sample_rate, config)
    except _RejectedError as error:
        return RejectedItem(item.place, item.id, error.reason, str(error))
    language = item.language or config.text.language
    return Utterance(item.id, item.text, model_text, item.speaker, language, audio)


def _model_text(item: SourceItem, config: PrepareConfig, frontend: Callable[[str], str]) -> str:
    wanted = config.text.language
    if config.text.kind != "raw" and item.language and not _same_language(item.language, wanted):
        raise _RejectedError(
            "other_language",
            f"language is {item.language}, expected {wanted}; prepare it with "
            f"text.language={item.language} or text.kind=raw",
        )
    if not item.text.strip():
        raise _RejectedError("unusable_text", "text is empty, expected at least one word")
    try:
        return frontend(item.text)
    except DataError as error:
        raise _RejectedError("unusable_text", str(error)) from error
    except Exception as error:
        error.add_note(f"while converting the text of {item.place}: {item.text!r}")
        raise


def _same_language(found: str, wanted: str) -> bool:
    """Compare without region: en-gb recordings are welcome in an en-us corpus."""
    return found.lower().replace("_", "-").split("-")[0] == wanted.split("-")[0]


def _read(item: SourceItem, config: PrepareConfig) -> NDArray[np.float32]:
    """Samples [T] at the corpus's rate."""
    path = Path(item.audio_path)
    if not path.is_file():
        raise _RejectedError("missing_audio", f"no audio file {path}; check the path")
    limit = _HOPELESS_LENGTH * config.max_seconds
    try:
        recording = read_audio(path, max_seconds=limit)
    except DataError as error:
        raise _RejectedError("unreadable_audio", str(error)) from error
    if recording.seconds >= limit:
        raise _too_long(max(audio_seconds(path), recording.seconds), config)
    return resample(recording.audio, recording.sample_rate, config.sample_rate)


def _condition(audio: NDArray[np.float32], config: PrepareConfig) -> NDArray[np.float32]:
    audio = audio - audio.mean()  # a constant offset would count as sound
    try:
        speech_level_db(audio, config.sample_rate)  # silence is rejected whatever the settings
        if config.trim_silence:
            audio = trim_silence(
                audio,
                config.sample_rate,
                threshold_db=config.trim_threshold_db,
                keep_before_s=config.trim_keep_before_s,
                keep_after_s=config.trim_keep_after_s,
            )
        if config.loudness_db is not None:
            audio = normalize_loudness(audio, config.sample_rate, config.loudness_db)
    except DataError as error:
        raise _RejectedError("silent_audio", str(error)) from error
    return np.ascontiguousarray(audio)


def _check_length(seconds: float, config: PrepareConfig) -> None:
    if seconds < config.min_seconds:
        raise _RejectedError(
            "too_short",
            f"{seconds:.2f} s of sound, expected at least min_seconds={config.min_seconds:g}; "
            "record it again or lower the bound",
        )
    if seconds > config.max_seconds:
        raise _too_long(seconds, config)


def _too_long(seconds: float, config: PrepareConfig) -> _RejectedError:
    return _RejectedError(
        "too_long",
        f"{seconds:.1f} s, expected at most max_seconds={config.max_seconds:g}; "
        "cut it into sentences or raise the bound",
    )


def _check_pace(num_characters: int, seconds: float, config: PrepareConfig) -> None:
    pace = num_characters / seconds
    facts = f"{num_characters} characters in {seconds:.2f} s are {pace:.1f} a second, expected"
    if pace < config.min_characters_per_second:
        bound = f"min_characters_per_second={config.min_characters_per_second:g}"
        raise _RejectedError("too_slow", f"{facts} at least {bound}; check the transcript")
    if pace > config.max_characters_per_second:
        bound = f"max_characters_per_second={config.max_characters_per_second:g}"
        raise _RejectedError("too_fast", f"{facts} at most {bound}; check the transcript")
