import dataclasses
import json
from pathlib import Path

import huggingface_hub.errors
import numpy as np
import pytest
import torch
from base_models import (
    ARCHITECTURES,
    CODEBOOK_SIZE,
    SENTENCES,
    load_grown,
    random_ids,
    tiny_tokenizer,
    tokens_for,
    write_tiny_base,
)
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, T5Config

import stage1_llm.base as base_module
from stage1_llm.base import (
    add_token_names,
    grow_model,
    load_base,
    num_text_ids,
    render_chat,
    resolve_llm_override,
)
from stage1_llm.chat import render
from stage1_llm.config import LLMTrainConfig
from stage1_llm.model import build_llm
from stage1_llm.prompt import build_prompt
from stage1_llm.text import TokenizerEncoder
from stage1_llm.vocab import Extras, grow_token_map, token_names
from tts_stack.config import load_config
from tts_stack.contract import PromptSpec, TokenMap, file_sha256
from tts_stack.errors import CheckpointError, ConfigError


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Path]:
    """Folders of tiny base models, by the family of their template."""
    top = tmp_path_factory.mktemp("bases")
    return {
        "chatml": write_tiny_base(top / "qwen2", "qwen2", template="chatml"),
        "thinking": write_tiny_base(top / "qwen3", "qwen3", template="thinking"),
        "llama3": write_tiny_base(top / "llama", "llama", template="llama3", tie=False),
    }


# Reading


def test_a_base_model_is_read_in_float32_with_the_hash_of_its_weights(bases):
    base = load_base(str(bases["chatml"]))
    assert base.model.dtype == torch.float32
    assert base.sha256 == file_sha256(bases["chatml"] / "model.safetensors")
    assert Path(base.source) == bases["chatml"].resolve()


def test_the_hash_covers_every_part_of_a_model_in_several_files(bases, tmp_path):
    whole = load_base(str(bases["chatml"]))
    tmp_path = tmp_path / "parts"
    whole.model.save_pretrained(tmp_path, max_shard_size="40KB")
    whole.tokenizer.save_pretrained(tmp_path)
    parts = sorted(tmp_path.glob("*.safetensors"))
    assert len(parts) > 1
    first = load_base(str(tmp_path)).sha256
    weights = load_file(parts[-1])
    save_file({name: w + 1 for name, w in weights.items()}, parts[-1], metadata={"format": "pt"})
    assert load_base(str(tmp_path)).sha256 != first


@pytest.mark.parametrize(
    ("config", "name"), [(BertConfig(), "BertConfig"), (T5Config(), "T5Config")]
)
def test_a_model_that_is_no_causal_lm_is_refused(tmp_path, config, name):
    config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=f"{name} is not a causal language model; give one"):
        load_base(str(tmp_path))


def test_a_family_with_a_causal_class_is_refused_when_another_class_was_trained(tmp_path):
    BertConfig(architectures=["BertForMaskedLM"]).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="BertForMaskedLM is not a causal language model"):
        load_base(str(tmp_path))


def copy_base(source: Path, folder: Path, *without: str) -> Path:
    folder.mkdir()
    for file in source.iterdir():
        if file.name not in without:
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_a_folder_without_config_is_refused(bases, tmp_path):
    folder = copy_base(bases["chatml"], tmp_path / "copy", "config.json")
    with pytest.raises(CheckpointError, match=r"copy: no config\.json, expected the folder of a"):
        load_base(str(folder))


def test_a_damaged_config_is_refused(bases, tmp_path):
    folder = copy_base(bases["chatml"], tmp_path / "copy")
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        load_base(str(folder))


def test_damaged_weights_are_refused(bases, tmp_path):
    folder = copy_base(bases["chatml"], tmp_path / "copy")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="copy: cannot be read as a causal LM"):
        load_base(str(folder))


def test_a_missing_weight_is_refused_not_drawn_at_random(bases, tmp_path):
    folder = copy_base(bases["chatml"], tmp_path / "copy")
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 weights are missing, model\.norm\.weight among"):
        load_base(str(folder))


def test_missing_weights_files_are_refused(bases, tmp_path):
    folder = copy_base(bases["chatml"], tmp_path / "copy", "model.safetensors")
    with pytest.raises(CheckpointError, match="cannot be read as a causal LM"):
        load_base(str(folder))


