import json
import math
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.testing import assert_close

from tts_stack.errors import CheckpointError, ConfigError, TTSStackError
from tts_stack.run_lock import hold
from tts_stack.runtime import open_run_dir, step_generator
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
from tts_stack.training.interrupts import StopRequest


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


def config(steps, **changes):
    values = {"validate_every": 5, "checkpoint_every": 5, "log_every": 1, "device": "cpu"}
    return TrainerConfig(steps, **{**values, **changes})


def run(task, path, steps, *, resume=False, fingerprint="corpus A", **changes):
    settings = config(steps, **changes)
    return train(task, path, settings, resume=resume, fingerprint=fingerprint, title="test")


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
    with pytest.raises(TTSStackError, match=r"stopped at step 8; .*--resume"):
        run(Regression(stop_at=7), tmp_path / "b", 20)  # in its eighth step, which is finished
    run(second, tmp_path / "b", 20, resume=True)
    assert_close(second.model.weight, whole.model.weight, rtol=0, atol=0)


def test_a_validation_due_when_the_signal_comes_is_made_up_for_on_resume(tmp_path):
    run(Regression(), tmp_path / "a", 20)
    with pytest.raises(TTSStackError, match="stopped at step 10;"):
        run(Regression(stop_at=9), tmp_path / "b", 20)
    summary = run(Regression(), tmp_path / "b", 20, resume=True)
    rows = [
        [row for row in read_metrics(tmp_path / name) if "validation/loss" in row] for name in "ab"
    ]
    assert rows[0] == rows[1]
    assert len(rows[0]) == 5 and summary.last_validation["loss"] == rows[0][-1]["validation/loss"]


def test_a_second_ctrl_c_stops_at_once():
    before = signal.getsignal(signal.SIGINT)  # a shell's background job ignores it
    with pytest.raises(KeyboardInterrupt), StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.is_set
        os.kill(os.getpid(), signal.SIGTERM)  # SLURM may send it twice
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_rising_validation_loss_is_told_once_a_rise(tmp_path, caplog):
    task = Regression()
    losses = iter([5, 4, 4.5, 4.6, 4.7, 4.8, 3, 3.1, 3.2, 2.9, 3.0, 3.1, 3.2, 3.3])
    task.validate = lambda: {"loss": next(losses)}
    run(task, tmp_path, 13, validate_every=1)
    told = [record.getMessage() for record in caplog.records if "above its best" in record.message]
    assert len(told) == 2
    assert told[0].startswith("step 4: validation loss is 4.7 and has been above its best for 3")
    assert "4 at step 1, is kept in " in told[0] and told[0].endswith("best.safetensors")
    assert "2.9 at step 9" in told[1]


def test_a_rise_is_not_told_again_after_a_resume_nor_where_it_is_expected(tmp_path, caplog):
    for steps in (4, 6):
        task = Regression()
        losses = iter([1, 2, 3, 4, 5] if steps == 4 else [6, 7])
        task.validate = lambda losses=losses: {"loss": next(losses)}
        run(task, tmp_path / "a", steps, validate_every=1, resume=steps > 4)
    assert caplog.text.count("above its best") == 1
    task = Regression()
    losses = iter([1, 2, 3, 4, 5])
    task.validate = lambda: {"loss": next(losses)}
    train(task, tmp_path / "b", config(4, validate_every=1), resume=False, fingerprint="a",
          title="t", warn_when_rising=False)  # fmt: skip
    assert caplog.text.count("above its best") == 1


def test_counts_become_speed_in_rows_of_their_own(tmp_path):
    task = Regression()
    step = task.train_step
    task.train_step = lambda *given: {**step(*given), "num_tokens": 6, "num_positions": 8}
    run(task, tmp_path, 4, log_every=2)
    rows = read_metrics(tmp_path)
    speeds = [row for row in rows if "speed/padding_waste" in row]
    assert [(row["step"], row["speed/padding_waste"]) for row in speeds] == [(2, 0.25), (4, 0.25)]
    ratio = speeds[0]["speed/tokens_per_second"] / speeds[0]["speed/steps_per_second"]
    assert ratio == pytest.approx(6)
    (trained, _) = [row for row in rows if "train/loss" in row]
    assert set(trained) == {"step", "train/loss", "train/grad_norm"}
    assert not [row for row in speeds if any(name.startswith("train/") for name in row)]


