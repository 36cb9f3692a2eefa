import dataclasses
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.testing import assert_array_equal
from stage1_support import write_corpus

from stage1_llm.runs import Runs, expand_runs
from tts_stack.contract import AudioSpec
from tts_stack.data.instruction_export import export_instructions
from tts_stack.data.instructions import ImportSettings, import_instructions
from tts_stack.data.outside_tokens import outside_codec
from tts_stack.data.sound_tokens import parse_sound, render_sound
from tts_stack.errors import ConfigError, DataError, MissingDependencyError
from tts_stack.shards import SPLITS, Corpus, add_tokens, read_utterances, write_info

SETTINGS = ImportSettings(
    outside_codec("whisper-vq", 512), AudioSpec(16000, 320, 2), validation_fraction=0.3
)
START, END = "<|sound_start|>", "<|sound_end|>"


def sound(*codes: int) -> str:
    return START + "".join(f"<|sound_{code:04d}|>" for code in codes) + END


def row(text="hello", answer=None, **others) -> dict:
    turns = [
        {"role": "user", "content": "<|text_to_semantic|>" + text},
        {"role": "assistant", "content": sound(1, 2, 3) if answer is None else answer},
    ]
    return {"messages": turns} | others


def odd_rows() -> list[dict]:
    """Rows that differ in everything but what stage 1 reads of them."""
    turns = row()["messages"]
    system = {"role": "system", "content": "You speak."}
    sharegpt = [
        {"from": "human", "value": "<|text_to_semantic|> How now? "},
        {"from": "gpt", "value": sound(5)},
    ]
    return [
        row("plain"),
        {"messages": [system, *turns]},
        {"conversations": sharegpt, "id": "own-id", "messages": None},
        {"source": "mls", "n": 1, "ratio": 1.0, "messages": turns, "tags": ["a", {"b": None}]},
        {"messages": [turns[0] | {"name": "joe"}, {"content": sound(9), "role": "assistant"}]},
        row("tabs\tand\nlines  "),
        row("say <|sound_end|><|text_to_semantic|> now"),
        {"messages": [{"role": "user", "content": "\n <|text_to_semantic|>hi"}, turns[1]]},
        row("Grüße, 世界"),
        row(answer=f"\n{START} <|sound_0001|>\n<|sound_2|>{END} "),
        row(answer=f"{START}<|duration_03|><|sound_0007|><|sound_0008|>{END}"),
        row(answer=f"{START}<|duration_01|><|sound_0007|><|sound_0007|>{END}"),
        row(answer=render_sound(np.repeat([4, 5, 5], [250, 1, 3]), 512, durations=True)),
        row(answer=f"{START}<|sound_mask|><|sound_0001|>{END}"),
        row(speaker="Joe", language="DE-de", id=7, note="half \ud83d pair"),
    ]


