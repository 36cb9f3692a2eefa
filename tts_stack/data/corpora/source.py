"""What the corpus readers share: their result, safe ids, text files read line by line."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tts_stack.audio import AUDIO_EXTENSIONS
from tts_stack.data.report import RejectedItem
from tts_stack.errors import DataError
from tts_stack.records import SourceItem

_MAX_ID_LENGTH = 200  # an id plus an extension must fit into a file name


@dataclass(frozen=True)
class SourceCorpus:
    """A user's corpus, read but not yet checked against its recordings."""

    layout: str  # ljspeech, jsonl or pairs
    items: tuple[SourceItem, ...]
    rejected: tuple[RejectedItem, ...]


def build_source(
    layout: str, path: Path, found: Iterable[SourceItem | RejectedItem]
) -> SourceCorpus:
    """Separate items from rejections; of items that share an id the first is kept.

    Raises:
        DataError: there is not one line in `found`.
    """
    items: dict[str, SourceItem] = {}
    rejected: list[RejectedItem] = []
    for entry in found:
        if isinstance(entry, RejectedItem):
            rejected.append(entry)
        elif entry.id in items:
            first = items[entry.id].place
            message = f"id {entry.id!r} is already used by {first}, expected unique ids; rename one"
            rejected.append(RejectedItem(entry.place, entry.id, "duplicate_id", message))
        else:
            items[entry.id] = entry
    if not items and not rejected:
        raise DataError(f"{path}: is empty, expected one line for each recording")
    return SourceCorpus(layout, tuple(items.values()), tuple(rejected))


def why_unsafe(id: str) -> str | None:
    """Why an id cannot name a file in a folder, or None when it can."""
    if not id.strip():
        return "id is empty, expected a name"
    if "/" in id or "\\" in id or id in (".", ".."):
        return f"id {id!r} contains a path, expected a plain name without / and \\"
    if not id.isprintable():
        return f"id {id!r} contains control characters, expected a plain name"
    if len(id.encode()) > _MAX_ID_LENGTH:
        return f"id of {len(id.encode())} bytes, expected at most {_MAX_ID_LENGTH}"
    return None


def read_numbered_lines(path: Path) -> list[tuple[int, str]]:
    r"""Lines of a UTF-8 file with their numbers from 1, blank ones left out.

    A byte order mark and `\r\n` endings are accepted.

    Raises:
        DataError: the file cannot be read or is not UTF-8.
    """
    lines = read_utf8(path).split("\n")
    return [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def read_utf8(path: Path) -> str:
    r"""A UTF-8 file without byte order mark, line endings made `\n`.

    Raises:
        DataError: the file cannot be read or is not UTF-8; the message names the line.
    """
    try:
        data = path.read_bytes()
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise DataError(
            f"{path.name}:{line}: byte 0x{data[error.start]:02x} is not UTF-8; save {path} as UTF-8"
        ) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def audio_rank(path: Path) -> int:
    """Preference among several files of one recording: lossless first."""
    return AUDIO_EXTENSIONS.index(path.suffix.lower())


def is_audio(path: Path) -> bool:
    """Whether the extension is one of those that can be read."""
    return path.suffix.lower() in AUDIO_EXTENSIONS
