import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import torch
from stage1_support import (
    CODEC,
    ENCODE,
    SYMBOLS,
    TOKENS,
    make_contract,
    make_samples,
    text_of,
    tiny_config,
    tiny_network,
)
from torch.testing import assert_close

from stage1_llm.decoder import GenericDecoder, LlamaDecoder, is_fast_model, make_decoder
from stage1_llm.generate import SamplingSettings, TokenStream, generate
from stage1_llm.hidden_states import teacher_forced_states
from stage1_llm.model import build_llm
from stage1_llm.network import build_network
from stage1_llm.prompt import prompt_prefix
from stage1_llm.text import SymbolEncoder
from stage1_llm.vocab import Extras, build_token_map
from tts_stack.errors import ConfigError, DataError
from tts_stack.records import TokenizedUtterance

SCHEMES = [("plain", 1.0), ("aligned", 1.7)]


def utterance_of(sample):
    return TokenizedUtterance(sample.id, text_of(sample), sample.semantic_tokens)


@pytest.mark.parametrize("layer", [0, 1, -1])
@pytest.mark.parametrize("state_position", ["reads", "predicts"])
@pytest.mark.parametrize(("scheme", "stride"), SCHEMES)
def test_teacher_forced_states_equal_those_of_generation(scheme, stride, state_position, layer):
    model = tiny_network()
    contract = make_contract(
        position_scheme=scheme,
        text_stride=stride,
        state_position=state_position,
        hidden_layer=layer,
    )
    utterances, expected = [], []
    for index, text in enumerate(["abc", "a", "cabbac"]):  # unequal lengths in one batch
        count = 4 + 5 * index
        settings = SamplingSettings(1.0, min_tokens=count, max_tokens=count)
        text_ids = ENCODE(text).ids
        spoken = generate(model, contract, text_ids, settings, torch.Generator().manual_seed(index))
        utterances.append(TokenizedUtterance(str(index), text, spoken.semantic_tokens.numpy()))
        expected.append(spoken.hidden_states)
    for found, wanted in zip(
        teacher_forced_states(model, contract, ENCODE, utterances), expected, strict=True
    ):
        assert_close(found, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("layer", "num_mixed"), [(-1, 3), (-1, 2), (1, 2)])
def test_mixed_layers_are_those_states_side_by_side_in_both_ways(
    monkeypatch, layer, num_mixed, fast
):
    monkeypatch.setattr("stage1_llm.decoder.is_fast_model", lambda model: fast)
    model = tiny_network()
    contract = make_contract(hidden_layer=layer, num_mixed_layers=num_mixed)
    settings = SamplingSettings(1.0, min_tokens=6, max_tokens=6)
    spoken = generate(model, contract, ENCODE("ab").ids, settings, torch.Generator().manual_seed(0))
    utterance = TokenizedUtterance("x", "ab", spoken.semantic_tokens.numpy())
    found = teacher_forced_states(model, contract, ENCODE, [utterance])[0]
    assert found.shape == (6, num_mixed * 32)
    assert_close(found, spoken.hidden_states, atol=1e-4, rtol=0)
    top = layer % 3
    for place, one in enumerate(range(top - num_mixed + 1, top + 1)):
        alone = make_contract(hidden_layer=one)
        wanted = teacher_forced_states(model, alone, ENCODE, [utterance])[0]
        assert_close(found[:, 32 * place : 32 * (place + 1)], wanted, atol=0, rtol=0)


@pytest.mark.parametrize(("layer", "num_mixed"), [(-1, 4), (0, 2)])
def test_more_mixed_layers_than_the_model_has_are_refused(layer, num_mixed):
    contract = make_contract(hidden_layer=layer, num_mixed_layers=num_mixed)
    message = f"num_mixed_layers is {num_mixed}, expected 1 .. {layer % 3 + 1}"
    with pytest.raises(ConfigError, match=message):
        teacher_forced_states(tiny_network(), contract, ENCODE, [utterance_of(make_samples(1)[0])])


FORMS = [
    pytest.param(num_codebooks, durations, fast, id=f"{num_codebooks}-{durations}-{fast}")
    for num_codebooks in (1, 3)
    for durations in ("none", "tokens", "codebook")
    for fast in (True, False)
]


