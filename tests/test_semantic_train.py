import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from tts_stack import training
from tts_stack.contract import TextSpec
from tts_stack.errors import CheckpointError, ConfigError, DataError
from tts_stack.records import Utterance
from tts_stack.runtime import seed_everything
from tts_stack.semantic.checkpoint import load_codec
from tts_stack.semantic.config import CodecConfig, CodecOptimizerConfig, CodecTrainConfig
from tts_stack.semantic.dataset import CodecBatch
from tts_stack.semantic.losses import CTCHead
from tts_stack.semantic.model import build_codec
from tts_stack.semantic.train import CodecTask, CodecTrainer, run_training
from tts_stack.shards import Corpus, CorpusInfo, write_info, write_shard
from tts_stack.training import ScheduleConfig, TrainerConfig, load_weights, read_metrics

RATE = 8000
TONES = {"a": 300.0, "b": 700.0, "c": 1500.0}  # one symbol is 0.15 s of one tone


def sing(text):
    time = np.arange(int(0.15 * RATE)) / RATE
    return np.concatenate([0.3 * np.sin(2 * np.pi * TONES[c] * time) for c in text])


def utterances(count, seed):
    random = np.random.default_rng(seed)
    for index in range(count):
        text = "".join(random.choice(list(TONES), size=random.integers(2, 6)))
        yield Utterance(f"{seed}-{index}", text, text, "", "", sing(text).astype(np.float32))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def write_corpus(path, sample_rate=RATE, num_validation=4, config_hash="h"):
    counts = {"train": 24, "validation": num_validation}
    for seed, (split, count) in enumerate(counts.items()):
        rows = list(utterances(count, seed))
        write_shard(
            path / f"{split}.parquet", rows, sample_rate=sample_rate, config_hash=config_hash
        )
    info = CorpusInfo(
        sample_rate=sample_rate,
        text=TextSpec("raw", "en-us"),
        symbols=tuple(TONES),
        config_hash=config_hash,
        shards={split: (f"{split}.parquet",) for split in counts},
        num_utterances=counts,
        seconds={"train": 10.0, "validation": 2.0},
    )
    write_info(path, info)
    return path


def codec_config(**changes):
    values = {
        "id": "test",
        "sample_rate": RATE,
        "n_fft": 256,
        "hop_length": 80,
        "n_mels": 20,
        "frames_per_token": 4,
        "levels": [5, 5, 5],
        "hidden_size": 24,
        "ffn_size": 48,
        "kernel_size": 3,
        "num_encoder_blocks": 1,
        "num_decoder_blocks": 1,
    }
    return CodecConfig(**{**values, **changes})


def train_config(corpus, run, *, max_steps, **changes):
    values = {
        "corpus": str(corpus),
        "run": str(run),
        "codec": codec_config(),
        "trainer": TrainerConfig(
            max_steps=max_steps, validate_every=10, checkpoint_every=10, log_every=1, device="cpu"
        ),
        "optimizer": CodecOptimizerConfig(lr=3e-3, weight_decay=0.0, max_grad_norm=1.0),
        "schedule": ScheduleConfig(kind="constant", warmup_steps=2),
        "batch_seconds": 4.0,
        "ctc_weight": 0.1,
        "ctc_steps_per_token": 2,
        "num_validation_clips": 10,
    }
    return CodecTrainConfig(**{**values, **changes})


