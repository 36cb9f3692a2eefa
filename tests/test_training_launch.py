"""Two processes as a user starts them: by the command line itself, and by torchrun."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_semantic_train import write_corpus
from torch.testing import assert_close

from tts_stack.training import load_weights, read_metrics

pytestmark = pytest.mark.slow
DEADLINE_S = 120
SIZES = [
    "codec.sample_rate=8000",
    "codec.n_fft=256",
    "codec.hop_length=80",
    "codec.n_mels=20",
    "codec.hidden_size=24",
    "codec.ffn_size=48",
    "codec.levels=[5,5,5]",
    "batch_seconds=2",
    "trainer.device=cpu",
    "trainer.precision=32-true",
    "trainer.num_threads=1",
    "trainer.validate_every=10",
    "trainer.checkpoint_every=5",
    "trainer.log_every=1",
    "schedule.kind=constant",
]
MODULE = [sys.executable, "-m", "tts_stack"]
SCRIPT = "what pip installs as tts-stack"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "tts_stack"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def alone(corpus, tmp_path_factory):
    """Ten steps of two micro-batches in one process."""
    run = tmp_path_factory.mktemp("alone")
    done = start(MODULE, corpus, run, "trainer.max_steps=10", "trainer.accumulate=2")
    assert done.wait(DEADLINE_S) == 0, done.stdout.read()
    return run / "codec"


def start(launcher, corpus, run, *settings):
    command = [*launcher, "train-codec", f"corpus={corpus}", f"run={run}", *SIZES, *settings]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )


def wait_for(found, process):
    end = time.monotonic() + DEADLINE_S
    while not found():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < end
        time.sleep(0.02)


def losses(folder):
    return [row["train/loss"] for row in read_metrics(folder) if "train/loss" in row]


def child_of(process):
    """The process that the training started; None before there is one."""
    pids = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(pids[0]) if pids else None


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize(
    ("launcher", "strategy"),
    [(MODULE, "auto"), (SCRIPT, "fsdp"), (TORCHRUN, "ddp")],
    ids=["module", "script", "torchrun"],
)
def test_a_command_runs_in_two_processes_and_equals_one(
    corpus, alone, tmp_path, launcher, strategy
):
    if launcher is SCRIPT:
        script = tmp_path / "tts-stack"
        script.write_text("from tts_stack.cli import main\n\nmain()\n", encoding="utf-8")
        launcher = [sys.executable, str(script)]
    settings = ["trainer.max_steps=10", "trainer.devices=2", f"trainer.strategy={strategy}"]
    done = start(launcher, corpus, tmp_path, *settings)
    assert done.wait(DEADLINE_S) == 0, done.stdout.read()
    folder = tmp_path / "codec"
    assert losses(folder) == pytest.approx(losses(alone), rel=1e-5)
    found, wanted = (
        load_weights(path / "checkpoints" / "final.safetensors") for path in (folder, alone)
    )
    assert_close(found, wanted, rtol=1e-3, atol=1e-4)
    assert (folder / "codec" / "model.safetensors").exists()


def test_sigterm_to_the_command_saves_once_and_the_run_resumes(corpus, tmp_path):
    folder = tmp_path / "codec"
    running = start(MODULE, corpus, tmp_path, "trainer.max_steps=2000", "trainer.devices=2")
    wait_for(lambda: (folder / "checkpoints" / "last.ckpt").exists(), running)
    running.send_signal(signal.SIGTERM)
    assert running.wait(DEADLINE_S) == 1
    output = running.stdout.read()
    assert output.count("the checkpoint is saved: add --resume") == 1, output
    done = max(row["step"] for row in read_metrics(folder))
    more = [f"trainer.max_steps={done + 3}", "trainer.devices=2", "--resume"]
    resumed = start(MODULE, corpus, tmp_path, *more)
    assert resumed.wait(DEADLINE_S) == 0, resumed.stdout.read()
    assert len(losses(folder)) == done + 3


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads process ids from /proc")
@pytest.mark.parametrize("killed", ["main", "other"])
def test_a_process_that_is_killed_takes_the_other_with_it(corpus, tmp_path, killed):
    running = start(MODULE, corpus, tmp_path, "trainer.max_steps=100000", "trainer.devices=2")
    wait_for(lambda: (tmp_path / "codec" / "checkpoints" / "last.ckpt").exists(), running)
    pids = {"main": running.pid, "other": child_of(running)}
    os.kill(pids[killed], signal.SIGKILL)
    assert running.wait(DEADLINE_S) != 0
    end = time.monotonic() + DEADLINE_S
    while is_running(pids["other"]):
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_wrong_number_of_processes_is_one_line(corpus, tmp_path):
    done = start(TORCHRUN, corpus, tmp_path, "trainer.max_steps=10")
    assert done.wait(DEADLINE_S) != 0
    assert "is 1, but the launcher started 2 processes; make both the same" in done.stdout.read()
