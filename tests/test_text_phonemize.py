import sys

import pytest

from tts_stack.errors import ConfigError, MissingDependencyError
from tts_stack.text.phonemize import build_phonemizer, gruut_languages

pytest.importorskip("gruut_lang_en")


@pytest.fixture(scope="module")
def english():
    return build_phonemizer("en-us", "gruut")


@pytest.mark.parametrize(
    ("text", "phonemes"),
    [
        ("Hello, world! Yes; no: go?", "hɛlˈoʊ, wˈɚld! jˈɛs; nˈoʊ: ɡˈoʊ?"),
        ("judge church", "dʒˈʌdʒ tʃˈɚtʃ"),
        ("well-known", "wˈɛl nˈoʊn"),
        ("I have read it. I will read it.", "ˈaɪ hˈæv ɹˈɛd ˈɪt. ˈaɪ wˈɪl ɹˈid ˈɪt."),
        ("A B C. A man.", "ˈeɪ bˈi sˈi. ə mˈæn."),
        ("the A-list", "ðə ˈeɪ lˈɪst"),
        ("FBI and NASA in the US", "ˈɛf bˈi ˈaɪ ˈænd nˈæsə ˈɪn ðə jˈu ˈɛs"),
        ("FBI", "ˈɛf bˈi ˈaɪ"),
        ("WILL IT WORK?", "wˈɪl ˈɪt wˈɚk?"),
        ("HELLO WORLD", "hɛlˈoʊ wˈɚld"),
        ("naïve café", "nˌaɪˈiv kæfˈeɪ"),
        ("blorgify", "blˈɔɹdʒəfi"),
    ],
)
def test_english_table(english, text, phonemes):
    assert english(text) == phonemes


def test_possessive_of_an_unknown_word_takes_the_right_s(english):
    assert english("blorgify's") == english("blorgify") + "z"


def test_the_result_does_not_depend_on_what_was_read_before(english):
    first = english("the live record")
    english("they record and live")
    assert english("the live record") == first


def test_en_gb_shares_the_lexicon():
    if "en-gb" not in gruut_languages():
        pytest.skip("gruut knows no en-gb")
    assert build_phonemizer("en-gb", "gruut")("yes") == "jˈɛs"


def test_unknown_language_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"text.language is 'xx'.*expected one of .*en-us"):
        build_phonemizer("xx", "gruut")


def test_unknown_engine_is_refused():
    with pytest.raises(ConfigError, match="text.engine is 'flite', expected one of gruut, espeak"):
        build_phonemizer("en-us", "flite")


def test_missing_espeak_names_the_extra_and_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "phonemizer.backend", None)
    with pytest.raises(MissingDependencyError, match=r"tts-stack\[espeak\].*espeak-ng"):
        build_phonemizer("en-us", "espeak")
