"""Trainings in two CPU processes (gloo); each pair is forked, so a test takes about a second."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from training_support import Network, ToyTask, in_processes, read_json, toy_config, train_toy

from tts_stack.training import (
    Share,
    TrainerConfig,
    from_main,
    load_weights,
    make_fabric,
    read_metrics,
    sum_over_processes,
    total_weight,
    train,
    update,
)
from tts_stack.training import fabric as fabric_module

FINE = [(0, ""), (0, "")]


def final(folder, name="final"):
    return load_weights(folder / "checkpoints" / f"{name}.safetensors")


def steps(folder):
    return [row for row in read_metrics(folder) if "train/loss" in row]


def validations(folder):
    return [row for row in read_metrics(folder) if "validation/loss" in row]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Twenty steps of two micro-batches in one process."""
    folder = tmp_path_factory.mktemp("alone")
    train_toy(folder, toy_config(accumulate=2))
    return folder


def test_two_processes_equal_one_that_accumulates_bit_for_bit(alone, tmp_path):
    assert in_processes(2, train_toy, tmp_path, toy_config(devices=2)) == FINE
    assert steps(tmp_path) == steps(alone)
    assert validations(tmp_path) == validations(alone)
    assert_close(final(tmp_path), final(alone), rtol=0, atol=0)
    assert_close(final(tmp_path, "best"), final(alone, "best"), rtol=0, atol=0)


