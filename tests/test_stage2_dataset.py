import numpy as np
import pytest
import torch
from stage2_support import HIDDEN_SIZE, LLM, SPEC, make_corpus, make_states, row_states
from torch.testing import assert_close

from stage2_vocoder.dataset import (
    CachedAudio,
    VocoderData,
    crop_batches,
    crop_rows,
    length_batches,
    whole_batches,
)
from stage2_vocoder.segment import with_margin
from stage2_vocoder.states import StateIdentity, StateStore, StateWriter, corpus_hash
from tts_stack.errors import DataError


@pytest.fixture
def corpus(tmp_path):
    return make_corpus(tmp_path / "corpus")


@pytest.fixture
def data(tmp_path, corpus):
    make_states(tmp_path / "states", corpus)
    return VocoderData.open(corpus, StateStore.open(tmp_path / "states", corpus), "train", 10**6)


def test_a_whole_batch_pads_states_and_audio_alike(data, corpus):
    batch = data.whole([1, 0])
    assert batch.lengths.tolist() == [16, 45]  # 0.31 s and 0.9 s at 50 tokens a second
    assert batch.hidden_states.shape == (2, HIDDEN_SIZE, 45)
    assert batch.audio.shape == (2, 45 * SPEC.samples_per_token)
    states = torch.from_numpy(row_states("train", 1)).half().float().T
    assert_close(batch.hidden_states[0, :, :16], states)
    assert torch.all(batch.hidden_states[0, :, 16:] == 0)
    recorded = torch.from_numpy(corpus.audio("train")[1])
    assert_close(batch.audio[0, : len(recorded)], recorded, rtol=0, atol=0)
    assert torch.all(batch.audio[0, len(recorded) :] == 0)


def test_a_crops_audio_and_states_cover_the_same_tokens(data, corpus):
    batch = data.segments([0], [with_margin(20, 30, 3, 45)])
    states = torch.from_numpy(row_states("train", 0)).half().float().T
    assert_close(batch.hidden_states[0], states[:, 17:33])
    assert batch.starts.tolist() == [3]
    recorded = torch.from_numpy(corpus.audio("train")[0])
    assert_close(batch.audio[0], recorded[20 * 160 : 30 * 160], rtol=0, atol=0)


def test_the_cache_keeps_to_its_limit_and_loses_nothing():
    rows = [np.arange(4, dtype=np.float32) / 32768, np.full(4, -1, dtype=np.float32)]
    audio = CachedAudio(rows, max_bytes=8)
    for _ in range(2):
        assert_close(audio.read(0, 1, 6), np.float32([1, 2, 3, 0, 0]) / 32768)
        assert_close(audio.read(1, 0, 2), np.float32([-1, -1]))
    assert list(audio._cache) == [0]


def test_batches_depend_on_seed_and_step_alone(data):
    def crops(start, stop, seed=0):
        return list(
            crop_batches(
                data, batch_size=4, crop=10, margin=2, seed=seed, start_step=start, stop_step=stop
            )
        )

    def whole(start, stop):
        return list(whole_batches(data, batch_tokens=100, seed=0, start_step=start, stop_step=stop))

    for make in (crops, whole):
        for late, full in zip(make(5, 9), make(0, 9)[5:], strict=True):
            for one, other in zip(late, full, strict=True):
                assert_close(one, other, rtol=0, atol=0)
    assert not torch.equal(crops(0, 1)[0].audio, crops(0, 1, seed=1)[0].audio)


def test_every_utterance_comes_once_an_epoch_in_crop_mode():
    rows = [row for step in range(4) for row in crop_rows(6, 3, 0, step)]
    assert sorted(rows[:6]) == sorted(rows[6:]) == list(range(6))
    assert rows[:6] != rows[6:]


def test_batches_by_length_hold_every_row_once_within_the_budget():
    counts = np.random.default_rng(0).integers(5, 60, 100)
    batches = length_batches(counts, 200, seed=0, epoch=3)
    assert sorted(row for batch in batches for row in batch) == list(range(100))
    assert all(max(counts[batch]) * len(batch) <= 200 for batch in batches)


def test_an_utterance_over_the_budget_is_a_batch_of_its_own():
    assert sorted(length_batches(np.array([5, 500]), 100, 0, 0)) == [[0], [1]]


@pytest.mark.parametrize("crop", [15, 16, 17, 100])
def test_crops_around_a_clips_length_keep_one_shape(data, crop):
    batch = next(
        iter(
            crop_batches(data, batch_size=6, crop=crop, margin=1, seed=0, start_step=0, stop_step=1)
        )
    )
    assert batch.audio.shape == (6, crop * SPEC.samples_per_token)
    assert int(batch.num_tokens.min()) == min(16, crop)


def test_states_of_another_length_than_the_audio_are_refused(tmp_path, corpus):
    identity = StateIdentity(LLM, corpus_hash(corpus))
    writer = StateWriter(tmp_path / "bad", identity, hidden_size=3, num_rows={"train": 6})
    writer.write("train", range(6), [np.ones((7, 3))] * 6)
    writer.finish()
    data = VocoderData.open(corpus, StateStore.open(tmp_path / "bad", corpus), "train", 0)
    with pytest.raises(DataError, match="its audio is 45 tokens long, its hidden states 7"):
        data.whole([0])


def test_another_number_of_rows_is_refused(tmp_path, corpus):
    identity = StateIdentity(LLM, corpus_hash(corpus))
    writer = StateWriter(tmp_path / "bad", identity, hidden_size=3, num_rows={"train": 2})
    writer.write("train", range(2), [np.ones((7, 3))] * 2)
    writer.finish()
    with pytest.raises(DataError, match="hidden states of 2 train utterances, .* has 6"):
        VocoderData.open(corpus, StateStore.open(tmp_path / "bad", corpus), "train", 0)
