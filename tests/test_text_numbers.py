import pytest

from tts_stack.text.numbers import cardinal, decade, decimal, ordinal, year


@pytest.mark.parametrize(
    ("speak", "digits", "words"),
    [
        (cardinal, "0", "zero"),
        (cardinal, "1,204", "one thousand two hundred four"),
        (cardinal, "1000000", "one million"),
        (cardinal, "007", "oh oh seven"),
        (ordinal, "100", "one hundredth"),
        (ordinal, "42", "forty-second"),
        (ordinal, "20", "twentieth"),
        (decimal, "0.05", "zero point zero five"),
        (year, "1900", "nineteen hundred"),
        (year, "2000", "two thousand"),
        (decade, "1900", "nineteen hundreds"),
        (decade, "20", "twenties"),
    ],
)
def test_number_words(speak, digits, words):
    assert speak(digits) == words
