import dataclasses
import itertools
import json
import shutil

import pytest
import torch
from base_models import contract_for, load_grown, write_tiny_base
from safetensors.torch import load_file, save_file
from torch.nn import functional
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import stage1_llm.merge as merge_module
from stage1_llm.base import load_base
from stage1_llm.checkpoint import load_llm
from stage1_llm.lora import apply_lora, load_adapter, merge_lora, save_adapter
from stage1_llm.lora_config import LoraSettings
from stage1_llm.merge import Behaviour, compare, find_adapter, merge_adapter, observe
from stage1_llm.prompt import prompt_prefix
from stage1_llm.text import TokenizerEncoder
from tts_stack.contract import VoiceContract, llm_sha256
from tts_stack.errors import CheckpointError, ConfigError

LORA = LoraSettings(r=4, alpha=8, dropout=0.0, embeddings=True)


def train_adapter(source, run, *, prompt_format="chat"):
    """Teach a base model to count its sound tokens round and round, whatever the text."""
    base, tokens = load_grown(source, prompt_format)
    contract = contract_for(base, tokens, prompt_format)
    model = apply_lora(base.model, LORA, tokens).train()
    text_ids = TokenizerEncoder(base.tokenizer)("This is what the two models read.").ids
    prefix = prompt_prefix(text_ids, tokens, contract.prompt).token_ids.tolist()
    count = itertools.islice(itertools.cycle(range(tokens.codebook_size)), 40)
    ids = torch.tensor([[*prefix, *(tokens.semantic_offset + i for i in count)]])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.02)
    start = len(prefix) - 1
    for _ in range(60):
        optimizer.zero_grad()
        logits = model(input_ids=ids).logits[0, start:-1]
        functional.cross_entropy(logits, ids[0, start + 1 :]).backward()
        optimizer.step()
    save_adapter(model, run / "llm" / "adapter", contract, base, LORA)
    return model.eval(), tokens


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def trained(request, tmp_path_factory):
    """(base folder, run folder, base + adapter as trained, tokens)."""
    top = tmp_path_factory.mktemp("merge")
    source = write_tiny_base(top / "base", "qwen2", tie=request.param)
    model, tokens = train_adapter(source, top / "run")
    return source, top / "run", model, tokens


def copy_run(trained, folder):
    return shutil.copytree(trained[1], folder)


def test_a_merged_model_is_base_and_adapter_in_plain_transformers(trained, tmp_path):
    _, _, model, tokens = trained
    run = copy_run(trained, tmp_path / "run")
    report = merge_adapter(run)
    assert report.folder == run / "llm" / "model"
    plain = AutoModelForCausalLM.from_pretrained(report.folder)
    ids = torch.arange(tokens.vocab_size)[None]
    with torch.no_grad():
        assert_close(plain(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-5)
    assert report.max_difference <= report.allowed
    assert report.num_equal == report.num_continued == 32


def test_tied_embeddings_do_not_make_the_reloaded_model_repeat_a_token(trained, tmp_path):
    """transformers issue 45127: the matrix merged twice, or the wrong half, after reload."""
    _, _, model, tokens = trained
    report = merge_adapter(copy_run(trained, tmp_path / "run"))
    plain = AutoModelForCausalLM.from_pretrained(report.folder)
    is_tied = plain.config.tie_word_embeddings
    weights = plain.get_input_embeddings().weight, plain.get_output_embeddings().weight
    assert (weights[0] is weights[1]) == is_tied
    assert ("lm_head.weight" in load_file(report.folder / "model.safetensors")) != is_tied
    contract = VoiceContract.load(report.folder / "voice.json")
    tokenizer = AutoTokenizer.from_pretrained(report.folder)
    text_ids = TokenizerEncoder(tokenizer)("This is what the two models read.").ids
    prompt = torch.from_numpy(prompt_prefix(text_ids, tokens, contract.prompt).token_ids)[None]
    spoken = plain.generate(prompt, max_new_tokens=32, do_sample=False)[0, prompt.shape[1] :]
    counted = [tokens.semantic_offset + i % tokens.codebook_size for i in range(32)]
    assert spoken.tolist() == counted
    assert observe(model, prompt).continuation == tuple(counted)


def add_the_adapter_twice(model):
    """What peft's own merge does to a tied matrix that both halves adapt."""
    embedding = model.get_input_embeddings()
    delta = embedding.get_delta_weight("default")
    merged = merge_lora(model)
    merged.get_output_embeddings().weight.data += delta
    return merged


def forget_the_head(model):
    """What reloading did in the issue: one half of a matrix that had become two."""
    merged = merge_lora(model)
    head = merged.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().flip(0))
    merged.config.tie_word_embeddings = False
    return merged


