"""A folder, with or without subfolders, of recordings with a transcript beside each.

`x.wav` (or any other audio extension) goes with `x.txt` or `x.lab`.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from tts_stack.data.corpora.source import (
    SourceCorpus,
    audio_rank,
    build_source,
    is_audio,
    read_utf8,
    why_unsafe,
)
from tts_stack.data.report import RejectedItem
from tts_stack.errors import DataError
from tts_stack.records import SourceItem

TEXT_EXTENSIONS = (".txt", ".lab")


def read_pairs(path: Path) -> SourceCorpus:
    """Read a folder of recordings and transcripts with the same name.

    Raises:
        DataError: no recording has a transcript beside it.
    """
    files = list(_walk(path.resolve()))
    audio = _by_stem([file for file in files if is_audio(file)], audio_rank)
    texts = _by_stem(
        [file for file in files if file.suffix.lower() in TEXT_EXTENSIONS],
        lambda file: TEXT_EXTENSIONS.index(file.suffix.lower()),
    )
    if not set(audio) & set(texts):
        raise DataError(
            f"{path}: found {len(audio)} audio files and none with a transcript beside it, "
            "expected x.txt or x.lab beside each x.wav"
        )
    return build_source("pairs", path, _read_items(path.resolve(), audio, texts))


def has_audio(path: Path) -> bool:
    """Whether any audio file lies in the folder or below it."""
    return any(is_audio(file) for file in _walk(path))


def _read_items(
    folder: Path, audio: dict[Path, Path], texts: dict[Path, Path]
) -> Iterator[SourceItem | RejectedItem]:
    for stem, file in audio.items():
        name = stem.relative_to(folder)
        id = "_".join(name.parts)
        place = str(file.relative_to(folder))
        unsafe = why_unsafe(id)
        if unsafe:
            yield RejectedItem(place, id, "bad_line", unsafe)
        elif stem not in texts:
            message = f"no transcript beside it, expected {name}.txt or {name}.lab"
            yield RejectedItem(place, id, "missing_text", message)
        else:
            yield _read_pair(id, file, texts[stem], folder)
    for stem in sorted(set(texts) - set(audio)):
        id = "_".join(stem.relative_to(folder).parts)
        message = "no recording beside it; add it or delete the text"
        yield RejectedItem(str(texts[stem].relative_to(folder)), id, "missing_audio", message)


def _read_pair(id: str, audio: Path, text: Path, folder: Path) -> SourceItem | RejectedItem:
    place = str(text.relative_to(folder))
    try:
        words = " ".join(read_utf8(text).split())
    except DataError as error:
        return RejectedItem(place, id, "bad_line", str(error))
    return SourceItem(id=id, audio_path=str(audio), text=words, place=place)


def _walk(folder: Path) -> Iterator[Path]:
    """Files in a folder and below it, by name, without hidden ones and links to folders."""
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(root) / name for name in sorted(names) if not name.startswith("."))


def _by_stem(files: list[Path], rank: Callable[[Path], int]) -> dict[Path, Path]:
    found: dict[Path, Path] = {}
    for file in sorted(files, key=lambda file: (file.parent, file.stem, rank(file))):
        found.setdefault(file.with_suffix(""), file)
    return found