def write_jsonl(path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def import_rows(tmp_path, rows, settings=SETTINGS):
    write_jsonl(tmp_path / "rows.jsonl", rows)
    return import_instructions(tmp_path / "rows.jsonl", tmp_path / "corpus", settings)


def utterances(corpus) -> dict:
    opened = Corpus.open(corpus)
    return {row.id: row for split in SPLITS for row in opened.tokenized(split)}


def read_back(tmp_path, name="back.jsonl", **options) -> list:
    export_instructions(tmp_path / "corpus", tmp_path / name, **options)
    text = (tmp_path / name).read_text(encoding="utf-8")
    if name.endswith(".json"):
        return json.loads(text)
    return [json.loads(line) for line in text.split("\n")[:-1]]


@pytest.mark.parametrize("name", ["back.jsonl", "back.json"])
def test_every_row_comes_back_equal_and_in_order(tmp_path, name):
    rows = odd_rows() * 4
    for index, each in enumerate(rows):
        each = rows[index] = json.loads(json.dumps(each))
        each["index"] = index
        if each.get("id") == "own-id":
            each["id"] = f"own-id-{index}"
    report = import_rows(tmp_path, rows)
    assert (report.malformed, sum(report.kept.values())) == ((), len(rows))
    assert min(report.kept.values()) > 1  # both splits, merged again
    back = read_back(tmp_path, name)
    assert back == rows
    assert [list(found) for found in back] == [list(wanted) for wanted in rows]  # order of keys


def test_random_tokens_come_back_equal_in_every_form(tmp_path):
    random = np.random.default_rng(0)
    rows = []
    for _ in range(200):
        lengths = random.integers(1, 130, 6)
        codes = np.repeat(random.integers(0, 512, 6), lengths)
        durations = bool(random.integers(0, 2))
        rows.append(row(answer=render_sound(codes, 512, durations=durations)))
    import_rows(tmp_path, rows)
    assert read_back(tmp_path) == rows


def test_a_split_comes_back_in_order(tmp_path):
    import_rows(tmp_path, [row(n=n) for n in range(40)])
    parts = [[found["n"] for found in read_back(tmp_path, splits=[split])] for split in SPLITS]
    assert all(part == sorted(part) and len(part) > 5 for part in parts)
    assert sorted(parts[0] + parts[1]) == list(range(40))


def test_stage_1_reads_text_and_expanded_tokens(tmp_path):
    report = import_rows(tmp_path, odd_rows())
    found = utterances(tmp_path / "corpus")
    assert found["row-1"].model_text == "plain"
    assert_array_equal(found["row-1"].semantic_tokens, [1, 2, 3])
    assert_array_equal(found["own-id"].semantic_tokens, [5])
    assert_array_equal(found["row-10"].semantic_tokens, [1, 2])
    assert_array_equal(found["row-11"].semantic_tokens, [7, 7, 7, 8])
    assert_array_equal(
        found["row-13"].semantic_tokens,
        expand_runs(Runs(np.array([4, 5]), np.array([250, 4]))),
    )
    assert (found["row-15"].speaker, found["row-15"].language) == ("Joe", "de-de")
    assert (found["row-1"].speaker, found["row-1"].language) == ("", "en-us")
    assert_array_equal(found["row-14"].semantic_tokens, [512, 1])  # the mask
    assert report.num_masked == 1
    assert "1 rows hold masked tokens: train with prompt.format=chat" in report.lines()


def test_control_tokens_in_the_text_are_text(tmp_path):
    import_rows(tmp_path, [row(), row(f"say <|sound_end|> {sound(3)}")])
    found = utterances(tmp_path / "corpus")["row-2"]
    assert found.model_text == "say sound end sound start sound 0003 sound end"
    assert_array_equal(found.semantic_tokens, [1, 2, 3])


def test_the_corpus_says_what_it_holds(tmp_path):
    report = import_rows(tmp_path, [row(letter) for letter in "abcdefghijklmnop"])
    info = Corpus.open(tmp_path / "corpus").info
    assert (info.sample_rate, info.text.kind, info.has_audio) == (16000, "raw", False)
    assert (info.codec, info.codec_audio) == (SETTINGS.codec, SETTINGS.audio)
    train = [found.model_text for found in Corpus.open(tmp_path / "corpus").tokenized("train")]
    assert info.symbols == tuple(sorted(train))  # those of the validation split do not count
    assert 0 < len(train) < 16
    assert info.num_utterances == report.kept
    assert sum(report.seconds.values()) == pytest.approx(16 * 3 * 0.04)
    assert not (tmp_path / "corpus.partial").exists()


def test_whatever_reads_audio_says_that_there_is_none(tmp_path):
    import_rows(tmp_path, [row(), row()])
    corpus = Corpus.open(tmp_path / "corpus")
    message = (
        "corpus: no recordings; the corpus holds text and tokens only, which train stage 1; for "
        "the codec and the vocoder prepare recordings with tts-stack prepare"
    )
    for ask in (
        corpus.require_audio,
        lambda: corpus.audio("train"),
        lambda: list(corpus.utterances("train")),
    ):
        with pytest.raises(DataError, match=message):
            ask()
    with pytest.raises(DataError, match=r"parquet: row-\d: no recording; the corpus holds text"):
        list(read_utterances(corpus.shard_paths("train")[0]))


def test_the_split_depends_on_ids_and_seed_alone(tmp_path):
    def validation_ids(name, rows, seed=0):
        (tmp_path / name).mkdir()
        import_rows(tmp_path / name, rows, dataclasses.replace(SETTINGS, seed=seed))
        opened = Corpus.open(tmp_path / name / "corpus")
        return {found.id for found in opened.tokenized("validation")}

    rows = [row(id=f"id-{index}") for index in range(30)]
    first = validation_ids("first", rows)
    assert 3 < len(first) < 20
    assert validation_ids("reversed", rows[::-1]) == first
    assert validation_ids("more", rows + [row(id="new")]) - {"new"} == first
    assert validation_ids("seed", rows, seed=1) != first


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_of_two_rows_each_split_gets_one(tmp_path, fraction):
    report = import_rows(
        tmp_path, [row(n=1), row(n=2)], dataclasses.replace(SETTINGS, validation_fraction=fraction)
    )
    assert report.kept == {"train": 1, "validation": 1}
    assert read_back(tmp_path) == [row(n=1), row(n=2)]


def test_a_single_row_leaves_no_validation_split_and_says_so(tmp_path):
    report = import_rows(tmp_path, [row()])
    assert report.kept == {"train": 1, "validation": 0}
    assert report.lines()[-1] == "no validation split: one row is too few; add rows"


def test_the_validation_split_has_an_upper_bound(tmp_path):
    report = import_rows(
        tmp_path, [row() for _ in range(40)], dataclasses.replace(SETTINGS, max_validation=2)
    )
    assert report.kept == {"train": 38, "validation": 2}


def test_rows_spread_over_shards_come_back_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr("tts_stack.data.instructions._ROWS_PER_SHARD", 3)
    rows = [row(n=n) for n in range(20)]
    import_rows(tmp_path, rows)
    assert len(Corpus.open(tmp_path / "corpus").shard_paths("train")) > 3
    assert read_back(tmp_path) == rows


MALFORMED = {
    "not_json": ([1], "found a list, expected an object with messages"),
    "no_turns": (
        {"text": "a", "id": "b"},
        r"no list messages or conversations, expected one \(keys found: id, text\)",
    ),
    "missing_role": (
        {"messages": row()["messages"][:1]},
        r"no assistant turn, expected one \(found: user\)",
    ),
    "wrong_turns": (
        {"messages": row()["messages"] * 2},
        "turns are user, assistant, user, assistant; expected user, assistant",
    ),
    "bad_content": (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}, row()["messages"][1]]},
        "content of turn 1 is list, expected a string",
    ),
    "no_task_token": (
        {"messages": [{"role": "user", "content": "Please say hello"}, row()["messages"][1]]},
        r"user turn begins with 'Please say hello', expected <\|text_to_semantic\|> before",
    ),
    "unusable_text": (row("..."), r'text "\.\.\.": nothing to speak in it'),
    "no_sound_start": (row(answer="<|sound_0001|>" + END), "expected <.sound_start.> first"),
    "no_sound_end": (row(answer=sound(1, 2)[:-13]), r"ends with '.*sound_0002\|>', expected"),
    "no_sound": (row(answer=START + END), "holds no sound token, expected at least one"),
    "unknown_token": (
        row(answer=START + "<|sound_0001|><|noise|>" + END),
        r"holds '<\|noise\|>' at character 14 after <\|sound_start\|>, expected sound and duration",
    ),
    "outside_codebook": (row(answer=sound(1, 512)), r"sound token 512, expected 0 \.\. 511"),
    "bad_duration": (
        row(answer=f"{START}<|sound_0001|><|duration_02|>{END}"),
        r"<\|duration_02\|> stands before <\|sound_end\|>, expected a sound token",
    ),
    "duplicate_id": (row(id="first"), "id 'first' is already used by row 1, expected unique ids"),
}
MORE_MALFORMED = [
    ("missing_role", {"messages": []}, r"no user turn, expected one \(found: none\)"),
    ("missing_role", {"messages": [{"role": "assistant", "content": "a"}]}, "no user turn"),
    ("wrong_turns", {"messages": row()["messages"][::-1]}, "turns are assistant, user; expected"),
    ("bad_content", {"messages": ["hello"]}, "turn 1 is a str, expected role and content"),
    ("bad_content", {"messages": [{"role": "user"}]}, "content of turn 1 is NoneType, expected"),
    (
        "no_task_token",
        {"messages": [{"role": "user", "content": "a<|text_to_semantic|>b"}, row()["messages"][1]]},
        "user turn begins with 'a<.text_to",
    ),
    ("unusable_text", row("a\ud83d"), "text holds half a surrogate pair"),
    ("unusable_text", row(""), "nothing to speak"),
    ("no_sound_start", row(answer=""), "assistant turn is '', expected"),
    ("no_sound_end", row(answer=START), r"ends with '<\|sound_start\|>', expected"),
    ("unknown_token", row(answer=START + sound(1)), r"holds '<\|sound_start\|>.*' at character 0"),
    ("unknown_token", row(answer=f"{START}<|sound_٣|>{END}"), "at character 0"),
    ("bad_duration", row(answer=f"{START}<|duration_00|><|sound_0001|>{END}"), "duration of 0"),
    ("bad_duration", row(answer=f"{START}<|duration_100|><|sound_0001|>{END}"), "duration of 100"),
    (
        "bad_duration",
        row(answer=f"{START}<|duration_02|><|duration_03|><|sound_0001|>{END}"),
        r"<\|duration_02\|> stands before another duration",
    ),
]


