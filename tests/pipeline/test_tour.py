"""The README's tour on the demonstration corpus, and a kill in the middle of each training."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import soundfile
from pipeline_sizes import SMALL_CODEC, SMALL_LLM, SMALL_VOCODER

from tts_stack.training import read_metrics

pytestmark = pytest.mark.slow


def test_the_tour_runs_with_nothing_but_a_step_count(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli("train-llm", "trainer.max_steps=4").code == 0
    assert cli("train-vocoder", "trainer.max_steps=3").code == 0
    assert cli("train-vocoder", "trainer.max_steps=2", "--phase", "adversarial").code == 0
    assert cli("synth", "hello", "out.wav", "--voice", "runs/demo").code == 0
    assert soundfile.info("out.wav").samplerate == 24000
    assert read_metrics(Path("runs/demo/llm"))[-1]["step"] == 4
    assert read_metrics(Path("runs/demo/vocoder/adversarial"))[-1]["step"] == 2


@pytest.mark.parametrize(
    ("command", "folder", "sizes"),
    [
        (["train-codec"], "codec", SMALL_CODEC),
        (["train-llm"], "llm", SMALL_LLM),
        (["train-vocoder"], "vocoder/reconstruction", SMALL_VOCODER),
        (["train-vocoder", "--phase", "adversarial"], "vocoder/adversarial", SMALL_VOCODER),
    ],
    ids=["codec", "llm", "reconstruction", "adversarial"],
)
def test_a_killed_training_resumes_and_meets_the_unbroken_run(
    small_run, tmp_path, command, folder, sizes
):
    last_figures = []
    for name in ("unbroken", "killed"):
        run = tmp_path / name
        _copy_without(small_run.run, run, folder)
        arguments = [*command, f"corpus={small_run.corpus}", f"run={run}", *sizes,
                     "trainer.max_steps=24", "trainer.validate_every=12",
                     "trainer.checkpoint_every=4", "trainer.log_every=1"]  # fmt: skip
        if name == "killed":
            _kill_after_a_checkpoint(arguments, run / folder)
            arguments.append("--resume")
        subprocess.run([sys.executable, "-m", "tts_stack", *arguments], check=True)
        rows = [row for row in read_metrics(run / folder) if "train/grad_norm" in row or
                "train/generator/grad_norm" in row]  # fmt: skip
        assert [row["step"] for row in rows] == list(range(1, 25))
        last_figures.append(rows[-1])
    assert last_figures[0] == last_figures[1]


def _copy_without(source: Path, target: Path, folder: str) -> None:
    import shutil

    shutil.copytree(source, target)
    shutil.rmtree(target / folder)


def _kill_after_a_checkpoint(arguments: list[str], folder: Path) -> None:
    process = subprocess.Popen([sys.executable, "-m", "tts_stack", *arguments])
    deadline = time.monotonic() + 240
    while not (folder / "checkpoints" / "last.ckpt").exists():
        assert process.poll() is None, "training ended before its first checkpoint"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
