import sys
from types import SimpleNamespace

import numpy as np
import pytest
from training_support import toy_config

from tts_stack.errors import ConfigError, MissingDependencyError
from tts_stack.processes import is_main_process
from tts_stack.training import make_fabric
from tts_stack.training.writers import MediaLog, WandbWriter


def test_a_process_alone_needs_no_launcher():
    fabric = make_fabric(toy_config())
    assert (fabric.world_size, fabric.device.type, is_main_process()) == (1, "cpu", True)


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID"])
def test_any_rank_above_zero_is_not_the_main_process(monkeypatch, name):
    monkeypatch.setenv(name, "0")
    assert is_main_process()
    monkeypatch.setenv(name, "1")
    assert not is_main_process()


def test_torchrun_with_another_number_of_processes_is_refused(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"num_nodes is 2, but the launcher started 4 processes"):
        make_fabric(toy_config(devices=2))


def test_srun_with_another_number_of_processes_is_refused(monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(ConfigError, match=r"num_nodes is 1, but the launcher started 2 processes"):
        make_fabric(toy_config())


def test_several_machines_need_something_that_tells_them_apart(monkeypatch):
    monkeypatch.delenv("NODE_RANK", raising=False)
    with pytest.raises(ConfigError, match=r"num_nodes is 2, but nothing says which machine"):
        make_fabric(toy_config(num_nodes=2))


def test_one_gpu_by_number_is_not_enough_for_two_processes(monkeypatch):
    monkeypatch.setattr("tts_stack.training.fabric.choose_device", lambda name: _cuda(1))
    with pytest.raises(ConfigError, match=r"device is 'cuda:1', expected cuda or cpu for 2 proc"):
        make_fabric(toy_config(devices=2, device="cuda:1"))


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr("tts_stack.training.fabric.choose_device", lambda name: _cuda(None))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"trainer\.devices is 2, this machine has 1 GPUs"):
        make_fabric(toy_config(devices=2, device="cuda"))


def test_tasks_for_one_process_say_so():
    with pytest.raises(ConfigError, match=r"accumulate is 6, train-vocoder takes 1; set all"):
        toy_config(devices=2, accumulate=3).require_one_process("train-vocoder")
    toy_config().require_one_process("train-vocoder")


def test_a_logger_whose_package_is_missing_is_named_before_anything_starts(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # how Python marks a module as missing
    with pytest.raises(MissingDependencyError, match=r"wandb_project is set, .* pip install wandb"):
        make_fabric(toy_config(wandb_project="speech"))


def test_wandb_gets_figures_and_media_and_a_resumed_run_continues(monkeypatch, tmp_path):
    calls = []
    fake = SimpleNamespace(
        Audio=lambda samples, sample_rate: ("audio", len(samples), sample_rate),
        Image=lambda pixels: ("image", pixels.shape),
        Html=lambda text: ("html", text),
        init=lambda **settings: calls.append(settings) or run,
    )
    run = SimpleNamespace(
        log=lambda figures, step: calls.append((step, figures)), finish=lambda: calls.append("end")
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    writer = WandbWriter("speech", tmp_path)
    writer.add_figures({"train/loss": 1.5}, 3)
    media = MediaLog([writer], 4)
    media.add_audio("a", np.zeros(8, np.float32), 8000)
    media.add_image("i", np.zeros((2, 3, 3), np.uint8))
    media.add_text("t", "<b>")
    writer.close()
    WandbWriter("speech", tmp_path)
    first, *logged, last = calls
    assert first["project"] == "speech" and first["resume"] == "allow"
    assert logged == [
        (3, {"train/loss": 1.5}),
        (4, {"a": ("audio", 8, 8000)}),
        (4, {"i": ("image", (2, 3, 3))}),
        (4, {"t": ("html", "<pre>&lt;b&gt;</pre>")}),
        "end",
    ]
    assert last["id"] == first["id"] and len(first["id"]) == 8


def test_media_without_a_writer_goes_nowhere():
    media = MediaLog([], 0)
    media.add_text("t", "x")
    assert not media.is_shown


def _cuda(index):
    return SimpleNamespace(type="cuda", index=index)
