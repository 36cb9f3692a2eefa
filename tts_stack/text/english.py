"""English: symbols, dates, money, times and numbers -> words, by an ordered table of rules.

wetext's English grammar, applied to a whole sentence, misreads decades ("1990s"), round thousands
("1,000" -> "thousand"), metres, clock times and abbreviations, and reorders dates. So it is asked
only for the shapes it reads well (fractions, numeric dates, addresses of four numbers).
"""

import re
from collections.abc import Callable

from tts_stack.text.abbreviations import expand_abbreviations
from tts_stack.text.numbers import cardinal, decade, decimal, ordinal, spell_digits, year
from tts_stack.text.wetext_grammar import apply_wetext

Match = re.Match[str]
_Rule = tuple[re.Pattern[str], Callable[[Match], str]]

_NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
_MONTHS = (
    "January February March April May June July August September October November December"
).split()
_MONTH = r"(?P<month>Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sept?|Oct|Nov|Dec)(?P<rest>[a-z]*)\.?"
_CURRENCIES = {
    "$": ("dollar", "dollars", "cent", "cents"),
    "£": ("pound", "pounds", "penny", "pence"),
    "€": ("euro", "euros", "cent", "cents"),
    "¥": ("yen", "yen", "sen", "sen"),
    "₹": ("rupee", "rupees", "paisa", "paise"),
}
_SCALES = {
    "k": "thousand", "m": "million", "mn": "million", "b": "billion", "bn": "billion",
    "t": "trillion", "thousand": "thousand", "million": "million", "billion": "billion",
    "trillion": "trillion",
}  # fmt: skip
_UNITS = {
    "kg": "kilogram", "mg": "milligram", "g": "gram", "km": "kilometer", "cm": "centimeter",
    "mm": "millimeter", "m": "meter", "mi": "mile", "lb": "pound", "lbs": "pound", "oz": "ounce",
    "ft": "foot", "yd": "yard", "ml": "milliliter", "mL": "milliliter", "L": "liter",
    "Hz": "hertz", "kHz": "kilohertz", "MHz": "megahertz", "GHz": "gigahertz", "kB": "kilobyte",
    "KB": "kilobyte", "MB": "megabyte", "GB": "gigabyte", "TB": "terabyte", "W": "watt",
    "kW": "kilowatt", "V": "volt", "ms": "millisecond", "s": "second", "sec": "second",
    "min": "minute", "h": "hour", "hr": "hour", "hrs": "hour", "mph": "mile per hour",
    "km/h": "kilometer per hour", "°C": "degree Celsius", "°F": "degree Fahrenheit",
    "°": "degree", "km²": "square kilometer", "m²": "square meter", "m³": "cubic meter",
}  # fmt: skip
_UNIT = "|".join(re.escape(unit) for unit in sorted(_UNITS, key=len, reverse=True))
_TOP_LEVEL = r"(?:com|org|net|edu|gov|info|io|ai|co|uk|us|eu|de|fr|jp|dev|app|tv|me)"
_DOMAIN = rf"(?:[a-z0-9-]+\.)+{_TOP_LEVEL}"
_ADDRESS_MARKS = {
    ".": " dot ", "/": " slash ", "-": " dash ", "_": " underscore ", "@": " at ", ":": " colon ",
    "=": " equals ", "&": " and ", "+": " plus ", "%": " percent ", "?": " question mark ",
    "#": " hash ", "~": " tilde ",
}  # fmt: skip
_SYMBOLS = {
    "&": "and", "@": "at", "+": "plus", "=": "equals", "%": "percent", "×": "times",
    "÷": "divided by", "±": "plus or minus", "≈": "about", "§": "section", "¢": "cents",
    "$": "dollars", "£": "pounds", "€": "euros", "¥": "yen", "₹": "rupees", "°": "degrees",
    "#": "number", "√": "square root of", "≤": "at most", "≥": "at least", "²": "squared",
    "³": "cubed", "©": "", "®": "", "™": "",
}  # fmt: skip
_ROMAN = {"I": 1, "V": 5, "X": 10}
_REIGN = (
    "Louis|Henry|George|Edward|Charles|James|Richard|William|Elizabeth|Philip|Pius|Paul|Napoleon|"
    "Benedict|Gregory|Alexander|Frederick|Leo|Nicholas|Catherine|Ivan|Francis|Clement|Innocent|Mary"
)
_NUMBERED = "Chapter|Part|Volume|Act|Scene|War|Book|Section|Article|Phase|Type|Class|Title|Figure"


