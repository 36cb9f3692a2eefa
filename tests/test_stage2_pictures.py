import numpy as np
import pytest
import torch
from stage2_support import SPEC, make_corpus, make_states, tiny_config

from stage2_vocoder.pictures import (
    DIFFERENCE_COLORS,
    GAP,
    LEVEL_COLORS,
    Pictures,
    colored,
    spectrogram_picture,
)
from stage2_vocoder.states import StateStore
from stage2_vocoder.train import phase_folder, run_training

WHITE = [255, 255, 255]


class Shown:
    """A MediaLog that remembers."""

    def __init__(self, is_shown=True):
        self.is_shown = is_shown
        self.images, self.sounds = {}, {}

    def add_image(self, name, pixels):
        self.images[name] = pixels

    def add_audio(self, name, samples, sample_rate):
        self.sounds[name] = (samples, sample_rate)


def test_the_ends_of_the_scale_have_the_end_colours_and_what_lies_beyond_too():
    values = torch.tensor([[-5.0, 0.0, 1.0, 7.0, float("nan")]])
    found = colored(values, LEVEL_COLORS)[0].tolist()
    first, last = list(LEVEL_COLORS[0]), list(LEVEL_COLORS[-1])
    assert found == [first, first, last, last, first]


def test_between_two_colours_lies_their_mean():
    found = colored(torch.tensor([[0.25]]), ((0, 0, 0), (100, 200, 50), (0, 0, 0)))
    assert found.tolist() == [[[50, 100, 25]]]


def test_low_frequencies_are_at_the_bottom():
    found = colored(torch.tensor([[0.0], [1.0]]), LEVEL_COLORS)
    assert found[1, 0].tolist() == list(LEVEL_COLORS[0])


def test_a_picture_is_target_output_and_difference_one_above_the_other():
    target = torch.full((6, 9), -3.0)
    output = target.clone()
    output[0, 4] += 5  # one low bin too loud
    output[5, 2] -= 5  # one high bin too quiet
    picture = spectrogram_picture(target, output)
    assert picture.shape == (3 * 6 + 2 * GAP, 9, 3) and picture.dtype == np.uint8
    first, second, third = picture[:6], picture[6 + GAP : 12 + GAP], picture[12 + 2 * GAP :]
    assert np.all(first == LEVEL_COLORS[-1])  # the loudest bin of the recording
    assert second[0, 2].tolist() == list(LEVEL_COLORS[2])  # 5 of 10 nat below
    assert second[5, 4].tolist() == list(LEVEL_COLORS[-1])  # louder than the scale
    assert third[5, 4].tolist() == list(DIFFERENCE_COLORS[2])
    assert third[0, 2].tolist() == list(DIFFERENCE_COLORS[0])
    assert third[3, 3].tolist() == list(DIFFERENCE_COLORS[1])
    assert np.all(picture[6 : 6 + GAP] == WHITE)


@pytest.fixture
def train(tmp_path):
    corpus = make_corpus(tmp_path / "corpus")
    make_states(tmp_path / "states", corpus)
    store = StateStore.open(tmp_path / "states", corpus)

    def run(phase, *overrides):
        config = tiny_config(corpus.path, tmp_path, "trainer.max_steps=2", *overrides)
        run_training(config, phase, resume=False, states=store)
        return phase_folder(tmp_path, phase)

    return run


@pytest.mark.parametrize("phase", ["reconstruction", "adversarial"])
def test_tensorboard_has_sound_and_spectrogram_of_each_shown_utterance(train, phase):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if phase == "adversarial":
        train("reconstruction")
    folder = train(phase, "data.num_shown=2", "trainer.validate_every=1")
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"audio": 0, "images": 0})
    events.Reload()
    images, sounds = events.Tags()["images"], events.Tags()["audio"]
    assert set(images) == {f"validation/{index}/spectrogram" for index in (0, 1)}
    assert set(sounds) == {
        f"validation/{index}/{w}" for index in (0, 1) for w in ("output", "target")
    }
    steps = {name: [event.step for event in events.Audio(name)] for name in sounds}
    assert steps["validation/0/output"] == [0, 1, 2]
    assert steps["validation/0/target"] == [0]
    assert [event.step for event in events.Images(images[0])] == [0, 1, 2]


def test_the_sound_is_the_validated_vocoders_and_the_target_comes_once(
    train, tmp_path, monkeypatch
):
    from stage2_vocoder import train as train_module

    made = []
    real = train_module.Pictures
    monkeypatch.setattr(
        train_module, "Pictures", lambda task, count: made.append(real(task, count)) or made[-1]
    )
    train("reconstruction")
    (pictures,) = made
    assert isinstance(pictures, Pictures)
    later, first, nobody = Shown(), Shown(), Shown(is_shown=False)
    pictures(7, later)
    pictures(0, first)
    pictures(0, nobody)
    assert not nobody.images and not nobody.sounds
    assert set(later.sounds) == {"validation/0/output", "validation/1/output"}
    assert set(first.sounds) - set(later.sounds) == {"validation/0/target", "validation/1/target"}
    batch = pictures.task.validator.batches[0]
    audio, rate = first.sounds["validation/0/target"]
    assert rate == SPEC.sample_rate and np.array_equal(audio, batch.audio[0].numpy())
    vocoder = pictures.task.vocoder.eval()
    with torch.no_grad():
        wanted = vocoder(batch.hidden_states, batch.lengths)[0]
    assert np.array_equal(later.sounds["validation/0/output"][0], wanted.numpy())
    frames = len(audio) // pictures.task.loss.mel.hop_length
    assert first.images["validation/0/spectrogram"].shape == (3 * 12 + 2 * GAP, frames, 3)


def test_nothing_is_shown_when_none_is_asked_for(train):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = train("reconstruction", "data.num_shown=0")
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert not events.Tags()["images"] and not events.Tags()["audio"]
