import numpy as np
import pytest

from tts_stack.errors import ConfigError
from tts_stack.synthesize import Speech, SpokenSentence, SynthesisSettings, close_sentence


@pytest.mark.parametrize(
    ("text", "symbols", "closed"),
    [
        ("abc", "abc.", "abc."),
        ("abc,", "abc,.", "abc."),
        ("abc?", "abc?.", "abc?"),
        ("abc.", "abc.", "abc."),
        ("abc", "abc", "abc"),
        ("abc", "", "abc."),  # no symbols: a base model's tokenizer knows every mark
    ],
)
def test_a_text_ends_with_a_mark_the_voice_knows(text, symbols, closed):
    assert close_sentence(text, tuple(symbols)) == closed


def test_what_a_listener_may_notice_is_reported():
    sentences = (
        SpokenSentence("fine", "f", 3, "end", 1, 0),
        SpokenSentence("long", "l", 3, "length", 3, 0),
        SpokenSentence("stuck", "s", 3, "repetition", 3, 2),
    )
    warnings = Speech(np.zeros(3, np.float32), 24000, sentences, ("😀",)).warnings
    assert warnings == (
        "nothing to speak in '😀': left out",
        "sentence 'long' reached its length bound after 3 attempts and was cut there; "
        "try another --seed",
        "sentence 'stuck' got stuck repeating after 3 attempts and was cut there; "
        "try another --seed",
        "sentence 'stuck': left out 2 symbols this voice never saw",
    )


def test_settings_outside_their_range_are_refused():
    with pytest.raises(ConfigError, match="speed is 3, expected 0.5 to 2.0"):
        SynthesisSettings(speed=3)