@pytest.mark.parametrize(
    ("reason", "bad", "message"),
    [(reason, *case) for reason, case in MALFORMED.items()] + MORE_MALFORMED,
)
def test_a_malformed_row_is_reported_by_number_and_left_out(tmp_path, reason, bad, message):
    good = [row(id="first"), row("third")]
    report = import_rows(tmp_path, [good[0], bad, good[1]])
    (found,) = report.malformed
    assert (found.row, found.reason) == (2, reason)
    with pytest.raises(DataError, match=message):
        raise DataError(found.message)
    listing = (tmp_path / "corpus" / "malformed.jsonl").read_text(encoding="utf-8")
    assert json.loads(listing) == {"row": 2, "reason": reason, "message": found.message}
    assert read_back(tmp_path) == good


def test_every_reason_is_tested():
    from tts_stack.data.malformed import REASONS

    assert set(MALFORMED) == set(REASONS)


def test_the_summary_counts_malformed_rows_by_reason(tmp_path):
    bad = [row("..."), row(answer=sound(999)), row("!")]
    lines = import_rows(tmp_path, [row(), *bad, row()]).lines()
    assert lines[0].startswith("kept 2 of 5 rows: 1 train (0.00 h), 1 validation")
    assert lines[1] == f"left out 3, listed in {tmp_path / 'corpus' / 'malformed.jsonl'}:"
    assert lines[2:4] == [
        "       2  nothing to speak in the text",
        "       1  sound token outside the codebook",
    ]
    assert lines[4] == '  row 2: text "...": nothing to speak in it; give at least one word'


