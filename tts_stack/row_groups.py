"""Random access to rows of Parquet shards that are larger than memory."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tts_stack.errors import DataError
from tts_stack.records import TokenizedUtterance

MAX_OPEN_FILES = 64
TEXT_COLUMNS = ("id", "model_text", "speaker", "language")
TOKENS_COLUMN = "semantic_tokens"
_STREAMED_ROWS = 256


class Row(NamedTuple):
    """One row inside its row group."""

    table: pa.Table  # of the row group
    place: int  # in the table
    path: Path  # of the shard


class RowGroups:
    """Rows of several shards by number; may travel to other processes.

    A row is read with the few that share its row group; at most MAX_OPEN_FILES shards are open.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)
        self._files: OrderedDict[int, pq.ParquetFile] = OrderedDict()
        shards, groups, sizes = [], [], []
        for shard, path in enumerate(self._paths):
            metadata = pq.read_metadata(path)
            for group in range(metadata.num_row_groups):
                shards.append(shard)
                groups.append(group)
                sizes.append(metadata.row_group(group).num_rows)
        self._shards, self._groups = np.array(shards, np.int32), np.array(groups, np.int32)
        self._stops = np.cumsum(np.array(sizes, np.int64))  # of each row group, in rows

    def __len__(self) -> int:
        return int(self._stops[-1]) if len(self._stops) else 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": OrderedDict()}  # open files do not travel

    def read(self, index: int, columns: Sequence[str]) -> Row:
        """Some columns of row `index`; the others are not touched.

        Raises:
            IndexError: there is no such row.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
        which = int(np.searchsorted(self._stops, index, side="right"))
        shard, group = int(self._shards[which]), int(self._groups[which])
        table = self._open(shard).read_row_group(group, columns=list(columns), use_threads=False)
        return Row(table, index - int(self._stops[which]) + len(table), self._paths[shard])

    def _open(self, shard: int) -> pq.ParquetFile:
        if shard not in self._files:
            if len(self._files) == MAX_OPEN_FILES:
                self._files.popitem(last=False)[1].close()
            self._files[shard] = pq.ParquetFile(self._paths[shard])
        self._files.move_to_end(shard)
        return self._files[shard]


class SplitTokens(Sequence[TokenizedUtterance]):
    """Text and tokens of one split by row number, read when asked for."""

    def __init__(self, paths: Sequence[Path], num_codebooks: int) -> None:
        self._rows, self._num_codebooks = RowGroups(paths), num_codebooks

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        """The utterance of row `index`."""
        row = self._rows.read(index, [*TEXT_COLUMNS, TOKENS_COLUMN])
        return _utterance(row.table, row.place, self._num_codebooks, row.path)


def iter_tokens(path: Path, num_codebooks: int) -> Iterator[TokenizedUtterance]:
    """Rows of one shard in order, a few hundred of them in memory at once."""
    columns = [*TEXT_COLUMNS, TOKENS_COLUMN]
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(_STREAMED_ROWS, columns=columns, use_threads=False):
            for row in range(len(batch)):
                yield _utterance(batch, row, num_codebooks, path)


def _utterance(
    table: pa.Table | pa.RecordBatch, row: int, num_codebooks: int, path: Path
) -> TokenizedUtterance:
    texts = {name: table.column(name)[row].as_py() for name in TEXT_COLUMNS}
    found = table.column(TOKENS_COLUMN)[row]
    if not found.is_valid:
        raise DataError(
            f"{path}: utterance {texts['id']} has no {TOKENS_COLUMN}; run tts-stack tokenize "
            f"corpus={path.parent}"
        )
    flat: NDArray[np.int64] = found.values.to_numpy().astype(np.int64)
    tokens = flat if num_codebooks == 1 else flat.reshape(-1, num_codebooks)
    return TokenizedUtterance(semantic_tokens=tokens, **texts)
