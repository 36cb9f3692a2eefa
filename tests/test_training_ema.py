import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tts_stack.training import EMA


def weight_of(value):
    module = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, value)
    return module


def test_the_average_moves_by_one_minus_decay():
    module = weight_of(1.0)
    average = EMA(module, 0.75, warm_start=False)
    nn.init.constant_(module.weight, 3.0)
    average.update(module)
    assert average.weights["weight"].item() == 1.5


def test_a_warm_start_forgets_the_first_weights_quickly():
    module = weight_of(0.0)
    average = EMA(module, 0.15)
    nn.init.constant_(module.weight, 1.0)
    average.update(module)
    assert average.weights["weight"].item() == pytest.approx(1 - 1 / 10)
    average.update(module)  # 2 / 11 would be above the decay
    assert average.weights["weight"].item() == pytest.approx(1 - 0.1 * 0.15)


def test_the_module_gets_its_own_weights_back_even_after_an_error():
    module = nn.Linear(3, 3)
    average = EMA(module, 0.5)
    nn.init.normal_(module.weight)
    own, mean = module.weight.clone(), average.weights["weight"].clone()
    with pytest.raises(RuntimeError), average.applied_to(module):
        assert_close(module.weight, mean, rtol=0, atol=0)
        raise RuntimeError
    assert_close(module.weight, own, rtol=0, atol=0)
    assert_close(average.weights["weight"], mean, rtol=0, atol=0)


def test_frozen_weights_are_neither_kept_nor_changed():
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    average = EMA(module, 0.5)
    nn.init.constant_(module.bias, 7.0)
    average.update(module)
    assert set(average.weights) == {"weight"}
    with average.applied_to(module):
        assert module.bias.tolist() == [7.0, 7.0]


def test_a_reloaded_average_goes_on_as_the_old_one():
    module = weight_of(0.0)
    old = EMA(module, 0.9)
    nn.init.constant_(module.weight, 1.0)
    for _ in range(3):
        old.update(module)
    new = EMA(module, 0.9)
    new.load_state_dict(old.state_dict())
    for average in (old, new):
        average.update(module)
    assert torch.equal(new.weights["weight"], old.weights["weight"])