def test_processes_and_accumulation_go_together(tmp_path):
    train_toy(tmp_path / "alone", toy_config(accumulate=4))
    config = toy_config(devices=2, accumulate=2)
    assert in_processes(2, train_toy, tmp_path / "two", config) == FINE
    losses = [[row["train/loss"] for row in steps(tmp_path / name)] for name in ("alone", "two")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert_close(final(tmp_path / "two"), final(tmp_path / "alone"), rtol=1e-4, atol=1e-5)


def test_sharded_weights_learn_the_same(alone, tmp_path):
    config = toy_config(devices=2, strategy="fsdp")
    assert in_processes(2, train_toy, tmp_path, config) == FINE
    losses = [[row["train/loss"] for row in steps(folder)] for folder in (alone, tmp_path)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert_close(final(tmp_path), final(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ten_steps_and_ten_more_equal_twenty_in_two_processes(tmp_path, strategy):
    first, whole = (toy_config(count, devices=2, strategy=strategy) for count in (10, 20))
    assert in_processes(2, train_toy, tmp_path / "whole", whole) == FINE
    assert in_processes(2, train_toy, tmp_path / "parts", first) == FINE
    assert in_processes(2, _resume, tmp_path / "parts", whole) == FINE
    assert steps(tmp_path / "parts") == steps(tmp_path / "whole")
    last = [_state(tmp_path / name) for name in ("parts", "whole")]
    assert_close(last[0], last[1], rtol=0, atol=0)


def test_a_run_goes_on_with_another_number_of_processes(alone, tmp_path):
    assert in_processes(2, train_toy, tmp_path, toy_config(10, devices=2)) == FINE
    _resume(tmp_path, toy_config(accumulate=2))
    assert steps(tmp_path) == steps(alone)
    assert_close(final(tmp_path), final(alone), rtol=0, atol=0)


def test_sharded_checkpoints_hold_whole_tensors(tmp_path):
    config = toy_config(2, devices=2, strategy="fsdp")
    assert in_processes(2, train_toy, tmp_path, config) == FINE
    state = _state(tmp_path)
    assert state["network"]["head.weight"].shape == (4, 4)
    assert state["average"]["weights"]["head.weight"].shape == (4, 4)
    assert state["optimizer"]["state"][0]["exp_avg"].shape == (4, 4)


def test_only_the_main_process_writes(tmp_path):
    assert in_processes(2, train_toy, tmp_path, toy_config(devices=2)) == FINE
    assert [row["step"] for row in steps(tmp_path)] == list(range(1, 21))
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
    assert {path.name for path in tmp_path.iterdir()} == {
        "checkpoints",
        "metrics.jsonl",
        "run.lock",
        "system.json",
        "tensorboard",
    }
    assert len(read_json(tmp_path / "system.json")["peak_memory_mb"]) == 2


def test_a_signal_to_one_process_saves_and_ends_all(alone, tmp_path):
    main, other = in_processes(2, _stop_second_at_7, tmp_path, toy_config(devices=2))
    assert "stopped at step 7; the checkpoint is saved: add --resume" in main[1]
    assert other == (0, "SystemExit: 0")
    assert in_processes(2, _resume, tmp_path, toy_config(devices=2)) == FINE
    assert_close(final(tmp_path), final(alone), rtol=0, atol=0)


def test_an_error_in_one_process_ends_all(tmp_path):
    main, other = in_processes(2, _fail_second_at_3, tmp_path, toy_config(devices=2))
    assert "ValueError: only here" in other[1]
    assert main[0] != 0 and other[0] != 0


def test_a_nonfinite_loss_in_one_process_changes_no_weight_in_any(tmp_path):
    assert in_processes(2, _poison_second_at_3, tmp_path, toy_config(devices=2)) == FINE
    (row,) = [row for row in steps(tmp_path) if row["train/grad_norm"] != row["train/grad_norm"]]
    assert row["step"] == 4
    assert [row["step"] for row in steps(tmp_path)] == list(range(1, 21))
    assert all(torch.isfinite(weight).all() for weight in final(tmp_path).values())


def test_a_checkpoint_of_something_else_ends_all_with_one_message(tmp_path):
    train_toy(tmp_path, toy_config(4, accumulate=2))
    main, other = in_processes(2, _resume, tmp_path, toy_config(2, devices=2))
    assert "already at step 4, trainer.max_steps is 2" in main[1]
    assert other == (0, "SystemExit: 0")


def test_the_main_process_decides_what_is_best(tmp_path):
    assert in_processes(2, _validate_apart, tmp_path, toy_config(10, devices=2)) == FINE
    assert [row["validation/loss"] for row in validations(tmp_path)] == [3.0, 1.0, 2.0]


def test_only_processes_that_lightning_started_watch_their_parent():
    assert in_processes(2, _make_fabric_under_lightning) == FINE


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="reads process ids from /proc")
def test_a_process_ends_with_its_parent(tmp_path):
    (done,) = in_processes(1, _leave_a_child_behind, tmp_path / "pid")
    assert done == (0, "")
    pid = int((tmp_path / "pid").read_text())
    end = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and "(zombie)" not in _status(pid):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_what_processes_tell_each_other():
    assert in_processes(2, _talk) == FINE


def test_a_module_that_no_process_group_knows_is_refused():
    for _, error in in_processes(2, _update_bare_module):
        assert "Linear must come from fabric.setup in 2 processes" in error


def test_an_optimiser_of_weights_that_sharding_replaced_is_refused():
    for _, error in in_processes(2, _optimise_before_setup):
        assert "none of the 5 weights of the optimisers has a gradient" in error


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_shares_of_a_step_cover_its_micro_batches_once(accumulate):
    plan = list(range(12))
    shares = [list(Share(rank, 2, accumulate).steps(plan)) for rank in range(2)]
    for step, parts in enumerate(zip(*shares, strict=True)):
        size = 2 * accumulate
        assert sorted(sum(parts, [])) == plan[step * size : (step + 1) * size]
        assert [len(part) for part in parts] == [accumulate, accumulate]


def _resume(folder, config):
    train_toy(folder, config, resume=True)


def _state(folder):
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["task"]


def _is_second(task):
    return task.fabric.global_rank == 1


def _stop_second_at_7(folder, config):
    def on_step(task, step):
        if step == 6 and _is_second(task):
            os.kill(os.getpid(), signal.SIGTERM)

    train_toy(folder, config, on_step=on_step)


def _fail_second_at_3(folder, config):
    def on_step(task, step):
        if step == 3 and _is_second(task):
            raise ValueError("only here")

    train_toy(folder, config, on_step=on_step)


def _poison_second_at_3(folder, config):
    def on_step(task, step):
        task.poison = (3,) if _is_second(task) else ()

    train_toy(folder, config, on_step=on_step)


def _talk():
    fabric = make_fabric(toy_config(devices=2))
    rank = fabric.global_rank
    assert from_main(f"from {rank}") == "from 0"
    assert sum_over_processes([rank, 10.0]) == [1.0, 20.0]
    assert total_weight([2.0 + rank, 1.0]) == 7.0
    assert total_weight([0.0]) > 0


def _validate_apart(folder, config):
    task = ToyTask(config)
    losses = iter([3.0, 2.0, 1.0] if _is_second(task) else [3.0, 1.0, 2.0])
    task.validate = lambda: {"loss": next(losses)}
    summary = train(task, folder, config, resume=False, fingerprint="toy", title="toy")
    assert (summary.best, summary.best_step) == (1.0, 5)


def _make_fabric_under_lightning():
    del os.environ["TORCHELASTIC_RUN_ID"]
    watching = []
    fabric_module.end_with_parent = lambda: watching.append(True)
    fabric = make_fabric(toy_config(devices=2))
    assert watching == [True] * fabric.global_rank


def _leave_a_child_behind(path):
    ready, tell = os.pipe()
    if os.fork():
        os.read(ready, 1)
        return
    fabric_module.end_with_parent()
    path.write_text(str(os.getpid()))
    os.write(tell, b"x")
    time.sleep(60)
    os._exit(0)


def _status(pid):
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return "(zombie)"


def _update_bare_module():
    fabric = make_fabric(toy_config(devices=2))
    module = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    update(fabric, module(torch.ones(1)).sum(), module, optimizer, 1.0)


def _optimise_before_setup():
    fabric = make_fabric(toy_config(devices=2, strategy="fsdp"))
    network = Network()
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    module = fabric.setup_module(network)
    update(fabric, module(torch.ones(2, 4)), module, optimizer, 1.0)


def test_the_loss_of_a_step_is_that_of_its_rows_together(tmp_path):
    """One process, three micro-batches: what `update` sums is the mean over all rows."""
    config = TrainerConfig(1, 1, 1, device="cpu", accumulate=3)
    task = ToyTask(config)
    (batch,) = task.batches(0, 1)
    with torch.no_grad():
        wanted = task.network(torch.cat(batch)) / sum(len(micro) for micro in batch)
    assert task.train_step(batch, 0)["loss"] == pytest.approx(float(wanted), rel=1e-6)
