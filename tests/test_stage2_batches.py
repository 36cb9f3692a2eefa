from itertools import islice

import numpy as np
import pytest
import torch
from stage2_support import SPEC, make_corpus, make_states
from torch.testing import assert_close

from stage2_vocoder.batches import (
    BatchReader,
    StateNoise,
    crop_rows,
    length_batches,
    plan_crops,
    plan_whole,
    state_spread,
)
from stage2_vocoder.dataset import VocoderData
from stage2_vocoder.states import StateStore
from tts_stack.training import Share


@pytest.fixture
def data(tmp_path):
    corpus = make_corpus(tmp_path / "corpus")
    make_states(tmp_path / "states", corpus)
    return VocoderData.open(corpus, StateStore.open(tmp_path / "states", corpus), "train", 10**6)


def crops(data, start=0, **changes):
    settings = {"batch_size": 4, "crop": 10, "margin": 2, "seed": 0, **changes}
    return plan_crops(
        data.num_tokens(), samples_per_token=SPEC.samples_per_token, start=start, **settings
    )


def whole(data, start=0, batch_tokens=100):
    return plan_whole(data.num_tokens(), batch_tokens=batch_tokens, seed=0, start=start)


def assert_same(one, other):
    for left, right in zip(one, other, strict=True):
        assert_close(left, right, rtol=0, atol=0)


@pytest.mark.parametrize("plan", [crops, whole])
@pytest.mark.parametrize("start", [1, 4, 5, 13])
def test_a_plan_depends_on_seed_and_number_alone(data, plan, start):
    """Thirteen batches are several epochs of six utterances."""
    late, full = list(islice(plan(data, start), 4)), list(islice(plan(data), start + 4))[start:]
    assert late == full
    assert [planned.number for planned in late] == list(range(start, start + 4))
    for one, other in zip(late, full, strict=True):
        assert_same(one.read(data), other.read(data))


def test_another_seed_gives_other_crops(data):
    first, second = next(crops(data)), next(crops(data, seed=1))
    assert not torch.equal(first.read(data).audio, second.read(data).audio)


def test_every_utterance_comes_once_an_epoch_in_crop_mode():
    rows = [row for number in range(4) for row in crop_rows(6, 3, 0, number)]
    assert sorted(rows[:6]) == sorted(rows[6:]) == list(range(6))
    assert rows[:6] != rows[6:]


def test_a_batch_larger_than_the_data_goes_on_with_the_next_epoch():
    assert sorted(crop_rows(3, 7, 0, 0)[:6]) == [0, 0, 1, 1, 2, 2]


def test_batches_by_length_hold_every_row_once_within_the_budget():
    counts = np.random.default_rng(0).integers(5, 60, 100)
    batches = length_batches(counts, 200, seed=0, epoch=3)
    assert sorted(row for batch in batches for row in batch) == list(range(100))
    assert all(max(counts[batch]) * len(batch) <= 200 for batch in batches)


def test_an_utterance_over_the_budget_is_a_batch_of_its_own():
    assert sorted(length_batches(np.array([5, 500]), 100, 0, 0)) == [[0], [1]]


@pytest.mark.parametrize("crop", [15, 16, 17, 100])
def test_crops_around_a_clips_length_keep_one_shape(data, crop):
    batch = next(crops(data, batch_size=6, crop=crop, margin=1)).read(data)
    assert batch.audio.shape == (6, crop * SPEC.samples_per_token)
    assert int(batch.num_tokens.min()) == min(16, crop)


def test_two_processes_read_the_batches_of_one_that_accumulates(data):
    alone = list(BatchReader(data, Share(0, 1, 2)).steps(crops(data), 3))
    shares = [list(BatchReader(data, Share(rank, 2, 1)).steps(crops(data), 3)) for rank in (0, 1)]
    for step, first, second in zip(alone, *shares, strict=True):
        assert_same(step[0], first[0])
        assert_same(step[1], second[0])


def test_the_spread_is_the_standard_deviation_of_each_dimension(data):
    states = np.concatenate([data.states[row] for row in range(6)]).astype(np.float64)
    assert_close(state_spread(data), torch.from_numpy(states.std(0)).float())


def test_noise_has_the_configured_level_in_each_dimension_and_none_on_padding(data):
    spread = torch.linspace(0.5, 2.0, 12)
    batch = data.whole([0, 1])
    noisy = [StateNoise(spread, 0.25, seed=0).add(batch, number) for number in range(200)]
    noise = torch.stack([one.hidden_states for one in noisy]) - batch.hidden_states
    assert torch.all(noise[:, 1, :, 16:] == 0)  # the second utterance has 16 tokens of 45
    found = noise[:, 0].transpose(1, 2).reshape(-1, 12).std(0)
    assert_close(found, 0.25 * spread, rtol=0.05, atol=0)
    for name in ("lengths", "audio", "starts", "num_tokens"):
        assert getattr(noisy[0], name) is getattr(batch, name)


def test_noise_depends_on_seed_and_number_alone(data):
    batch, spread = data.whole([0]), torch.ones(12)

    def noisy(seed, number):
        return StateNoise(spread, 0.1, seed).add(batch, number).hidden_states

    assert torch.equal(noisy(0, 3), noisy(0, 3))
    assert not torch.equal(noisy(0, 3), noisy(0, 4))
    assert not torch.equal(noisy(0, 3), noisy(1, 3))


def test_level_zero_is_no_noise_at_all(data):
    assert StateNoise.of(data, 0.0, 0) is None
