import pytest
import torch
from stage1_support import (
    TOKENS,
    loss_config,
    make_samples,
    tiny_config,
    tiny_llm,
    tiny_network,
    train_config,
)
from torch.testing import assert_close

from stage1_llm.config import OptimizerConfig
from stage1_llm.loss import figures, step_sums
from stage1_llm.module import LLMTask
from stage1_llm.network import build_network
from stage1_llm.optimizer import build_optimizers, split_parameters
from tts_stack.contract import PromptSpec
from tts_stack.training import ScheduleConfig, TrainerConfig, load_weights, make_fabric, train

SPEC = PromptSpec(position_scheme="aligned", text_stride=2.0)


def make_task(config, samples=None):
    samples = samples or make_samples(12)
    network = build_network(tiny_llm(), (), dropout=config.llm.dropout)
    lengths = [sample.length for sample in samples]
    fabric = make_fabric(config.trainer)
    validation = make_samples(4, seed=1)
    return LLMTask(network, samples, lengths, validation, TOKENS, SPEC, config, fabric)


def run(tmp_path, config, *, resume=False):
    task = make_task(config)
    return train(task, tmp_path, config.trainer, resume=resume, fingerprint="f", title="t")


@pytest.mark.parametrize("kind", ["muon_adamw", "adamw"])
def test_every_weight_is_updated_once_and_decay_spares_embeddings_and_norms(kind):
    model = tiny_network(codebook_sizes=(10,))
    config = OptimizerConfig(kind, 1.0, 1.0, 0.5, 0.9, 0.95, 1.0, 0.0)
    optimizers = build_optimizers(model, config)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    ids = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(ids) == sorted(id(parameter) for parameter in model.parameters())
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    matrices, _ = split_parameters(model)
    assert decayed == {id(parameter) for parameter in matrices}
    assert id(model.llm.get_input_embeddings().weight) not in decayed


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_ten_and_ten_steps_equal_twenty_bit_for_bit(tmp_path, precision):
    def config(stop):
        # A constant rate: the cosine of ten steps is not the first half of that of twenty.
        return train_config(
            llm=tiny_config(dropout=0.1),
            schedule=ScheduleConfig("constant", 2),
            trainer=TrainerConfig(stop, 10, 10, device="cpu", precision=precision),
        )

    run(tmp_path / "whole", config(20))
    run(tmp_path / "parts", config(10))
    run(tmp_path / "parts", config(20), resume=True)
    names = "checkpoints/final.safetensors"
    whole, parts = (
        load_weights(tmp_path / "whole" / names),
        load_weights(tmp_path / "parts" / names),
    )
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_one_batch_is_learnt_by_heart():
    config = train_config(token_noise=0.0, schedule=ScheduleConfig("constant", 1))
    task = make_task(config, make_samples(3))
    batch = next(iter(task.batches(0, 1)))
    for step in range(60):
        task.train_step(batch, step)
    found = figures(step_sums(*task.model(batch[0], torch.ones(3))))
    assert found["audio"] < 0.1
    assert found["end"] < 0.1


def test_validation_reports_stops_and_hears_the_text():
    config = train_config(token_noise=0.0, schedule=ScheduleConfig("constant", 1), max_steps=80)
    task = make_task(config, make_samples(60))
    for step, batch in enumerate(task.batches(0, 80)):
        task.train_step(batch, step)
    figures = task.validate()
    assert figures["audio_swapped_text"] > figures["audio_own_text"] + 1
    for name in ("end_precision", "end_recall", "first_audio_accuracy", "audio_accuracy"):
        assert 0.5 < figures[name] <= 1


def test_a_batch_with_nothing_to_learn_changes_nothing():
    config = train_config(loss=loss_config(0.0, 0.0, 0.0))
    task = make_task(config)
    before = {name: value.clone() for name, value in task.weights().items()}
    figures = task.train_step(next(iter(task.batches(0, 1))), 0)
    assert (figures["loss"], figures["empty_batches"]) == (0, 1)
    assert all(torch.equal(before[name], value) for name, value in task.weights().items())


def test_the_batch_of_a_step_does_not_depend_on_where_the_run_began():
    task = make_task(train_config())
    whole, later = list(task.batches(0, 12)), list(task.batches(9, 12))
    for first, second in zip(whole[9:], later, strict=True):
        assert_close(first, second, atol=0, rtol=0)


def test_a_poisoned_gradient_leaves_the_weights_alone():
    task = make_task(train_config())
    before = {name: value.clone() for name, value in task.weights().items()}
    batch = next(iter(task.batches(0, 1)))
    nothing = torch.full_like(batch[0].position_ids, float("nan"))
    poisoned = (batch[0]._replace(position_ids=nothing),)
    assert not torch.isfinite(torch.tensor(task.train_step(poisoned, 0)["grad_norm"]))
    assert all(torch.equal(before[name], value) for name, value in task.weights().items())
