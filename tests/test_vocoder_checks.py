"""`check states` and `check stream`: they hold on sound code, and fail on broken code."""

import dataclasses

import numpy as np
import pytest
import torch
from stage2_support import tiny_config
from voice_support import make_places, write_llm

from stage1_llm.generate import GeneratedToken
from stage1_llm.hidden_states import teacher_forced_states
from stage2_vocoder.model import Vocoder
from stage2_vocoder.stream import StreamDecoder
from stage2_vocoder.train import run_training
from tts_stack.checks import states, stream
from tts_stack.checks.states import check_states, readable_part, state_gap
from tts_stack.checks.stream import check_stream
from tts_stack.contract import PromptSpec
from tts_stack.errors import CheckpointError, DataError
from tts_stack.shards import Corpus
from tts_stack.states import extract_states

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return make_places(tmp_path_factory.mktemp("checks"))


@pytest.fixture(autouse=True)
def short_speech(monkeypatch):
    """The tiny LLM never ends by itself."""
    monkeypatch.setattr("stage1_llm.generate.UNKNOWN_LENGTH_TOKENS", 20)


def checked(folder):
    return check_states(folder / "run", folder / "corpus", CPU)


def test_the_states_of_both_ways_agree_and_the_gap_is_told(places):
    report = checked(places)
    assert report.claims and not report.failed
    assert "layer -1, reads; 2 validation texts" in report.settings[0]
    assert "gap between states of recorded tokens and of the LLM's own" in report.settings[1]
    assert "between two takes of the LLM" in report.settings[2]


@pytest.mark.parametrize(
    "prompt",
    [
        {"num_mixed_layers": 2},
        {"state_position": "predicts", "position_scheme": "aligned", "text_stride": 1.7},
        {"durations": "tokens", "max_run": 3},
        {"durations": "codebook", "max_run": 3},
    ],
    ids=str,
)
def test_every_form_of_prompt_agrees(tmp_path, prompt):
    assert not checked(make_places(tmp_path, **prompt)).failed


def test_states_of_the_wrong_position_are_found(places, monkeypatch):
    def shifted(network, contract, encode, utterances):
        prompt = dataclasses.replace(contract.prompt, state_position="predicts")
        return teacher_forced_states(
            network, dataclasses.replace(contract, prompt=prompt), encode, utterances
        )

    monkeypatch.setattr(states, "teacher_forced_states", shifted)
    (claim,) = checked(places).failed
    assert claim.name.startswith("teacher-forced states are those of cached generation")


def test_a_cache_on_disk_is_compared_too(tmp_path):
    make_places(tmp_path)
    extract_states(tmp_path / "run", tmp_path / "corpus", device=CPU)
    report = checked(tmp_path)
    assert len(report.claims) == 2 and not report.failed
    path = tmp_path / "run" / "states" / "validation-00000.safetensors"
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file({**tensors, "states": tensors["states"] + 0.1}, path, metadata=metadata)
    (claim,) = checked(tmp_path).failed
    assert "are those of the run's LLM, rounded to float16" in claim.name


def test_a_cache_of_another_llm_is_refused(tmp_path):
    make_places(tmp_path)
    extract_states(tmp_path / "run", tmp_path / "corpus", device=CPU)
    write_llm(tmp_path, seed=1)
    with pytest.raises(CheckpointError, match="hidden states of the LLM .*, expected the LLM"):
        checked(tmp_path)


def test_a_run_without_an_llm_names_the_command(places, tmp_path):
    with pytest.raises(CheckpointError, match="run tts-stack train-llm"):
        check_states(tmp_path, places / "corpus", CPU)


def test_a_corpus_that_the_llm_cannot_read_is_told(places, monkeypatch):
    monkeypatch.setattr(Corpus, "iter_tokenized", lambda corpus, split: iter(()))
    with pytest.raises(DataError, match="no text with a symbol that the LLM knows"):
        checked(places)


def test_a_gap_is_measured_in_standard_deviations_of_each_dimension():
    true = np.random.default_rng(0).normal(0, [1.0, 10.0], (4000, 2))
    moved = state_gap(true, true + [2.0, 5.0])
    assert moved.distance == pytest.approx([2.0, 0.5], rel=0.05)
    assert moved.shift == pytest.approx([2.0, 0.5], rel=0.05)
    assert moved.spread == pytest.approx([1.0, 1.0])
    wide = state_gap(true, 2 * true)
    assert wide.spread == pytest.approx([2.0, 2.0])
    assert wide.distance.min() > 0.5 and wide.shift.max() < 0.05
    assert state_gap(true, true).distance.max() == 0


def token(code, run_length=1):
    return GeneratedToken(code, torch.zeros(1), (), run_length)


def test_without_runs_every_step_can_be_read_back():
    steps = [token(1), token(1)]
    assert readable_part(steps, PromptSpec(), is_cut=True) == steps


def test_runs_that_reading_would_join_or_that_were_cut_are_left_out():
    spec = PromptSpec(durations="tokens", max_run=3)
    full, part, other = token(1, 3), token(1, 2), token(2)
    assert readable_part([full, part, other], spec, is_cut=False) == [full, part, other]
    assert readable_part([other, part, full], spec, is_cut=False) == [other]
    assert readable_part([full, other], spec, is_cut=True) == [full]


def test_streaming_holds_on_an_untrained_vocoder(places, tmp_path):
    report = check_stream(tiny_config(places / "corpus", tmp_path))
    assert len(report.claims) == 4 and not report.failed
    assert "no vocoder in this run yet" in report.settings[0]


def test_streaming_holds_on_the_run_s_own_vocoder(tmp_path):
    make_places(tmp_path)
    extract_states(tmp_path / "run", tmp_path / "corpus", device=CPU)
    config = tiny_config(
        tmp_path / "corpus", tmp_path / "run", "reconstruction.max_steps=1", "data.num_shown=0"
    )
    run_training(config, "reconstruction", resume=False)
    report = check_stream(config)
    assert not report.failed
    assert f"{tmp_path}/run/vocoder/reconstruction/model: 0.0" in report.settings[0]


@pytest.mark.parametrize(
    ("owner", "name", "broken", "failed"),
    [
        (Vocoder, "receptive_field_tokens", lambda vocoder: 1, [2, 3]),
        (StreamDecoder, "flush", lambda decoder: torch.zeros(0), [0, 1]),
        (stream, "with_margin", None, [3]),
    ],
    ids=["a margin too small", "a tail never flushed", "a crop at the wrong place"],
)
def test_broken_streaming_is_found(places, tmp_path, monkeypatch, owner, name, broken, failed):
    whole = stream.with_margin

    def shifted(start, stop, margin, num_tokens):
        part = whole(start, stop, margin, num_tokens)
        return dataclasses.replace(part, crop_start=min(part.crop_start + 1, part.crop_stop - 1))

    monkeypatch.setattr(owner, name, broken or shifted)
    report = check_stream(tiny_config(places / "corpus", tmp_path))
    assert [index for index, claim in enumerate(report.claims) if not claim.is_met] == failed