@pytest.mark.parametrize("family", ["chatml", "llama3"])
def test_a_model_without_tokenizer_is_refused(bases, tmp_path, family):
    folder = copy_base(bases[family], tmp_path / "copy", "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"copy: no tokenizer, expected tokenizer\.json"):
        load_base(str(folder))


def test_a_damaged_tokenizer_is_refused(bases, tmp_path):
    folder = copy_base(bases["chatml"], tmp_path / "copy")
    (folder / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(CheckpointError, match="no readable tokenizer"):
        load_base(str(folder))


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path):
    folder = write_tiny_base(tmp_path, vocab=320, num_rows=300)
    with pytest.raises(
        CheckpointError, match="tokenizer has 325 ids, the model 300 embedding rows"
    ):
        load_base(str(folder))


@pytest.mark.parametrize("name", ["./nowhere", "/no/where", "nowhere"])
def test_a_folder_that_does_not_exist_is_no_hub_name(name, monkeypatch):
    monkeypatch.setattr(base_module, "snapshot_download", None)  # never called
    with pytest.raises(CheckpointError, match="no such folder; give the folder"):
        load_base(name)


def test_offline_a_hub_name_says_how_to_give_a_folder(monkeypatch):
    def offline(name, **settings):
        raise huggingface_hub.errors.LocalEntryNotFoundError("outgoing traffic has been disabled.")

    monkeypatch.setattr(base_module, "snapshot_download", offline)
    message = (
        r"some/model: neither a folder, nor in the local cache, nor .* \(outgoing traffic has "
    )
    with pytest.raises(
        CheckpointError, match=message + "been disabled.*; check the name, or give the folder"
    ):
        load_base("some/model")


def test_a_hub_model_comes_from_the_local_cache_first(bases, monkeypatch):
    calls = []

    def download(name, local_files_only=False, **settings):
        calls.append(local_files_only)
        return str(bases["chatml"])

    monkeypatch.setattr(base_module, "snapshot_download", download)
    assert load_base("some/model").source == "some/model"
    assert calls == [True]


def test_a_hub_model_whose_weights_are_not_in_the_cache_is_downloaded(bases, tmp_path, monkeypatch):
    cached = copy_base(bases["chatml"], tmp_path / "cached", "model.safetensors")

    def download(name, local_files_only=False, **settings):
        return str(cached if local_files_only else bases["chatml"])

    monkeypatch.setattr(base_module, "snapshot_download", download)
    assert load_base("some/model").sha256 == load_base(str(bases["chatml"])).sha256


# Growing


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_a_grown_model_keeps_its_logits_through_plain_transformers(tmp_path, kind, tie):
    base, tokens = load_grown(write_tiny_base(tmp_path / "base", kind, tie=tie))
    base.model.save_pretrained(tmp_path / "grown")
    base.tokenizer.save_pretrained(tmp_path / "grown")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "grown")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "grown")
    ids = random_ids(tokens.vocab_size)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, base.model(ids).logits)
    names = token_names(tokens, "tagged")
    assert {i: tokenizer.convert_tokens_to_ids(name) for i, name in names.items()} == {
        i: i for i in names
    }
    assert tokenizer.encode("".join(names.values()), add_special_tokens=False) == list(names)
    assert tokenizer.decode(list(names), skip_special_tokens=True) == ""
    weights = again.get_input_embeddings().weight, again.get_output_embeddings().weight
    assert (weights[0] is weights[1]) == tie


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_growing_keeps_old_rows_and_pads_to_a_multiple_of_128(tmp_path, tie):
    base = load_base(str(write_tiny_base(tmp_path, tie=tie)))
    embeddings = base.model.get_input_embeddings(), base.model.get_output_embeddings()
    old = [module.weight.detach().clone() for module in embeddings]
    tokens = tokens_for(base)
    grow_model(base.model, tokens, seed=0)
    assert base.model.config.vocab_size == tokens.vocab_size == 384
    for before, module in zip(old, embeddings_of(base), strict=True):
        assert module.weight.shape == (384, 32)
        assert torch.equal(module.weight[: tokens.num_text], before[: tokens.num_text])
        unused = slice(tokens.num_text, len(before))  # rows that the base had without ids
        assert (module.weight[unused] != before[unused]).all()
    assert base.model.get_output_embeddings().out_features == 384
    assert (embeddings_of(base)[0].weight is embeddings_of(base)[1].weight) == tie


