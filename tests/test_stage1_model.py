import pytest
import torch
from stage1_support import TOKENS, make_samples, tiny_llm
from torch.testing import assert_close

from stage1_llm.collate import collate_prompts
from stage1_llm.dataset import sample_prompt
from stage1_llm.model import (
    head,
    hidden_states,
    layer_index,
    load_saved_weights,
    saved_weights,
)
from tts_stack.contract import PromptSpec
from tts_stack.errors import CheckpointError, ConfigError

ALIGNED = PromptSpec(position_scheme="aligned", text_stride=2.0)


@pytest.mark.parametrize(("architecture", "model_type"), [("llama", "llama"), ("qwen3", "qwen3")])
def test_the_configured_shape_is_built(architecture, model_type):
    model = tiny_llm(architecture=architecture, num_kv_heads=1, tie_embeddings=False)
    assert model.config.model_type == model_type
    assert (model.config.vocab_size, model.config.num_key_value_heads) == (128, 1)
    assert model.get_input_embeddings().weight is not head(model).weight


def test_the_seed_alone_decides_the_weights():
    torch.manual_seed(1)
    first = saved_weights(tiny_llm(seed=5))
    torch.manual_seed(2)
    second = saved_weights(tiny_llm(seed=5))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("spec", [PromptSpec(), ALIGNED])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_rows_are_independent_of_neighbours_and_padding(spec, attention):
    model, samples = tiny_llm(), make_samples(4)
    model.set_attn_implementation(attention)
    prompts = [sample_prompt(sample, TOKENS, spec) for sample in samples]
    batch = collate_prompts(prompts, pad_id=TOKENS.pad)
    states = hidden_states(model, batch.input_ids, batch.position_ids)
    for row, prompt in enumerate(prompts):
        alone = collate_prompts([prompt], pad_id=TOKENS.pad)
        expected = hidden_states(model, alone.input_ids, alone.position_ids)[0]
        assert_close(states[row, : len(prompt)], expected, atol=1e-5, rtol=1e-4)


def test_audio_sees_its_text_though_positions_restart():
    model = tiny_llm()
    prompt = sample_prompt(make_samples(1)[0], TOKENS, ALIGNED)
    batch = collate_prompts([prompt], pad_id=TOKENS.pad)
    other = batch.input_ids.clone()
    other[0, 1] = TOKENS.text_offset + (other[0, 1] - TOKENS.text_offset + 1) % 3
    states = hidden_states(model, batch.input_ids, batch.position_ids)
    changed = hidden_states(model, other, batch.position_ids)
    difference = (states - changed)[0, prompt.num_text :].abs().amax(-1)
    assert (difference > 1e-4).all()


def test_no_state_sees_the_future():
    model = tiny_llm()
    batch = collate_prompts([sample_prompt(make_samples(1)[0], TOKENS, ALIGNED)], pad_id=0)
    embeddings = model.get_input_embeddings()(batch.input_ids)
    changed = batch.input_ids.clone()
    changed[0, 5:] = TOKENS.audio_end
    first = hidden_states(model, batch.input_ids, batch.position_ids)[0, :5]
    assert_close(first, hidden_states(model, changed, batch.position_ids)[0, :5])
    assert embeddings.shape == (*batch.input_ids.shape, 32)


def test_layers_are_counted_from_the_embeddings_to_the_final_norm():
    model = tiny_llm()
    batch = collate_prompts([sample_prompt(make_samples(1)[0], TOKENS, ALIGNED)], pad_id=0)
    states = [hidden_states(model, batch.input_ids, batch.position_ids, layer=i) for i in range(3)]
    assert_close(states[0], model.get_input_embeddings()(batch.input_ids))
    last = hidden_states(model, batch.input_ids, batch.position_ids, layer=-1)
    assert_close(states[2], last)
    assert [layer_index(model, layer) for layer in (-3, -1, 2)] == [0, 2, 2]
    with pytest.raises(ConfigError, match=r"hidden_layer is 3, expected -3 .. 2"):
        layer_index(model, 3)


def test_weights_of_another_shape_are_refused():
    with pytest.raises(CheckpointError, match="weights do not fit the model"):
        load_saved_weights(tiny_llm(), saved_weights(tiny_llm(hidden_size=64)))
    with pytest.raises(CheckpointError, match="missing or unknown"):
        load_saved_weights(tiny_llm(), saved_weights(tiny_llm(num_layers=1)))
