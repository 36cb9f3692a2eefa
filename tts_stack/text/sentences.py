"""Raw text -> pieces short enough for one pass of the LLM; nothing is lost on the way.

Works on spans of the text, so that the pieces, joined, hold every word in order.
"""

import re

from tts_stack.errors import ConfigError

_LOOK_AHEAD = 12  # characters past the limit that a cut pattern may look at
_MIN_CHARS = 20  # a shorter piece joins its neighbour: very short prompts sound hurried
_END = re.compile(
    r"[.!?\u2026]+[\"'\u201d\u2019)\]]*(?=\s)|[\u3002\uff01\uff1f]+[\u300d\u300f\u201d]*|\n\s*\n"
)
_WORD_BEFORE = re.compile(r"[^\s(\"'\u201c\u2018]*$")
_INITIALS = re.compile(r"(?:[A-Za-z]\.)*[A-Za-z]", flags=re.IGNORECASE)
_ABBREVIATIONS = frozenset(
    "mr mrs ms dr prof rev hon gen col capt lt sgt gov sen rep pres messrs mt ft maj st vs approx "
    "fig figs vol ch pp sec eq art nos est jan feb mar apr jun jul aug sept sep oct nov dec "
    "e.g i.e cf al viz z.b bzw mme mlle sr sra".split()
)
_CUTS = (
    re.compile(r"[;:]\s|[\uff1b\uff1a]"),
    re.compile(r",\s|\s[\u2013\u2014-]+\s|[\uff0c\u3001]"),
    re.compile(r"\s(?=(?:and|but|or|because|which|that|when|while|who|if|und|oder|aber|et|y)\s)"),
    re.compile(r"\s"),
)


def split_sentences(text: str, *, max_chars: int = 200) -> list[str]:
    """Split at sentence ends, join very short sentences, cut over-long ones at the best place.

    Args:
        text: raw text, before normalisation.
        max_chars: no piece is longer; a word without a space is cut if nothing else helps.

    Raises:
        ConfigError: `max_chars` is below 1.
    """
    if max_chars < 1:
        raise ConfigError(f"max_chars is {max_chars}, expected at least 1")
    sentences = _merge_short(_sentences(text), max_chars)
    return [piece for sentence in sentences for piece in _cut_long(sentence, max_chars)]


def _sentences(text: str) -> list[str]:
    pieces, start = [], 0
    for match in _END.finditer(text):
        if _ends_sentence(text, match):
            pieces.append(text[start : match.end()])
            start = match.end()
    pieces.append(text[start:])
    return [piece for piece in map(_one_line, pieces) if piece]


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _ends_sentence(text: str, match: re.Match[str]) -> bool:
    if not match[0].startswith("."):
        return True
    following = text[match.end() : match.end() + 8].lstrip(" \"'(\u201c\u2018")
    if following[:1].islower():
        return False
    word = _WORD_BEFORE.search(text, max(0, match.start() - 20), match.start())
    before = word[0].rstrip(".") if word else ""
    if before.lower() == "no":
        return not following[:1].isdigit()
    if before.lower() in _ABBREVIATIONS:
        return False
    return before == "I" or not (before and before[0].isupper() and _INITIALS.fullmatch(before))


def _merge_short(sentences: list[str], max_chars: int) -> list[str]:
    merged: list[str] = []
    for sentence in sentences:
        is_short = merged and min(len(merged[-1]), len(sentence)) < _MIN_CHARS
        if is_short and len(merged[-1]) + 1 + len(sentence) <= max_chars:
            merged[-1] = f"{merged[-1]} {sentence}"
        else:
            merged.append(sentence)
    return merged


def _cut_long(text: str, max_chars: int) -> list[str]:
    pieces = []
    while len(text) > max_chars:
        cut = _best_cut(text, max_chars)
        pieces.append(text[:cut].rstrip())
        text = text[cut:].lstrip()
    return [piece for piece in (*pieces, text) if piece]


def _best_cut(text: str, max_chars: int) -> int:
    """The last cut of the best kind in the second half, or of any kind, or `max_chars` itself."""
    for pattern, earliest in [(p, max_chars // 2) for p in _CUTS] + [(_CUTS[-1], 1)]:
        matches = pattern.finditer(text, earliest, max_chars + _LOOK_AHEAD)
        ends = [m.end() for m in matches if len(text[: m.end()].rstrip()) <= max_chars]
        if ends:
            return ends[-1]
    return max_chars
