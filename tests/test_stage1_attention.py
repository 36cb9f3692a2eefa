import pytest
import torch
from torch.testing import assert_close
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from stage1_llm import attention
from stage1_llm.attention import (
    Segments,
    packed_attention,
    set_packed_attention,
    use_packed_attention,
)
from tts_stack.errors import ConfigError

LENGTHS = (5, 1, 9, 5)
STARTS = (0, 5, 6, 15)
VOCAB = 17
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,  # grouped-query attention
    "head_dim": 6,
    "max_position_embeddings": 64,
}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
}
KERNELS = ["bare", "padded"]  # on a CPU, and elsewhere


def build(family="llama", attn_implementation="eager", **changes):
    kind, config = FAMILIES[family]
    torch.manual_seed(0)
    values = {**SHAPE, **changes}
    if family == "qwen2":
        values.pop("head_dim")
    return kind(config(**values, attn_implementation=attn_implementation))


def packed(family="llama", **changes):
    model = build(family, **changes)
    use_packed_attention(model)
    return model


def inputs(lengths=LENGTHS):
    """Embeddings [1, L, D] and positions like the aligned scheme's: text at steps of 1.7."""
    torch.manual_seed(1)
    embeddings = torch.randn(1, sum(lengths), SHAPE["hidden_size"])
    positions = []
    for length in lengths:
        num_text = length // 2
        text, audio = torch.arange(num_text) * 1.7, torch.arange(length - num_text)
        positions.append(torch.cat([text, audio.float()]))  # restarts inside a sample too
    return embeddings, torch.cat(positions)[None]


def logits_of(model, embeddings, positions, lengths=None, mask=None):
    ones = torch.ones(embeddings.shape[:2], dtype=torch.bool)
    more = {} if lengths is None else {"segments": Segments.of(torch.tensor(lengths))}
    return model(
        inputs_embeds=embeddings,
        position_ids=positions,
        attention_mask=ones if mask is None else mask,
        use_cache=False,
        **more,
    ).logits


def loss_of(logits):
    targets = torch.arange(logits.shape[1]) % VOCAB
    return torch.nn.functional.cross_entropy(logits[0], targets, reduction="sum")


def gradients(model):
    named = model.named_parameters()  # an untied embedding matrix takes no part here
    return {name: value.grad.clone() for name, value in named if value.grad is not None}


@pytest.fixture(params=KERNELS)
def kernel(request, monkeypatch):
    if request.param == "padded":

        def padded(query, key, value, lengths, scaling):
            segments = Segments.of(torch.tensor(lengths))
            return attention._padded_attention(query, key, value, segments, scaling, 0.0)

        monkeypatch.setattr(attention, "_bare_attention", padded)
    return request.param


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_equal_those_of_each_sample_alone(family, kernel):
    model, reference = packed(family), build(family)
    embeddings, positions = inputs()
    row = logits_of(model, embeddings, positions, LENGTHS)
    loss = 0.0
    for start, length in zip(STARTS, LENGTHS, strict=True):
        part = slice(start, start + length)
        alone = logits_of(reference, embeddings[:, part], positions[:, part])
        assert_close(row[:, part], alone, rtol=1e-5, atol=1e-5)
        loss_of(alone).backward()
        loss = loss + loss_of(row[:, part])
    loss.backward()
    expected = gradients(reference)
    assert_close(gradients(model), expected, rtol=1e-5, atol=1e-5)
    assert max(value.abs().max() for value in expected.values()) > 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_under_an_explicit_block_diagonal_mask(family, kernel):
    embeddings, positions = inputs()
    owner = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    sees = (owner[:, None] == owner) & torch.ones(len(owner), len(owner)).tril().bool()
    mask = torch.zeros(1, 1, *sees.shape).masked_fill(~sees, float("-inf"))
    expected = logits_of(build(family), embeddings, positions, mask=mask)
    found = logits_of(packed(family), embeddings, positions, LENGTHS)
    assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sample_has_no_gradient_with_respect_to_its_neighbours(family, kernel):
    embeddings, positions = inputs()
    embeddings.requires_grad_()
    row = logits_of(packed(family), embeddings, positions, LENGTHS)
    for start, length in zip(STARTS, LENGTHS, strict=True):
        part = slice(start, start + length)
        (gradient,) = torch.autograd.grad(loss_of(row[:, part]), embeddings, retain_graph=True)
        assert gradient[:, part].abs().amax(-1).min() > 0
        gradient[:, part] = 0
        assert gradient.count_nonzero() == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_right_padded_rows_equal_the_models_own_attention(family):
    embeddings, positions = inputs((6, 6))
    rows, positions = embeddings.view(2, 6, -1), positions.view(2, 6)
    expected = logits_of(build(family), rows, positions)
    assert_close(logits_of(packed(family), rows, positions), expected, rtol=1e-5, atol=1e-5)


