"""The one place that calls the `wetext` package (number grammars of English, Chinese, Japanese)."""

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wetext import Normalizer


def apply_wetext(text: str, code: str) -> str:
    """`text` with its numbers as words; unchanged where wetext has no reading for it."""
    try:
        return str(_normalizer(code).normalize(text))
    except AssertionError:  # how wetext 0.1.8 says that no path of its grammar fits
        return text


@cache
def _normalizer(code: str) -> "Normalizer":
    from wetext import Normalizer

    return Normalizer(lang=code, operator="tn")
