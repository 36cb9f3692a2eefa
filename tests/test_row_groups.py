import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tts_stack import row_groups
from tts_stack.errors import DataError
from tts_stack.row_groups import RowGroups, SplitTokens, iter_tokens

SHARDS = [[0, 1, 2, 3, 4], [5], [6, 7, 8]]


@pytest.fixture
def rows(tmp_path):
    paths = []
    for index, values in enumerate(SHARDS):
        paths.append(tmp_path / f"{index}.parquet")
        table = pa.table({"value": values, "other": values})
        pq.write_table(table, paths[-1], row_group_size=2)
    return RowGroups(paths)


def value(rows, index):
    row = rows.read(index, ["value"])
    assert row.table.column_names == ["value"]
    assert len(row.table) <= 2
    return row.table.column("value")[row.place].as_py(), row.path.name


def test_rows_of_several_shards_are_numbered_through(rows):
    assert len(rows) == 9
    for index in (8, 0, 5, 4, 3, 6, 7, 1, 2):
        shard = next(shard for shard, values in enumerate(SHARDS) if index in values)
        assert value(rows, index) == (index, f"{shard}.parquet")
        assert value(rows, index - 9) == (index, f"{shard}.parquet")


def test_a_row_that_is_not_there_is_an_index_error(rows):
    for index in (9, -10):
        with pytest.raises(IndexError, match=f"row {index} of 9"):
            rows.read(index, ["value"])
    assert len(RowGroups([])) == 0


def test_only_a_few_files_are_open_at_once(rows, monkeypatch):
    monkeypatch.setattr(row_groups, "MAX_OPEN_FILES", 2)
    for index in (0, 5, 6, 0, 8, 5, 1, 2):
        assert value(rows, index)[0] == index
        assert len(rows._files) <= 2
    assert list(rows._files) == [1, 0]  # the least recently used went out


def test_rows_travel_to_other_processes_without_their_open_files(rows):
    rows.read(0, ["value"])
    copy = pickle.loads(pickle.dumps(rows))
    assert not copy._files
    assert value(copy, 8) == value(rows, 8)


def test_a_row_without_tokens_is_named_with_the_command(tmp_path):
    path = tmp_path / "train-00000.parquet"
    texts = {name: ["one", "two"] for name in ("id", "model_text", "speaker", "language")}
    pq.write_table(pa.table({**texts, "semantic_tokens": [[1, 2], None]}), path)
    message = "train-00000.parquet: utterance two has no semantic_tokens; run tts-stack tokenize"
    with pytest.raises(DataError, match=message):
        SplitTokens([path], 1)[1]
    with pytest.raises(DataError, match=message):
        list(iter_tokens(path, 1))