@pytest.fixture(scope="module")
def finished_run(corpus, tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    summary = run_training(train_config(corpus, run, max_steps=20), resume=False)
    return run, summary


def test_a_run_writes_a_codec_that_loads(finished_run):
    run, summary = finished_run
    tokenizer = load_codec(run / "codec" / "codec")
    assert summary.steps == 20
    assert tokenizer.identity.codebook_size == 125
    assert tokenizer.audio_spec.samples_per_token == 320


def test_training_lowers_the_validation_loss(finished_run):
    _, summary = finished_run
    assert summary.best < summary.first_validation["loss"] * 0.7


def test_validation_reports_losses_and_codebook_use(finished_run):
    _, summary = finished_run
    assert set(summary.last_validation) == {"loss", "mel", "ctc", "codes_used", "entropy_bits"}
    assert 0 < summary.last_validation["entropy_bits"] <= np.log2(125)


def test_exported_weights_are_the_best_ones_without_the_transcript_head(finished_run):
    run, _ = finished_run
    best = load_weights(run / "codec" / "checkpoints" / "best.safetensors")
    exported = load_weights(run / "codec" / "codec" / "model.safetensors")
    assert_close(exported, {name: tensor.half() for name, tensor in best.items()})
    assert not [name for name in exported if "ctc" in name]


def test_a_resumed_run_equals_the_unbroken_one_bit_for_bit(corpus, finished_run, tmp_path):
    unbroken, _ = finished_run
    run_training(train_config(corpus, tmp_path, max_steps=10), resume=False)
    run_training(train_config(corpus, tmp_path, max_steps=20), resume=True)
    final = Path("codec") / "checkpoints" / "final.safetensors"
    expected, found = load_weights(unbroken / final), load_weights(tmp_path / final)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert read_metrics(tmp_path / "codec")[-1] == read_metrics(unbroken / "codec")[-1]


def test_one_batch_can_be_learnt(corpus, tmp_path):
    config = train_config(corpus, tmp_path, max_steps=150)
    task = CodecTask(Corpus.open(corpus), config, training.make_fabric(config.trainer))
    (batch,) = task.batches(0, 1)
    figures = [task.train_step(batch, step) for step in range(150)]
    assert float(figures[-1]["mel"]) < 0.4 * float(figures[0]["mel"])
    assert float(figures[-1]["ctc"]) < 0.2 * float(figures[0]["ctc"])


def losses_of(batch):
    seed_everything(0)
    trainer = CodecTrainer(build_codec(codec_config()), CTCHead(24, 3, steps_per_token=2))
    return trainer, trainer(batch)


def example_batch():
    mel = torch.randn(2, 20, 16, generator=torch.Generator().manual_seed(0))
    mel[1, :, 8:] = 0
    symbols = torch.tensor([[1, 2], [3, 0]])
    return CodecBatch(mel, torch.tensor([4, 2]), symbols, torch.tensor([2, 1]))


def test_padding_changes_no_loss():
    batch = example_batch()
    padded = batch._replace(
        mel=torch.nn.functional.pad(batch.mel, (0, 12), value=9.0),
        symbols=torch.nn.functional.pad(batch.symbols, (0, 3), value=2),
    )
    _, expected = losses_of(batch)
    _, found = losses_of(padded)
    assert_close(found.mel, expected.mel)
    assert_close(found.ctc, expected.ctc)


def test_transcript_gradient_passes_the_codes_into_the_encoder():
    trainer, losses = losses_of(example_batch())
    losses.ctc.backward()
    assert float(trainer.codec.patch.weight.grad.abs().sum()) > 0
    assert float(trainer.codec.to_code.weight.grad.abs().sum()) > 0
    assert trainer.codec.to_mel.weight.grad is None


def test_mel_gradient_leaves_the_transcript_head_alone():
    trainer, losses = losses_of(example_batch())
    losses.mel.backward()
    assert float(trainer.codec.patch.weight.grad.abs().sum()) > 0
    assert trainer.ctc_head.project.weight.grad is None


def test_another_sample_rate_is_refused(corpus, tmp_path):
    config = train_config(corpus, tmp_path, max_steps=1, codec=codec_config(sample_rate=16000))
    with pytest.raises(ConfigError, match=r"codec.sample_rate is 16000 Hz, .* has 8000 Hz"):
        run_training(config, resume=False)


def test_an_empty_validation_split_is_refused(tmp_path):
    path = tmp_path / "corpus"
    path.mkdir()
    write_corpus(path, num_validation=0)
    with pytest.raises(DataError, match=r"the validation split is empty, expected at least one"):
        run_training(train_config(path, tmp_path / "run", max_steps=1), resume=False)


def test_resuming_with_another_codec_is_refused_with_the_difference(corpus, tmp_path):
    run_training(train_config(corpus, tmp_path, max_steps=1), resume=False)
    other = dataclasses.replace(codec_config(), hidden_size=16)
    with pytest.raises(ConfigError, match=r"other settings: codec\.hidden_size was 24, is 16; use"):
        run_training(train_config(corpus, tmp_path, max_steps=2, codec=other), resume=True)


def test_resuming_on_another_corpus_is_refused(corpus, tmp_path):
    run_training(train_config(corpus, tmp_path, max_steps=1), resume=False)
    moved = shutil.copytree(corpus, tmp_path / "moved")
    run_training(train_config(moved, tmp_path, max_steps=2), resume=True)
    (tmp_path / "other").mkdir()
    other = write_corpus(tmp_path / "other", config_hash="i")
    with pytest.raises(
        CheckpointError, match=r"trained on corpus h with .* this run is on corpus i"
    ):
        run_training(train_config(other, tmp_path, max_steps=3), resume=True)


def test_the_loss_of_a_step_does_not_depend_on_how_it_is_divided(corpus, tmp_path):
    """Two micro-batches of one clip each, or both clips together."""

    def first_step(name, batch, **trainer):
        run_config = train_config(corpus, tmp_path / name, max_steps=1, ctc_weight=0.3)
        run_config.trainer = dataclasses.replace(run_config.trainer, **trainer)
        task = CodecTask(Corpus.open(corpus), run_config, training.make_fabric(run_config.trainer))
        return task.train_step([task.train_set.batch(clips) for clips in batch], 0)

    together, divided = first_step("a", [[0, 1, 2]]), first_step("b", [[0, 1], [2]], accumulate=2)
    for name in ("loss", "mel", "ctc", "grad_norm"):
        assert float(divided[name]) == pytest.approx(float(together[name]), rel=1e-4), name


def test_a_taken_run_folder_is_refused(corpus, tmp_path):
    run_training(train_config(corpus, tmp_path, max_steps=1), resume=False)
    with pytest.raises(ConfigError, match=r"already holds a training run; add --resume"):
        run_training(train_config(corpus, tmp_path, max_steps=1), resume=False)
