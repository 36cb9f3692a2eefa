"""English abbreviations with a full stop -> the words they stand for."""

import re

Match = re.Match[str]

_TITLES = {
    "Mr": "Mister", "Mrs": "Missus", "Ms": "Miz", "Prof": "Professor", "Rev": "Reverend",
    "Hon": "Honorable", "Gen": "General", "Col": "Colonel", "Capt": "Captain", "Lt": "Lieutenant",
    "Sgt": "Sergeant", "Gov": "Governor", "Sen": "Senator", "Rep": "Representative",
    "Pres": "President", "Messrs": "Messieurs", "Mt": "Mount", "Ft": "Fort", "Maj": "Major",
}  # fmt: skip
_WORDS = {
    "etc": "et cetera", "approx": "approximately", "Jr": "Junior", "Sr": "Senior",
    "Ave": "Avenue", "Blvd": "Boulevard", "Rd": "Road", "Inc": "Incorporated", "Ltd": "Limited",
    "Co": "Company", "Corp": "Corporation", "Dept": "Department", "Esq": "Esquire",
    "est": "established", "govt": "government", "Univ": "University",
}  # fmt: skip
_BEFORE_NUMBER = {
    "no": "number", "nos": "numbers", "fig": "figure", "figs": "figures", "vol": "volume",
    "ch": "chapter", "p": "page", "pp": "pages", "sec": "section", "eq": "equation",
    "art": "article",
}  # fmt: skip
_LETTERS = {"e.g.": "for example", "i.e.": "that is", "a.k.a.": "also known as"}
_FUNCTION_WORDS = frozenset(
    "In At On The From To For And Of By Near Is Was With As But Or So Our Your My His Her".split()
)


# A full stop after an abbreviation ends a sentence only at the end, or before one of these.
_STARTERS = (
    "The|A|An|He|She|It|They|We|I|You|This|That|These|Those|There|Then|But|And|So|In|On|At|If|When|"
    "His|Her|My|Our|Their|Its|Is|Are|Was|What|Who|Why|How|Where|For|To|As|After|Before|Now|No|Yes"
)
_END = rf"(?P<end>\s*$|(?=\s+(?:{_STARTERS})\b))?"


def _alternatives(words: dict[str, str]) -> str:
    return "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))


_TITLE = re.compile(rf"\b({_alternatives(_TITLES)})\.(?=\s*[A-Z])|\b(Mr|Mrs|Ms)\b\.?(?=\s+[A-Z])")
_SAINT_OR_STREET = re.compile(r"(?P<before>[\w'-]+ )?\b(?P<word>St|Dr)\.(?P<after>\s*[A-Z]?)")
_VERSUS = re.compile(r"\bvs\b\.?")
_WORD = re.compile(rf"\b({_alternatives(_WORDS)})\.{_END}")
_NUMBER_WORD = re.compile(
    rf"(?<![\w.])({_alternatives(_BEFORE_NUMBER)})\.\s*(?=\d)", flags=re.IGNORECASE
)
_LETTER = re.compile(rf"(?<!\w)({_alternatives(_LETTERS)})", flags=re.IGNORECASE)
_DEGREE = re.compile(rf"\bPh\.\s?D\b\.?{_END}")
_DOTTED = re.compile(rf"(?<![\w.])(?P<letters>(?:[A-Za-z]\.)+[A-Za-z])(?:\.{_END})?(?!\w)")
_INITIAL = re.compile(rf"(?<![\w'.-])([A-HJ-Z])\.(?=\s+(?!(?:{_STARTERS})\b)[A-Z][a-z.'])")


def expand_abbreviations(text: str) -> str:
    """Expand titles, streets, No. 5, U.S.A., initials; keep a stop that ends a sentence."""
    text = _LETTER.sub(lambda match: _LETTERS[match[1].lower()], text)
    text = _TITLE.sub(lambda match: _TITLES[match[1] or match[2]], text)
    text = _SAINT_OR_STREET.sub(_saint_or_street, text)
    text = _NUMBER_WORD.sub(_number_word, text)
    text = _VERSUS.sub("versus", text)
    text = _WORD.sub(lambda match: _WORDS[match[1]] + _stop(match), text)
    text = _DEGREE.sub(lambda match: "PhD" + _stop(match), text)
    text = _DOTTED.sub(_dotted, text)
    return _INITIAL.sub(r"\1", text)


def _stop(match: Match) -> str:
    return "" if match["end"] is None else "." + match["end"]


def _number_word(match: Match) -> str:
    word = _BEFORE_NUMBER[match[1].lower()]
    return (word.capitalize() if match[1][0].isupper() else word) + " "


def _dotted(match: Match) -> str:
    letters = match["letters"].replace(".", "")
    return (letters if letters.lower() in ("am", "pm") else letters.upper()) + _stop(match)


def _saint_or_street(match: Match) -> str:
    """`St. James` is a saint, `James St.` a street; likewise doctor and drive."""
    before, after = match["before"] or "", match["after"]
    follows_name = before[:1].isupper() and before.strip() not in _FUNCTION_WORDS
    names_next = bool(after.strip()) and not follows_name
    if match["word"] == "St":
        word = "Saint" if names_next else "Street"
    else:
        word = "Drive" if follows_name and not after.strip() else "Doctor"
    ends = follows_name and (after.strip() or not after) and word in ("Street", "Drive")
    return f"{before}{word}{'.' if ends else ''}{after}"
