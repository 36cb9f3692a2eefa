import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from instruction_support import SETTINGS, read_back, row, write_jsonl
from stage1_support import write_corpus

from tts_stack.data.instructions import import_instructions
from tts_stack.errors import DataError, MissingDependencyError


def hub_rows() -> list[dict]:
    """Rows of one shape, as a Hugging Face dataset has them."""
    return [row(f"text {n}", id=f"id-{n}", n=n, note=None if n else "x") for n in range(9)]


def test_a_parquet_folder_is_read_and_splits_are_named(tmp_path):
    (tmp_path / "hub" / "data").mkdir(parents=True)
    rows = hub_rows()
    for name, part in (
        ("train-00000-of-00002", rows[:4]),
        ("train-00001-of-00002", rows[4:]),
        ("test-00000-of-00001", [rows[0] | {"id": "held-out"}]),
    ):
        pq.write_table(pa.Table.from_pylist(part), tmp_path / "hub" / "data" / f"{name}.parquet")
    with pytest.raises(DataError, match="hub: holds the splits test, train; name one with --split"):
        import_instructions(tmp_path / "hub", tmp_path / "corpus", SETTINGS)
    with pytest.raises(DataError, match=r"has no split 'dev' \(splits found: test, train\)"):
        import_instructions(tmp_path / "hub", tmp_path / "corpus", SETTINGS, split="dev")
    import_instructions(tmp_path / "hub", tmp_path / "corpus", SETTINGS, split="train")
    assert read_back(tmp_path) == rows


def test_parquet_files_of_any_name_belong_together(tmp_path):
    (tmp_path / "hub").mkdir()
    rows = hub_rows()
    for name, part in (("a", rows[:4]), ("train-00000-of-00001", rows[4:])):
        pq.write_table(pa.Table.from_pylist(part), tmp_path / "hub" / f"{name}.parquet")
    import_instructions(tmp_path / "hub", tmp_path / "corpus", SETTINGS)
    assert read_back(tmp_path) == rows
    with pytest.raises(DataError, match=r"has no split 'a' \(splits found: none\)"):
        import_instructions(tmp_path / "hub", tmp_path / "more", SETTINGS, split="a")


def test_a_parquet_file_is_read_and_a_damaged_one_is_an_error(tmp_path):
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(hub_rows()), file)
    import_instructions(file, tmp_path / "corpus", SETTINGS)
    assert read_back(tmp_path) == hub_rows()
    file.write_bytes(b"no")
    with pytest.raises(DataError, match=r"rows\.parquet: not readable as Parquet"):
        import_instructions(file, tmp_path / "more", SETTINGS)


def test_a_value_that_json_cannot_hold_is_malformed(tmp_path):
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([row(audio=b"RIFF"), row(audio=None)]), file)
    report = import_instructions(file, tmp_path / "corpus", SETTINGS)
    assert [bad.row for bad in report.malformed] == [1]
    assert report.malformed[0].message == (
        "row holds a value that JSON cannot (Object of type bytes is not JSON serializable); "
        "drop that column"
    )


def test_a_saved_dataset_is_read(tmp_path):
    datasets = pytest.importorskip("datasets", reason="the extra tts-stack[datasets]")
    dataset = datasets.Dataset.from_list(hub_rows())
    dataset.save_to_disk(tmp_path / "saved")
    import_instructions(tmp_path / "saved", tmp_path / "corpus", SETTINGS)
    assert read_back(tmp_path) == hub_rows()
    with pytest.raises(DataError, match=r"has no split 'train' \(splits found: none\)"):
        import_instructions(tmp_path / "saved", tmp_path / "more", SETTINGS, split="train")


def test_a_split_of_a_saved_dataset_dict_is_read(tmp_path):
    datasets = pytest.importorskip("datasets", reason="the extra tts-stack[datasets]")
    dataset = datasets.Dataset.from_list(hub_rows())
    parts = {"train": dataset.select(range(2, 9)), "test": dataset.select(range(2))}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match="saved: holds the splits train, test; name one"):
        import_instructions(tmp_path / "saved", tmp_path / "corpus", SETTINGS)
    import_instructions(tmp_path / "saved", tmp_path / "corpus", SETTINGS, split="train")
    assert read_back(tmp_path) == hub_rows()[2:]


def test_a_saved_dataset_without_the_package_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text("{}")
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(
        MissingDependencyError, match=r"saved: is a Hugging Face dataset.*'tts-stack\[datasets\]'"
    ):
        import_instructions(tmp_path / "saved", tmp_path / "corpus", SETTINGS)


def test_a_damaged_saved_dataset_is_an_error(tmp_path):
    pytest.importorskip("datasets", reason="the extra tts-stack[datasets]")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text("{}")
    with pytest.raises(DataError, match="saved: not a readable dataset"):
        import_instructions(tmp_path / "saved", tmp_path / "corpus", SETTINGS)
    (tmp_path / "saved" / "dataset_dict.json").write_text("{}")
    with pytest.raises(DataError, match=r"dataset_dict\.json: cannot be read"):
        import_instructions(tmp_path / "saved", tmp_path / "corpus", SETTINGS)


def test_a_source_that_is_not_understood_is_an_error(tmp_path):
    def refuse(name, message, **options):
        with pytest.raises(DataError, match=message):
            import_instructions(tmp_path / name, tmp_path / "out", SETTINGS, **options)

    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.jsonl").write_text("\n\n")
    (tmp_path / "broken.json").write_text('[{"messages": ')
    write_jsonl(tmp_path / "rows.jsonl", [row()])
    write_corpus(tmp_path / "corpus")
    refuse("none", "none: no such file or folder; expected a JSON array, a JSONL file, or")
    refuse("empty", "empty: no dataset in this folder")
    refuse("blank.jsonl", "blank.jsonl: holds no rows")
    refuse("broken.json", "begins as a JSON array, but is none .*; repair it, or save it as JSONL")
    refuse("rows.jsonl", "split 'train' was asked for, but a file has no splits", split="train")
    refuse("corpus", "corpus: is a prepared corpus already")