def embeddings_of(base):
    return base.model.get_input_embeddings(), base.model.get_output_embeddings()


def test_qwen2_5_gets_the_rows_that_ichigo_s_run_had():
    tokens = grow_token_map(151665, 512, Extras(has_mask=True), pad=0, num_rows=151936)
    assert tokens.vocab_size == 152192


def test_rows_are_never_taken_away(tmp_path):
    base = load_base(str(write_tiny_base(tmp_path, num_rows=640)))
    tokens = tokens_for(base)
    assert tokens.vocab_size == 640
    smaller = dataclasses.replace(tokens, vocab_size=512)
    with pytest.raises(ConfigError, match="640 embedding rows, the voice 512 ids; rows are never"):
        grow_model(base.model, smaller, seed=0)


def test_new_rows_have_the_mean_and_covariance_of_the_old_ones(tmp_path):
    base = load_base(str(write_tiny_base(tmp_path, tie=False, num_rows=2304)))
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(32, generator=generator)
    for scale, module in zip((1.0, 0.1), embeddings_of(base), strict=True):
        noise = torch.randn(2304, 1, generator=generator) * direction
        noise += 0.1 * torch.randn(2304, 32, generator=generator)
        module.weight.data = scale * (noise + 3)
    tokens = tokens_for(base)
    grow_model(base.model, tokens, seed=0)
    for scale, module in zip((1.0, 0.1), embeddings_of(base), strict=True):
        weight = module.weight.detach()
        old, new = weight[: tokens.num_text], weight[tokens.num_text :]
        assert_close(new.mean(0), old.mean(0), atol=0.2 * scale, rtol=0)
        assert_close(new.T.cov(), old.T.cov(), atol=0.5 * scale**2, rtol=0)
        axis = torch.linalg.eigh(new.T.cov()).eigenvectors[:, -1]
        assert abs(float(axis @ direction / direction.norm())) > 0.99


def test_new_rows_depend_on_the_seed_alone(tmp_path):
    folder = write_tiny_base(tmp_path)
    rows = []
    for seed in (0, 0, 1):
        torch.rand(1)  # the global state moves on
        rows.append(load_grown(folder, seed=seed)[0].model.get_input_embeddings().weight)
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])


def test_a_grown_model_stops_at_the_end_token_in_plain_transformers(tmp_path):
    base, tokens = load_grown(write_tiny_base(tmp_path))
    assert base.model.generation_config.eos_token_id == tokens.audio_end
    assert base.model.config.eos_token_id == tokens.audio_end


# Names of tokens


@pytest.mark.parametrize("family", ["chatml", "thinking", "llama3"])
@pytest.mark.parametrize("is_reloaded", [False, True], ids=["fresh", "reloaded"])
def test_ordinary_text_encodes_as_before(bases, tmp_path, family, is_reloaded):
    tokenizer = tiny_tokenizer(family)
    plain = {text: tokenizer.encode(text) for text in SENTENCES}
    tokens = grow_token_map(num_text_ids(tokenizer), 12, pad=0, num_rows=0)
    add_token_names(tokenizer, tokens, "tagged")
    if is_reloaded:
        tokenizer.save_pretrained(tmp_path)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert {text: tokenizer.encode(text) for text in SENTENCES} == plain


@pytest.mark.parametrize("family", ["chatml", "thinking", "llama3"])
@pytest.mark.parametrize("is_reloaded", [False, True], ids=["fresh", "reloaded"])
def test_text_that_looks_like_a_control_token_is_text(tmp_path, family, is_reloaded):
    tokenizer = tiny_tokenizer(family)
    num_plain = tokenizer.backend_tokenizer.get_vocab_size(with_added_tokens=False)
    added = [token.content for token in tokenizer.added_tokens_decoder.values()]
    tokens = grow_token_map(num_text_ids(tokenizer), 12, Extras(has_mask=True), pad=0, num_rows=0)
    add_token_names(tokenizer, tokens, "chat")
    if is_reloaded:
        tokenizer.save_pretrained(tmp_path)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "so " + " and ".join([*added, *token_names(tokens, "chat").values()]) + "."
    assert max(tokenizer.encode(text)) > num_plain  # as they stand, they are read as tokens
    ids = TokenizerEncoder(tokenizer)(text).ids
    begin = {tokenizer.bos_token_id} - {None}  # Llama 3's begin token is part of its vocabulary
    assert max(ids) < num_plain
    assert not begin & set(ids)
    assert tokenizer.decode(ids) == text


