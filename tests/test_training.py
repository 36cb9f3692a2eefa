import json
import math
import os
import signal

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tts_stack.errors import CheckpointError, ConfigError, TTSStackError
from tts_stack.runtime import step_generator
from tts_stack.training import (
    ScheduleConfig,
    TrainerConfig,
    load_weights,
    make_fabric,
    read_metrics,
    save_weights,
    set_learning_rate,
    train,
    update,
)


class Regression:
    """Fit y = 2x with batches drawn from (seed, step)."""

    monitor = "loss"

    def __init__(self, *, poison: tuple[int, ...] = (), stop_at: int | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.fabric = make_fabric(TrainerConfig(1, 1, 1, device="cpu"))
        self.poison, self.stop_at = poison, stop_at

    def batches(self, start_step, stop_step):
        for step in range(start_step, stop_step):
            yield torch.randn(8, 1, generator=step_generator(0, step))

    def train_step(self, batch, step):
        if step == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        loss = (self.model(batch) - 2 * batch).square().mean()
        if step in self.poison:
            loss = loss * math.nan
        set_learning_rate(self.optimizer, 1 / (step + 1))
        norm = update(self.fabric, loss, self.model, self.optimizer, 1.0)
        return {"loss": loss.detach(), "grad_norm": norm}

    def validate(self):
        return {"loss": float((self.model.weight.detach() - 2).abs())}

    def state_dict(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def weights(self):
        return self.model.state_dict()


def run(task, path, steps, *, resume=False, fingerprint="corpus A", **changes):
    config = TrainerConfig(
        **{
            "max_steps": steps,
            "validate_every": 5,
            "checkpoint_every": 5,
            "log_every": 1,
            "device": "cpu",
            **changes,
        }
    )
    return train(task, path, config, resume=resume, fingerprint=fingerprint, title="test")


def test_ten_steps_and_ten_more_equal_twenty_bit_for_bit(tmp_path):
    whole, first, second = Regression(), Regression(), Regression()
    run(whole, tmp_path / "a", 20)
    run(first, tmp_path / "b", 10)
    run(second, tmp_path / "b", 20, resume=True)
    assert_close(second.model.weight, whole.model.weight, rtol=0, atol=0)
    rows = [row["train/loss"] for row in read_metrics(tmp_path / "a") if "train/loss" in row]
    resumed = [row["train/loss"] for row in read_metrics(tmp_path / "b") if "train/loss" in row]
    assert rows == resumed


def test_a_terminated_run_saves_and_resumes_to_the_same_weights(tmp_path):
    whole, second = Regression(), Regression()
    run(whole, tmp_path / "a", 20)
    with pytest.raises(TTSStackError, match=r"stopped at step 7; .*--resume"):
        run(Regression(stop_at=7), tmp_path / "b", 20)
    run(second, tmp_path / "b", 20, resume=True)
    assert_close(second.model.weight, whole.model.weight, rtol=0, atol=0)


def test_metrics_after_the_checkpoint_are_forgotten_on_resume(tmp_path):
    run(Regression(), tmp_path, 5)
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": 9, "train/loss": 1.0}) + '\n{"step": 1')  # cut by a kill
    run(Regression(), tmp_path, 6, resume=True)
    assert [row["step"] for row in read_metrics(tmp_path) if "train/loss" in row] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]


def test_the_best_weights_are_those_of_the_lowest_validation(tmp_path):
    task = Regression()
    summary = run(task, tmp_path, 20)
    best = load_weights(tmp_path / "checkpoints" / "best.safetensors")["weight"]
    assert float((best - 2).abs()) == pytest.approx(summary.best)
    assert summary.best == min(
        row["validation/loss"] for row in read_metrics(tmp_path) if "validation/loss" in row
    )


def test_a_nonfinite_step_changes_nothing_and_is_counted(tmp_path):
    poisoned = Regression(poison=(1,))
    summary = run(poisoned, tmp_path, 2, max_nonfinite_steps=2)
    alone = Regression()
    run(alone, tmp_path / "one", 1)
    assert summary.skipped_steps == 1
    assert_close(poisoned.model.weight, alone.model.weight, rtol=0, atol=0)


def test_nonfinite_steps_in_a_row_stop_training_and_keep_the_checkpoint(tmp_path):
    with pytest.raises(TTSStackError, match=r"3 steps in a row without a finite loss, .* step 9"):
        run(Regression(poison=(6, 7, 8)), tmp_path, 20, max_nonfinite_steps=3)
    assert (tmp_path / "checkpoints" / "last.ckpt").exists()


def test_a_checkpoint_of_another_corpus_is_refused(tmp_path):
    run(Regression(), tmp_path, 2)
    with pytest.raises(CheckpointError, match="trained on corpus A, this run is on corpus B"):
        run(Regression(), tmp_path, 4, resume=True, fingerprint="corpus B")


def test_a_checkpoint_past_the_wanted_steps_is_refused(tmp_path):
    run(Regression(), tmp_path, 4)
    with pytest.raises(CheckpointError, match=r"already at step 4, trainer\.max_steps is 2"):
        run(Regression(), tmp_path, 2, resume=True)


def test_a_damaged_checkpoint_is_named(tmp_path):
    run(Regression(), tmp_path, 2)
    (tmp_path / "checkpoints" / "last.ckpt").write_bytes(b"junk")
    with pytest.raises(CheckpointError, match=r"last\.ckpt: damaged checkpoint"):
        run(Regression(), tmp_path, 4, resume=True)


def test_weights_survive_the_disk_and_junk_is_refused(tmp_path):
    save_weights({"x": torch.arange(3.0)}, tmp_path / "w.safetensors")
    assert_close(load_weights(tmp_path / "w.safetensors")["x"], torch.arange(3.0))
    (tmp_path / "w.safetensors").write_bytes(b"junk")
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        load_weights(tmp_path / "w.safetensors")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("wsd", [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 1, 1, 0.55]),
        (
            "cosine",
            [1 / 3, 2 / 3]
            + [0.1 + 0.9 * (0.5 + 0.5 * math.cos(math.pi * i / 8)) for i in range(8)],
        ),
    ],
)
def test_schedules_follow_their_formula(kind, expected):
    schedule = ScheduleConfig(kind, warmup_steps=2, min_factor=0.1, decay_fraction=0.2)
    assert [schedule.factor(step, 10) for step in range(10)] == pytest.approx(expected)


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match=r"trainer\.max_steps is 0, expected at least 1"):
        TrainerConfig(0, 1, 1)
    with pytest.raises(ConfigError, match=r"trainer\.precision is '8'"):
        TrainerConfig(1, 1, 1, precision="8")
    with pytest.raises(ConfigError, match=r"schedule\.kind is 'step'"):
        ScheduleConfig("step", 1)
