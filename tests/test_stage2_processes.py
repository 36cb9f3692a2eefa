"""Stage 2 in two CPU processes (gloo): the same step, the same weights, the same resume."""

import os

import pytest
import torch
from stage2_support import LLM, make_corpus, make_states, tiny_config
from torch.testing import assert_close
from training_support import in_processes

from stage2_vocoder import train as train_module
from stage2_vocoder.train import phase_folder, run_training
from tts_stack.errors import ConfigError
from tts_stack.shards import Corpus
from tts_stack.training import load_weights, read_metrics

FINE = [(0, ""), (0, "")]
PHASES = ["reconstruction", "adversarial"]
# Six utterances: with batches of three crops and of at most one second, several epochs.
SETTINGS = (
    "reconstruction.batch_seconds=1.2",
    "reconstruction.schedule.kind=constant",
    "adversarial.schedule.kind=constant",
    "adversarial.warmup_steps=1",
    "data.state_noise=0.1",
    "trainer.validate_every=2",
    "trainer.checkpoint_every=2",
    "discriminator.num_scales=2",
)


@pytest.fixture(scope="module")
def top(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    make_corpus(folder / "corpus")
    return folder


@pytest.fixture
def new_run(top, tmp_path):
    """A run folder, with a finished reconstruction where the adversarial phase is to start."""

    def make(name, phase):
        run = tmp_path / name
        make_states(run / "states", Corpus.open(top / "corpus"))
        if phase == "adversarial":
            assert in_processes(1, train_phase, top, run, "reconstruction", 2) == FINE[:1]
        return run

    return make


def train_phase(top, run, phase, steps, *overrides, resume=False):
    settings = (*SETTINGS, f"trainer.max_steps={steps}", *overrides)
    config = tiny_config(top / "corpus", run, *settings)
    run_training(config, phase, resume=resume, llm_sha256=LLM)


def resume_phase(*arguments):
    train_phase(*arguments, resume=True)


def final(run, phase, name="final"):
    return load_weights(phase_folder(run, phase) / "checkpoints" / f"{name}.safetensors")


def rows(run, phase):
    """Figures of every step and validation, without those of the clock and of one process."""
    found = read_metrics(phase_folder(run, phase))
    return [row for row in found if not any(name.startswith("speed/") for name in row)]


def state(run, phase):
    path = phase_folder(run, phase) / "checkpoints" / "last.ckpt"
    found = torch.load(path, weights_only=True)["task"]
    assert found.pop("phase") == phase
    return found


@pytest.mark.parametrize("phase", PHASES)
def test_two_processes_equal_one_that_accumulates_bit_for_bit(top, new_run, phase):
    alone, both = new_run("alone", phase), new_run("both", phase)
    one = in_processes(1, train_phase, top, alone, phase, 4, "trainer.accumulate=2")
    assert one == FINE[:1]
    assert in_processes(2, train_phase, top, both, phase, 4, "trainer.devices=2") == FINE
    assert rows(both, phase) == rows(alone, phase)
    for name in ("final", "best"):
        assert_close(final(both, phase, name), final(alone, phase, name), rtol=0, atol=0)
    assert_close(state(both, phase), state(alone, phase), rtol=0, atol=0)


def test_both_processes_learn_from_their_own_share(top, new_run):
    """What two processes learn is not what either would learn alone."""
    alone, both = new_run("alone", "reconstruction"), new_run("both", "reconstruction")
    assert in_processes(1, train_phase, top, alone, "reconstruction", 2) == FINE[:1]
    two = in_processes(2, train_phase, top, both, "reconstruction", 2, "trainer.devices=2")
    assert two == FINE
    first = [run_rows[1]["train/mel"] for run_rows in map(steps, (alone, both))]
    assert first[0] != pytest.approx(first[1], rel=1e-6)


def steps(run):
    return [row for row in rows(run, "reconstruction") if "train/mel" in row]


@pytest.mark.parametrize("phase", PHASES)
def test_two_steps_and_two_more_equal_four_in_two_processes(top, new_run, phase):
    whole, parts = new_run("whole", phase), new_run("parts", phase)
    two = "trainer.devices=2"
    assert in_processes(2, train_phase, top, whole, phase, 4, two) == FINE
    assert in_processes(2, train_phase, top, parts, phase, 2, two) == FINE
    # The rest alone: a run goes on with another number of processes.
    rest = in_processes(1, resume_phase, top, parts, phase, 4, "trainer.accumulate=2")
    assert rest == FINE[:1]
    assert_close(state(parts, phase), state(whole, phase), rtol=0, atol=0)


def test_the_vocoder_is_written_once(top, new_run):
    run = new_run("run", "reconstruction")
    assert in_processes(2, train_and_count_writes, top, run, "reconstruction", 2) == FINE
    assert (run / "writes").read_text() == "0\n"
    model = phase_folder(run, "reconstruction") / "model"
    assert {path.name for path in model.iterdir()} == {"config.json", "model.safetensors"}


def train_and_count_writes(top, run, phase, steps):
    real = train_module.save_vocoder

    def save(*arguments):
        with (run / "writes").open("a") as file:
            file.write(os.environ["RANK"] + "\n")
        real(*arguments)

    train_module.save_vocoder = save  # in this forked process alone
    train_phase(top, run, phase, steps, "trainer.devices=2")


def test_sharded_weights_are_refused(top, tmp_path):
    with pytest.raises(ConfigError, match="strategy is 'fsdp', train-vocoder takes auto or ddp"):
        train_phase(top, tmp_path, "reconstruction", 1, "trainer.strategy=fsdp")
