"""LJSpeech layout: `metadata.csv` of `id|text` or `id|text|normalised text`, and `wavs/<id>.*`.

The columns are separated by `|` alone: quotes are part of the text.
"""

from collections.abc import Iterator
from pathlib import Path

from tts_stack.data.corpora.source import (
    SourceCorpus,
    audio_rank,
    build_source,
    is_audio,
    read_numbered_lines,
    why_unsafe,
)
from tts_stack.data.report import RejectedItem
from tts_stack.errors import DataError
from tts_stack.records import SourceItem

METADATA_FILE = "metadata.csv"
AUDIO_FOLDER = "wavs"


def read_ljspeech(path: Path) -> SourceCorpus:
    """Read a folder in LJSpeech layout; the normalised text is taken where there is one.

    Raises:
        DataError: there is no `wavs` folder, or `metadata.csv` is empty or not UTF-8.
    """
    folder = path / AUDIO_FOLDER
    if not folder.is_dir():
        raise DataError(
            f"{path}: has {METADATA_FILE} but no folder {AUDIO_FOLDER}/, expected the recordings "
            "in it"
        )
    lines = read_numbered_lines(path / METADATA_FILE)
    return build_source("ljspeech", path / METADATA_FILE, _read_lines(lines, _index_audio(folder)))


def _read_lines(
    lines: list[tuple[int, str]], audio: dict[str, Path]
) -> Iterator[SourceItem | RejectedItem]:
    for number, line in lines:
        place = f"{METADATA_FILE}:{number}"
        columns = [column.strip() for column in line.split("|")]
        id, texts = columns[0], columns[1:]
        unsafe = why_unsafe(id)
        if unsafe:
            yield RejectedItem(place, id, "bad_line", unsafe)
        elif len(texts) not in (1, 2):
            message = (
                f"found {len(columns)} columns, expected id|text or id|text|normalised text; a "
                "text with | in it needs a JSONL manifest"
            )
            yield RejectedItem(place, id, "bad_line", message)
        elif id not in audio:
            message = f"found no audio file {AUDIO_FOLDER}/{id}.*; add it or delete the line"
            yield RejectedItem(place, id, "missing_audio", message)
        else:
            text = texts[-1] or texts[0]
            yield SourceItem(id=id, audio_path=str(audio[id]), text=text, place=place)


def _index_audio(folder: Path) -> dict[str, Path]:
    """Audio files by name without extension, and by full name: both serve as ids."""
    files = [path for path in folder.resolve().iterdir() if is_audio(path)]
    index: dict[str, Path] = {}
    for file in sorted(files, key=lambda path: (audio_rank(path), path.name)):
        index.setdefault(file.stem, file)
        index.setdefault(file.name, file)
    return index
