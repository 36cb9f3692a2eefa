from itertools import islice

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from tts_stack.contract import AudioSpec
from tts_stack.mel import LogMel
from tts_stack.records import Utterance
from tts_stack.semantic.dataset import CodecDataset, clip_mel, pack_sorted, plan_batches
from tts_stack.shards import write_shard

SPEC = AudioSpec(sample_rate=8000, hop_length=80, frames_per_token=4)


def log_mel():
    return LogMel(sample_rate=8000, n_fft=256, hop_length=80, n_mels=20)


def dataset(path, lengths, max_cache_bytes=10**6):
    random = np.random.default_rng(0)
    rows = [
        Utterance(str(i), "", "abz", "", "", random.normal(0, 0.1, length).astype(np.float32))
        for i, length in enumerate(lengths)
    ]
    write_shard(path / "train.parquet", rows, sample_rate=8000, config_hash="h")
    return CodecDataset(
        [path / "train.parquet"], ["a", "b"], log_mel(), SPEC, max_cache_bytes=max_cache_bytes
    )


@pytest.mark.parametrize("num_samples", [1, 319, 320, 321, 1000])
def test_a_clip_has_four_frames_a_token(num_samples):
    mel = clip_mel(np.zeros(num_samples, np.float32), log_mel(), SPEC)
    assert mel.shape == (4 * SPEC.num_tokens(num_samples), 20)


def test_batch_pads_with_zeros_and_counts_tokens(tmp_path):
    batch = dataset(tmp_path, [320, 641]).batch([0, 1])
    assert batch.mel.shape == (2, 20, 12)
    assert_close(batch.num_tokens, torch.tensor([1, 3]))
    assert_close(batch.mel[0, :, 4:], torch.zeros(20, 8))


def test_unknown_symbols_of_a_transcript_are_dropped(tmp_path):
    batch = dataset(tmp_path, [320]).batch([0])
    assert_close(batch.symbols, torch.tensor([[1, 2]]))
    assert_close(batch.num_symbols, torch.tensor([2]))


def test_a_full_cache_changes_no_value(tmp_path):
    cached, uncached = dataset(tmp_path, [900]), dataset(tmp_path, [900], max_cache_bytes=0)
    assert torch.equal(cached.mel(0), cached.mel(0))
    assert torch.equal(cached.mel(0), uncached.mel(0))


def test_statistics_are_those_of_the_frames(tmp_path):
    clips = dataset(tmp_path, [640, 320])
    mean, std = clips.statistics(num_clips=2)
    frames = torch.cat([clips.mel(0), clips.mel(1)])
    assert_close(mean, frames.mean(0))
    assert_close(std, frames.std(0))


def test_batches_stay_within_the_budget_padding_included():
    num_tokens = [3, 3, 4, 5, 20]
    assert pack_sorted(range(5), num_tokens, 9) == [[0, 1], [2], [3], [4]]


def test_an_epoch_visits_every_clip_once():
    lengths = [5 + i % 7 for i in range(50)]
    seen: list[int] = []
    for batch in plan_batches(lengths, 30, seed=0, start_step=0):
        assert max(lengths[clip] for clip in batch) * len(batch) <= 30
        seen += batch
        if len(seen) >= 50:
            break
    assert sorted(seen) == list(range(50))


def test_batch_of_a_step_does_not_depend_on_where_the_run_started():
    lengths = [5 + i % 7 for i in range(50)]
    whole = list(islice(plan_batches(lengths, 30, seed=3, start_step=0), 60))
    for start_step in (1, 13, 37):
        later = plan_batches(lengths, 30, seed=3, start_step=start_step)
        assert list(islice(later, 60 - start_step)) == whole[start_step:]


def test_another_seed_gives_other_batches():
    lengths = list(range(1, 60))
    first, second = (
        list(islice(plan_batches(lengths, 90, seed=seed, start_step=0), 5)) for seed in (0, 1)
    )
    assert first != second