def speak_english(text: str, *, day_first: bool = False) -> str:
    """Write every number, symbol and abbreviation of `text` as words.

    Args:
        text: text with plain typography (see `cleaning.plain_typography`).
        day_first: read 3/4/2021 as the third of April.
    """
    for pattern, speak in _RULES:
        if pattern is _NUMERIC_DATE and day_first:
            text = pattern.sub(_day_first_date, text)
        else:
            text = pattern.sub(speak, text)
        if pattern is _LAST_ADDRESS:
            text = expand_abbreviations(text)
    return text


def _address(match: Match) -> str:
    address = re.sub(r"(?i)^https?://|/$", "", match[0])
    address = re.sub(r"(?i)\bwww(?=\.)", "W W W", address)
    address = re.sub(r"\.([a-z]{2})(?=$|[/:.?])", lambda m: "." + " ".join(m[1].upper()), address)
    spoken = "".join(_ADDRESS_MARKS.get(character, character) for character in address)
    return re.sub(r"(?<=[a-zA-Z])(?=\d)|(?<=\d)(?=[a-zA-Z])", " ", spoken)


def _power(match: Match) -> str:
    exponent = {"2": "squared", "3": "cubed"}.get(match[1])
    if exponent:
        return f" {exponent}"
    sign = "minus " if match[1].startswith("-") else ""
    return f" to the power of {sign}{cardinal(match[1].lstrip('-'))}"


def _money(match: Match) -> str:
    singular, plural, small, smalls = _CURRENCIES[match["sign"]]
    number, scale = match["number"], _SCALES.get((match["scale"] or "").lower())
    if match["upto"]:
        return (
            f"{decimal(number)} to {decimal(match['upto'])}{f' {scale}' if scale else ''} {plural}"
        )
    if scale:
        return f"{decimal(number)} {scale} {plural}"
    whole, _, part = number.partition(".")
    if len(part) != 2:
        return f"{decimal(number)} {singular if number == '1' else plural}"
    cents = f"{cardinal(str(int(part)))} {small if part == '01' else smalls}"
    if int(whole.replace(",", "")) == 0:
        return cents
    large = f"{cardinal(whole)} {singular if whole == '1' else plural}"
    return large if part == "00" else f"{large} and {cents}"


def _clock(match: Match) -> str:
    hour, minute, half = int(match["hour"]), match["minute"] or "00", match["half"]
    if match["second"]:
        return (
            f"{cardinal(str(hour))} {_plural('hour', hour)} {cardinal(str(int(minute)))} "
            f"{_plural('minute', int(minute))} and {cardinal(str(int(match['second'])))} "
            f"{_plural('second', int(match['second']))}"
        )
    suffix = f" {half.upper()}M" if half else ""
    if minute != "00":
        minutes = "oh " * (minute[0] == "0") + cardinal(str(int(minute)))
        return f"{cardinal(str(hour))} {minutes}{suffix}"
    if suffix:
        return cardinal(str(hour)) + suffix
    if hour in (0, 24):
        return "midnight"
    return cardinal(str(hour)) + (" o'clock" if hour <= 12 else " hundred")


def _plural(noun: str, count: int) -> str:
    return noun if count == 1 else noun + "s"


def _month_name(match: Match) -> str | None:
    """Full name, or None where the letters are another word ("Marching", "Decade")."""
    name = next(name for name in _MONTHS if name.startswith(match["month"][:3]))
    short = match["month"] + match["rest"]
    return name if name.startswith(short) and (short == name or not match["rest"]) else None


def _month_day(match: Match) -> str:
    name = _month_name(match)
    if name is None or not 1 <= int(match["day"]) <= 31:
        return match[0]
    return f"{name} {ordinal(str(int(match['day'])))}" + _comma_year(match["year"])


def _day_month(match: Match) -> str:
    name = _month_name(match)
    if name is None or not 1 <= int(match["day"]) <= 31:
        return match[0]
    article = match["the"] or "the "
    return f"{article}{ordinal(str(int(match['day'])))} of {name}" + _comma_year(match["year"])


