import json
import logging

import pytest
import torch
from base_models import ARCHITECTURES, contract_for, load_grown, random_ids, write_tiny_base
from peft import PeftModel
from safetensors import safe_open
from torch.nn import functional
from torch.testing import assert_close

from stage1_llm.base import load_base
from stage1_llm.config import LLMTrainConfig
from stage1_llm.lora import (
    adapter_weights,
    apply_lora,
    has_adapter,
    load_adapter,
    load_adapter_weights,
    merge_lora,
    read_origin,
    save_adapter,
)
from stage1_llm.lora_config import LoraSettings
from stage1_llm.model import embedded_states, head
from stage1_llm.rows import GrownHead
from tts_stack.config import load_config
from tts_stack.contract import VoiceContract
from tts_stack.errors import CheckpointError, ConfigError

TIED = pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def settings(**changes):
    return LoraSettings(**{"r": 4, "alpha": 8, "dropout": 0.0, "embeddings": True, **changes})


def adapted(folder, lora=None, **base):
    base, tokens = load_grown(write_tiny_base(folder, **base))
    return apply_lora(base.model, lora or settings(), tokens), base, tokens


def perturb(model, seed=0):
    """What training would do: every adapter and new row somewhere else."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in adapter_weights(model).values():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))


def staged_logits(model, ids):
    """As training calls the model: embeddings, body, head."""
    positions = torch.arange(ids.shape[1])[None].expand(ids.shape)
    states = embedded_states(model, model.get_input_embeddings()(ids), positions)
    return head(model)(states)


# Step 0


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("embeddings", [True, False], ids=["embeddings", "projections"])
@TIED
def test_at_step_0_the_logits_are_the_base_model_s_to_the_last_bit(tmp_path, kind, embeddings, tie):
    base, tokens = load_grown(write_tiny_base(tmp_path, kind, tie=tie))
    ids = random_ids(tokens.vocab_size)
    with torch.no_grad():
        before, staged_before = base.model(ids).logits, staged_logits(base.model, ids)
        model = apply_lora(base.model, settings(embeddings=embeddings, dropout=0.5), tokens).train()
        assert torch.equal(model(ids).logits, before)
        assert torch.equal(staged_logits(model, ids), staged_before)


@TIED
def test_adapters_are_on_every_projection_and_the_embeddings(tmp_path, tie):
    model, _, _ = adapted(tmp_path, tie=tie)
    names = {name.rpartition(".lora_")[0] for name in adapter_weights(model) if ".lora_" in name}
    layers = {f"model.layers.{i}.{part}" for i in (0, 1) for part in projection_paths()}
    heads = set() if tie else {"lm_head"}
    assert names == layers | {"model.embed_tokens"} | heads


def projection_paths():
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    return {f"{'self_attn' if n in attention else 'mlp'}.{n}" for n in PROJECTIONS}


def test_named_projections_alone_get_adapters(tmp_path):
    lora = settings(target_modules=["q_proj", "down_proj"], embeddings=False)
    model, _, _ = adapted(tmp_path, lora)
    names = {n.rpartition(".lora_")[0].rpartition(".")[2] for n in adapter_weights(model)}
    assert names == {"q_proj", "down_proj", ""}  # and new rows


def test_an_unknown_projection_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(ConfigError, match="no projection c_attn; choose from down_proj, gate_proj"):
        adapted(tmp_path, settings(target_modules=["c_attn"]))


def test_the_adapters_depend_on_the_seed_alone(tmp_path):
    folder = write_tiny_base(tmp_path)
    found = []
    for seed in (0, 0, 1):
        base, tokens = load_grown(folder)
        torch.rand(1)
        found.append(adapter_weights(apply_lora(base.model, settings(), tokens, seed=seed)))
    name = "model.layers.0.self_attn.q_proj.lora_A.weight"
    assert torch.equal(found[0][name], found[1][name])
    assert not torch.equal(found[0][name], found[2][name])


# Training


@pytest.mark.parametrize("embeddings", [True, False], ids=["embeddings", "projections"])
@TIED
def test_gradients_reach_adapters_and_new_rows_and_nothing_else(tmp_path, embeddings, tie):
    model, _, tokens = adapted(tmp_path, settings(embeddings=embeddings), tie=tie)
    perturb(model)
    ids = random_ids(tokens.vocab_size, (4, 64))
    ids[0, : tokens.vocab_size - tokens.num_text] = torch.arange(tokens.num_text, tokens.vocab_size)
    staged_logits(model, ids).sin().sum().backward()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name in dict(model.named_parameters()) if is_adapter(name)}
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            assert parameter.grad.abs().sum(-1).gt(0).any(), name
        else:
            assert parameter.grad is None, name
    rows = model.get_input_embeddings()
    rows = getattr(rows, "base_layer", rows).new_rows
    assert len(rows) == tokens.vocab_size - tokens.num_text
    assert rows.grad.abs().sum(-1).gt(0).all()  # every new row, also those of padding


def is_adapter(name):
    return "lora_" in name or "new_rows" in name


@TIED
def test_a_step_changes_new_rows_and_leaves_the_old_ones(tmp_path, tie):
    lora = settings(embeddings=False, target_modules=["q_proj"])
    model, _, tokens = adapted(tmp_path, lora, tie=tie)
    old = torch.arange(tokens.num_text)
    new = torch.arange(tokens.num_text, tokens.vocab_size)
    embed = model.get_input_embeddings()
    before = embed(old), embed(new).detach().clone()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, 0.1, weight_decay=0)
    logits = staged_logits(model, random_ids(tokens.vocab_size))
    functional.cross_entropy(
        logits.flatten(0, 1), random_ids(tokens.vocab_size).flatten()
    ).backward()
    optimizer.step()
    assert torch.equal(embed(old), before[0])
    assert (embed(new) != before[1]).any(-1).all() == tie  # untied: only ids that were read
    states = torch.randn(3, 32)
    expected = states @ torch.cat([embed(old), new_head_rows(model)]).T
    if tie:
        assert_close(head(model)(states), expected)
        assert_close(new_head_rows(model), embed(new))


def new_head_rows(model):
    return head(model).new_rows


@TIED
def test_a_head_s_adapter_is_that_of_the_embeddings_where_they_are_tied(tmp_path, tie):
    model, _, tokens = adapted(tmp_path, tie=tie)
    perturb(model)
    rows = model.get_input_embeddings()(torch.arange(tokens.vocab_size))
    states = torch.randn(3, 32)
    is_same = torch.allclose(head(model)(states), states @ rows.T, atol=1e-4)
    assert is_same == tie


def test_the_head_s_gradients_are_those_of_a_plain_head_with_its_rows():
    generator = torch.Generator().manual_seed(0)
    plain = torch.nn.Linear(4, 10, bias=False, dtype=torch.float64).requires_grad_(False)
    rows = torch.randn(3, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    states = torch.randn(2, 5, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    grown = GrownHead(plain, torch.nn.Parameter(rows.detach().clone()))
    expected = states @ torch.cat([plain.weight[:7], rows]).T
    assert_close(grown(states), expected)
    weights = torch.randn(2, 5, 10, generator=generator, dtype=torch.float64)
    wanted = torch.autograd.grad((expected * weights).sum(), (states, rows))
    found = torch.autograd.grad((grown(states) * weights).sum(), (states, grown.new_rows))
    assert_close(found, wanted)


@TIED
def test_training_learns_a_new_token(tmp_path, tie):
    lora = settings(dropout=0.01)
    model, _, tokens = adapted(tmp_path, lora, tie=tie)
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.02)
    ids = random_ids(tokens.num_text, (4, 6))
    target = torch.full((4, 6), tokens.semantic_offset + 3)
    for _ in range(30):
        optimizer.zero_grad()
        loss = functional.cross_entropy(staged_logits(model, ids).flatten(0, 1), target.flatten())
        loss.backward()
        optimizer.step()
    assert loss < 0.1


# Weights in checkpoints


@TIED
def test_weights_are_adapters_and_new_rows_and_load_again(tmp_path, tie):
    model, _, tokens = adapted(tmp_path / "a", tie=tie)
    perturb(model)
    weights = {name: weight.clone() for name, weight in adapter_weights(model).items()}
    rows = {name: w.shape for name, w in weights.items() if name.startswith("new_rows.")}
    shape = (tokens.vocab_size - tokens.num_text, 32)
    heads = {} if tie else {"new_rows.lm_head.weight": shape}
    assert rows == {"new_rows.model.embed_tokens.weight": shape, **heads}
    ids = random_ids(tokens.vocab_size)
    expected = staged_logits(model, ids)
    fresh, _, _ = adapted(tmp_path / "a", tie=tie)
    load_adapter_weights(fresh, weights)
    assert torch.equal(staged_logits(fresh, ids), expected)


def test_new_rows_are_kept_whole_so_that_other_first_values_do_not_matter(tmp_path):
    folder = write_tiny_base(tmp_path)
    found = []
    for seed in (0, 1):
        base, tokens = load_grown(folder, seed=seed)
        model = apply_lora(base.model, settings(), tokens)
        if not found:
            perturb(model)
            weights = adapter_weights(model)
        load_adapter_weights(model, weights)
        found.append(staged_logits(model, random_ids(tokens.vocab_size)).detach())
    assert_close(found[0], found[1], atol=1e-4, rtol=1e-5)


def test_weights_that_do_not_fit_are_refused(tmp_path):
    model, _, _ = adapted(tmp_path)
    weights = adapter_weights(model)
    name = "model.embed_tokens.lora_embedding_A"
    with pytest.raises(CheckpointError, match="embed_tokens.lora_embedding_A missing or unknown"):
        load_adapter_weights(model, {n: w for n, w in weights.items() if n != name})
    with pytest.raises(CheckpointError, match="other missing or unknown"):
        load_adapter_weights(model, {**weights, "other": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"embedding_A is \[1, 2\], expected \[4, 384\]"):
        load_adapter_weights(model, {**weights, name: torch.zeros(1, 2)})


def test_has_adapter_says_so(tmp_path):
    base, tokens = load_grown(write_tiny_base(tmp_path))
    assert not has_adapter(base.model)
    assert has_adapter(apply_lora(base.model, settings(), tokens))
    assert not has_adapter(merge_lora(base.model))


# The adapter folder


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def saved(request, tmp_path):
    """(base folder, adapter folder, trained model, tokens)."""
    source = write_tiny_base(tmp_path / "base", tie=request.param)
    base, tokens = load_grown(source)
    model = apply_lora(base.model, settings(), tokens)
    perturb(model)
    folder = tmp_path / "adapter"
    save_adapter(model, folder, contract_for(base, tokens), base, settings())
    return source, folder, model.eval(), tokens


def test_a_saved_adapter_loads_onto_its_base(saved):
    source, folder, model, tokens = saved
    base = load_base(str(source))
    contract = load_adapter(folder, base)
    assert contract == VoiceContract.load(folder / "voice.json")
    ids = random_ids(tokens.vocab_size)
    assert_close(staged_logits(base.model, ids), staged_logits(model, ids), atol=1e-4, rtol=1e-5)


def test_the_folder_holds_the_adapter_alone_and_names_its_base(saved):
    source, folder, model, tokens = saved
    assert {file.name for file in folder.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "new_rows.safetensors",
        "base.json",
        "voice.json",
    }
    origin = read_origin(folder)
    assert origin.source == str(source.resolve())
    assert origin.sha256 == load_base(str(source)).sha256
    assert origin.settings == settings()
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        assert all(".lora_" in name for name in file.keys())  # noqa: SIM118 - no mapping
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 8, "LORA")


def test_plain_peft_reads_the_folder_onto_the_grown_base(saved):
    source, folder, model, tokens = saved
    base, _ = load_grown(source)
    with safe_open(folder / "new_rows.safetensors", "pt") as file, torch.no_grad():
        for name in file.keys():  # noqa: SIM118 - no mapping
            base.model.get_parameter(name)[tokens.num_text :] = file.get_tensor(name)
    plain = PeftModel.from_pretrained(base.model, folder).eval()
    ids = random_ids(tokens.vocab_size)
    assert_close(plain(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-5)


def test_the_size_is_logged(saved, tmp_path, caplog):
    source, _, model, tokens = saved
    base, _ = load_grown(source)
    with caplog.at_level(logging.INFO):
        save_adapter(model, tmp_path / "again", contract_for(base, tokens), base, settings())
    assert "MB adapters and" in caplog.text
    assert "MB new rows (the base model has" in caplog.text


def test_an_adapter_on_the_wrong_base_is_refused_with_both_names(saved, tmp_path):
    source, folder, _, _ = saved
    other = load_base(str(write_tiny_base(tmp_path / "other", seed=1)))
    message = rf"trained on {source.resolve()} \(\w{{12}}\), not on .*other \(\w{{12}}\); give the"
    with pytest.raises(CheckpointError, match=message):
        load_adapter(folder, other)


def test_a_folder_without_an_adapter_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"no base\.json, expected the folder that tts-stack"):
        read_origin(tmp_path)


def test_a_damaged_origin_is_refused(saved):
    _, folder, _, _ = saved
    (folder / "base.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"base\.json: cannot be read"):
        read_origin(folder)


# Merging


@pytest.mark.parametrize("embeddings", [True, False], ids=["embeddings", "projections"])
@TIED
def test_merging_keeps_the_logits_and_the_tie(tmp_path, embeddings, tie):
    model, _, tokens = adapted(tmp_path, settings(embeddings=embeddings), tie=tie)
    perturb(model)
    model.eval()
    ids = random_ids(tokens.vocab_size)
    with torch.no_grad():
        before = model(ids).logits
        merged = merge_lora(model)
        assert_close(merged(ids).logits, before, atol=2e-5, rtol=1e-5)
    embedding, output = merged.get_input_embeddings(), merged.get_output_embeddings()
    assert (type(embedding), type(output)) == (torch.nn.Embedding, torch.nn.Linear)
    assert (embedding.weight is output.weight) == tie
    assert not [name for name, _ in merged.named_parameters() if is_adapter(name)]


# Settings


@pytest.mark.parametrize(
    ("name", "r", "alpha", "embeddings"),
    [
        ("r_8_alpha_16", 8, 16, True),
        ("r_16_alpha_32", 16, 32, True),
        ("r_64_alpha_128", 64, 128, True),
        ("attention_r_8_alpha_16", 8, 16, False),
    ],
)
def test_presets_compose(name, r, alpha, embeddings):
    config = load_config(LLMTrainConfig, "train_llm", ["corpus=c", "run=r", f"+lora={name}"])
    lora = config.lora
    assert (lora.r, lora.alpha, lora.dropout, lora.embeddings) == (r, alpha, 0.01, embeddings)
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert lora.target_modules == (["all-linear"] if embeddings else attention)


def test_without_a_preset_there_is_no_lora():
    assert load_config(LLMTrainConfig, "train_llm", ["corpus=c", "run=r"]).lora is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("lora.r=0", "lora.r is 0, expected at least 1"),
        ("lora.alpha=-1", "lora.alpha is -1, expected at least 1"),
        ("lora.dropout=1.0", "lora.dropout is 1.0, expected at least 0 and below 1"),
        ("lora.target_modules=[]", "lora.target_modules is empty"),
        ("lora.rank=3", "unknown key lora.rank"),
        ("+lora=r_9", "no config lora/r_9; did you mean lora=r_"),
    ],
)
def test_wrong_settings_are_refused(change, message):
    preset = [] if change.startswith("+") else ["+lora=r_8_alpha_16"]
    with pytest.raises(ConfigError, match=message):
        load_config(LLMTrainConfig, "train_llm", ["corpus=c", "run=r", *preset, change])