@pytest.mark.parametrize("wrong", [add_the_adapter_twice, forget_the_head])
def test_a_wrong_merge_is_refused_and_leaves_nothing(trained, tmp_path, monkeypatch, wrong):
    run = copy_run(trained, tmp_path / "run")
    monkeypatch.setattr(merge_module, "merge_lora", wrong)
    with pytest.raises(CheckpointError, match="the merged model is not base . adapter: largest"):
        merge_adapter(run)
    assert [folder.name for folder in (run / "llm").iterdir()] == ["adapter"]


def test_a_refused_merge_keeps_the_model_that_was_there(trained, tmp_path, monkeypatch):
    run = copy_run(trained, tmp_path / "run")
    merge_adapter(run)
    before = llm_sha256(run / "llm" / "model")
    monkeypatch.setattr(merge_module, "merge_lora", forget_the_head)
    with pytest.raises(CheckpointError):
        merge_adapter(run)
    assert llm_sha256(run / "llm" / "model") == before


def behaviour(logits, *continuation):
    return Behaviour(torch.tensor(logits), continuation)


def test_logits_may_differ_by_a_share_of_the_largest_one(tmp_path):
    before = behaviour([1.0, -10.0], 1, 2, 3, 4)
    report = compare(before, behaviour([1.09, -10.0], 1, 2, 0, 4), tmp_path, 0.01)
    assert (report.num_equal, report.num_continued) == (2, 4)
    assert (report.allowed, report.max_logit) == pytest.approx((0.1, 10.0))
    with pytest.raises(
        CheckpointError, match="not base . adapter: largest difference of logits 0.2"
    ):
        compare(before, behaviour([1.2, -10.0], 1, 2, 3, 4), tmp_path, 0.01)


def test_logits_that_are_not_numbers_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="not base . adapter"):
        compare(behaviour([1.0], 1, 2), behaviour([float("nan")], 1, 2), tmp_path, 1.0)


