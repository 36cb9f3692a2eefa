"""Tokens of an outside speech tokenizer from a file: JSONL or Parquet of `id`, `semantic_tokens`.

Each row is checked against the codec's sizes; the first bad one stops the reading.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tts_stack.contract import CodecIdentity
from tts_stack.errors import DataError

_COLUMNS = ("id", "semantic_tokens")
_BATCH_ROWS = 256


class _Row(NamedTuple):
    place: str  # "tokens.jsonl:17"
    id: object
    tokens: Any


def read_token_file(path: Path, codec: CodecIdentity) -> dict[str, NDArray[np.int64]]:
    """Tokens by id, [S] for one codebook and [S, K] for K.

    Raises:
        DataError: the file cannot be read, an id occurs twice, or a row's tokens are not whole
            numbers, ragged, of another number of codebooks, or outside the codebook.
    """
    found: dict[str, NDArray[np.int64]] = {}
    places: dict[str, str] = {}
    rows = _read_parquet(path) if path.suffix == ".parquet" else _read_jsonl(path)
    for row in rows:
        if not isinstance(row.id, str):
            raise DataError(f"{row.place}: id is {json.dumps(row.id)}, expected a string")
        if row.id in found:
            raise DataError(
                f"{row.place}: id {row.id!r} is already used by {places[row.id]}, expected once"
            )
        found[row.id] = _check(row, codec)
        places[row.id] = row.place
    if not found:
        raise DataError(f"{path}: holds no rows, expected one an utterance")
    return found


def _check(row: _Row, codec: CodecIdentity) -> NDArray[np.int64]:
    place = f"{row.place}: semantic_tokens of {row.id}"
    tokens = _to_array(row.tokens, place, codec)
    num_codebooks = codec.num_codebooks
    if tokens.ndim == 1 and num_codebooks > 1:
        raise DataError(
            f"{place}: is a flat list, expected rows of {num_codebooks} codes; correct "
            "--num-codebooks or write [[first codebook, second, …], …]"
        )
    if tokens.ndim == 2 and tokens.shape[1] != num_codebooks:
        hint = (
            "transpose it: one row a token, not one a codebook"
            if tokens.shape[0] == num_codebooks
            else "correct --num-codebooks"
        )
        raise DataError(
            f"{place}: {tokens.shape[1]} codes a token, expected {num_codebooks}; {hint}"
        )
    return tokens.reshape(-1) if num_codebooks == 1 else tokens


def _to_array(tokens: Any, place: str, codec: CodecIdentity) -> NDArray[np.int64]:
    """[S] or [S, K] as written."""
    if not isinstance(tokens, list):
        raise DataError(f"{place}: is {type(tokens).__name__}, expected a list of whole numbers")
    if not tokens:
        return np.zeros((0, codec.num_codebooks), dtype=np.int64)
    widths = {len(part) if isinstance(part, list) else 0 for part in tokens}
    if len(widths) > 1:
        raise DataError(
            f"{place}: is ragged ({', '.join(map(str, sorted(widths)))} codes a token), expected "
            f"{codec.num_codebooks} everywhere"
        )
    codes = [code for part in tokens for code in (part if isinstance(part, list) else [part])]
    wrong = [code for code in codes if type(code) is not int]
    if wrong:
        raise DataError(f"{place}: holds {wrong[0]!r}, expected whole numbers")
    _check_range(codes, place, codec.codebook_size)  # before they have to fit into 64 bits
    array = np.array(codes, dtype=np.int64)
    return array.reshape(len(tokens), -1) if widths != {0} else array


def _check_range(codes: list[int], place: str, codebook_size: int) -> None:
    outside = [code for code in codes if not 0 <= code < codebook_size]
    if outside:
        raise DataError(
            f"{place}: code {outside[0]}, expected 0 .. {codebook_size - 1}; correct "
            "--codebook-size, or write codes without special tokens"
        )


def _read_jsonl(path: Path) -> Iterator[_Row]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _parse(line, f"{path.name}:{number}")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as UTF-8 text ({error})") from error


def _parse(line: str, place: str) -> _Row:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not JSON ({error}), expected one object a line") from error
    if not isinstance(values, dict) or any(key not in values for key in _COLUMNS):
        found = ", ".join(values) if isinstance(values, dict) else type(values).__name__
        raise DataError(f"{place}: found {found or 'nothing'}, expected id and semantic_tokens")
    return _Row(place, values["id"], values["semantic_tokens"])


def _read_parquet(path: Path) -> Iterator[_Row]:
    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path}: not readable as Parquet ({error})") from error
    missing = [name for name in _COLUMNS if name not in file.schema_arrow.names]
    if missing:
        names = ", ".join(file.schema_arrow.names)
        raise DataError(f"{path}: no column {missing[0]!r} (columns found: {names})")
    number = 0
    for batch in file.iter_batches(_BATCH_ROWS, columns=list(_COLUMNS)):
        for row in batch.to_pylist():
            number += 1
            yield _Row(f"{path.name}: row {number}", row["id"], row["semantic_tokens"])
