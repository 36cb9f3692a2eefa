import math

import pytest
from omegaconf import MISSING

from tts_stack.errors import ConfigError
from tts_stack.ranges import check_choice, check_number


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bound", [{}, {"at_least": 0}, {"above": 0}, {"at_most": 1}, {"below": 1}])
def test_what_is_no_finite_number_is_outside_every_range(value, bound):
    with pytest.raises(ConfigError, match=f"x is {value}, expected"):
        check_number("x", value, **bound)


@pytest.mark.parametrize(
    ("bound", "inside", "outside", "wanted"),
    [
        ({"at_least": 1}, 1, 0.9, "at least 1"),
        ({"above": 0}, 1e-9, 0, "more than 0"),
        ({"at_most": 1}, 1, 1.1, "at most 1"),
        ({"below": 1}, 0.99, 1, "below 1"),
        ({"at_least": 0, "below": 1}, 0, 1, "at least 0 and below 1"),
    ],
)
def test_bounds_are_inside_or_not_as_they_say(bound, inside, outside, wanted):
    check_number("x", inside, **bound)
    with pytest.raises(ConfigError, match=f"x is {outside}, expected {wanted}$"):
        check_number("x", outside, **bound)


def test_a_value_yet_to_come_passes():
    check_number("x", MISSING, at_least=1)
    check_number("x", None, at_least=1)
    check_choice("x", MISSING, ("a",))


def test_a_word_that_is_no_choice_is_refused_with_the_choices():
    with pytest.raises(ConfigError, match="x is 'c', expected one of a, b"):
        check_choice("x", "c", ("a", "b"))
