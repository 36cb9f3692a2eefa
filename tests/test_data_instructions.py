import dataclasses
import json

import numpy as np
import pytest
from instruction_support import (
    SETTINGS,
    import_rows,
    odd_rows,
    read_back,
    row,
    sound,
    utterances,
    write_jsonl,
)
from numpy.testing import assert_array_equal

from stage1_llm.runs import Runs, expand_runs
from tts_stack.data.instructions import import_instructions
from tts_stack.data.outside_tokens import outside_codec
from tts_stack.data.sound_tokens import render_sound
from tts_stack.errors import ConfigError, DataError
from tts_stack.shards import SPLITS, Corpus, read_utterances


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