def test_all_rows_malformed_is_an_error_that_leaves_nothing(tmp_path):
    message = (
        r"rows\.jsonl: none of 2 rows can be used \(1  nothing to speak in the text, 1  sound "
        r"token outside the codebook\); row 1: text"
    )
    with pytest.raises(DataError, match=message):
        import_rows(tmp_path, [row("..."), row(answer=sound(999))])
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_broken_line_of_jsonl_is_left_out_and_lines_are_counted(tmp_path):
    lines = [b"\xef\xbb\xbf" + json.dumps(row(n=1)).encode(), b"", b"{", b"\xff", b'{"a": NaN}']
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"\r\n".join([*lines, json.dumps(row(n=6)).encode()]))
    report = import_instructions(file, tmp_path / "corpus", SETTINGS)
    assert [(bad.row, bad.reason) for bad in report.malformed] == [
        (3, "not_json"),
        (4, "not_json"),
        (5, "not_json"),
    ]
    assert report.malformed[0].message.startswith("not JSON (Expecting property name")
    assert "NaN is not JSON" in report.malformed[2].message
    assert read_back(tmp_path) == [row(n=1), row(n=6)]


def test_a_json_array_is_read_whatever_its_name(tmp_path):
    rows = odd_rows()
    for name in ("rows.json", "rows.txt"):
        (tmp_path / name).write_text(json.dumps(rows, indent=1), encoding="utf-8")
        import_instructions(tmp_path / name, tmp_path / f"{name}-out" / "corpus", SETTINGS)
        assert read_back(tmp_path / f"{name}-out") == rows


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


