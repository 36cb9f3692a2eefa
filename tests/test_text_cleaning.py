import random

import pytest

from tts_stack.text.cleaning import clean_text

_ALPHABET = "ab 1.,;:!?-–—…'\"“”‘’()[]<>|{}_*^~&%$😀é\u200b\u00ad\u0000ｆﬁ½。，「」٣\n\t"


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("“Hello” — she said (quietly)… ‘yes’", "Hello, she said, quietly. yes"),
        ("it’s the dogs’ ‘bones’", "it's the dogs bones"),
        ("wait -- what?!?!", "wait, what?"),
        ("Well...no", "Well. no"),
        ("10–20", "10-20"),
        ("ﬁne\u00adly\u200bdone\u0007 now", "finely done now"),
        ("Hi 😀, there 👩‍👩‍👧!", "Hi, there!"),
        ("<|audio_start|> [0] </s>", "audio start 0 /s"),
        ("Ａ１ ½", "A1 1/2"),
        ("well-known", "well-known"),
        ("so , , then ; . end", "so, then. end"),
    ],
)
def test_cleaning_table(text, cleaned):
    assert clean_text(text) == cleaned


def test_cleaning_is_idempotent_and_leaves_no_control_marks():
    generator = random.Random(0)
    for _ in range(3000):
        text = "".join(generator.choices(_ALPHABET, k=generator.randrange(24)))
        once = clean_text(text)
        assert clean_text(once) == once, repr(text)
        assert not set(once) & set('<>|[]{}"\n\t\u0000'), repr(text)
        assert "  " not in once
