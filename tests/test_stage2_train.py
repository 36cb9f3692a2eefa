import math
import os
import signal

import numpy as np
import pytest
import torch
from stage2_support import (
    HIDDEN_SIZE,
    LLM,
    SECONDS,
    SPEC,
    flat_tensors,
    make_corpus,
    make_states,
    tiny_config,
)
from torch.testing import assert_close

from stage2_vocoder import module
from stage2_vocoder.checkpoint import load_vocoder, read_identity
from stage2_vocoder.states import StateIdentity, StateStore, StateWriter, corpus_hash
from stage2_vocoder.train import finished_vocoder, phase_folder, run_training
from tts_stack.errors import CheckpointError, ConfigError, TTSStackError
from tts_stack.shards import Corpus
from tts_stack.training import load_weights, read_metrics

TASKS = {"reconstruction": "ReconstructionTask", "adversarial": "AdversarialTask"}


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


def stop_at(monkeypatch, phase, step):
    """Let a SIGTERM arrive in the middle of a phase, once."""
    task = getattr(module, TASKS[phase])
    train_step = task.train_step

    def interrupted(self, batch, number):
        if number == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(self, batch, number)

    monkeypatch.setattr(task, "train_step", interrupted)


def test_a_run_interrupted_in_each_phase_equals_the_unbroken_one_bit_for_bit(new_run, monkeypatch):
    unbroken, broken = new_run("unbroken"), new_run("broken")
    settings = ("data.state_noise=0.2", "adversarial.warmup_steps=3", "trainer.validate_every=4")
    for phase in TASKS:
        run_phase(unbroken, phase, 10, *settings)
        with monkeypatch.context() as patch:
            stop_at(patch, phase, 4)
            with pytest.raises(TTSStackError, match="stopped at step 5; the checkpoint is saved"):
                run_phase(broken, phase, 10, *settings)
        run_phase(broken, phase, 10, *settings, resume=True)
        for name in ("last.ckpt", "final.safetensors", "best.safetensors"):
            files = [phase_folder(run, phase) / "checkpoints" / name for run in (unbroken, broken)]
            one, other = map(read_tensors, files)
            assert one.keys() == other.keys()
            for key, tensor in one.items():
                assert torch.equal(tensor, other[key]), f"{phase} {name} {key}"
        assert losses_of(broken, phase) == losses_of(unbroken, phase)


def read_tensors(path):
    """Every tensor of a checkpoint by its place."""
    if path.suffix == ".safetensors":
        return load_weights(path)
    return flat_tensors(torch.load(path, weights_only=True)["task"])


def test_a_checkpoint_holds_all_that_a_phase_needs(new_run):
    run = new_run("run")
    run_phase(run, "reconstruction", 2)
    run_phase(run, "adversarial", 3)
    states = {
        phase: torch.load(phase_folder(run, phase) / "checkpoints" / "last.ckpt", weights_only=True)
        for phase in TASKS
    }
    first, second = states["reconstruction"], states["adversarial"]
    assert (first["step"], first["task"]["step"], second["task"]["step"]) == (2, 2, 3)
    assert {phase: state["task"]["phase"] for phase, state in states.items()} == {
        "reconstruction": "reconstruction",
        "adversarial": "adversarial",
    }
    assert first["task"].keys() == {"phase", "step", "vocoder", "optimizer"}
    assert second["task"].keys() == {
        "phase",
        "step",
        "vocoder",
        "average",
        "discriminators",
        "generator_optimizer",
        "discriminator_optimizer",
    }
    optimizers = [second["task"][f"{name}_optimizer"] for name in ("generator", "discriminator")]
    for optimizer in (first["task"]["optimizer"], *optimizers):
        assert all(
            {"exp_avg", "exp_avg_sq", "step"} <= one.keys() for one in optimizer["state"].values()
        )
        assert len(optimizer["state"]) == len(optimizer["param_groups"][0]["params"])


