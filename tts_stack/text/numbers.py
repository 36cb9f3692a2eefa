"""English words of numbers: cardinals, ordinals, years, decades, decimals, digit by digit."""

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
).split()
_TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety".split()
_SCALES = ["", " thousand", " million", " billion", " trillion", " quadrillion"]
_MAX_DIGITS = 3 * len(_SCALES)
_IRREGULAR_ORDINALS = {
    "one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth",
    "nine": "ninth", "twelve": "twelfth",
}  # fmt: skip


def cardinal(digits: str) -> str:
    """`"1,204"` -> one thousand two hundred four; too long or zero-led numbers digit by digit."""
    digits = digits.replace(",", "")
    if len(digits) > _MAX_DIGITS or (len(digits) > 1 and digits[0] == "0"):
        return spell_digits(digits)
    value = int(digits)
    if value == 0:
        return "zero"
    groups = []
    for scale in _SCALES:
        value, group = divmod(value, 1000)
        if group:
            groups.append(_below_thousand(group) + scale)
    return " ".join(reversed(groups))


def ordinal(digits: str) -> str:
    """`"21"` -> twenty-first."""
    words = cardinal(digits)
    cut = max(words.rfind(" "), words.rfind("-")) + 1
    head, last = words[:cut], words[cut:]
    if last in _IRREGULAR_ORDINALS:
        return head + _IRREGULAR_ORDINALS[last]
    return head + (last[:-1] + "ieth" if last.endswith("y") else last + "th")


def decimal(number: str) -> str:
    """`"3.14"` -> three point one four; also whole numbers and versions (1.2.3)."""
    whole, *parts = number.split(".")
    if len(parts) > 1:
        return " point ".join(cardinal(part) for part in (whole, *parts))
    words = cardinal(whole or "0")
    return " point ".join([words, *(spell_digits(part, zero="zero") for part in parts)])


def year(digits: str) -> str:
    """`"1984"` -> nineteen eighty-four, `"2005"` -> two thousand five."""
    century, rest = divmod(int(digits), 100)
    if century % 10 == 0 and rest < 10:
        return cardinal(digits)
    if rest == 0:
        return cardinal(str(century)) + " hundred"
    return f"{cardinal(str(century))} {'oh ' if rest < 10 else ''}{cardinal(str(rest))}"


def decade(digits: str) -> str:
    """`"1990"` -> nineteen nineties, `"80"` -> eighties."""
    words = year(digits) if len(digits) == 4 else cardinal(digits)
    return words[:-1] + "ies" if words.endswith("y") else words + "s"


def spell_digits(digits: str, zero: str = "oh") -> str:
    """`"007"` -> oh oh seven."""
    return " ".join(zero if digit == "0" else _ONES[int(digit)] for digit in digits)


def _below_thousand(value: int) -> str:
    hundreds, rest = divmod(value, 100)
    words = [_ONES[hundreds] + " hundred"] if hundreds else []
    if rest >= 20:
        words.append(_TENS[rest // 10] + (f"-{_ONES[rest % 10]}" if rest % 10 else ""))
    elif rest:
        words.append(_ONES[rest])
    return " ".join(words)
