"""Raw text -> words as they are spoken: cleaning, then number and abbreviation rules.

English, Chinese and Japanese go through wetext's grammars (English with our own rules before
it). Text of any other language is only cleaned: its numbers reach the LLM as digits, or are
spoken by the phonemizer.
"""

import re

from tts_stack.text.cleaning import clean_text, drop_symbols, plain_typography, tidy_marks
from tts_stack.text.english import speak_english
from tts_stack.text.wetext_grammar import apply_wetext

_NOT_ENGLISH = re.compile(r"[^\w\s,.;:!?'-]|[\d_]")


def normalize_text(text: str, language: str) -> str:
    """Clean `text` and write its numbers, dates and symbols as words.

    Args:
        text: any text.
        language: BCP 47 code; the part before the first hyphen decides on the rules.
    """
    code, _, region = language.lower().partition("-")
    if code == "en":
        spoken = speak_english(plain_typography(text), day_first=region not in ("", "us"))
        return drop_symbols(_NOT_ENGLISH.sub(" ", drop_symbols(spoken)))
    if code in ("zh", "ja"):
        return tidy_marks(apply_wetext(clean_text(text), code))
    return clean_text(text)
