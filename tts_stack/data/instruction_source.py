"""Rows of instruction data from a file or folder: JSON array, JSONL, Hugging Face dataset.

Large data streams, except a JSON array, which has to be read whole.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from tts_stack.data.malformed import MalformedError
from tts_stack.errors import DataError, MissingDependencyError
from tts_stack.shards import CORPUS_FILE

_FORMS = (
    "expected a JSON array, a JSONL file, or the folder of a Hugging Face dataset (save_to_disk, "
    "or Parquet files)"
)
_DATASET_DICT = "dataset_dict.json"
_BATCH_ROWS = 256
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# "train-00000-of-00002.parquet" and "validation.parquet" name their split.
_SPLIT_FILE = re.compile(r"(\w+)-\d+-of-\d+|(train|valid|validation|dev|test)")


@dataclass(frozen=True)
class SourceRow:
    """A row as it was read, or why it could not be."""

    number: int  # line of a JSONL file, else place in the array or dataset, from 1
    value: object
    error: MalformedError | None = None


@dataclass(frozen=True)
class InstructionSource:
    """Instruction data, opened but not yet read."""

    path: Path
    num_rows: int  # blank lines of JSONL included
    sha256: str  # of the files
    rows: Callable[[], Iterator[SourceRow]]


def open_source(path: Path, split: str | None = None) -> InstructionSource:
    """Recognise the form of instruction data.

    Args:
        path: file or folder.
        split: of a dataset that has several.

    Raises:
        DataError: the path is missing, empty or of another form, or a split has to be named.
        MissingDependencyError: the folder was written by `save_to_disk` and the package
            `datasets` is not installed.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file or folder; {_FORMS}")
    source = _open_folder(path, split) if path.is_dir() else _open_file(path, split)
    if not source.num_rows:
        raise DataError(f"{path}: holds no rows; {_FORMS}")
    return source


def _open_file(path: Path, split: str | None) -> InstructionSource:
    if split is not None:
        raise DataError(f"{path}: split {split!r} was asked for, but a file has no splits")
    if path.suffix == ".parquet":
        return _open_parquet(path, [path])
    sha256, num_lines, first = _scan_file(path)
    if first == b"[":
        values = _read_array(path)
        return InstructionSource(path, len(values), sha256, lambda: _number(values))
    return InstructionSource(path, num_lines if first else 0, sha256, lambda: _read_lines(path))


def _open_folder(path: Path, split: str | None) -> InstructionSource:
    if (path / CORPUS_FILE).is_file():
        raise DataError(f"{path}: is a prepared corpus already; {_FORMS}")
    if (path / _DATASET_DICT).is_file():
        return _open_dataset(path / _choose_split(path, _dict_splits(path / _DATASET_DICT), split))
    if (path / "state.json").is_file():
        _choose_split(path, [], split)
        return _open_dataset(path)
    files = sorted(path.rglob("*.parquet"))
    if not files:
        raise DataError(f"{path}: no dataset in this folder; {_FORMS}")
    names = {_split_of(file) for file in files}
    if "" in names:  # not every file names a split: they belong together
        _choose_split(path, [], split)
        return _open_parquet(path, files)
    chosen = _choose_split(path, sorted(names), split)
    return _open_parquet(path, [file for file in files if _split_of(file) == chosen])


def _dict_splits(file: Path) -> list[str]:
    try:
        return [str(name) for name in json.loads(file.read_text(encoding="utf-8"))["splits"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file}: cannot be read ({error}); save the dataset again") from error


def _choose_split(path: Path, found: Sequence[str], split: str | None) -> str:
    """The named split, or the only one; empty when there are none."""
    if split is None and len(found) <= 1:
        return found[0] if found else ""
    names = ", ".join(found) or "none"
    if split is None:
        raise DataError(f"{path}: holds the splits {names}; name one with --split")
    if split not in found:
        raise DataError(f"{path}: has no split {split!r} (splits found: {names})")
    return split


def _split_of(file: Path) -> str:
    found = _SPLIT_FILE.fullmatch(file.stem)
    return (found[1] or found[2]) if found else ""


def _open_parquet(path: Path, files: Sequence[Path]) -> InstructionSource:
    try:
        num_rows = sum(pq.read_metadata(file).num_rows for file in files)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path}: not readable as Parquet ({error})") from error

    def read() -> Iterator[SourceRow]:
        tables = (pq.ParquetFile(file).iter_batches(_BATCH_ROWS) for file in files)
        return _number(row for batches in tables for batch in batches for row in batch.to_pylist())

    return InstructionSource(path, num_rows, _hash_files(files), read)


def _open_dataset(path: Path) -> InstructionSource:
    """A folder written by `Dataset.save_to_disk`."""
    try:
        import datasets
    except ImportError as error:
        raise MissingDependencyError(
            f"{path}: is a Hugging Face dataset, which needs the package datasets; "
            "run: pip install 'tts-stack[datasets]'"
        ) from error
    try:
        dataset = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path}: not a readable dataset ({error})") from error

    def read() -> Iterator[SourceRow]:
        tables = dataset.with_format("arrow").iter(batch_size=_BATCH_ROWS)
        return _number(row for table in tables for row in table.to_pylist())

    return InstructionSource(path, len(dataset), _hash_files(sorted(path.glob("*.arrow"))), read)


def _number(values: Any) -> Iterator[SourceRow]:
    for number, value in enumerate(values, start=1):
        yield SourceRow(number, value)


def _read_lines(path: Path) -> Iterator[SourceRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(_BYTE_ORDER_MARK)
            if not line.strip():
                continue
            try:
                yield SourceRow(number, _parse(line))
            except (ValueError, RecursionError) as error:
                message = f"not JSON ({error}), expected one object a line"
                yield SourceRow(number, None, MalformedError("not_json", message))


def _read_array(path: Path) -> list[object]:
    try:
        values: list[object] = _parse(path.read_bytes().removeprefix(_BYTE_ORDER_MARK))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: begins as a JSON array, but is none ({error}); repair it, or save it as "
            "JSONL, where only the broken row is left out"
        ) from error
    return values


def _parse(data: bytes) -> Any:
    return json.loads(data.decode(), parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _scan_file(path: Path) -> tuple[str, int, bytes]:
    """SHA-256, number of lines, and the first byte that is not white space."""
    digest, num_lines, first, last = hashlib.sha256(), 0, b"", b""
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
                num_lines += block.count(b"\n")
                first = first or block.removeprefix(_BYTE_ORDER_MARK).lstrip()[:1]
                last = block[-1:]
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    return digest.hexdigest(), num_lines + (last not in (b"", b"\n")), first


def _hash_files(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(_scan_file(file)[0].encode())
    return digest.hexdigest()
