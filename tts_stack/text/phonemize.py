"""Normalised text -> IPA: words with stress marks, one space between them, marks attached.

English uses the lexicon, part-of-speech tagger and grapheme-to-phoneme model of gruut directly,
which is many times as fast as its own pipeline; other languages go through the whole pipeline.
"""

import re
import unicodedata
from collections.abc import Callable
from functools import cache, lru_cache

from tts_stack.errors import ConfigError, MissingDependencyError
from tts_stack.text.cleaning import tidy_marks
from tts_stack.text.lexicon import Lexicon

PUNCTUATION = ",.?!;:"
Phonemizer = Callable[[str], str]

_ENGLISH = ("en-us", "en-gb")  # gruut has one lexicon for both, of American English
_TIES = dict.fromkeys(map(ord, "\u0361\u035c\u2040\u203f"), None)
_TOKEN = re.compile(r"\bA-|[^\W\d_]+(?:'[^\W\d_]+)*'?|[,.?!;:]")
_ACRONYM = re.compile(r"([A-Z]{2,})('?s)?")
_MAX_ACRONYM = 4  # letters; longer unknown capitals are read as a word
_INITIALISMS = frozenset("US UK EU UN AI IT ID PC TV DC LA AM PM HR PR".split())
_CACHED_WORDS = 100_000
# The lexicon names few roles: a past participle reads like the past tense, and so on.
_ROLES = {
    "VBN": "VBD", "VBP": "VB", "VBZ": "VB", "VBG": "VB", "MD": "VB",
    "NNS": "NN", "NNP": "NN", "NNPS": "NN", "JJR": "JJ", "JJS": "JJ", "RBR": "RB", "RBS": "RB",
}  # fmt: skip


class EnglishPhonemizer:
    """English words -> IPA with gruut's lexicon, tagger and model; not for several threads."""

    def __init__(self) -> None:
        from gruut.g2p import GraphemesToPhonemes
        from gruut.pos import PartOfSpeechTagger
        from gruut.utils import find_lang_dir

        folder = find_lang_dir("en-us")
        self._lexicon = Lexicon(
            folder / "lexicon.db", GraphemesToPhonemes(folder / "g2p/model.crf")
        )
        self._tag = PartOfSpeechTagger(folder / "pos/model.crf")
        self._word = lru_cache(maxsize=_CACHED_WORDS)(self._word_phonemes)

    def __call__(self, text: str) -> str:
        tokens = _TOKEN.findall(text)
        shouted = not any(character.islower() for character in text)
        parts: list[str] = []
        for index, (token, role) in enumerate(zip(tokens, self._roles(tokens), strict=True)):
            if token in PUNCTUATION:
                _attach(parts, token)
            elif _is_letter_a(tokens, index):
                parts.append(self._letter("a"))
            else:
                parts.extend(self._word(token.rstrip("-"), role, shouted))
        return " ".join(parts)

    def _roles(self, tokens: list[str]) -> list[str]:
        """Parts of speech, found only where a word's reading depends on them: tagging is slow."""
        words = [token.rstrip("-") for token in tokens]
        if not any(map(self._lexicon.is_homograph, words)):
            return [""] * len(tokens)
        return [_ROLES.get(tag, tag) for tag in self._tag(words)]

    def _word_phonemes(self, word: str, role: str, shouted: bool) -> tuple[str, ...]:
        acronym = _ACRONYM.fullmatch(word)
        if acronym and self._is_spelled(acronym[1], shouted):
            letters = [self._letter(letter) for letter in acronym[1]]
            if acronym[2]:
                letters[-1] += "z"
            return tuple(letters)
        if len(word) == 1 and word not in "aAI":
            return (self._letter(word),)
        phonemes = _symbols(self._lexicon.phonemes(word, role))
        return (phonemes,) if phonemes else ()

    def _is_spelled(self, letters: str, shouted: bool) -> bool:
        if letters in _INITIALISMS:
            return not shouted  # in a text of capitals only, "IT" is the word
        return len(letters) <= _MAX_ACRONYM and letters not in self._lexicon

    def _letter(self, letter: str) -> str:
        return _symbols(self._lexicon.phonemes(letter, "letter"))


