import math

import numpy as np
import torch
from stage1_support import TOKENS, make_samples, tiny_llm
from torch.testing import assert_close

from stage1_llm.collate import collate_prompts
from stage1_llm.dataset import sample_prompt
from stage1_llm.loss import (
    group_hits,
    group_means,
    group_sums,
    supervised_positions,
    weighted_loss,
)
from stage1_llm.model import head, hidden_states
from stage1_llm.prompt import build_prompt
from tts_stack.contract import PromptSpec

WEIGHTS = torch.tensor([0.1, 1.0, 2.0])
SPEC = PromptSpec(position_scheme="aligned", text_stride=2.0)
A = TOKENS.text_offset


def batch_of(samples):
    return collate_prompts([sample_prompt(s, TOKENS, SPEC) for s in samples], pad_id=TOKENS.pad)


def sums_of(model, batch, weights=WEIGHTS):
    labelled = supervised_positions(batch.labels, batch.groups, weights)
    states = hidden_states(model, batch.input_ids, batch.position_ids)
    logits = head(model)(states.flatten(0, 1)[labelled.positions])
    return group_sums(logits, labelled.labels, labelled.groups)


def gradients(model, samples):
    model.zero_grad()
    (WEIGHTS * sums_of(model, batch_of(samples)).losses).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


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


def test_sums_and_weighted_mean_by_hand():
    logits = torch.tensor([[0.0, 0.0], [0.0, math.log(3)], [0.0, 0.0]])
    labels, groups = torch.tensor([0, 1, 1]), torch.tensor([0, 1, 1])
    sums = group_sums(logits, labels, groups)
    half, quarter = math.log(2), math.log(4 / 3)
    assert_close(sums.losses, torch.tensor([half, quarter + half, 0.0]))
    assert_close(sums.counts, torch.tensor([1.0, 2.0, 0.0]))
    expected = (0.1 * half + quarter + half) / 2.1
    assert_close(weighted_loss(sums, WEIGHTS), torch.tensor(expected))
    assert_close(group_hits(logits, labels, groups), torch.tensor([1.0, 1.0, 0.0]))
    assert group_means(sums.losses, sums.counts).keys() == {"text", "audio"}


def test_nothing_to_learn_is_zero_with_zero_gradient_never_nan():
    logits = torch.zeros(0, 5, requires_grad=True)
    empty = torch.zeros(0, dtype=torch.long)
    loss = weighted_loss(group_sums(logits, empty, empty), WEIGHTS)
    loss.backward()
    assert loss.item() == 0
    assert torch.isfinite(logits.grad).all()


def test_the_gradient_of_a_batch_is_the_sum_over_its_samples():
    model, samples = tiny_llm(), make_samples(4)
    together = gradients(model, samples)
    singles = [gradients(model, [sample]) for sample in samples]
    for name, gradient in together.items():
        assert_close(gradient, sum(single[name] for single in singles), atol=1e-5, rtol=1e-4)


def test_neither_padding_nor_its_token_matters():
    model, samples = tiny_llm(), make_samples(4)
    prompts = [sample_prompt(sample, TOKENS, SPEC) for sample in samples]
    expected = sums_of(model, collate_prompts(prompts, pad_id=TOKENS.pad)).losses
    found = sums_of(model, collate_prompts(prompts, pad_id=TOKENS.audio_end)).losses
    assert_close(found, expected)
