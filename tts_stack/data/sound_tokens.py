"""Semantic tokens as text: `<|sound_start|><|sound_0209|><|duration_03|><|sound_0017|>…`.

The chat form of Ichigo, and Speechless's durations: one stretches the sound token behind it.
"""

import re
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tts_stack.contract import MIN_RUN
from tts_stack.data.malformed import MalformedError
from tts_stack.token_names import (
    SOUND_END,
    SOUND_MASK,
    SOUND_START,
    duration_name,
    sound_names,
)

MAX_DURATION = 99  # two digits
_SHOWN_CHARACTERS = 24
# One token and the white space behind it.
_TOKEN = re.compile(r"<\|(?:(sound|duration)_([0-9]{1,9})|sound_mask)\|>\s*")


class _Token(NamedTuple):
    kind: str  # sound, duration, mask
    value: int


def render_sound(codes: NDArray[np.int64], codebook_size: int, *, durations: bool = False) -> str:
    """The assistant turn of codes [S], a mask being `codebook_size`; `durations` collapses runs."""
    known = sound_names(codebook_size)
    names = [known[code] if code < codebook_size else SOUND_MASK for code in codes.tolist()]
    if durations:
        runs = ((name, len(list(run))) for name, run in groupby(names))
        names = [part for name, length in runs for part in _stretched(name, length)]
    return "".join([SOUND_START, *names, SOUND_END])


def parse_sound(content: str, codebook_size: int) -> NDArray[np.int64]:
    """Codes [S] of an assistant turn, durations expanded; a mask is the code `codebook_size`.

    White space between the tokens and around them is skipped.

    Raises:
        MalformedError: the turn is anything else than start, tokens, end; a code is outside the
            codebook; a duration stretches nothing.
    """
    content = content.strip()
    if not content.startswith(SOUND_START):
        raise MalformedError(
            "no_sound_start", f"assistant turn is {_show(content)}, expected {SOUND_START} first"
        )
    if not content.endswith(SOUND_END):
        end = content[-_SHOWN_CHARACTERS:]
        raise MalformedError(
            "no_sound_end", f"assistant turn ends with {end!r}, expected {SOUND_END} last"
        )
    codes: list[int] = []
    length = 0  # of the token to come; 0: no duration was read
    for token in _scan(content[len(SOUND_START) : -len(SOUND_END)]):
        if token.kind == "duration":
            _check_duration(token, length)
            length = token.value
            continue
        codes += [_code(token, codebook_size)] * max(length, 1)
        length = 0
    if length:
        raise MalformedError(
            "bad_duration",
            f"{duration_name(length)} stands before {SOUND_END}, expected a sound token",
        )
    if not codes:
        raise MalformedError(
            "no_sound", "assistant turn holds no sound token, expected at least one"
        )
    return np.array(codes, dtype=np.int64)


def _stretched(name: str, length: int) -> Iterator[str]:
    """A run as tokens: a duration before each part of MIN_RUN or more."""
    for done in range(0, length, MAX_DURATION):
        part = min(length - done, MAX_DURATION)
        yield f"{duration_name(part)}{name}" if part >= MIN_RUN else name


def _scan(inner: str) -> Iterator[_Token]:
    inner = inner.lstrip()
    place = 0
    for found in _TOKEN.finditer(inner):
        if found.start() != place:
            break
        place = found.end()
        yield _Token(found[1] or "mask", int(found[2] or 0))
    if place != len(inner):
        raise MalformedError(
            "unknown_token",
            f"assistant turn holds {_show(inner[place:])} at character {place} after "
            f"{SOUND_START}, expected sound and duration tokens up to {SOUND_END}",
        )


def _check_duration(token: _Token, before: int) -> None:
    if not 1 <= token.value <= MAX_DURATION:
        raise MalformedError(
            "bad_duration", f"duration of {token.value} tokens, expected 1 .. {MAX_DURATION}"
        )
    if before:
        raise MalformedError(
            "bad_duration",
            f"<|duration_{before:02d}|> stands before another duration, expected a sound token",
        )


def _code(token: _Token, codebook_size: int) -> int:
    if token.kind == "mask":
        return codebook_size
    if token.value >= codebook_size:
        raise MalformedError(
            "outside_codebook",
            f"sound token {token.value}, expected 0 .. {codebook_size - 1}; give the codebook_size "
            "of the codec that made the data",
        )
    return token.value


def _show(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…")