def test_a_tokenizer_that_knows_a_name_already_is_refused(tmp_path):
    base, _ = load_grown(write_tiny_base(tmp_path))
    again = grow_token_map(num_text_ids(base.tokenizer), CODEBOOK_SIZE, pad=0, num_rows=0)
    with pytest.raises(ConfigError, match=r"already has \[TEXT\] \(id 325\) and 12 more of the"):
        add_token_names(base.tokenizer, again, "tagged")


def test_ids_that_do_not_line_up_are_refused():
    tokenizer = tiny_tokenizer()
    tokens = grow_token_map(num_text_ids(tokenizer) + 1, 12, pad=0, num_rows=0)
    with pytest.raises(ConfigError, match=r"gives \[TEXT\] the id 325, expected 326; its ids have"):
        add_token_names(tokenizer, tokens, "tagged")


# Chat templates


def chat_tokenizer(family):
    tokenizer = tiny_tokenizer(family)
    tokens = grow_token_map(num_text_ids(tokenizer), 12, Extras(has_mask=True), pad=0, num_rows=0)
    add_token_names(tokenizer, tokens, "chat")
    return tokenizer, tokens


@pytest.mark.parametrize("family", ["chatml", "thinking", "llama3"])
def test_a_chat_prompt_is_the_rendered_conversation(family):
    tokenizer, tokens = chat_tokenizer(family)
    template = render_chat(tokenizer, tokens)
    spec = PromptSpec(format="chat", before_text=template.before, after_text=template.after)
    sound = np.array([2, 0, 9], dtype=np.int64)
    for text in (*SENTENCES, "x", "A line\nand another."):
        prompt = build_prompt(TokenizerEncoder(tokenizer)(text).ids, sound, tokens, spec)
        answer = "<|sound_start|><|sound_0002|><|sound_0000|><|sound_0009|><|sound_end|>"
        rendered = render(tokenizer, "<|text_to_semantic|>" + text, answer)
        whole = tokenizer.encode(rendered, add_special_tokens=False)
        assert prompt.token_ids.tolist() == whole[: len(prompt)]
        assert tokenizer.convert_ids_to_tokens(whole[len(prompt) - 1]) == "<|sound_end|>"
    assert template.before[-1] == tokens.text_start


@pytest.mark.parametrize(
    ("family", "settings"),
    [("chatml", {}), ("llama3", {}), ("thinking", {"enable_thinking": False})],
)
def test_a_chat_prompt_is_the_generation_prompt(family, settings):
    tokenizer, tokens = chat_tokenizer(family)
    template = render_chat(tokenizer, tokens)
    turn = [{"role": "user", "content": "<|text_to_semantic|>Hello"}]
    asked = tokenizer.apply_chat_template(
        turn, add_generation_prompt=True, tokenize=False, **settings
    )
    text_ids = TokenizerEncoder(tokenizer)("Hello").ids
    ours = [*template.before, *text_ids, *template.after]
    assert tokenizer.encode(asked, add_special_tokens=False) == ours


def test_a_tokenizer_without_chat_template_is_refused():
    tokenizer, tokens = chat_tokenizer(None)
    with pytest.raises(
        ConfigError, match=r"no chat template, .* give an instruct model, or prompt"
    ):
        render_chat(tokenizer, tokens)


@pytest.mark.parametrize(
    "content",
    ["''", "message.content | upper", "message.content + message.content", "message.content[20:]"],
    ids=["drops", "changes", "doubles", "cuts"],
)
def test_a_template_that_drops_or_changes_the_content_is_refused(content):
    tokenizer, tokens = chat_tokenizer("chatml")
    tokenizer.chat_template = (
        "{%- for message in messages %}{{- " + content + " + '<|im_end|>' }}{%- endfor %}"
    )
    with pytest.raises(ConfigError, match="drops or changes what it is given"):
        render_chat(tokenizer, tokens)


def test_a_template_that_fails_is_an_error_not_a_traceback():
    tokenizer, tokens = chat_tokenizer("chatml")
    tokenizer.chat_template = "{{- raise_exception('no such role') }}"
    with pytest.raises(ConfigError, match=r"the chat template fails \(no such role\)"):
        render_chat(tokenizer, tokens)


