"""gruut's English pronunciation table in memory, with fallbacks for words that it lacks.

gruut asks its SQLite file, which has no index, once per new word (20 ms); reading the whole table
takes half a second, once per process.
"""

import sqlite3
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path

Guess = Callable[[str], Sequence[str] | None]

_ROLE_PREFIX = "gruut:"
_VOICELESS = ("p", "t", "k", "f", "θ")
_SIBILANTS = ("s", "z", "ʃ", "ʒ", "t͡ʃ", "d͡ʒ")


class Lexicon:
    """Word and part of speech -> phonemes."""

    def __init__(self, database: Path, guess: Guess) -> None:
        self._guess = guess
        self._readings: dict[str, dict[str, str]] = {}
        with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
            rows = connection.execute(
                "SELECT word, role, phonemes FROM word_phonemes ORDER BY word, pron_order, id"
            )
            for word, role, phonemes in rows:
                readings = self._readings.setdefault(word, {})
                readings.setdefault(role.removeprefix(_ROLE_PREFIX), phonemes)
        connection.close()

    def __contains__(self, word: str) -> bool:
        return word.lower() in self._readings

    def is_homograph(self, word: str) -> bool:
        """Whether the part of speech decides how `word` is read."""
        readings = self._readings.get(word.lower(), {})
        return len({readings[role] for role in readings if role != "letter"}) > 1

    def phonemes(self, word: str, role: str = "") -> list[str]:
        """Phonemes with stress marks; a word that is not in the table is guessed."""
        word = word.lower().rstrip("'")
        known = self._known(word, role) or self._known(_without_accents(word), role)
        if known:
            return known
        if word.endswith("'s") and len(word) > 2:
            base = self.phonemes(word[:-2], role)
            return base + _suffix_s(base[-1]) if base else base
        return list(self._guess(_without_accents(word)) or ())

    def _known(self, word: str, role: str) -> list[str]:
        readings = self._readings.get(word) or self._readings.get(word.replace("'", ""))
        if not readings:
            return []
        first = next(iter(readings.values()))
        return readings.get(role, readings.get("", first)).split()


def _suffix_s(last: str) -> list[str]:
    """Sound of a possessive 's after the phoneme `last`."""
    if last in _SIBILANTS:
        return ["ɪ", "z"]
    return ["s"] if last in _VOICELESS else ["z"]


def _without_accents(word: str) -> str:
    decomposed = unicodedata.normalize("NFKD", word)
    return "".join(letter for letter in decomposed if not unicodedata.combining(letter))