def _month_year(match: Match) -> str:
    name = _month_name(match)
    return match[0] if name is None else f"{name} {year(match['year'])}"


def _comma_year(digits: str | None) -> str:
    return f", {year(digits)}" if digits else ""


def _wetext(match: Match) -> str:
    return apply_wetext(match[0], "en")


def _day_first_date(match: Match) -> str:
    first, second, rest = match[0].split("/")
    return apply_wetext(f"{second}/{first}/{rest}", "en")


def _digit_groups(match: Match) -> str:
    plus = "plus " if match[0].startswith("+") else ""
    groups = re.findall(r"\d+", match[0])
    return plus + ", ".join(spell_digits(group) for group in groups)


def _measure(match: Match) -> str:
    head, space, tail = _UNITS[match["unit"]].partition(" ")
    words = decimal(match["number"])
    if match["number"] == "1":
        return f"{words} {head}{space}{tail}"
    if head in ("square", "cubic"):
        return f"{words} {head} {tail}s"
    plural = {"foot": "feet"}.get(head, head if head.endswith("hertz") else head + "s")
    return f"{words} {plural}{space}{tail}"


def _number(match: Match) -> str:
    digits = match[0]
    if re.fullmatch(r"1[1-9]\d\d|20\d\d", digits):
        return year(digits)
    return decimal(digits)


def _reign(match: Match) -> str:
    return f"{match[1]} the {ordinal(str(_roman(match[2])))}"


def _numbered(match: Match) -> str:
    return f"{match[1]} {cardinal(str(_roman(match[2])))}"


def _roman(digits: str) -> int:
    values = [_ROMAN[digit] for digit in digits]
    following = [*values[1:], 0]
    return sum(-a if a < b else a for a, b in zip(values, following, strict=True))


def _rule(pattern: str, speak: Callable[[Match], str] | str) -> _Rule:
    if isinstance(speak, str):
        return re.compile(pattern), lambda match: match.expand(speak)
    return re.compile(pattern), speak


_NUMERIC_DATE = re.compile(r"(?<![\d/])\d{1,2}/\d{1,2}/(?:\d{4}|\d{2})(?![\d/])")
_LAST_ADDRESS = re.compile(rf"(?i)(?<![\w@])(?:www\.)?{_DOMAIN}\b(?:/[\w./?=&%#~+-]*[\w/])?")