@pytest.mark.parametrize("phase", list(TASKS))
def test_steps_without_a_finite_loss_stop_and_leave_the_last_good_checkpoint(
    new_run, monkeypatch, phase
):
    run = new_run("run")
    if phase == "adversarial":
        run_phase(run, "reconstruction", 2)
    settings = ("trainer.checkpoint_every=4", "trainer.max_nonfinite_steps=3")
    run_phase(run, phase, 4, *settings, f"{phase}.schedule.kind=constant")
    good = final_weights(run, phase)
    with monkeypatch.context() as patch:
        patch.setattr(module, "num_samples", nan_from_here)
        with pytest.raises(TTSStackError, match="3 steps in a row without a finite loss, last at"):
            run_phase(run, phase, 20, *settings, f"{phase}.schedule.kind=constant", resume=True)
    path = phase_folder(run, phase) / "checkpoints" / "last.ckpt"
    state = torch.load(path, weights_only=True)
    assert (state["step"], state["skipped_steps"]) == (4, 0)
    weights = {**state["task"]["vocoder"], **state["task"].get("average", {}).get("weights", {})}
    for name, tensor in good.items():
        assert torch.equal(weights[name], tensor), name
    summary = run_phase(run, phase, 6, *settings, f"{phase}.schedule.kind=constant", resume=True)
    assert (summary.steps, summary.skipped_steps) == (6, 0)


def nan_from_here(batch, spec):
    batch.audio.fill_(math.nan)  # what the loss is about to compare with
    return batch.num_tokens * spec.samples_per_token


def test_one_step_without_a_finite_loss_is_skipped_and_counted(new_run, monkeypatch):
    run = new_run("run")
    real, calls = module.num_samples, []

    def nan_once(batch, spec):
        calls.append(batch)
        return nan_from_here(batch, spec) if len(calls) == 2 else real(batch, spec)

    monkeypatch.setattr(module, "num_samples", nan_once)
    summary = run_phase(run, "reconstruction", 4)
    assert (summary.steps, summary.skipped_steps) == (4, 1)
    assert all(
        torch.isfinite(weight).all() for weight in final_weights(run, "reconstruction").values()
    )


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


def test_a_vocoder_of_states_of_another_width_is_refused(new_run, tmp_path):
    """The reconstruction read 12 values a token; the states of the run now have 5."""
    run = new_run("run")
    run_phase(run, "reconstruction", 1)
    corpus = Corpus.open(tmp_path / "corpus")
    narrow = StateWriter(
        tmp_path / "narrow",
        StateIdentity(LLM, corpus_hash(corpus)),
        hidden_size=5,
        num_rows=corpus.info.num_utterances,
    )
    for split, seconds in SECONDS.items():
        counts = [SPEC.num_tokens(round(second * SPEC.sample_rate)) for second in seconds]
        narrow.write(split, range(len(counts)), [np.ones((count, 5)) for count in counts])
    narrow.finish()
    store = StateStore.open(tmp_path / "narrow", corpus)
    config = tiny_config(corpus.path, run, "trainer.max_steps=1")
    with pytest.raises(
        CheckpointError, match="hidden size 12, .* this run is .* hidden size 5, .* train the recon"
    ):
        run_training(config, "adversarial", resume=False, states=store)


def test_states_that_are_handed_over_are_read_instead_of_the_runs_own(new_run, tmp_path):
    corpus = Corpus.open(tmp_path / "corpus")
    make_states(tmp_path / "elsewhere", corpus)
    store = StateStore.open(tmp_path / "elsewhere", corpus)
    config = tiny_config(corpus.path, tmp_path / "bare", "trainer.max_steps=2")
    run_training(config, "reconstruction", resume=False, states=store)
    run_phase(new_run("run"), "reconstruction", 2)
    found, wanted = (final_weights(tmp_path / name, "reconstruction") for name in ("bare", "run"))
    assert_close(found, wanted, rtol=0, atol=0)


def test_a_batch_larger_than_the_data_is_said_in_one_line_and_works(new_run, caplog):
    run = new_run("run")
    run_phase(run, "reconstruction", 1, "reconstruction.batch_seconds=1000")
    assert not caplog.records or "more than once" not in caplog.text
    run_phase(run, "adversarial", 2, "adversarial.batch_size=8")
    assert "a step takes 8 crops (adversarial.batch_size x processes x accumulate)" in caplog.text
    assert "the corpus has 6 utterances: some come more than once" in caplog.text


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
