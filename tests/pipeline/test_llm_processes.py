"""Stage 1 in two processes (gloo, CPU): the same step, the same weights, the same resume."""

import os
import shutil
import subprocess
import sys

import pytest
from base_models import write_tiny_base
from stage1_support import write_corpus
from torch.testing import assert_close

from tts_stack.training import load_weights, read_metrics

SETTINGS = [
    "llm=tiny",
    "batching.max_tokens=64",
    "batching.max_length=40",
    "trainer.precision=32-true",
    "trainer.device=cpu",
    "trainer.validate_every=4",
    "trainer.checkpoint_every=4",
    "trainer.log_every=1",
    "schedule.kind=constant",
    "num_listened=0",
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    # Twelve validation samples make several batches: both processes validate.
    folder = tmp_path_factory.mktemp("processes") / "corpus"
    return write_corpus(folder, num_train=40, num_validation=12)


def train(corpus, run, *overrides):
    """Run the command and return (final weights, metrics rows)."""
    arguments = [f"corpus={corpus}", f"run={run}", *SETTINGS, *map(str, overrides)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tts_stack", "train-llm", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    folder = run / "llm"
    rows = [row for row in read_metrics(folder) if "speed/steps_per_second" not in row]
    return load_weights(folder / "checkpoints" / "final.safetensors"), rows


def assert_same(first, second, *, atol):
    assert first[0].keys() == second[0].keys()
    for name, weight in first[0].items():
        assert_close(weight, second[0][name], atol=atol, rtol=0)
    for one, other in zip(first[1], second[1], strict=True):
        assert one == pytest.approx(other, abs=max(atol, 1e-12), rel=1e-4 if atol else 0)


def test_two_processes_equal_one_with_twice_the_micro_batches(corpus, tmp_path):
    # AdamW divides by the size of a gradient: where that is rounding noise, so is the step.
    steps = ["trainer.max_steps=4", "optimizer.kind=adamw", "optimizer.lr=1e-4"]
    one = train(corpus, tmp_path / "one", *steps, "trainer.accumulate=2")
    two = train(corpus, tmp_path / "two", *steps, "trainer.devices=2")
    assert_same(one, two, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dynamic", "packing"])
def test_sharded_weights_equal_whole_ones(corpus, tmp_path, kind):
    steps = ["trainer.max_steps=4", "optimizer.kind=adamw", "optimizer.lr=1e-4"]
    steps += [f"batching.kind={kind}", "optimizer.ema_decay=0.9"]
    one = train(corpus, tmp_path / "one", *steps, "trainer.accumulate=2")
    two = train(corpus, tmp_path / "two", *steps, "trainer.devices=2", "trainer.strategy=fsdp")
    assert_same(one, two, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("devices", [1, 2])
def test_four_and_four_steps_equal_eight_bit_for_bit(corpus, tmp_path, devices, adapter):
    settings = [
        f"trainer.devices={devices}",
        "trainer.accumulate=2",
        "batching.kind=packing",
        "batching.curriculum.start_length=12",
        "batching.curriculum.steps=6",
        "optimizer.ema_decay=0.9",
        "llm.dropout=0.1",
        "loss.text_weight={kind:linear,value:0.3,steps:6,final:0.1}",
    ]
    if adapter:
        base = write_tiny_base(tmp_path / "base", kind="qwen2", tie=True)
        settings += [f"llm={base}", "+lora=r_8_alpha_16"]
    whole = train(corpus, tmp_path / "whole", *settings, "trainer.max_steps=8")
    parts = tmp_path / "parts"
    train(corpus, parts, *settings, "trainer.max_steps=4")
    # A run planned for eight steps and stopped at four has the same checkpoint: the rate is
    # constant. Only then may the number of steps change.
    resumed = train(corpus, parts, *settings, "trainer.max_steps=8", "--resume")
    assert_same(whole, resumed, atol=0)
    shutil.rmtree(parts)
