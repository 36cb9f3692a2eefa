"""Checks of settings: a number in its range, a word among its choices; used by every config.py."""

import math
from collections.abc import Collection

from omegaconf import MISSING

from tts_stack.errors import ConfigError


def check_number(
    name: str,
    value: float | str | None,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> None:
    """Refuse a setting outside its bounds; NaN and infinity are never inside.

    Args:
        name: of the setting, as the user writes it.
        value: None and MISSING, a value yet to come, pass.
        at_least: bound that is allowed itself.
        above: bound that is not.
        at_most: bound that is allowed itself.
        below: bound that is not.

    Raises:
        ConfigError: it is outside.
    """
    if value is None or value == MISSING:
        return
    number = float(value)
    is_inside = (
        math.isfinite(number)
        and (at_least is None or number >= at_least)
        and (above is None or number > above)
        and (at_most is None or number <= at_most)
        and (below is None or number < below)
    )
    if not is_inside:
        bounds = (
            ("at least", at_least),
            ("more than", above),
            ("at most", at_most),
            ("below", below),
        )
        wanted = " and ".join(f"{word} {bound:,}" for word, bound in bounds if bound is not None)
        raise ConfigError(f"{name} is {value}, expected {wanted or 'a finite number'}")


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Refuse a word that is not among the choices; MISSING, a value yet to come, passes.

    Raises:
        ConfigError: it is not.
    """
    if value not in (*choices, MISSING):
        raise ConfigError(f"{name} is {value!r}, expected one of {', '.join(choices)}")