_RULES: list[_Rule] = [
    # Addresses, before anything touches their marks.
    _rule(r"(?i)\bhttps?://[^\s,]*[\w/]", _address),
    _rule(rf"(?i)\b[\w.+-]+@{_DOMAIN}\b", _address),
    (_LAST_ADDRESS, _address),  # abbreviations are expanded after this rule
    # Powers, feet and inches, phone numbers.
    _rule(r"(?<=\w)\^\(?(-?\d+)\)?", _power),
    _rule(r"(?<![\w.])(\d)'\s?(\d{1,2})(?:\"|'')", r"\1 foot \2"),
    _rule(
        r"(?<![\w.])\+?(?:\d{1,3}[ .-])?(?:\(\d{3}\) ?|\d{3}[ .-])\d{3}[ .-]\d{4}(?!\w)",
        _digit_groups,
    ),
    _rule(r"(?<![\w.-])\d{3}-\d{4}(?![\w-])", _digit_groups),
    # Money.
    _rule(r"(?<=\d)-(?=[$£€¥₹]\d)", " to "),
    _rule(
        rf"(?:\bUS)?(?P<sign>[$£€¥₹])\s?(?P<number>{_NUMBER})(?:-(?P<upto>{_NUMBER}))?"
        r"(?:\s?(?P<scale>(?i:thousand|million|billion|trillion|bn|mn|[kmbt]))\b)?",
        _money,
    ),
    # Clock times; "10:30:15" is a duration, "16:9" a ratio.
    _rule(
        r"(?<![\d:.])(?P<hour>[01]?\d|2[0-4]):(?P<minute>[0-5]\d)(?::(?P<second>[0-5]\d))?"
        r"(?![\d:])(?:\s?(?P<half>[AaPp])\.?[Mm]\b)?",
        _clock,
    ),
    _rule(
        r"(?<![\d:.,])(?P<hour>1[0-2]|0?[1-9])(?P<minute>(?!))?(?P<second>(?!))?"
        r"\s?(?P<half>[AaPp])\.?[Mm]\b",
        _clock,
    ),
    _rule(r"(\d):(?=\d)", r"\1 to "),
    # Dates.
    _rule(r"(?<![\d-])(?:1\d|20)\d\d-[01]\d-[0-3]\d(?![\d-])", _wetext),
    (_NUMERIC_DATE, _wetext),
    _rule(
        rf"\b{_MONTH}\s+(?P<day>\d{{1,2}})(?:st|nd|rd|th)?(?![\d:%/.,-]\d|\d|\s?(?:%|percent))"
        r"(?:,?\s+(?P<year>[12]\d{3})\b)?",
        _month_day,
    ),
    _rule(
        rf"(?P<the>\b[Tt]he )?\b(?P<day>\d{{1,2}})(?:st|nd|rd|th)?\s+(?:of\s+)?{_MONTH}\b"
        r"(?:,?\s+(?P<year>[12]\d{3})\b)?",
        _day_month,
    ),
    _rule(rf"\b{_MONTH},?\s+(?P<year>[12]\d{{3}})\b", _month_year),
    _rule(r"(?<!\w)'?(\d0|\d\d\d0)'?s\b", lambda match: decade(match[1])),
    _rule(r"(?<=-)(\d0|\d\d\d0)'?s\b", lambda match: decade(match[1])),
    # Groups of digits that are read digit by digit, versions, fractions.
    _rule(r"(?<![\w.])\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}(?![\w.]*\d)", _wetext),
    _rule(r"(?<![\w-])\d+(?:-\d+){2,}(?![\w-])", _digit_groups),
    _rule(r"\b[vV](?=\d+\.\d)", "version "),
    _rule(r"\d+(?:\.\d+){2,}", lambda match: decimal(match[0])),
    _rule(r"\b24/7\b", "twenty-four seven"),
    _rule(r"\b9/11\b", "nine eleven"),
    _rule(r"(?<=\d) (?=\d/\d)", " and "),
    _rule(r"(?<![\w/.,])\d{1,2}/\d{1,3}(?![\w/]|[.,]\d)", _wetext),
    # Roman numerals after a name or a heading.
    _rule(rf"\b({_REIGN}) ([IVX]{{1,5}})(?![\w'.])", _reign),
    _rule(rf"\b({_NUMBERED}) ([IVX]{{1,5}})(?![\w'])", _numbered),
    # Signs and ranges.
    _rule(r"(?<![\w.])\.(\d+)", lambda match: "point " + spell_digits(match[1], zero="zero")),
    _rule(r"(?<=\d)(%?)-(?=[$£€]?\d)", r"\1 to "),
    _rule(r"(?<![\w-])-(?=\d)", "minus "),
    _rule(r"(?<=\d)\s?[x×*]\s?(?=\d)", " times "),
    _rule(r"(?<=\d)x\b", " times"),
    _rule(r"(?<=[\d)])\s?/\s?(?=\d)", " over "),
    _rule(rf"(?<![\w.])(?P<number>{_NUMBER})\s?(?P<unit>{_UNIT})(?!\w|[²³/])", _measure),
    _rule(r"(?<=\d),(?=\d{1,2}(?!\d)|\d{4})", ", "),
    # Numbers by themselves.
    _rule(r"(\d[\d,]*)(?:st|nd|rd|th)\b", lambda match: ordinal(match[1].replace(",", ""))),
    _rule(r"\bA(?=\d)", "A-"),
    _rule(r"(?<=[^\W\d_])-?(?=\d)", lambda match: match[0] or " "),
    _rule(r"(?<=\d)(?=[^\W\d_])", " "),
    _rule(rf"(?<![\d.]){_NUMBER}", _number),
    _rule(r"\d+", lambda match: spell_digits(match[0])),
    # Symbols by themselves.
    _rule(r"(?<=\w)/(?=\w)", " "),
    _rule(f"[{re.escape(''.join(_SYMBOLS))}]", lambda match: f" {_SYMBOLS[match[0]]} "),
]  # fmt: skip
