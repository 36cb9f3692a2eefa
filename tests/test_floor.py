"""`tts-stack floor`: three inputs of one vocoder, and which stage they blame."""

import json
import shutil

import numpy as np
import pytest
import torch
from stage2_support import tiny_config as vocoder_config
from torch.testing import assert_close
from voice_support import LEVELS, make_places, write_codec, write_llm

from stage2_vocoder.module import ReconstructionTask
from tts_stack.errors import CheckpointError, ConfigError
from tts_stack.floor import (
    FloorReport,
    code_inputs,
    mel_inputs,
    one_hot_digits,
    run_floor,
    with_constants,
)
from tts_stack.semantic.checkpoint import load_codec
from tts_stack.semantic.fsq import FSQ
from tts_stack.shards import Corpus
from tts_stack.states import live_states


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    return make_places(tmp_path_factory.mktemp("floor"))


@pytest.fixture
def places(template, tmp_path):
    """A copy of it to work in."""
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    return tmp_path


def floor_config(places, *overrides, max_steps=3):
    steps = (f"reconstruction.max_steps={max_steps}", f"trainer.max_steps={max_steps}")
    return vocoder_config(places / "corpus", places / "run", *steps, "data.num_shown=0", *overrides)


def test_each_input_is_trained_alike_and_the_report_is_kept(places):
    report = run_floor(floor_config(places))
    assert report.steps == 3 and list(report.figures) == ["mel", "codes", "states"]
    values = json.loads((places / "run" / "floor" / "floor.json").read_text())
    assert values["figures"] == report.figures and values["verdict"] == report.verdict
    counts = {}
    for name, width in (("mel", 4 * 10 + 2), ("codes", sum(LEVELS)), ("states", 32)):
        folder = places / "run" / "floor" / name / "vocoder" / "reconstruction"
        identity = json.loads((folder / "model" / "config.json").read_text())
        assert identity["hidden_size"] == width
        counts[name] = identity["vocoder"]
        assert {"mel", "stft"} <= report.figures[name].keys()
        assert report.figures[name]["mel"] > 0
    assert counts["mel"] == counts["codes"] == counts["states"]
    assert len({report.figures[name]["mel"] for name in report.figures}) == 3


def test_states_of_a_retrained_llm_are_not_trained_on_further(places):
    run_floor(floor_config(places))
    write_llm(places, seed=1)
    with pytest.raises(CheckpointError, match="or delete .*floor/states to train anew"):
        run_floor(floor_config(places))


def test_a_second_call_trains_nothing_and_says_the_same(places, monkeypatch):
    first = run_floor(floor_config(places))
    monkeypatch.setattr(ReconstructionTask, "train_step", None)
    assert run_floor(floor_config(places)) == first


def test_a_broken_off_call_goes_on_with_the_input_it_was_at(places, monkeypatch):
    whole = run_floor(floor_config(places))
    shutil.rmtree(places / "run" / "floor" / "codes")
    (places / "run" / "floor" / "floor.json").unlink()
    steps = []
    train_step = ReconstructionTask.train_step
    monkeypatch.setattr(
        ReconstructionTask,
        "train_step",
        lambda task, batch, step: steps.append(step) or train_step(task, batch, step),
    )
    assert run_floor(floor_config(places)) == whole
    assert steps == [0, 1, 2]


def test_other_settings_are_not_mixed_in(places):
    run_floor(floor_config(places))
    with pytest.raises(ConfigError, match="vocoder.dim was 8, is 16"):
        run_floor(floor_config(places, "vocoder.dim=16"))


def test_states_on_the_fly_need_no_cache(places):
    run_floor(floor_config(places, "data.states=on_the_fly", max_steps=1))
    assert not (places / "run" / "states").exists()


def test_several_processes_are_refused(places):
    with pytest.raises(ConfigError, match="floor takes 1"):
        run_floor(floor_config(places, "trainer.devices=2"))


def test_a_corpus_without_its_codec_is_refused(places):
    shutil.rmtree(places / "corpus" / "codec")
    with pytest.raises(CheckpointError, match="no codec/ beside its tokens"):
        run_floor(floor_config(places))


def test_a_corpus_with_another_codec_is_refused(places):
    write_codec(places / "corpus" / "codec", seed=1)
    with pytest.raises(CheckpointError, match="the tokens are of small"):
        run_floor(floor_config(places))