def test_a_tokenizer_that_lacks_what_the_template_writes_is_refused():
    tokenizer, tokens = chat_tokenizer("chatml")
    tokenizer.chat_template = tiny_tokenizer("llama3").chat_template
    lacking = (
        r"writes <\|end_header_id\|>, <\|eot_id\|>, <\|start_header_id\|>, which the tokenizer"
    )
    with pytest.raises(ConfigError, match=lacking):
        render_chat(tokenizer, tokens)


def test_a_template_that_lets_text_run_on_is_warned_of(caplog):
    tokenizer, tokens = chat_tokenizer("chatml")
    render_chat(tokenizer, tokens)
    assert not caplog.records
    tokenizer.chat_template = (
        "{%- for message in messages %}{{- message.content + 's sleeps on.' }}{%- endfor %}"
    )
    tokenizer.add_tokens(["Heres"])
    render_chat(tokenizer, tokens)
    assert "lets text run into what follows it" in caplog.text


# Configuration


@pytest.mark.parametrize(
    ("given", "resolved"),
    [
        (["llm=tiny", "run=x"], ["llm=tiny", "run=x"]),
        (["llm=Qwen/Qwen3-0.6B"], ["llm=base", "llm.base_model=Qwen/Qwen3-0.6B"]),
        (["llm=../my base"], ["llm=base", "llm.base_model=../my base"]),
        (["llm=tinny"], ["llm=tinny"]),
        (["llm.base_model=a/b"], ["llm.base_model=a/b"]),
        (["lora=r_8_alpha_16"], ["+lora=r_8_alpha_16"]),
        (["+lora=r_8_alpha_16", "lora=null"], ["+lora=r_8_alpha_16", "lora=null"]),
    ],
)
def test_a_folder_or_hub_name_in_place_of_a_choice_becomes_the_base_model(given, resolved):
    assert resolve_llm_override(given, ["tiny", "base"]) == resolved


def test_a_folder_beside_the_command_is_a_base_model_but_a_choice_comes_first(
    tmp_path, monkeypatch
):
    (tmp_path / "mine").mkdir()
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    given = resolve_llm_override(["llm=mine", "llm=tiny"], ["tiny"])
    assert given == ["llm=base", "llm.base_model=mine", "llm=tiny"]


def train_config(*overrides):
    return load_config(LLMTrainConfig, "train_llm", ["corpus=c", "run=r", *overrides])


@pytest.mark.parametrize(
    ("name", "model", "lr"),
    [
        ("qwen2_5_0_5b", "Qwen/Qwen2.5-0.5B-Instruct", 1e-3),
        ("qwen2_5_1_5b", "Qwen/Qwen2.5-1.5B-Instruct", 1e-4),
        ("qwen3_0_6b", "Qwen/Qwen3-0.6B", 5e-4),
        ("llama3_2_1b", "meta-llama/Llama-3.2-1B-Instruct", 1e-4),
    ],
)
def test_a_named_base_model_brings_its_learning_rate_and_batch(name, model, lr):
    config = train_config(f"llm={name}")
    assert (config.llm.base_model, config.optimizer.kind, config.optimizer.lr) == (
        model,
        "adamw",
        lr,
    )
    assert config.batching.max_tokens * config.trainer.accumulate == 49152
    assert config.prompt.position_scheme == "plain"


def test_a_base_model_by_folder_composes_with_lora():
    config = train_config(*resolve_llm_override(["llm=some/folder", "+lora=r_8_alpha_16"], []))
    assert config.llm.base_model == "some/folder"
    assert (config.lora.r, config.lora.alpha, config.lora.dropout) == (8, 16, 0.01)


def test_soprano_has_the_size_that_is_published():
    config = train_config("llm=soprano_80m")
    tokens = TokenMap(8192, 0, 1, 2, 3, 4, 8000)
    with torch.device("meta"):
        model = build_llm(config.llm, tokens, seed=0)
    total = sum(parameter.numel() for parameter in model.parameters())
    assert total == 79_714_048
    assert total - 2 * 8192 * 512 == 71_325_440
    assert json.loads(model.config.to_json_string())["num_hidden_layers"] == 17