@pytest.mark.parametrize("state_position", ["reads", "predicts"])
@pytest.mark.parametrize(("num_codebooks", "durations", "fast"), FORMS)
def test_codebooks_and_runs_give_the_same_states_in_both_ways(
    monkeypatch, num_codebooks, durations, fast, state_position
):
    contract = form_contract(num_codebooks, durations, state_position)
    network = build_network(
        build_llm(tiny_config(), contract.tokens, seed=0), contract.codebook_sizes, seed=1
    ).eval()
    for embedding in network.codebooks.embeddings if network.codebooks else ():
        torch.nn.init.normal_(embedding.weight)  # untrained ones are zero and would hide a mistake
    monkeypatch.setattr("stage1_llm.decoder.is_fast_model", lambda model: fast)
    encode = SymbolEncoder(contract.tokens)
    settings = SamplingSettings(1.0, 1.0, min_tokens=25, max_tokens=25, stuck_tokens=0)
    spoken = canonical_generation(network, contract, encode("cab").ids, settings)
    shape = (25,) if num_codebooks == 1 else (25, num_codebooks)
    assert spoken.semantic_tokens.shape == shape
    utterance = TokenizedUtterance("x", "cab", spoken.semantic_tokens.numpy())
    found = teacher_forced_states(network, contract, encode, [utterance])[0]
    whole = 25 - contract.prompt.max_run  # the bound may have cut the last run short
    assert_close(found[:whole], spoken.hidden_states[:whole], atol=1e-4, rtol=0)


def form_contract(num_codebooks, durations, state_position):
    max_run = 4 if durations != "none" else 1
    tokens = build_token_map(SYMBOLS, 50, Extras(max_run=max_run if durations == "tokens" else 1))
    contract = make_contract(
        durations=durations, max_run=max_run, state_position=state_position,
        position_scheme="aligned", text_stride=1.7,
    )  # fmt: skip
    codec = dataclasses.replace(CODEC, codebook_size=50, num_codebooks=num_codebooks)
    return dataclasses.replace(contract, tokens=tokens, codec=codec)


def canonical_generation(network, contract, text_ids, settings):
    """One with runs, none of them next to an equal one: read back, those would be one run."""
    for seed in range(100):
        arguments = (network, contract, text_ids, settings, torch.Generator().manual_seed(seed))
        steps = list(TokenStream(*arguments))
        rows = [(step.semantic_token, *step.codes) for step in steps]
        has_runs = any(step.run_length > 1 for step in steps[:-1])
        is_canonical = all(row != after for row, after in pairwise(rows))
        if is_canonical and has_runs == (contract.prompt.durations != "none"):
            return generate(*arguments[:-1], torch.Generator().manual_seed(seed))
    raise AssertionError("no seed gives such a generation")


@pytest.mark.parametrize("shape", [{}, {"architecture": "qwen3", "num_kv_heads": 1}])
def test_the_fast_decoder_equals_the_models_own_forward(shape):
    model = tiny_network(**shape)
    contract = make_contract(position_scheme="aligned", text_stride=1.7)
    prefix = prompt_prefix([TOKENS.text_offset] * 3, TOKENS, contract.prompt)
    decoders = [
        GenericDecoder(model, layer=-1),
        make_decoder(model, layer=-1, capacity=4),
    ]
    assert isinstance(decoders[1], LlamaDecoder)
    with torch.inference_mode():
        results = [
            [decoder.prefill(prefix), *(decoder.step(5 + i, 1.0 + i) for i in range(4))]
            for decoder in decoders
        ]
    for generic, fast in zip(*results, strict=True):
        assert_close(fast.state, generic.state, atol=1e-5, rtol=1e-4)
        assert_close(fast.logits, generic.logits, atol=1e-5, rtol=1e-4)


def test_a_model_with_scaled_rotary_positions_takes_the_generic_decoder():
    model = tiny_network()
    config = model.llm.config
    config.rope_parameters = {**config.rope_parameters, "rope_type": "linear"}
    assert not is_fast_model(model.llm)
    assert isinstance(make_decoder(model, layer=-1, capacity=1), GenericDecoder)


def test_states_do_not_depend_on_the_other_utterances():
    model, contract = tiny_network(), make_contract(position_scheme="aligned", text_stride=2.0)
    utterances = [utterance_of(sample) for sample in make_samples(5)]
    together = teacher_forced_states(model, contract, ENCODE, utterances)
    for utterance, states in zip(utterances, together, strict=True):
        assert states.shape == (len(utterance.semantic_tokens), 32)
        alone = teacher_forced_states(model, contract, ENCODE, [utterance])[0]
        assert_close(states, alone, atol=1e-5, rtol=1e-4)


def test_half_precision_is_for_the_result_only():
    model, contract = tiny_network(), make_contract()
    utterances = [utterance_of(make_samples(1)[0])]
    full = teacher_forced_states(model, contract, ENCODE, utterances)[0]
    half = teacher_forced_states(model, contract, ENCODE, utterances, dtype=torch.float16)[0]
    assert_close(half, full.half())


def test_no_utterance_gives_no_states():
    assert teacher_forced_states(tiny_network(), make_contract(), ENCODE, []) == []


def test_an_utterance_that_cannot_be_read_is_named():
    utterance = utterance_of(make_samples(1)[0])
    foreign = dataclasses.replace(utterance, semantic_tokens=np.array([99]))
    with pytest.raises(DataError, match=r"s0: prompt: semantic tokens 99 .. 99, expected 0 .. 9"):
        teacher_forced_states(tiny_network(), make_contract(), ENCODE, [utterance, foreign])