def open_inputs(places):
    corpus = Corpus.open(places / "corpus")
    states = live_states(places / "run", places / "corpus", device=torch.device("cpu"))
    codec = load_codec(places / "corpus" / "codec")
    return corpus, codec, mel_inputs(corpus, codec, states), code_inputs(corpus, states), states


def test_inputs_have_the_rows_and_tokens_of_the_states(places):
    _, _, mel, codes, states = open_inputs(places)
    for split in ("train", "validation"):
        rows = [reader.split(split) for reader in (mel, codes, states)]
        counts = [[part.num_tokens(row) for row in range(len(part))] for part in rows]
        assert counts[0] == counts[1] == counts[2]
        for row, count in enumerate(counts[0]):
            assert [len(part.read(row, 0, count)) for part in rows] == [count] * 3


def test_a_row_without_states_is_left_out_of_every_input(places):
    corpus, codec, _, _, states = open_inputs(places)
    states.counts["train"][2] = 0
    for reader in (mel_inputs(corpus, codec, states), code_inputs(corpus, states)):
        assert reader.split("train").num_tokens(2) == 0


def test_mel_inputs_are_the_frames_of_a_token_side_by_side(places):
    corpus, codec, mel, _, _ = open_inputs(places)
    mels = [codec.log_mel([audio])[0].T for audio in corpus.audio("train")]  # [F, K] each
    everything = torch.cat(mels)
    scaled = (mels[3] - everything.mean(0)) / everything.std(0)
    found = torch.from_numpy(mel.split("train").read(3, 2, 5)).float()
    assert_close(found[:, :40], scaled[8:20].reshape(3, 40), atol=2e-3, rtol=1e-3)
    assert_close(found[:, 40:], torch.tensor([[40.0**0.5, -(40.0**0.5)]] * 3), atol=1e-2, rtol=0)


def test_code_inputs_are_the_digits_of_fsq():
    fsq = FSQ(LEVELS)
    tokens = np.arange(12)
    found = one_hot_digits(tokens, LEVELS)
    digits = (fsq.values(torch.from_numpy(tokens)) * torch.tensor([2, 1])).long() + torch.tensor(
        [2, 1]
    )
    assert_close(found[:, :4].argmax(1), digits[:, 0])
    assert_close(found[:, 4:].argmax(1), digits[:, 1])
    assert len(found.unique(dim=0)) == 12


def test_a_layer_norm_does_not_mix_up_codes():
    found = torch.nn.functional.layer_norm(one_hot_digits(np.arange(12), LEVELS), [7])
    distances = torch.cdist(found, found) + 9 * torch.eye(12)
    assert distances.min() > 1


def test_a_layer_norm_hides_the_level_of_a_mel_only_without_the_constants():
    mel = torch.randn(1, 20)
    other = 3 * mel + 1
    norm = torch.nn.functional.layer_norm
    assert_close(norm(mel, [20]), norm(other, [20]), atol=1e-4, rtol=0)
    difference = norm(with_constants(mel), [22]) - norm(with_constants(other), [22])
    assert difference.abs().max() > 0.3


def report(mel, codes, states, **more):
    return FloorReport(
        300,
        {
            "mel": {"mel": mel, "stft": 1.0, **more},
            "codes": {"mel": codes, "stft": 1.0, **more},
            "states": {"mel": states, "stft": 1.0},
        },
    )


@pytest.mark.parametrize(
    ("figures", "wanted"),
    [
        ((0.4, 0.41, 0.42), "the decoder is the limit"),
        ((0.4, 0.38, 0.42), "the decoder is the limit"),  # states better than codes, all alike
        ((0.4, 0.6, 0.65), "the codec is the limit"),
        ((0.4, 0.45, 0.8), "the LLM is the limit"),
    ],
)
def test_the_stage_that_adds_most_is_blamed(figures, wanted):
    assert report(*figures).verdict.startswith(wanted)


def test_what_the_stages_add_is_what_the_states_cost():
    added = report(0.4, 0.5, 0.7).added
    assert list(added) == ["decoder", "codec", "llm"]
    assert sum(added.values()) == pytest.approx(0.7)


def test_a_figure_that_one_input_lacks_is_not_in_the_table():
    heading, *rows = report(0.4, 0.5, 0.7, pesq=2.0).rows()
    assert heading == ("input", "mel L1", "STFT")
    assert rows[0] == ("mel", "0.400", "1.000") and len(rows) == 3
