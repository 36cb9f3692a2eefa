"""A tokenised corpus -> rows in chat form, as JSON or JSONL.

Rows that were imported come back equal and in their first order; rows that `prepare` and
`tokenize` made get the plain form, the training split first.
"""

import heapq
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from tts_stack.data.instruction_row import JsonObject, make_record, restore_record, row_number
from tts_stack.errors import ConfigError, DataError
from tts_stack.shards import SPLITS, Corpus

_SUFFIXES = (".jsonl", ".json")
_BATCH_ROWS = 256
_COLUMNS = ["id", "text", "speaker", "language", "semantic_tokens"]


def export_instructions(
    corpus_path: Path,
    out: Path,
    *,
    splits: Sequence[str] = SPLITS,
    durations: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Write the rows of a corpus in chat form; the file appears whole or not at all.

    Args:
        corpus_path: a tokenised corpus.
        out: file to write; .jsonl gives a row a line, .json one array.
        splits: which ones.
        durations: collapse runs in rows that were not imported; imported ones keep their form.
        on_progress: called with (rows written, rows in all) now and then.

    Returns:
        Rows written.

    Raises:
        ConfigError: `out` has another extension or cannot be written.
        DataError: the corpus is not tokenised, or holds several codebooks.
    """
    if out.suffix not in _SUFFIXES:
        raise ConfigError(f"{out}: extension is {out.suffix!r}, expected {' or '.join(_SUFFIXES)}")
    corpus = Corpus.open(corpus_path)
    codec = corpus.require_codec()
    if codec.num_codebooks != 1:
        raise DataError(
            f"{corpus_path}: {codec.num_codebooks} codebooks, the chat form holds one; tokenize "
            "with a single-codebook codec"
        )
    total = sum(corpus.info.num_utterances[split] for split in splits)
    rows = heapq.merge(
        *(_read_split(corpus, split) for split in splits), key=lambda row: _number(row, total)
    )
    records = (_to_record(row, codec.codebook_size, durations) for row in rows)
    try:
        _write(out, _count(records, total, on_progress))
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written ({error.strerror})") from error
    return total


def _read_split(corpus: Corpus, split: str) -> Iterator[dict[str, Any]]:
    """Rows of a split in order, with `instruction` where there is one."""
    columns = _COLUMNS if corpus.info.has_audio else [*_COLUMNS, "instruction"]
    for path in corpus.token_shards(split):
        for batch in pq.ParquetFile(path).iter_batches(_BATCH_ROWS, columns=columns):
            yield from batch.to_pylist()


def _number(row: dict[str, Any], total: int) -> int:
    """Imported rows come back in their first order; of others all are equal, so splits follow."""
    return row_number(row["instruction"]) if "instruction" in row else total


def _to_record(row: dict[str, Any], codebook_size: int, durations: bool) -> JsonObject:
    codes = np.array(row["semantic_tokens"], dtype=np.int64)
    if "instruction" in row:
        return restore_record(row["text"], codes, row["instruction"], codebook_size)
    others = {key: row[key] for key in ("id", "speaker", "language")}
    return make_record(row["text"], codes, codebook_size, durations=durations, **others)


def _count(
    records: Iterator[JsonObject], total: int, on_progress: Callable[[int, int], None]
) -> Iterator[JsonObject]:
    for done, record in enumerate(records, start=1):
        yield record
        if done % _BATCH_ROWS == 0 or done == total:
            on_progress(done, total)


def _write(out: Path, records: Iterator[JsonObject]) -> None:
    partial = out.with_name(out.name + ".partial")
    lines = map(_to_json, records)
    with partial.open("w", encoding="utf-8", newline="\n") as file:
        if out.suffix == ".jsonl":
            file.writelines(f"{line}\n" for line in lines)
        else:
            file.write("[")
            file.writelines(f"{',' if i else ''}\n{line}" for i, line in enumerate(lines))
            file.write("\n]\n")
    os.replace(partial, out)


def _to_json(record: JsonObject) -> str:
    """Readable in any script, unless the row holds half a surrogate pair, which UTF-8 cannot."""
    text = json.dumps(record, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(record)
    return text
