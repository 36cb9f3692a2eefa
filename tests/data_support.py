"""What the tests of tts_stack.data share: settings, made-up recordings, a stand-in front-end."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from tts_stack.contract import TextSpec
from tts_stack.data.config import PrepareConfig, TextConfig
from tts_stack.errors import DataError

RATE = 16000


def prepare_config(source: Path, corpus: Path, **changes: Any) -> PrepareConfig:
    values: dict[str, Any] = dict(
        source=str(source),
        corpus=str(corpus),
        sample_rate=RATE,
        text=TextConfig(kind="raw", language="en-us", engine="gruut"),
        trim_silence=True,
        trim_threshold_db=40.0,
        trim_keep_before_s=0.06,
        trim_keep_after_s=0.1,
        loudness_db=-23.0,
        min_seconds=0.3,
        max_seconds=5.0,
        min_characters_per_second=1.0,
        max_characters_per_second=40.0,
        validation_fraction=0.2,
        max_validation=200,
        shard_size=4,
        seed=0,
        num_workers=1,
    )
    return PrepareConfig(**{**values, **changes})


def build_upper(spec: TextSpec) -> Callable[[str], str]:
    """A stand-in front-end, at module level so that worker processes find it."""
    return speak_upper


def speak_upper(text: str) -> str:
    if not any(character.isalpha() for character in text):
        raise DataError(f'text "{text}": nothing to speak in it')
    return text.upper()


def build_broken(spec: TextSpec) -> Callable[[str], str]:
    """A front-end that fails on any work: proves that none is done."""
    raise_on_text: Callable[[str], str] = fail_to_speak
    return raise_on_text


def fail_to_speak(text: str) -> str:
    raise ZeroDivisionError("front-end called")


def tone(seconds: float, rate: int = RATE) -> np.ndarray:
    time = np.arange(round(seconds * rate)) / rate
    return (0.3 * np.sin(2 * np.pi * 220 * time)).astype(np.float32)


def write_tone(path: Path, seconds: float = 1.0, rate: int = RATE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, tone(seconds, rate), rate)
    return path


def write_ljspeech(folder: Path, num_clips: int) -> Path:
    """Clips clip-0, clip-1, ... of one second, each saying its number."""
    for index in range(num_clips):
        write_tone(folder / "wavs" / f"clip-{index}.wav")
    lines = [f"clip-{index}|clip number {index}\n" for index in range(num_clips)]
    (folder / "metadata.csv").write_text("".join(lines), encoding="utf-8")
    return folder
