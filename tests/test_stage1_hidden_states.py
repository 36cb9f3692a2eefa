import dataclasses

import numpy as np
import pytest
import torch
from stage1_support import TOKENS, make_contract, make_samples, text_of, tiny_llm
from torch.testing import assert_close

from stage1_llm.decoder import GenericDecoder, LlamaDecoder, is_fast_model, make_decoder
from stage1_llm.generate import SamplingSettings, generate
from stage1_llm.hidden_states import teacher_forced_states
from stage1_llm.prompt import prompt_prefix
from stage1_llm.vocab import encode_text
from tts_stack.errors import DataError
from tts_stack.records import TokenizedUtterance

SCHEMES = [("plain", 1.0), ("aligned", 1.7)]


def utterance_of(sample):
    return TokenizedUtterance(sample.id, text_of(sample), sample.semantic_tokens)


@pytest.mark.parametrize("layer", [0, 1, -1])
@pytest.mark.parametrize("state_position", ["reads", "predicts"])
@pytest.mark.parametrize(("scheme", "stride"), SCHEMES)
def test_teacher_forced_states_equal_those_of_generation(scheme, stride, state_position, layer):
    model = tiny_llm()
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
        text_ids = encode_text(text, TOKENS).ids
        spoken = generate(model, contract, text_ids, settings, torch.Generator().manual_seed(index))
        utterances.append(TokenizedUtterance(str(index), text, spoken.semantic_tokens.numpy()))
        expected.append(spoken.hidden_states)
    for found, wanted in zip(
        teacher_forced_states(model, contract, utterances), expected, strict=True
    ):
        assert_close(found, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", [{}, {"architecture": "qwen3", "num_kv_heads": 1}])
def test_the_fast_decoder_equals_the_models_own_forward(shape):
    model = tiny_llm(**shape)
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
    model = tiny_llm()
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": "linear"}
    assert not is_fast_model(model)
    assert isinstance(make_decoder(model, layer=-1, capacity=1), GenericDecoder)


def test_states_do_not_depend_on_the_other_utterances():
    model, contract = tiny_llm(), make_contract(position_scheme="aligned", text_stride=2.0)
    utterances = [utterance_of(sample) for sample in make_samples(5)]
    together = teacher_forced_states(model, contract, utterances)
    for utterance, states in zip(utterances, together, strict=True):
        assert states.shape == (len(utterance.semantic_tokens), 32)
        alone = teacher_forced_states(model, contract, [utterance])[0]
        assert_close(states, alone, atol=1e-5, rtol=1e-4)


def test_half_precision_is_for_the_result_only():
    model, contract = tiny_llm(), make_contract()
    utterances = [utterance_of(make_samples(1)[0])]
    full = teacher_forced_states(model, contract, utterances)[0]
    half = teacher_forced_states(model, contract, utterances, dtype=torch.float16)[0]
    assert_close(half, full.half())


def test_no_utterance_gives_no_states():
    assert teacher_forced_states(tiny_llm(), make_contract(), []) == []


def test_an_utterance_that_cannot_be_read_is_named():
    utterance = utterance_of(make_samples(1)[0])
    foreign = dataclasses.replace(utterance, semantic_tokens=np.array([99]))
    with pytest.raises(DataError, match=r"s0: prompt: semantic tokens 99 .. 99, expected 0 .. 9"):
        teacher_forced_states(tiny_llm(), make_contract(), [utterance, foreign])
