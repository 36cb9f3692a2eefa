"""Light cleaning that every text front-end starts with: str -> str, for any language.

Afterwards a text holds letters, digits, symbols that carry words ($ % & ...) and plain
punctuation, with single spaces between words.
"""

import re
import unicodedata

_TYPOGRAPHY = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u201b\u02bc\u00b4\u2032", "'"),
        **dict.fromkeys("\u2010\u2011\u2212", "-"),
        **dict.fromkeys("\u2012\u2013\u2014\u2015", "\u2013"),
        **dict.fromkeys("\u201c\u201d\u201e\u201f\u2033\u00ab\u00bb\u2039\u203a\u201a", '"'),
        **dict.fromkeys("\u300a\u300b\u3008\u3009\u300c\u300d\u300e\u300f\u3010\u3011", '"'),
        "\u2026": "...",
        "\u2044": "/",
    }
)
_DROPPED = str.maketrans(
    {**dict.fromkeys('[]{}<>|\\^~"`*_', " "), **dict.fromkeys("()", ", ")},
)
_DROPPED_CATEGORIES = ("Cc", "Cf", "Cs", "Co", "Cn", "So", "Sk")
_KEPT_SYMBOLS = "\u00b0\u00a9\u00ae\u2122"  # degree, copyright, registered, trade mark
_LIGATURES = "\ufb00\ufb01\ufb02\ufb03\ufb04\ufb05\ufb06"
_FRACTIONS = "\u00bc\u00bd\u00be\u2153\u2154\u215b"
_RANGE_DASH = re.compile(r"(?<=\d)\u2013(?=\d)")
_DASH = re.compile(r"\s*\u2013\s*|\s+-+\s+|\s*-{2,}\s*")
_SPACE_BEFORE_MARK = re.compile(r"\s+(?=[,.;:!?](?:\s|$|[,.;:!?]))")
_LONE_APOSTROPHE = re.compile(r"(?<!\w)'|'(?!\w)")
_ELLIPSIS = re.compile(r"\.{2,}")
_MARKS = re.compile(r"[,.;:!?](?:\s*[,.;:!?](?!\d))+")


def clean_text(text: str) -> str:
    """Replace typography by plain characters; drop emoji, brackets and control characters.

    Idempotent. A control token such as `<|audio_start|>` is text like any other and loses its
    brackets.
    """
    return drop_symbols(plain_typography(text))


def plain_typography(text: str) -> str:
    """Curly quotes, dashes, ligatures, full-width forms and odd spaces -> plain characters."""
    text = "".join(map(_plain_character, unicodedata.normalize("NFC", text)))
    text = unicodedata.normalize("NFC", text)  # again: a dropped character may have stood between
    return " ".join(_RANGE_DASH.sub("-", text.translate(_TYPOGRAPHY)).split())


def drop_symbols(text: str) -> str:
    """Brackets, quotation marks and symbols without a reading go; dashes become commas."""
    text = text.translate(_DROPPED)
    while (tidied := _drop_once(text)) != text:  # one mark gone can leave another alone
        text = tidied
    return text


def _drop_once(text: str) -> str:
    text = _LONE_APOSTROPHE.sub("", text)
    text = _DASH.sub(", ", text)
    return tidy_marks(_ELLIPSIS.sub(". ", text))


def tidy_marks(text: str) -> str:
    """One mark after a word, one space between words, no mark at the start."""
    text = " ".join(text.split())
    text = _SPACE_BEFORE_MARK.sub("", text)
    text = _MARKS.sub(_strongest_mark, text)
    return text.strip(" ,;:-")


def _strongest_mark(match: re.Match[str]) -> str:
    """The first ! or ? of a run of marks, else its full stop, else its first mark."""
    run = match[0]
    strong = next((mark for mark in run if mark in "!?"), None)
    return strong or ("." if "." in run else run[0])


def has_words(text: str) -> bool:
    """Whether a letter or digit of any script is in the text."""
    return any(character.isalnum() for character in text)


def _plain_character(character: str) -> str:
    if character.isspace() or character == "\u200b":
        return " "
    if character.isascii():
        return character if character.isprintable() else " "
    if character in _KEPT_SYMBOLS:
        return character
    category = unicodedata.category(character)
    if category in _DROPPED_CATEGORIES:
        return "" if category == "Cf" else " "
    if category == "Nd":
        return str(unicodedata.digit(character))
    if character in _FRACTIONS:
        return " " + unicodedata.normalize("NFKC", character)
    if unicodedata.east_asian_width(character) == "F" or character in _LIGATURES:
        return unicodedata.normalize("NFKC", character)
    return character