def _is_letter_a(tokens: list[str], index: int) -> bool:
    """Whether "A" is the letter ("A-list", "A B C", "vitamin A.") and not the article."""
    if tokens[index] == "A-":
        return True
    if tokens[index] != "A":
        return False
    neighbours = tokens[max(index - 1, 0) : index] + tokens[index + 1 : index + 2]
    ends_phrase = index > 0 and (index + 1 == len(tokens) or tokens[index + 1] in PUNCTUATION)
    return ends_phrase or any(len(t) == 1 and t.isupper() and t != "I" for t in neighbours)


def _attach(parts: list[str], mark: str) -> None:
    """Put a mark right after the last word; only the first of several marks is kept."""
    if parts and parts[-1][-1] not in PUNCTUATION:
        parts[-1] += mark


def _symbols(phonemes: list[str]) -> str:
    return unicodedata.normalize("NFC", "".join(phonemes).translate(_TIES))


class GruutPhonemizer:
    """Any other language of gruut, through its whole pipeline (numbers included)."""

    def __init__(self, language: str) -> None:
        self._language = language

    def __call__(self, text: str) -> str:
        from gruut import sentences

        parts: list[str] = []
        for sentence in sentences(text, lang=self._language):
            for word in sentence:
                if word.text in PUNCTUATION:
                    _attach(parts, word.text)
                elif word.phonemes and not (word.is_major_break or word.is_minor_break):
                    parts.append(_symbols(word.phonemes))
        return " ".join(parts)


class EspeakPhonemizer:
    """Any language of espeak-ng, through the optional package `phonemizer`."""

    def __init__(self, language: str) -> None:
        try:
            from phonemizer.backend import EspeakBackend
        except ImportError as error:
            raise _missing_espeak("the Python package phonemizer is not installed") from error
        if not EspeakBackend.is_available():
            raise _missing_espeak("the program espeak-ng is not installed")
        supported = sorted(EspeakBackend.supported_languages())
        if language not in supported:
            raise _unsupported(language, "espeak", supported)
        self._backend = EspeakBackend(
            language, preserve_punctuation=True, with_stress=True, punctuation_marks=PUNCTUATION
        )

    def __call__(self, text: str) -> str:
        spoken = self._backend.phonemize([text], strip=True)[0]
        return tidy_marks(unicodedata.normalize("NFC", spoken.translate(_TIES)))


@cache
def build_phonemizer(language: str, engine: str) -> Phonemizer:
    """The phonemizer of a language, made once per process.

    Raises:
        ConfigError: the engine is unknown or does not speak the language.
        MissingDependencyError: the engine is not installed.
    """
    if engine == "espeak":
        return EspeakPhonemizer(language)
    if engine != "gruut":
        raise ConfigError(f"text.engine is {engine!r}, expected one of gruut, espeak")
    supported = gruut_languages()
    if language not in supported:
        raise _unsupported(language, engine, supported)
    return EnglishPhonemizer() if language in _ENGLISH else GruutPhonemizer(language)


def gruut_languages() -> list[str]:
    """Languages whose gruut data package is installed."""
    from gruut.const import KNOWN_LANGS
    from gruut.utils import find_lang_dir

    return sorted(language for language in KNOWN_LANGS if find_lang_dir(language) is not None)


def _unsupported(language: str, engine: str, supported: list[str]) -> ConfigError:
    return ConfigError(
        f"text.language is {language!r}, which {engine} does not speak here; "
        f"expected one of {', '.join(supported)}"
    )


def _missing_espeak(found: str) -> MissingDependencyError:
    return MissingDependencyError(
        f"text.engine is 'espeak', but {found}; install tts-stack[espeak] and the Debian package "
        "espeak-ng, or set text.engine=gruut"
    )
