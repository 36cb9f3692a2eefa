"""What stage 1's commands say about bad input: one line, the place, and what to do."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from base_models import write_tiny_base
from stage1_support import CODEC, write_corpus

from tts_stack.shards import add_tokens, read_info, write_info

SMALL = [
    "batching.max_tokens=64",
    "batching.max_length=40",
    "num_listened=0",
    "trainer.max_steps=2",
    "trainer.validate_every=2",
    "trainer.checkpoint_every=2",
    "trainer.device=cpu",
]
LORA = "+lora=r_8_alpha_16"


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus")


@pytest.fixture
def train(cli, corpus, tmp_path):
    def run(*overrides, corpus=corpus):
        where = (f"corpus={corpus}", f"run={tmp_path / 'run'}")
        return cli("train-llm", *where, *SMALL, *overrides)

    return run


def assert_refused(result, *parts):
    assert result.code == 1
    assert "Traceback" not in result.output
    errors = [line for line in result.output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    for part in parts:
        assert part in errors[0], errors[0]


def test_a_base_that_is_no_causal_lm(train, tmp_path):
    folder = tmp_path / "bert"
    folder.mkdir()
    config = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert_refused(train(f"llm={folder}"), "BertForMaskedLM is not a causal language model")


def test_a_base_that_is_not_there(train, tmp_path):
    assert_refused(train(f"llm={tmp_path / 'nowhere'}"), "nowhere", "no such folder")


def test_a_tokenizer_without_the_template_that_chat_needs(train, tmp_path):
    base = write_tiny_base(tmp_path / "base", template=None)
    assert_refused(train(f"llm={base}", "prompt.format=chat"), "chat template")


def test_chat_without_a_base_model(train):
    result = train("llm=tiny", "prompt.format=chat")
    assert_refused(result, "a model from scratch has no chat template", "llm=FOLDER")


def test_lora_without_a_base_model(train):
    assert_refused(train("llm=tiny", LORA), "lora adapts a base model", "leave lora out")


def test_tags_that_the_corpus_does_not_have(train):
    result = train("llm=tiny", "prompt.speaker_tags=true")
    assert_refused(result, "prompt.speaker_tags is true, but no utterance", "leave the tags out")


def test_samples_longer_than_the_context(train):
    result = train("llm=tiny", "llm.max_positions=30")
    assert_refused(result, "batching.max_length is 40, but the model's context is 30 tokens")


def test_samples_longer_than_the_limit_are_left_out_and_named(train, caplog):
    result = train("llm=tiny", "batching.max_length=15")
    assert result.code == 0
    assert "train: 7 samples longer than 15 tokens left out: s0, s2, s3" in caplog.text


def test_tokens_outside_the_codebook(train, corpus):
    path = corpus / "train-00000.parquet"
    info = read_info(corpus)
    rows = [np.array([1, 2, 3]) for _ in range(info.num_utterances["train"])]
    rows[3] = np.array([1, 10, 2])
    add_tokens(path, rows, CODEC)
    assert_refused(train("llm=tiny"), "s3: prompt: semantic tokens 1 .. 10, expected 0 .. 9")


def test_an_empty_validation_set(train, corpus):
    info = read_info(corpus)
    nothing = dataclasses.replace(
        info,
        shards={**info.shards, "validation": ()},
        num_utterances={**info.num_utterances, "validation": 0},
    )
    write_info(corpus, nothing)
    assert_refused(train("llm=tiny"), "the validation split is empty, expected at least one")


def test_a_resume_with_other_settings_shows_the_difference(train):
    assert train("llm=tiny", "optimizer.lr=1e-3").code == 0
    result = train("llm=tiny", "optimizer.lr=2e-3", "--resume")
    assert_refused(result, "optimizer.lr was 0.001, is 0.002")


def test_an_adapter_on_the_wrong_base(train, cli, tmp_path):
    base = write_tiny_base(tmp_path / "base")
    other = write_tiny_base(tmp_path / "other", seed=1)
    assert train(f"llm={base}", LORA).code == 0
    result = cli("merge-lora", tmp_path / "run", "--base", other)
    assert_refused(result, "other", "base")
    assert not (tmp_path / "run" / "llm" / "model").exists()
    assert cli("merge-lora", tmp_path / "run").code == 0


def test_a_corpus_of_another_codec_than_the_model(train, cli, corpus, tmp_path):
    assert train("llm=tiny").code == 0
    other = shutil.copytree(corpus, tmp_path / "other")
    codec = dataclasses.replace(CODEC, weights_sha256="cd" * 32)
    info = read_info(other)
    for split, names in info.shards.items():
        tokens = [np.array([1, 2, 3])] * info.num_utterances[split]
        add_tokens(other / names[0], tokens, codec)
    write_info(other, dataclasses.replace(info, codec=codec))
    where = (f"corpus={other}", f"run={tmp_path / 'run'}")
    result = cli("train-vocoder", *where, "vocoder=tiny")
    assert_refused(result, "abababababab", "cdcdcdcdcdcd", "train the LLM on this corpus")


def test_a_merged_model_that_is_older_than_its_adapter(train, cli, corpus, tmp_path):
    base = write_tiny_base(tmp_path / "base")
    run = tmp_path / "run"
    assert train(f"llm={base}", LORA, "schedule.warmup_steps=0").code == 0
    assert cli("merge-lora", run).code == 0
    more = ("trainer.max_steps=4", "--resume")
    assert train(f"llm={base}", LORA, "schedule.warmup_steps=0", *more).code == 0
    vocoder = ("train-vocoder", f"corpus={corpus}", f"run={run}", "vocoder=tiny")
    for command in (vocoder, ("export", run, tmp_path / "voice")):
        assert_refused(cli(*command), "was trained on since", f"tts-stack merge-lora {run}")
    assert not (run / "states").exists() and not (tmp_path / "voice").exists()
    assert cli("merge-lora", run).code == 0
    assert "was trained on since" not in cli("export", run, tmp_path / "voice").output


@pytest.mark.parametrize("place", ["a file", "a folder that cannot be made"])
def test_a_merge_that_cannot_be_written(train, cli, tmp_path, place):
    base = write_tiny_base(tmp_path / "base")
    assert train(f"llm={base}", LORA).code == 0
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    out = tmp_path / "file" if place == "a file" else tmp_path / "file" / "model"
    assert_refused(cli("merge-lora", tmp_path / "run", "--out", out), str(out), "--out")
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"


def test_a_lora_run_that_was_not_merged_yet(train, cli, corpus, tmp_path):
    base = write_tiny_base(tmp_path / "base")
    assert train(f"llm={base}", LORA).code == 0
    result = cli("train-vocoder", f"corpus={corpus}", f"run={tmp_path / 'run'}", "vocoder=tiny")
    assert_refused(result, f"tts-stack merge-lora {tmp_path / 'run'}")
