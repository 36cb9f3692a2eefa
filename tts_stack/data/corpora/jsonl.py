"""JSONL manifest: one object a line with `audio` and `text`, optional `id speaker language`.

Audio paths are relative to the manifest or absolute.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from tts_stack.data.corpora.source import (
    SourceCorpus,
    build_source,
    read_numbered_lines,
    why_unsafe,
)
from tts_stack.data.report import RejectedItem
from tts_stack.errors import DataError
from tts_stack.records import SourceItem

_REQUIRED = ("audio", "text")
_OPTIONAL = ("id", "speaker", "language")


def read_jsonl(path: Path) -> SourceCorpus:
    """Read a manifest; keys other than the five known ones are ignored.

    Raises:
        DataError: the file is empty, cannot be read or is not UTF-8.
    """
    folder = path.parent.resolve()
    return build_source("jsonl", path, _read_lines(path, folder))


def _read_lines(path: Path, folder: Path) -> Iterator[SourceItem | RejectedItem]:
    for number, line in read_numbered_lines(path):
        place = f"{path.name}:{number}"
        try:
            yield _read_item(line, place, folder)
        except DataError as error:
            yield RejectedItem(place, "", "bad_line", str(error))


def _read_item(line: str, place: str, folder: Path) -> SourceItem:
    values = _parse(line)
    name = values["audio"]
    id = values.get("id") or "_".join(Path(name).with_suffix("").parts).strip("/._\\")
    unsafe = why_unsafe(id)
    if unsafe:
        raise DataError(unsafe)
    return SourceItem(
        id=id,
        audio_path=str(folder / name),
        text=values["text"],
        place=place,
        speaker=values.get("speaker", ""),
        language=values.get("language", "").lower(),
    )


def _parse(line: str) -> dict[str, str]:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise DataError(f"not JSON ({error}), expected one object a line") from error
    if not isinstance(values, dict):
        raise DataError(f"found a {type(values).__name__}, expected an object with audio and text")
    missing = [key for key in _REQUIRED if key not in values]
    if missing:
        found = ", ".join(sorted(values)) or "none"
        raise DataError(f"key {missing[0]!r} is missing (keys found: {found})")
    known = {key: values[key] for key in (*_REQUIRED, *_OPTIONAL) if values.get(key) is not None}
    for key in (*_REQUIRED, *known):
        if not isinstance(values[key], str):
            raise DataError(f"{key} is {json.dumps(values[key])}, expected a string")
    if not known["audio"].strip() or "\0" in known["audio"]:
        raise DataError(f"audio is {known['audio']!r}, expected a path")
    return known
