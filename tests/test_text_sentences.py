import random

import pytest

from tts_stack.errors import ConfigError
from tts_stack.text.sentences import split_sentences

_CHINESE = [
    "今天天气非常好，我们一起去公园里散步吧，好不好？",
    "我觉得这个主意非常好，马上就出发，不要再等了。",
]


@pytest.mark.parametrize(
    "pieces",
    [
        ["Mr. Smith paid $3.50 for it.", "He went, e.g. to No. 5, with J. R. Tolkien."],
        ["“Was this really a question?”", "“It was, indeed!”, said she."],
        ["The answer is a clear no.", "He went away and came back."],
        ["Yes. No. Maybe."],
        ["They moved to the U.S. Army base in Jan. 1990 by St. Louis."],
    ],
)
def test_text_is_split_at_sentence_ends(pieces):
    assert split_sentences(" ".join(pieces)) == pieces


def test_chinese_sentences_need_no_space():
    assert split_sentences("".join(_CHINESE)) == _CHINESE


def test_an_empty_line_ends_a_sentence():
    assert split_sentences("A heading without a stop\n\nA paragraph follows it.") == [
        "A heading without a stop",
        "A paragraph follows it.",
    ]


def test_blank_text_has_no_sentences():
    assert split_sentences(" \n\n ") == []


def test_over_long_sentence_is_cut_at_a_clause():
    text = "one two three four five six; seven eight nine, ten eleven twelve and thirteen fourteen"
    assert split_sentences(text, max_chars=40) == [
        "one two three four five six;",
        "seven eight nine, ten eleven twelve",
        "and thirteen fourteen",
    ]


def test_long_text_without_marks_or_spaces_is_cut():
    assert [len(piece) for piece in split_sentences("x" * 5000)] == [200] * 25
    words = split_sentences("word " * 1000)
    assert max(map(len, words)) <= 200 and " ".join(words).split() == ["word"] * 1000


def test_nothing_is_lost_and_no_piece_is_too_long():
    generator = random.Random(0)
    alphabet = "abcdE  ..,;:!?\n'\"’”1。！，"
    for _ in range(2000):
        text = "".join(generator.choices(alphabet, k=generator.randrange(200)))
        max_chars = generator.choice([1, 5, 30, 200])
        pieces = split_sentences(text, max_chars=max_chars)
        assert "".join("".join(pieces).split()) == "".join(text.split())
        assert all(piece == piece.strip() and 0 < len(piece) <= max_chars for piece in pieces)


def test_a_piece_of_no_characters_is_refused():
    with pytest.raises(ConfigError, match="max_chars is 0, expected at least 1"):
        split_sentences("hello", max_chars=0)
