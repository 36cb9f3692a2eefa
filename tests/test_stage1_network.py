import numpy as np
import pytest
import torch
from stage1_support import (
    SYMBOLS,
    TOKENS,
    make_samples,
    sample_of,
    tiny_llm,
    tiny_network,
    train_config,
)
from torch.testing import assert_close

from stage1_llm.attention import use_packed_attention
from stage1_llm.collate import collate_prompts, pack_prompts
from stage1_llm.dataset import sample_prompt
from stage1_llm.loss import denominators, step_loss, step_sums
from stage1_llm.model import embedded_states
from stage1_llm.module import prepare_network
from stage1_llm.network import build_network, load_codebooks
from stage1_llm.vocab import Extras, build_token_map
from tts_stack.contract import PromptSpec
from tts_stack.errors import CheckpointError

WEIGHTS = torch.tensor([0.1, 1.0, 1.0])
SPECS = {"plain": PromptSpec(), "aligned": PromptSpec("aligned", 1.7)}


def coded_samples(count=4):
    random = np.random.default_rng(5)
    return [sample_of("abc"[: 1 + i % 3], random.integers(0, 10, (3 + i, 3))) for i in range(count)]


def prompts_of(samples, spec=SPECS["plain"], tokens=TOKENS):
    return [sample_prompt(sample, tokens, spec) for sample in samples]


def loss_and_gradients(network, batch, totals):
    network.zero_grad()
    sums = step_sums(*network(batch, WEIGHTS))
    loss = step_loss(sums, WEIGHTS, 0.7, totals)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in network.named_parameters()}


@pytest.mark.parametrize("kind", ["dynamic", "packing"])
@pytest.mark.parametrize("scheme", SPECS)
@pytest.mark.parametrize("with_codebooks", [False, True])
def test_a_batch_gives_the_loss_and_gradients_of_its_samples_alone(kind, scheme, with_codebooks):
    samples = coded_samples() if with_codebooks else make_samples(4)
    network = tiny_network(codebook_sizes=(10, 10) if with_codebooks else ())
    if with_codebooks:
        for embedding in network.codebooks.embeddings:
            torch.nn.init.normal_(embedding.weight)
    prompts = prompts_of(samples, SPECS[scheme])
    whole = collate_prompts(prompts, pad_id=TOKENS.pad)
    totals = denominators(whole.groups, whole.codes, WEIGHTS)
    alone = [
        loss_and_gradients(network, collate_prompts([prompt], pad_id=0), totals)
        for prompt in prompts
    ]
    use_packed_attention(network.llm)
    together = pack_prompts(prompts) if kind == "packing" else whole
    loss, gradients = loss_and_gradients(network, together, totals)
    assert_close(loss, torch.stack([loss for loss, _ in alone]).sum(), atol=1e-5, rtol=1e-5)
    for name, gradient in gradients.items():
        expected = torch.stack([found[name] for _, found in alone]).sum(0)
        assert_close(gradient, expected, atol=1e-5, rtol=1e-4)


def test_a_sample_gives_its_packed_neighbour_no_gradient():
    network = tiny_network()
    use_packed_attention(network.llm)
    batch = pack_prompts(prompts_of(make_samples(3)))
    embeddings = network.embed(batch.input_ids, batch.codes).detach().requires_grad_()
    lengths = batch.segment_lengths
    states = embedded_states(network.llm, embeddings, batch.position_ids, segment_lengths=lengths)[
        0
    ]
    first, second = int(lengths[0]), int(lengths[0] + lengths[1])
    states[first:second].square().sum().backward()
    gradient = embeddings.grad[0]
    assert gradient[:first].count_nonzero() == gradient[second:].count_nonzero() == 0
    assert gradient[first:second].abs().sum(1).gt(0).all()


def test_every_code_is_predicted_from_the_token_and_the_codes_before_it():
    network = tiny_network(codebook_sizes=(10, 10))
    for embedding in network.codebooks.embeddings:
        torch.nn.init.normal_(embedding.weight)
    states, tokens = torch.randn(2, 32), torch.randn(2, 32)
    codes = torch.tensor([[3, 4], [5, 6]])
    first = network.codebooks(states, tokens, codes)
    other = network.codebooks(states, tokens, torch.tensor([[3, 9], [8, 6]]))
    assert_close(first[0], other[0])  # the first code sees neither
    assert_close(first[1][0], other[1][0])  # a code does not see itself
    assert (first[1][1] != other[1][1]).any()  # but the one before it
    assert (first[0] != network.codebooks(states, tokens + 1, codes)[0]).any()


def test_a_greedy_choice_of_codes_agrees_with_the_logits_in_training():
    network = tiny_network(codebook_sizes=(10, 10, 7))
    for embedding in network.codebooks.embeddings:
        torch.nn.init.normal_(embedding.weight)
    state, token = torch.randn(32), torch.randn(32)
    chosen = network.codebooks.choose(state, token, lambda logits: int(logits.argmax()))
    logits = network.codebooks(state[None], token[None], torch.tensor([chosen]))
    assert [int(one.argmax()) for one in logits] == chosen


def test_untrained_codebooks_leave_what_the_llm_says():
    samples = coded_samples(2)
    batch = collate_prompts(prompts_of(samples), pad_id=0)
    plain = build_network(tiny_llm(), ()).eval()
    coded = build_network(tiny_llm(), (10, 10)).eval()
    assert_close(coded(batch, WEIGHTS).logits, plain(batch, WEIGHTS).logits)


def test_codes_are_predicted_at_semantic_positions_only():
    tokens = build_token_map(SYMBOLS, 10, Extras(max_run=9))
    spec = PromptSpec(durations="tokens", max_run=9)
    sample = sample_of("ab", [[3, 1], [3, 1], [4, 2]], tokens=tokens, spec=spec)
    batch = collate_prompts(prompts_of([sample], spec, tokens), pad_id=0)
    network = build_network(tiny_llm(), (10,)).eval()
    predictions = network(batch, WEIGHTS)
    semantic = (predictions.labels >= tokens.semantic_offset) & (
        predictions.labels < tokens.semantic_stop
    )
    assert ((predictions.codes[:, 0] >= 0) == semantic).all()
    assert step_sums(*predictions).code_count == 2


def test_dropout_is_for_training_alone():
    network = build_network(tiny_llm(), (), dropout=0.5)
    batch = collate_prompts(prompts_of(make_samples(2)), pad_id=0)
    network.eval()
    assert_close(network(batch, WEIGHTS).logits, network(batch, WEIGHTS).logits)
    network.train()
    assert (network(batch, WEIGHTS).logits != network(batch, WEIGHTS).logits).any()


def test_missing_codebook_heads_are_named(tmp_path):
    assert load_codebooks(tmp_path, (), 32) is None
    with pytest.raises(CheckpointError, match="no readable heads of 2 codebooks"):
        load_codebooks(tmp_path, (10, 10), 32)


def test_gradient_checkpointing_changes_no_gradient():
    batch = collate_prompts(prompts_of(make_samples(3)), pad_id=0)
    totals = denominators(batch.groups, batch.codes, WEIGHTS)
    found = []
    for is_on in (False, True):
        config = train_config()
        config.trainer.gradient_checkpointing = is_on
        network = tiny_network()
        prepare_network(network, config, torch.device("cpu"))
        found.append(loss_and_gradients(network, batch, totals)[1])
    for name, gradient in found[0].items():
        assert_close(found[1][name], gradient, atol=1e-6, rtol=1e-5)
