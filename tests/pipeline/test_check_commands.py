"""`tts-stack check`: what it prints, how it ends, and what it says about bad input."""

import pytest
import torch
from base_models import write_tiny_base
from stage1_support import write_corpus

import stage1_llm.build as build
import stage1_llm.checks.collate as collate


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("check") / "corpus", num_train=20)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_tiny_base(tmp_path_factory.mktemp("check") / "base")


@pytest.fixture
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["collate", "pack", "resume"])
def test_a_check_prints_its_claims_and_leaves_nothing(in_empty_folder, cli, corpus, name):
    result = cli("check", name, f"corpus={corpus}", "batching.kind=packing")
    assert result.code == 0, result.output
    assert "largest difference" in result.output
    assert f"corpus {corpus}: 20 utterances" in result.output
    assert "FAILED" not in result.output
    num_claims = result.output.count("\nok ")
    assert f"check {name}: all {num_claims} claims hold" in result.output
    assert not list(in_empty_folder.iterdir())


def test_check_collate_shows_a_sample_token_by_token(in_empty_folder, cli, corpus):
    output = cli("check", "collate", f"corpus={corpus}", "loss.text_weight.value=0.25").output
    rows = [line.split("│") for line in output.splitlines() if line.count("│") > 5]
    cells = [[cell.strip() for cell in row[1:7]] for row in rows]
    assert cells[0] == ["1", "[TEXT]", "-", "-", "-", "0"]
    assert {row[4] for row in cells if row[2] == "text"} == {"0.25"}
    assert all(row[0] == row[3] for row in cells if row[2] == "audio")
    assert cells[-1][1:5] == ["[STOP]", "end", "3", "1"]


@pytest.mark.parametrize("name", ["lora", "merge"])
def test_adapters_are_checked_with_the_default_preset_or_the_users(
    in_empty_folder, cli, corpus, base, name
):
    where = (f"corpus={corpus}", f"llm={base}", "prompt.format=chat")
    result = cli("check", name, *where)
    assert result.code == 0, result.output
    assert "LoRA r 8 alpha 16; prompt chat" in result.output
    result = cli("check", name, *where, "lora=attention_r_8_alpha_16", "lora.r=2")
    assert result.code == 0, result.output
    assert "LoRA r 2 alpha 16" in result.output
    assert not list(in_empty_folder.iterdir())


def test_a_broken_batch_ends_with_code_1_and_the_claim(in_empty_folder, cli, corpus, monkeypatch):
    true = collate.collate_prompts

    def broken(prompts, *, pad_id):
        batch = true(prompts, pad_id=pad_id)
        groups = batch.groups.masked_fill(~batch.attention_mask, 1)
        return batch._replace(groups=groups, labels=batch.labels.clamp(min=0))

    monkeypatch.setattr(collate, "collate_prompts", broken)
    result = cli("check", "collate", f"corpus={corpus}")
    assert result.code == 1
    assert "FAILED  padding, template, tags and masked tokens are never labelled" in result.output
    assert "error: check collate: 4 of 6 claims do not hold, first: every audio" in result.output


def test_a_broken_adapter_ends_with_code_1_and_the_claim(
    in_empty_folder, cli, corpus, base, monkeypatch
):
    true = build.apply_lora

    @torch.no_grad()
    def broken(*args, **kwargs):
        model = true(*args, **kwargs)
        for name, weight in model.named_parameters():
            if ".lora_B" in name:
                weight.fill_(1e-3)
        return model

    monkeypatch.setattr(build, "apply_lora", broken)
    result = cli("check", "lora", f"corpus={corpus}", f"llm={base}")
    assert result.code == 1
    assert "FAILED  at step 0 the logits are those of the base model" in result.output
    assert "error: check lora: 1 of 5 claims do not hold, first: at step 0" in result.output


def test_an_unknown_check_is_answered_with_the_known_ones(in_empty_folder, cli, corpus):
    result = cli("check", "speed", f"corpus={corpus}")
    assert result.code == 2
    assert "'speed' is not one of" in result.output
    assert "'collate', 'pack', 'lora'" in result.output


@pytest.mark.parametrize("name", ["lora", "merge"])
def test_an_adapter_check_of_a_model_from_scratch_says_what_to_give(
    in_empty_folder, cli, corpus, name
):
    result = cli("check", name, f"corpus={corpus}")
    assert result.code == 1
    assert f"error: check {name}: llm is built from scratch" in result.output
    assert "give one with llm=FOLDER or llm=HUB/NAME" in result.output


def test_a_setting_that_does_not_exist_is_named(in_empty_folder, cli, corpus):
    result = cli("check", "pack", f"corpus={corpus}", "batching.kinds=packing")
    assert result.code == 1
    assert "unknown key batching.kinds; the nearest valid key is batching.kind" in result.output


@pytest.mark.slow
def test_without_a_corpus_the_demonstration_is_checked(in_empty_folder, cli):
    result = cli("check", "pack")
    assert result.code == 0, result.output
    assert "corpus runs/demo/corpus: 24 utterances" in result.output
    made = [path.name for path in (in_empty_folder / "runs" / "demo").iterdir()]
    assert made == ["corpus"]
