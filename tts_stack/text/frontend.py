"""Raw text -> what the LLM reads; the only entrance to this package for the other stages."""

from dataclasses import dataclass
from functools import cache
from typing import Protocol

from tts_stack.contract import TextSpec
from tts_stack.errors import DataError
from tts_stack.text.cleaning import clean_text, has_words
from tts_stack.text.normalize import normalize_text
from tts_stack.text.phonemize import Phonemizer, build_phonemizer

_SHOWN_CHARACTERS = 40  # of a text quoted in a message


class TextFrontend(Protocol):
    """Turns one text into the string whose symbols the LLM reads."""

    @property
    def spec(self) -> TextSpec:
        """What this front-end was built for."""
        ...

    def __call__(self, text: str) -> str:
        """Convert `text`.

        Raises:
            DataError: no word is in the text.
        """
        ...


@dataclass(frozen=True)
class RawFrontend:
    """Cleaned text; numbers and abbreviations are left to the LLM."""

    spec: TextSpec

    def __call__(self, text: str) -> str:
        return _checked(clean_text(text), text)


@dataclass(frozen=True)
class NormalizedFrontend:
    """Words as they are spoken, in the spelling of the language."""

    spec: TextSpec

    def __call__(self, text: str) -> str:
        return _checked(normalize_text(text, self.spec.language), text)


@dataclass(frozen=True)
class PhonemeFrontend:
    """IPA characters of the words as they are spoken."""

    spec: TextSpec
    phonemizer: Phonemizer

    def __call__(self, text: str) -> str:
        normalized = _checked(normalize_text(text, self.spec.language), text)
        phonemes = self.phonemizer(normalized)
        return _checked(phonemes, text)


@cache
def build_frontend(spec: TextSpec) -> TextFrontend:
    """The front-end that `spec` names, made once per process.

    Raises:
        ConfigError: the engine is unknown or does not speak the language.
        MissingDependencyError: the engine is not installed.
    """
    if spec.kind == "raw":
        return RawFrontend(spec)
    if spec.kind == "normalized":
        return NormalizedFrontend(spec)
    return PhonemeFrontend(spec, build_phonemizer(spec.language, spec.engine))


def _checked(spoken: str, text: str) -> str:
    if has_words(spoken):
        return spoken
    shown = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
    raise DataError(f'text "{shown}": nothing to speak in it; give at least one word')
