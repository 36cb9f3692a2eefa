import random

import pytest

from tts_stack.text.normalize import normalize_text

_TABLE = """
It cost $1.5M. | It cost one point five million dollars.
£3.50 | three pounds and fifty pence
$0.50 or $1.01 | fifty cents or one dollar and one cent
$10-20 and $10-$20 | ten to twenty dollars and ten dollars to twenty dollars
€20 | twenty euros
pages 10-20 | pages ten to twenty
COVID-19 | COVID-nineteen
1:23:45 | one hour twenty-three minutes and forty-five seconds
13:00 | thirteen hundred
24:00 | midnight
3:05 pm | three oh five PM
10:00 | ten o'clock
at 10 a.m. we | at ten AM we
at 10 a.m. He left | at ten AM. He left
16:9 | sixteen to nine
x^3 and 10^6 | x cubed and ten to the power of six
mc² | mc squared
1,2,3 | one, two, three
1,234,567 | one million two hundred thirty-four thousand five hundred sixty-seven
1,000 | one thousand
3.14 and 2,000.50 | three point one four and two thousand point five zero
in 1984, 1800, 1905 | in nineteen eighty-four, eighteen hundred, nineteen oh five
2005 and 2010 | two thousand five and twenty ten
the 1990s, the '90s, mid-1980s | the nineteen nineties, the nineties, mid-nineteen eighties
21st, 2nd, 12th, 30th | twenty-first, second, twelfth, thirtieth
50% to 10-20% | fifty percent to ten to twenty percent
-5 degrees, 5°C | minus five degrees, five degrees Celsius
call 555-123-4567 | call five five five, one two three, four five six seven
+1 (555) 123-4567 | plus one, five five five, one two three, four five six seven
Jan 3, 2020 | January third, twenty twenty
8 August 1974 | the eighth of August, nineteen seventy-four
Sept. 11, 2001 | September eleventh, two thousand one
03/04/2021 | the fourth of march twenty twenty one
2021-03-04 | the fourth of march twenty twenty one
1½ cups, 1/2 cup | one and one half cups, one half cup
24/7 and 9/11 | twenty-four seven and nine eleven
.25 and -0.5 | point two five and minus zero point five
5kg, 100m, 6 ft | five kilograms, one hundred meters, six feet
1 km, 60mph | one kilometer, sixty miles per hour
20 m² | twenty square meters
5'10" | five foot ten
Agent 007 | Agent oh oh seven
v1.2.3 | version one point two point three
MP3, H2O, F-16, A4 | MP three, H two O, F-sixteen, A-four
3 x 4 = 12 | three times four equals twelve
AT&T, #1 | AT and T, number one
see https://example.co.uk. | see example dot C O dot U K.
me@foo.com | me at foo dot com
Mr. Smith vs. Dr. No. | Mister Smith versus Doctor No.
St. James St. | Saint James Street
In St. Louis on Main St. He went | In Saint Louis on Main Street. He went
No. 5, pp. 4-5, Fig. 3 | Number five, pages four to five, Figure three
from the U.S.A. today | from the USA today
He left the U.S.A. | He left the USA.
J. R. R. Tolkien, J.R.R. Tolkien | J R R Tolkien, JRR Tolkien
plan B. Then we | plan B. Then we
Ph.D. thesis, e.g. this | PhD thesis, for example this
Louis XIV, World War II | Louis the fourteenth, World War two
Mon ami, Mar a Lago | Mon ami, Mar a Lago
<|audio_start|> | audio start
""".strip().splitlines()


@pytest.mark.parametrize("line", _TABLE)
def test_english_table(line):
    text, spoken = line.rsplit(" | ", 1)
    assert normalize_text(text, "en-us") == spoken


def test_british_english_reads_the_day_first():
    assert normalize_text("3/4/2021", "en-gb") == "the third of april twenty twenty one"


def test_no_digit_or_symbol_is_left_in_english():
    generator = random.Random(0)
    alphabet = "0123456789" * 2 + "aAIXkm .,:;/-+$£%'°²½^()<|>&@#_"
    for _ in range(3000):
        text = "".join(generator.choices(alphabet, k=generator.randrange(1, 16)))
        spoken = normalize_text(text, "en-us")
        assert all(c.isalpha() or c in " ,.;:!?'-" for c in spoken), (text, spoken)


def test_a_number_of_thousands_of_digits_is_spelled():
    assert normalize_text("12" * 2000, "en-us").split() == ["one", "two"] * 2000


@pytest.mark.parametrize(
    ("text", "language", "spoken"),
    [
        ("花了3.5元", "zh-cn", "花了三点五元"),
        ("100円です。", "ja", "百円です。"),
        ("Ich habe 3 «Äpfel»", "de-de", "Ich habe 3 Äpfel"),
    ],
)
def test_other_languages(text, language, spoken):
    assert normalize_text(text, language) == spoken


def test_plain_words_are_left_alone():
    text = "The man, who came home; said: is it not a matter of law? I've no idea!"
    assert normalize_text(text, "en-us") == text