def test_repeating_one_token_is_refused_where_base_and_adapter_did_not(tmp_path):
    varied, stuck = behaviour([1.0], 1, 2, 3, 4), behaviour([1.0], 1, 2, 7, 7)
    with pytest.raises(CheckpointError, match="repeats token 7, base . adapter does not"):
        compare(varied, stuck, tmp_path, 0.1)
    compare(stuck, stuck, tmp_path, 0.1)  # it was no better before


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_file_has_the_number_type_asked_for(trained, tmp_path, dtype):
    report = merge_adapter(copy_run(trained, tmp_path / "run"), dtype=dtype)
    weights = load_file(report.folder / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {getattr(torch, dtype)}
    assert report.num_equal == 32


def test_an_unknown_number_type_is_refused(trained):
    with pytest.raises(ConfigError, match="dtype is 'int8', expected one of float32, float16"):
        merge_adapter(trained[1], dtype="int8")


def test_a_merged_folder_is_a_voice_s_llm(trained, tmp_path):
    run = copy_run(trained, tmp_path / "run")
    folder = merge_adapter(run).folder
    loaded = load_llm(folder)  # checks hash and rows
    assert loaded.contract.llm_sha256 == llm_sha256(folder)
    adapter = VoiceContract.load(run / "llm" / "adapter" / "voice.json")
    assert dataclasses.replace(loaded.contract, llm_sha256="") == adapter
    assert loaded.encode("Hello").ids
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sound = f"<|sound_{0:04d}|>"
    assert tokenizer.convert_tokens_to_ids(sound) == loaded.contract.tokens.semantic_offset


def test_codebook_heads_come_along_and_count_in_the_hash(trained, tmp_path):
    run = copy_run(trained, tmp_path / "run")
    plain = VoiceContract.load(merge_adapter(run).folder / "voice.json").llm_sha256
    save_file({"heads.0.weight": torch.ones(2)}, run / "llm" / "adapter" / "codebooks.safetensors")
    folder = merge_adapter(run).folder
    assert load_file(folder / "codebooks.safetensors")["heads.0.weight"].tolist() == [1.0, 1.0]
    sealed = VoiceContract.load(folder / "voice.json").llm_sha256
    assert sealed == llm_sha256(folder) != plain


def test_the_base_may_have_moved(trained, tmp_path):
    source, _, _, _ = trained
    run = copy_run(trained, tmp_path / "run")
    origin = run / "llm" / "adapter" / "base.json"
    origin.write_text(json.dumps({**json.loads(origin.read_text()), "source": "/gone/away"}))
    with pytest.raises(CheckpointError, match="/gone/away: no such folder"):
        merge_adapter(run)
    merge_adapter(run, base=str(source))


def test_a_wrong_base_is_refused_with_both_names(trained, tmp_path):
    source, run, _, _ = trained
    other = write_tiny_base(tmp_path / "other", seed=1)
    with pytest.raises(CheckpointError, match=rf"trained on {source.resolve()} .*, not on .*other"):
        merge_adapter(run, base=str(other), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_adapter_folder_outside_a_run_needs_a_place_for_the_model(trained, tmp_path):
    adapter = shutil.copytree(trained[1] / "llm" / "adapter", tmp_path / "mine")
    with pytest.raises(
        ConfigError, match="outside a run folder; say where the model goes with --out"
    ):
        merge_adapter(adapter)
    assert merge_adapter(adapter, out=tmp_path / "out").folder == tmp_path / "out"
    assert find_adapter(trained[1] / "llm" / "adapter") == trained[1] / "llm" / "adapter"


def test_another_folder_is_never_overwritten(trained, tmp_path):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").write_text("do not lose me")
    with pytest.raises(ConfigError, match="letters: holds something else than an LLM folder"):
        merge_adapter(trained[1], out=tmp_path / "letters")
    assert (tmp_path / "letters" / "dear.txt").exists()


def test_a_run_without_adapter_is_refused(tmp_path):
    with pytest.raises(
        CheckpointError, match="no adapter, expected llm/adapter as tts-stack train"
    ):
        merge_adapter(tmp_path)


def test_a_damaged_adapter_is_refused(trained, tmp_path):
    run = copy_run(trained, tmp_path / "run")
    (run / "llm" / "adapter" / "adapter_model.safetensors").write_bytes(b"no")
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        merge_adapter(run)


def test_an_adapter_that_is_merged_is_the_adapter_that_was_trained(trained):
    source, run, model, tokens = trained
    base = load_base(str(source))
    load_adapter(run / "llm" / "adapter", base)
    ids = torch.arange(tokens.vocab_size)[None]
    with torch.no_grad():
        assert_close(base.model(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-5)


def test_the_command_prints_the_largest_difference(trained, tmp_path):
    import typer

    from tts_stack.commands import llm

    app = typer.Typer()
    llm.register(app)
    run = copy_run(trained, tmp_path / "run")
    result = CliRunner().invoke(app, ["merge-lora", str(run), "--dtype", "bfloat16"])
    assert result.exit_code == 0, result.output
    assert "largest difference of logits" in result.output
    assert "equal for 32 of 32 tokens" in result.output
    assert "train-vocoder" in result.output
