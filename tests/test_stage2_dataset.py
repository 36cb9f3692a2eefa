import dataclasses
from itertools import islice

import numpy as np
import pytest
import torch
from stage2_support import HIDDEN_SIZE, LLM, SPEC, make_corpus, make_states, row_states
from torch.testing import assert_close

from stage2_vocoder.batches import plan_crops, plan_whole
from stage2_vocoder.dataset import CachedAudio, VocoderData
from stage2_vocoder.metrics import validation_rows
from stage2_vocoder.segment import with_margin
from stage2_vocoder.states import StateIdentity, StateStore, StateWriter, corpus_hash
from tts_stack.errors import DataError
from tts_stack.shards import Corpus


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


def store_of(folder, corpus, rows, *, hidden_size=3, num_rows=None):
    """A store of made-up training states beside the right validation ones."""
    counts = {"train": len(rows) if num_rows is None else num_rows}
    identity = StateIdentity(LLM, corpus_hash(corpus))
    writer = StateWriter(folder, identity, hidden_size=hidden_size, num_rows=counts)
    writer.write("train", range(len(rows)), rows)
    writer.finish()
    return StateStore.open(folder, corpus)


def token_counts(corpus):
    return [SPEC.num_tokens(len(audio)) for audio in corpus.audio("train")]


def test_audio_shorter_than_its_tokens_claim_is_found_before_anything_is_read(tmp_path, corpus):
    counts = token_counts(corpus)
    counts[2] += 1
    store = store_of(tmp_path / "bad", corpus, [np.ones((count, 3)) for count in counts])
    message = (
        r"train-00000.parquet: train-2 is 4960 samples long, which is 31 tokens, and has hidden "
        r"states for 32; run tts-stack tokenize and extract the states again"
    )
    with pytest.raises(DataError, match=message):
        VocoderData.open(corpus, store, "train", 0)


def test_audio_shorter_than_its_shard_says_is_refused_when_it_is_read(data):
    short = [np.zeros(1600, np.float32)] * 6
    cut = dataclasses.replace(data, audio=CachedAudio(short, 0))
    with pytest.raises(DataError, match="row 0: its audio is 10 tokens long, its hidden states 45"):
        cut.whole([0])


def test_another_number_of_rows_is_refused(tmp_path, corpus):
    store = store_of(tmp_path / "bad", corpus, [np.ones((7, 3))] * 2)
    with pytest.raises(DataError, match="hidden states of 2 train utterances, .* has 6"):
        VocoderData.open(corpus, store, "train", 0)


def test_states_of_the_wrong_width_are_refused_when_they_are_read(tmp_path, corpus):
    rows = [np.ones((count, 3)) for count in token_counts(corpus)]
    store = store_of(tmp_path / "narrow", corpus, rows)
    told = dataclasses.replace(store, info=dataclasses.replace(store.info, hidden_size=4))
    data = VocoderData.open(corpus, told, "train", 0)
    with pytest.raises(DataError, match="row 1: its hidden states are 3 wide, expected 4; extract"):
        data.whole([1])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_clip_with_a_sample_that_is_no_number_is_named(data, value):
    rows = [np.zeros(800, np.float32), np.array([0.5, value, value], np.float32)]
    audio = CachedAudio(rows, 10**6)
    audio.read(0, 0, 800)
    with pytest.raises(
        DataError, match="row 1: 2 of its 3 samples are NaN or infinite, .* prepare"
    ):
        audio.read(1, 0, 3)


def test_rows_without_states_are_in_no_batch(tmp_path, corpus):
    rows = [np.ones((count, 3)) for count in token_counts(corpus)]
    rows[3] = np.zeros((0, 3))
    data = VocoderData.open(corpus, store_of(tmp_path / "some", corpus, rows), "train", 0)
    counts = data.num_tokens()
    assert counts[3] == 0
    whole = plan_whole(counts, batch_tokens=100, seed=0, start=0)
    crops = plan_crops(
        counts, batch_size=4, crop=10, margin=1, samples_per_token=160, seed=0, start=0
    )
    for plan in (whole, crops):
        seen = {row for planned in islice(plan, 20) for row in planned.rows}
        assert seen == {0, 1, 2, 4, 5}
    assert validation_rows(data, 6, 10.0) == [0, 1, 2, 4, 5]


def test_a_split_without_any_states_is_refused(tmp_path, corpus):
    store = store_of(tmp_path / "none", corpus, [np.zeros((0, 3))] * 6)
    with pytest.raises(DataError, match="no train utterance has hidden states, expected at least"):
        VocoderData.open(corpus, store, "train", 0)


def test_an_empty_split_is_refused(tmp_path, corpus):
    info = dataclasses.replace(corpus.info, shards={**corpus.info.shards, "validation": ()})
    empty = Corpus(corpus.path, info)
    make_states(tmp_path / "states", corpus)
    store = StateStore.open(tmp_path / "states", corpus)
    with pytest.raises(
        DataError, match="the validation split is empty, expected at least one clip"
    ):
        VocoderData.open(empty, store, "validation", 0)
