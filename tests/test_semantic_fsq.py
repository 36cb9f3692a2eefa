import pytest
import torch
from torch.testing import assert_close

from tts_stack.semantic.fsq import FSQ


def test_every_code_survives_the_way_to_values_and_back():
    fsq = FSQ([8, 5, 5, 5])
    codes = torch.arange(1000)
    assert_close(fsq.indices(fsq.values(codes)), codes)


def test_codes_count_their_digits_first_dimension_fastest():
    fsq = FSQ([4, 3])
    # digits (0..3, 0..2) stand for values (digit - 2) / 2 and (digit - 1) / 1
    values = torch.tensor([[-1.0, -1.0], [0.5, -1.0], [-1.0, 0.0], [0.5, 1.0]])
    assert_close(fsq.indices(values), torch.tensor([0, 3, 4, 11]))
    assert_close(fsq.values(torch.tensor([0, 3, 4, 11])), values)


def test_odd_level_rounds_to_hand_computed_values():
    # bound(z) = 1.998 * tanh(z) for level 5; values are multiples of 1/2
    z = torch.tensor([[-9.0], [-0.6], [0.0], [0.2], [0.9], [9.0]])
    expected = torch.tensor([[-1.0], [-0.5], [0.0], [0.0], [0.5], [1.0]])
    assert_close(FSQ([5])(z), expected)


def test_even_level_reaches_its_asymmetric_ends_and_keeps_zero():
    z = torch.tensor([[-50.0], [0.0], [50.0]])
    assert_close(FSQ([8])(z), torch.tensor([[-1.0], [0.0], [0.75]]))


@pytest.mark.parametrize("level", [3, 4, 5, 8])
def test_rounding_gives_exactly_level_values(level):
    values = FSQ([level])(torch.linspace(-20, 20, 4001)[:, None])
    assert len(values.unique()) == level


def test_forward_values_are_grid_points():
    fsq = FSQ([8, 5, 5, 5])
    values = fsq(torch.randn(200, 4, generator=torch.Generator().manual_seed(0)) * 2)
    assert_close(fsq.values(fsq.indices(values)), values)


def test_gradient_is_that_of_the_unrounded_value():
    z = torch.tensor([[0.3]], requires_grad=True)
    FSQ([5])(z).sum().backward()
    slope = 4 * (1 - 1e-3) / 2 * (1 - torch.tanh(torch.tensor(0.3)) ** 2) / 2
    assert_close(z.grad, slope[None, None])


def test_tables_are_not_weights():
    assert FSQ([8, 5, 5, 5]).state_dict() == {}