def test_steps_with_nothing_to_learn_are_counted_through_a_resume(tmp_path):
    for steps, resume in ((4, False), (6, True)):
        task = Regression()
        step = task.train_step
        task.train_step = lambda batch, number, step=step: (
            {"loss": 0.0, "empty_batches": 1} if number in (2, 4) else step(batch, number)
        )
        summary = run(task, tmp_path, steps, resume=resume)
    assert summary.empty_batches == 2
    assert summary.skipped_steps == 0


def test_each_validation_may_show_sounds_and_pictures(tmp_path):
    shown = []

    def on_validation(step, media):
        shown.append(step)
        media.add_text("tokens", f"<|step {step}|>")
        media.add_audio("speech", np.zeros(80, np.float32), 8000)
        media.add_image("spectrogram", np.zeros((4, 6, 3), np.uint8))

    train(Regression(), tmp_path, config(10), resume=False, fingerprint="a", title="t",
          on_validation=on_validation)  # fmt: skip
    assert shown == [0, 5, 10]
    events = EventAccumulator(str(tmp_path / "tensorboard"), {"tensors": 0, "audio": 0}).Reload()
    assert [event.step for event in events.Audio("speech")] == [0, 5, 10]
    assert [event.step for event in events.Images("spectrogram")] == [0, 5, 10][-4:]
    text = events.Tensors("tokens/text_summary")[-1].tensor_proto.string_val[0]
    assert b"&lt;|step 10|&gt;" in text  # what looks like a tag is text


def test_the_system_is_recorded(tmp_path):
    run(Regression(), tmp_path, 2)
    system = json.loads((tmp_path / "system.json").read_text(encoding="utf-8"))
    assert (system["device"], system["processes"], system["steps"]) == ("cpu", 1, 2)
    assert system["threads"] == torch.get_num_threads()
    assert 10 < system["peak_memory_mb"][0] < 100_000


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
    with pytest.raises(
        ConfigError, match=r"trainer\.strategy is 'dp', expected one of auto, ddp, fsdp"
    ):
        TrainerConfig(1, 1, 1, strategy="dp")
    with pytest.raises(ConfigError, match=r"trainer\.accumulate is 0, expected at least 1"):
        TrainerConfig(1, 1, 1, accumulate=0)
    with pytest.raises(ConfigError, match=r"schedule\.kind is 'step'"):
        ScheduleConfig("step", 1)


def test_two_trainings_in_one_folder_are_refused(tmp_path):
    with hold(tmp_path), pytest.raises(ConfigError, match="another training is running in it"):
        run(Regression(), tmp_path, 3)
    assert not (tmp_path / "checkpoints" / "last.ckpt").exists()
    assert run(Regression(), tmp_path, 3).steps == 3  # free again
    with hold(tmp_path), pytest.raises(ConfigError, match="another training is running in it"):
        open_run_dir(tmp_path, TrainerConfig(3, 1, 1), resume=True)
    assert not (tmp_path / "config.yaml").exists()


def test_a_killed_training_leaves_its_folder_free(tmp_path):
    script = "import sys, time\nfrom pathlib import Path\nfrom tts_stack.run_lock import hold\n"
    script += "with hold(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(60)\n"
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    with pytest.raises(ConfigError, match="another training"), hold(tmp_path):
        pass
    process.kill()
    process.wait()
    with hold(tmp_path):
        pass


def test_a_step_is_skipped_for_its_loss_too_and_then_changes_nothing():
    task = Regression()
    before = task.model.weight.detach().clone()
    loss = task.model.weight.sum() + math.nan  # its gradient is finite
    norm = update(task.fabric, loss, task.model, task.optimizer, 1.0)
    assert math.isnan(norm)
    assert torch.equal(task.model.weight, before)


def test_a_training_without_one_finite_validation_says_so(tmp_path):
    task = Regression()
    task.validate = lambda: {"loss": math.nan}
    with pytest.raises(TTSStackError, match="no validation gave a finite loss"):
        run(task, tmp_path, 3)


def test_resuming_what_is_not_there_says_so(tmp_path, caplog):
    run(Regression(), tmp_path, 3, resume=True)
    assert f"nothing to resume in {tmp_path}" in caplog.text


def test_nothing_is_shown_of_a_model_that_says_nan(tmp_path):
    shown = []
    task = Regression()
    losses = iter([2.0, math.nan, 1.0])
    task.validate = lambda: {"loss": next(losses)}
    config = TrainerConfig(2, 1, 1, device="cpu")
    train(
        task, tmp_path, config, resume=False, fingerprint="f", title="t",
        on_validation=lambda step, media: shown.append(step),
    )  # fmt: skip
    assert shown == [0, 2]