def test_a_folder_that_holds_something_is_not_overwritten(tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "work").write_text("mine")
    with pytest.raises(DataError, match="corpus: is not empty; choose another folder or delete"):
        import_rows(tmp_path, [row()])
    assert (tmp_path / "corpus" / "work").read_text() == "mine"


def test_an_import_that_was_killed_starts_again(tmp_path):
    (tmp_path / "corpus.partial").mkdir()
    (tmp_path / "corpus.partial" / "train-00009.parquet").write_bytes(b"half")
    (tmp_path / "corpus").mkdir()  # empty
    import_rows(tmp_path, [row(), row()])
    assert sorted(path.name for path in (tmp_path / "corpus").iterdir()) == [
        "corpus.json",
        "malformed.jsonl",
        "train-00000.parquet",
        "validation-00000.parquet",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codec": outside_codec("mimi", 9, 2)}, "num_codebooks is 2, expected 1"),
        ({"validation_fraction": 0.0}, "validation_fraction is 0.0, expected between 0 and 1"),
    ],
)
def test_wrong_settings_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(SETTINGS, **changes)


def test_progress_ends_at_the_number_of_rows(tmp_path):
    write_jsonl(tmp_path / "rows.jsonl", [row() for _ in range(250)])
    done: list = []
    import_instructions(
        tmp_path / "rows.jsonl",
        tmp_path / "corpus",
        SETTINGS,
        on_progress=lambda *now: done.append(now),
    )
    assert done == [(100, 250), (200, 250), (250, 250)]


def test_a_corpus_of_recordings_exports_to_rows_that_import_again(tmp_path):
    first = write_corpus(tmp_path / "corpus")
    rows = read_back(tmp_path)
    wanted = [row for split in SPLITS for row in Corpus.open(first).tokenized(split)]
    assert rows[0] == {
        "messages": [
            {"role": "user", "content": "<|text_to_semantic|>" + wanted[0].model_text},
            {"role": "assistant", "content": sound(*wanted[0].semantic_tokens)},
        ],
        "id": "s0",
        "language": "en-us",
    }
    assert [found["id"] for found in rows] == [found.id for found in wanted]
    (tmp_path / "again").mkdir()
    settings = dataclasses.replace(SETTINGS, codec=outside_codec("fake", 10))
    import_rows(tmp_path / "again", rows, settings)
    found = utterances(tmp_path / "again" / "corpus")
    for each in wanted:
        assert found[each.id].model_text == each.model_text
        assert_array_equal(found[each.id].semantic_tokens, each.semantic_tokens)


def test_a_corpus_of_recordings_exports_with_durations(tmp_path):
    corpus = Corpus.open(write_corpus(tmp_path / "corpus"))
    for split in SPLITS:
        rows = [np.array([1, 1, 1, 2]) for _ in corpus.tokenized(split)]
        add_tokens(corpus.shard_paths(split)[0], rows, corpus.require_codec())
    content = read_back(tmp_path, durations=True)[0]["messages"][1]["content"]
    assert content == f"{START}<|duration_03|><|sound_0001|><|sound_0002|>{END}"


def test_what_cannot_be_exported_is_an_error(tmp_path):
    import_rows(tmp_path, [row(), row()])
    with pytest.raises(ConfigError, match=r"extension is '\.csv', expected \.jsonl or \.json"):
        export_instructions(tmp_path / "corpus", tmp_path / "rows.csv")
    with pytest.raises(ConfigError, match=r"rows\.json: cannot be written \(No such file"):
        export_instructions(tmp_path / "corpus", tmp_path / "none" / "rows.json")


