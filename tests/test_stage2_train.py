import math

import pytest
import torch
from stage2_support import HIDDEN_SIZE, LLM, SPEC, make_corpus, make_states, tiny_config
from torch.testing import assert_close

from stage2_vocoder.checkpoint import load_vocoder, read_identity
from stage2_vocoder.train import finished_vocoder, phase_folder, run_training
from tts_stack.errors import CheckpointError, ConfigError
from tts_stack.training import load_weights, read_metrics


@pytest.fixture
def corpus(tmp_path):
    return make_corpus(tmp_path / "corpus")


@pytest.fixture
def new_run(tmp_path, corpus):
    def make(name, llm=LLM):
        make_states(tmp_path / name / "states", corpus, llm)
        return tmp_path / name

    return make


def run_phase(run, phase, steps, *overrides, resume=False, llm=LLM):
    config = tiny_config(run.parent / "corpus", run, f"trainer.max_steps={steps}", *overrides)
    return run_training(config, phase, resume=resume, llm_sha256=llm)


def final_weights(run, phase):
    return load_weights(phase_folder(run, phase) / "checkpoints" / "final.safetensors")


def losses_of(run, phase):
    rows = read_metrics(phase_folder(run, phase))
    name = "train/total" if phase == "reconstruction" else "train/generator/total"
    return {row["step"]: row[name] for row in rows if name in row}


def test_both_phases_run_and_leave_a_vocoder_that_decodes(new_run):
    run = new_run("run")
    run_phase(run, "reconstruction", 4)
    assert finished_vocoder(run) == phase_folder(run, "reconstruction") / "model"
    run_phase(run, "adversarial", 3)
    folder = finished_vocoder(run)
    assert folder == phase_folder(run, "adversarial") / "model"
    identity = read_identity(folder)
    assert (identity.llm_sha256, identity.audio, identity.phase) == (LLM, SPEC, "adversarial")
    audio = load_vocoder(folder)(torch.randn(1, HIDDEN_SIZE, 5))
    assert audio.shape == (1, 5 * SPEC.samples_per_token)
    assert torch.isfinite(audio).all()


def test_the_adversarial_phase_starts_from_the_reconstruction(new_run):
    run = new_run("run")
    last = run_phase(run, "reconstruction", 4).last_validation
    first = run_phase(run, "adversarial", 1).first_validation
    assert math.isclose(first["mel"], last["mel"], rel_tol=5e-3)  # weights went through float16


@pytest.mark.parametrize("phase", ["reconstruction", "adversarial"])
def test_ten_and_ten_steps_are_twenty_bit_for_bit(new_run, phase):
    unbroken, broken = new_run("unbroken"), new_run("broken")
    for run in (unbroken, broken):
        if phase == "adversarial":
            run_phase(run, "reconstruction", 2)
    # The schedule looks at the last step, so the first ten are a part of twenty.
    constant = (
        "reconstruction.schedule.kind=constant",
        "adversarial.schedule.kind=constant",
        "adversarial.warmup_steps=4",
    )
    run_phase(unbroken, phase, 20, *constant)
    run_phase(broken, phase, 10, *constant)
    run_phase(broken, phase, 20, *constant, resume=True)
    wanted = final_weights(unbroken, phase)
    for name, tensor in final_weights(broken, phase).items():
        assert_close(tensor, wanted[name], rtol=0, atol=0)
    assert losses_of(broken, phase) == losses_of(unbroken, phase)


def test_adversarial_without_reconstruction_names_the_command(new_run):
    with pytest.raises(
        CheckpointError, match="no finished reconstruction to start from; run tts-stack"
    ):
        run_phase(new_run("run"), "adversarial", 2)


def test_a_reconstruction_of_another_size_is_refused(new_run):
    run = new_run("run")
    run_phase(run, "reconstruction", 1)
    with pytest.raises(
        CheckpointError, match="vocoder 8/16 x 1.1, .* this run is .* vocoder 8/32 x"
    ):
        run_phase(run, "adversarial", 1, "vocoder.intermediate_dim=32")


def test_states_of_another_llm_stop_training_before_it_starts(new_run):
    run = new_run("run", llm="old")
    with pytest.raises(CheckpointError, match=f"of the LLM old, expected the LLM {LLM}"):
        run_phase(run, "reconstruction", 1)
    assert not phase_folder(run, "reconstruction").exists()


def test_a_run_is_not_overwritten_and_an_unknown_phase_is_refused(new_run):
    run = new_run("run")
    run_phase(run, "reconstruction", 1)
    with pytest.raises(ConfigError, match="already holds a training run"):
        run_phase(run, "reconstruction", 1)
    with pytest.raises(ConfigError, match="phase is 'gan', expected reconstruction or adversarial"):
        run_phase(run, "gan", 1)


def test_without_any_vocoder_the_message_says_what_to_run(tmp_path):
    with pytest.raises(CheckpointError, match="no finished vocoder; run tts-stack train-vocoder"):
        finished_vocoder(tmp_path)


def test_a_phase_with_its_own_steps_ignores_the_trainers(new_run):
    assert run_phase(new_run("run"), "reconstruction", 50, "reconstruction.max_steps=2").steps == 2
