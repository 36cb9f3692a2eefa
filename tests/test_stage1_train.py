import dataclasses
import json

import pytest
import torch
from stage1_support import (
    CODEC,
    make_samples,
    prompt_config,
    text_of,
    train_config,
    write_corpus,
)

from stage1_llm.checkpoint import load_llm
from stage1_llm.generate import SamplingSettings, generate
from stage1_llm.train import run_training
from tts_stack.contract import CONTRACT_FILE, VoiceContract
from tts_stack.errors import CheckpointError, ConfigError, DataError
from tts_stack.shards import read_info, write_info
from tts_stack.training import TrainerConfig, load_weights


def long_config(corpus, run):
    trainer = TrainerConfig(200, validate_every=100, checkpoint_every=100, device="cpu")
    return train_config(corpus, run, trainer=trainer)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(corpus folder, run folder, summary) of a short training."""
    root = tmp_path_factory.mktemp("stage1")
    corpus = write_corpus(root / "corpus", num_train=60)
    run = root / "voice"
    summary = run_training(long_config(corpus, run), resume=False)
    return corpus, run, summary


def test_training_lowers_the_loss_and_writes_a_voice(finished):
    _, run, summary = finished
    assert summary.best < 0.5 * summary.first_validation["audio"]
    network, contract, _ = load_llm(run / "llm" / "model")
    assert (contract.name, contract.codec) == ("voice", CODEC)
    assert contract.prompt.text_stride == 2.0
    assert contract.length.tokens_per_symbol == pytest.approx(2.0)
    best = load_weights(run / "llm" / "checkpoints" / "best.safetensors")
    weight = network.llm.get_input_embeddings().weight
    assert torch.equal(weight, best["model.embed_tokens.weight"])


def test_the_voice_speaks_the_tokens_of_its_text(finished):
    _, run, _ = finished
    network, contract, encode = load_llm(run / "llm" / "model")
    sample = make_samples(1, seed=9)[0]
    text_ids = encode(text_of(sample)).ids
    settings = SamplingSettings(temperature=0, stuck_tokens=0)
    spoken = generate(network, contract, text_ids, settings, torch.Generator())
    assert spoken.finish_reason == "end"
    assert spoken.semantic_tokens.tolist() == sample.semantic_tokens.tolist()


def test_a_finished_run_is_not_overwritten_but_resumes(finished):
    corpus, run, summary = finished
    with pytest.raises(ConfigError, match="already holds a training run; add --resume"):
        run_training(long_config(corpus, run), resume=False)
    again = run_training(long_config(corpus, run), resume=True)
    assert again.best == summary.best


def test_a_run_refuses_tokens_of_another_codec(finished, tmp_path):
    _, run, _ = finished
    other = write_corpus(tmp_path / "corpus")
    info = read_info(other)
    write_info(
        other, dataclasses.replace(info, codec=dataclasses.replace(CODEC, weights_sha256="x"))
    )
    with pytest.raises(DataError, match="tokens from codec"):
        run_training(train_config(other, run), resume=True)


def test_a_corpus_without_tokens_is_refused(tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    info = dataclasses.replace(read_info(corpus), codec=None, codec_audio=None)
    write_info(corpus, info)
    with pytest.raises(DataError, match="no semantic tokens yet; run tts-stack tokenize"):
        run_training(train_config(corpus, tmp_path / "run"), resume=False)


def test_a_layer_the_model_lacks_is_refused_before_training(tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    config = train_config(corpus, tmp_path / "run", prompt=prompt_config(hidden_layer=7))
    with pytest.raises(ConfigError, match="hidden_layer is 7"):
        run_training(config, resume=False)


def copy_voice(run, folder):
    folder.mkdir()
    for file in (run / "llm" / "model").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.parametrize("name", ["voice.json", "config.json", "model.safetensors"])
def test_a_missing_file_is_named(finished, tmp_path, name):
    folder = copy_voice(finished[1], tmp_path / "copy")
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=f"no {name}, expected the folder"):
        load_llm(folder)


def test_foreign_weights_are_refused_by_their_hash(finished, tmp_path):
    folder = copy_voice(finished[1], tmp_path / "copy")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(CheckpointError, match="not of one voice"):
        load_llm(folder)


def test_a_contract_with_another_vocabulary_is_refused(finished, tmp_path):
    folder = copy_voice(finished[1], tmp_path / "copy")
    contract = VoiceContract.load(folder / CONTRACT_FILE)
    tokens = dataclasses.replace(contract.tokens, vocab_size=256)
    dataclasses.replace(contract, tokens=tokens).save(folder / CONTRACT_FILE)
    with pytest.raises(CheckpointError, match="128 embedding rows, voice.json says 256"):
        load_llm(folder)


def test_a_damaged_model_config_is_an_error_not_a_traceback(finished, tmp_path):
    folder = copy_voice(finished[1], tmp_path / "copy")
    (folder / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(CheckpointError, match="cannot be read as a causal LM"):
        load_llm(folder)


def test_a_listener_hears_every_validation_with_the_validation_samples(tmp_path):
    heard = []

    def listen(network, contract, samples, step, media):
        heard.append((step, len(samples), contract.name, hasattr(media, "add_audio")))

    config = train_config(write_corpus(tmp_path / "corpus"), tmp_path / "voice", max_steps=5)
    run_training(config, resume=False, listen=listen)
    assert heard == [(0, 4, "voice", True), (5, 4, "voice", True)]