def test_several_codebooks_have_no_chat_form(tmp_path):
    path = write_corpus(tmp_path / "corpus")
    info = Corpus.open(path).info
    codec = dataclasses.replace(info.codec, num_codebooks=2)
    write_info(path, dataclasses.replace(info, codec=codec))
    with pytest.raises(DataError, match="corpus: 2 codebooks, the chat form holds one"):
        export_instructions(path, tmp_path / "rows.json")


@pytest.mark.parametrize(
    ("code", "size", "name"),
    [
        (7, 9, "<|sound_0007|>"),
        (209, 512, "<|sound_0209|>"),
        (9999, 10000, "<|sound_9999|>"),
        (7, 10001, "<|sound_00007|>"),
        (65535, 65536, "<|sound_65535|>"),
        (512, 512, "<|sound_mask|>"),
    ],
)
def test_the_number_of_a_sound_token_has_four_digits_or_more(code, size, name):
    assert render_sound(np.array([code]), size) == START + name + END
    assert_array_equal(parse_sound(START + name + END, size), [code])


def test_names_are_those_of_the_vocabulary():
    from stage1_llm.vocab import Extras, build_token_map, token_names

    tokens = build_token_map(("a",), 10001, Extras(has_mask=True, max_run=99))
    names = token_names(tokens, "chat")
    rendered = render_sound(np.array([12, 10001]), 10001)
    expected = [tokens.audio_start, tokens.semantic_offset + 12, tokens.mask, tokens.audio_end]
    assert rendered == "".join(names[token_id] for token_id in expected)
    stretched = render_sound(np.full(99, 5), 10001, durations=True)
    assert names[tokens.duration_offset + 97] in stretched


def test_a_long_run_is_split_at_two_digits():
    found = render_sound(np.full(100, 5), 512, durations=True)
    assert found == f"{START}<|duration_99|><|sound_0005|><|sound_0005|>{END}"


def run_command(*words) -> str:
    """Output of a command of this group."""
    import typer
    from typer.testing import CliRunner

    from tts_stack.commands.instructions import register

    app = typer.Typer(pretty_exceptions_enable=False)
    register(app)
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_commands_import_and_export(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "rows.jsonl", [*odd_rows(), row("...")])
    output = run_command("import-instructions", "rows.jsonl", "corpus", "--seed", "1")
    assert "kept 15 of 16 rows" in output
    assert "row 16: text" in output
    assert "next: tts-stack train-llm corpus=corpus llm=qwen2_5_0_5b prompt.format=chat" in output
    info = Corpus.open(tmp_path / "corpus").info
    assert (info.codec.id, info.codec.codebook_size) == ("whisper-vq", 512)
    assert info.codec_audio.token_rate == 25
    assert "back.json: 15 rows" in run_command("export-instructions", "corpus", "back.json")
    assert json.loads((tmp_path / "back.json").read_text(encoding="utf-8")) == odd_rows()
    command = ("export-instructions", "corpus", "part.jsonl", "--split", "validation")
    assert f"part.jsonl: {info.num_utterances['validation']} rows" in run_command(*command)


def test_the_command_imports_tokens(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "corpus")  # 960 samples each at 24 kHz: one token of 960 samples
    ids = [f"s{index}" for index in range(16)]
    write_jsonl(tmp_path / "t.jsonl", [{"id": id, "semantic_tokens": [[1, 2]]} for id in ids])
    sizes = ("--codebook-size", 64, "--num-codebooks", 2)
    rates = ("--sample-rate", 24000, "--hop-length", 480, "--frames-per-token", 2)
    output = run_command("import-tokens", "corpus", "t.jsonl", "--codec-id", "snac", *sizes, *rates)
    assert "16 utterances, 16 tokens of snac" in output
    assert "next: tts-stack train-llm corpus=corpus" in output
    assert Corpus.open(tmp_path / "corpus").tokenized("train")[0].semantic_tokens.tolist() == [
        [1, 2]
    ]
