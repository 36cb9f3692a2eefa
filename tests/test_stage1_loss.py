import math

import numpy as np
import pytest
import torch
from stage1_support import TOKENS, make_samples, tiny_network
from torch.testing import assert_close

from stage1_llm.collate import collate_prompts
from stage1_llm.dataset import sample_prompt
from stage1_llm.loss import (
    Denominators,
    base_loss,
    denominators,
    figures,
    step_loss,
    step_sums,
    supervised_positions,
)
from stage1_llm.prompt import build_prompt
from tts_stack.contract import PromptSpec

WEIGHTS = torch.tensor([0.1, 1.0, 2.0])
SPEC = PromptSpec(position_scheme="aligned", text_stride=2.0)
A = TOKENS.text_offset


def batch_of(samples):
    return collate_prompts([sample_prompt(s, TOKENS, SPEC) for s in samples], pad_id=TOKENS.pad)


def sums_of(network, batch, weights=WEIGHTS):
    return step_sums(*network(batch, weights))


def gradients(network, samples):
    network.zero_grad()
    (WEIGHTS * sums_of(network, batch_of(samples)).losses).sum().backward()
    return {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}


def test_each_label_is_predicted_from_the_position_before_it():
    batch = collate_prompts([build_prompt([A], np.array([6]), TOKENS, SPEC)], pad_id=0)
    labelled = supervised_positions(batch.labels, batch.groups, WEIGHTS)
    assert labelled.positions.tolist() == [0, 1, 2, 3]
    assert labelled.labels.tolist() == [A, 2, 10, 3]  # audio_start predicts the first token
    assert labelled.groups.tolist() == [0, 0, 1, 2]


def test_a_group_of_weight_zero_is_not_computed_but_the_end_is():
    batch = collate_prompts([build_prompt([A], np.array([6]), TOKENS, SPEC)], pad_id=0)
    labelled = supervised_positions(batch.labels, batch.groups, torch.tensor([0.0, 1.0, 1.0]))
    assert labelled.labels.tolist() == [10, 3]


def test_positions_never_reach_into_the_row_before():
    batch = batch_of(make_samples(3))
    index = supervised_positions(batch.labels, batch.groups, WEIGHTS).positions
    length = batch.labels.shape[1]
    assert (index % length != length - 1).all()


def sums_by_hand(logits, labels, groups):
    return step_sums(logits, labels, groups, (), torch.zeros(len(labels), 0, dtype=torch.long))


def test_sums_and_weighted_mean_by_hand():
    logits = torch.tensor([[0.0, 0.0], [0.0, math.log(3)], [math.log(3), 0.0]])
    labels, groups = torch.tensor([0, 1, 1]), torch.tensor([0, 1, 1])
    sums = sums_by_hand(logits, labels, groups)
    half, right, wrong = math.log(2), math.log(4 / 3), math.log(4)
    assert_close(sums.losses, torch.tensor([half, right + wrong, 0.0]))
    assert_close(sums.counts, torch.tensor([1.0, 2.0, 0.0]))
    assert_close(sums.hits, torch.tensor([0.0, 1.0, 0.0]))  # a tie is no hit
    assert_close(sums.hits_5, torch.tensor([1.0, 2.0, 0.0]))
    totals = Denominators(torch.tensor(2.1), torch.tensor(0.0))
    expected = (0.1 * half + right + wrong) / 2.1
    assert_close(step_loss(sums, WEIGHTS, 1.0, totals), torch.tensor(expected))
    assert figures(sums) == pytest.approx(
        {
            "text": half,
            "text_accuracy": 0.0,
            "text_top5": 1.0,
            "audio": (right + wrong) / 2,
            "audio_accuracy": 0.5,
            "audio_top5": 1.0,
        }
    )


def test_the_fifth_is_a_top_5_hit_and_the_sixth_is_not():
    logits = torch.arange(7.0).flip(0).repeat(2, 1)  # class 0 highest
    sums = sums_by_hand(logits, torch.tensor([4, 5]), torch.tensor([1, 1]))
    assert_close(sums.hits_5, torch.tensor([0.0, 1.0, 0.0]))


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_a_model_that_says_the_same_of_everything_is_never_right(value):
    logits, labels = torch.full((2, 9), value), torch.tensor([0, 8])
    sums = step_sums(logits, labels, torch.tensor([1, 2]), (logits,), labels[:, None])
    assert sums.hits.sum() == sums.hits_5.sum() == sums.code_hits_5 == 0


def test_codes_count_apart_and_their_gaps_count_nowhere():
    logits = torch.zeros(3, 4)
    labels, groups = torch.tensor([0, 1, 2]), torch.tensor([1, 1, 2])
    code_logits = (torch.zeros(3, 8),)
    codes = torch.tensor([[3], [-100], [-100]])
    sums = step_sums(logits, labels, groups, code_logits, codes)
    assert_close(sums.code_loss, torch.tensor(math.log(8)))
    assert (sums.code_count, sums.code_hits_5) == (1, 0)  # eight equal logits: no hit
    totals = Denominators(torch.tensor(4.0), torch.tensor(1.0))
    base = base_loss(sums, WEIGHTS, totals)
    assert_close(base, torch.tensor(math.log(4)))
    assert_close(step_loss(sums, WEIGHTS, 0.5, totals), base + 0.5 * math.log(8))
    assert figures(sums)["codebooks"] == pytest.approx(math.log(8))


def test_the_denominators_are_known_before_the_network_runs():
    prompt = build_prompt([A], np.array([[6, 1], [7, 2]]), TOKENS, SPEC)
    batch = collate_prompts([prompt], pad_id=0)
    totals = denominators(batch.groups, batch.codes, WEIGHTS)
    assert_close(totals.weight, torch.tensor(2 * 0.1 + 2 * 1.0 + 2.0))
    assert totals.codes == 2
    nothing = denominators(batch.groups, batch.codes, torch.zeros(3))
    assert (nothing.weight, nothing.codes) == (0, 0)


def test_nothing_to_learn_is_zero_with_zero_gradient_never_nan():
    logits = torch.zeros(0, 5, requires_grad=True)
    empty = torch.zeros(0, dtype=torch.long)
    totals = Denominators(torch.tensor(0.0), torch.tensor(0.0))
    loss = step_loss(sums_by_hand(logits, empty, empty), WEIGHTS, 1.0, totals)
    loss.backward()
    assert loss.item() == 0
    assert torch.isfinite(logits.grad).all()


def test_the_gradient_of_a_batch_is_the_sum_over_its_samples():
    model, samples = tiny_network(), make_samples(4)
    together = gradients(model, samples)
    singles = [gradients(model, [sample]) for sample in samples]
    for name, gradient in together.items():
        assert_close(gradient, sum(single[name] for single in singles), atol=1e-5, rtol=1e-4)


def test_neither_padding_nor_its_token_matters():
    model, samples = tiny_network(), make_samples(4)
    prompts = [sample_prompt(sample, TOKENS, SPEC) for sample in samples]
    expected = sums_of(model, collate_prompts(prompts, pad_id=TOKENS.pad)).losses
    found = sums_of(model, collate_prompts(prompts, pad_id=TOKENS.audio_end)).losses
    assert_close(found, expected)