def test_a_real_mask_and_a_cache_are_honoured_where_there_are_no_samples():
    embeddings, positions = inputs((6,))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]]).bool()
    reference, model = build(), packed()
    expected = logits_of(reference, embeddings, positions, mask=mask)[:, 2:]
    assert_close(logits_of(model, embeddings, positions, mask=mask)[:, 2:], expected)
    ids = torch.tensor([[3, 1, 4, 1]])
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": 99}
    assert_close(model.generate(ids, **settings), reference.generate(ids, **settings))


def test_no_mask_is_built_for_a_packed_row(monkeypatch):
    seen = []

    def spy(module, query, key, value, attention_mask, **kwargs):
        seen.append(attention_mask)
        return packed_attention(module, query, key, value, attention_mask, **kwargs)

    model = packed()
    interface = attention.AttentionInterface
    interface.register(attention.PACKED_ATTENTION, spy)
    logits_of(model, *inputs(), LENGTHS)
    interface.register(attention.PACKED_ATTENTION, packed_attention)
    assert seen == [None, None]


def test_gradients_are_the_same_under_gradient_checkpointing():
    model, embeddings_positions = packed().train(), inputs()
    loss_of(logits_of(model, *embeddings_positions, LENGTHS)).backward()
    expected = gradients(model)
    model.zero_grad()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    loss_of(logits_of(model, *embeddings_positions, LENGTHS)).backward()
    assert_close(gradients(model), expected, rtol=0, atol=0)


def test_a_compiled_model_gives_the_same(kernel):
    model, (embeddings, positions) = packed(), inputs()
    expected = logits_of(model, embeddings, positions, LENGTHS)
    model.get_decoder().compile(backend="eager")
    assert_close(logits_of(model, embeddings, positions, LENGTHS), expected)
    loss_of(logits_of(model, embeddings, positions, LENGTHS)).backward()


def test_bfloat16_autocast_stays_near_float32(kernel):
    model, (embeddings, positions) = packed(), inputs()
    expected = logits_of(model, embeddings, positions, LENGTHS)
    with torch.autocast("cpu", torch.bfloat16):
        found = logits_of(model, embeddings, positions, LENGTHS)
    loss_of(found.float()).backward()
    assert_close(found.float(), expected, rtol=0, atol=0.03)


def test_dropout_of_attention_weights_acts_in_training_and_keeps_samples_apart():
    model = packed(attention_dropout=0.5).train()
    embeddings, positions = inputs()
    embeddings.requires_grad_()
    first, second = (logits_of(model, embeddings, positions, LENGTHS) for _ in range(2))
    assert not torch.allclose(first, second)
    (gradient,) = torch.autograd.grad(loss_of(first[:, 6:15]), embeddings)
    gradient[:, 6:15] = 0
    assert gradient.count_nonzero() == 0


def test_the_bare_kernel_has_the_gradient_of_its_formula():
    torch.manual_seed(0)
    rows = [torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    kernel = attention._BareAttention.apply
    assert torch.autograd.gradcheck(lambda q, k, v: kernel(q, k, v, (3, 1), 0.7), rows)


def test_the_proof_leaves_the_model_and_the_random_state_as_they_were():
    model = build().train()
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    use_packed_attention(model)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_without_attention_is_refused():
    model = MambaForCausalLM(
        MambaConfig(vocab_size=VOCAB, hidden_size=16, state_size=4, num_hidden_layers=1)
    )
    with pytest.raises(ConfigError, match="MambaForCausalLM .*set batching.kind=dynamic"):
        use_packed_attention(model)


def test_a_model_that_ignores_the_samples_is_refused(monkeypatch):
    def blind(module, query, key, value, attention_mask, *, segments=None, **kwargs):
        return packed_attention(module, query, key, value, attention_mask, **kwargs)

    monkeypatch.setattr(attention, "packed_attention", blind)
    with pytest.raises(ConfigError, match="LlamaForCausalLM lets packed samples see each other"):
        use_packed_attention(build())


def test_a_model_with_an_attention_of_its_own_kind_is_refused(monkeypatch):
    def other(*args, scaling=None, **kwargs):
        return packed_attention(*args, scaling=2 * scaling, **kwargs)

    monkeypatch.setattr(attention, "packed_attention", other)
    model = build()
    with torch.no_grad():  # a new model's scores are all near 0: no scaling shows
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(100)
    with pytest.raises(ConfigError, match="LlamaForCausalLM computes packed samples differently"):
        use_packed_attention(model)


def test_a_sample_longer_than_the_attention_window_is_an_error():
    model = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=8))
    use_packed_attention(model)
    embeddings, positions = inputs((8, 9))
    logits_of(model, embeddings[:, :8], positions[:, :8], (8,))
    with pytest.raises(ConfigError, match="a packed sample has 9 tokens, .* window is 8"):
        logits_of(model, embeddings, positions, (8, 9))


def test_other_families_that_follow_the_interface_pass_the_proof():
    changes = {k: v for k, v in SHAPE.items() if k not in ("head_dim", "num_key_value_heads")}
    use_packed_attention(GPTNeoXForCausalLM(GPTNeoXConfig(**changes)))


def test_a_model_set_without_proof_trains_rows():
    model = build()
    set_packed_attention(model)
    assert model.config._attn_implementation == attention.PACKED_ATTENTION
