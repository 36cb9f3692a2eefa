import dataclasses

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from tts_stack.contract import TextSpec
from tts_stack.errors import CheckpointError, DataError
from tts_stack.records import Utterance
from tts_stack.semantic import tokenize as tokenize_module
from tts_stack.semantic.checkpoint import load_codec, save_codec
from tts_stack.semantic.config import CodecConfig
from tts_stack.semantic.model import build_codec
from tts_stack.semantic.tokenize import tokenize
from tts_stack.shards import Corpus, CorpusInfo, shard_codec, write_info, write_shard

LENGTHS = {"train-0": (900, 320, 1, 2000), "train-1": (641, 5000), "validation-0": (1500,)}


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus"
    path.mkdir()
    random = np.random.default_rng(0)
    for name, lengths in LENGTHS.items():
        rows = [
            Utterance(f"{name}-{i}", "", "a", "", "", random.normal(0, 0.1, length))
            for i, length in enumerate(lengths)
        ]
        write_shard(path / f"{name}.parquet", rows, sample_rate=8000, config_hash="h")
    info = CorpusInfo(
        sample_rate=8000,
        text=TextSpec("raw", "en-us"),
        symbols=("a",),
        config_hash="h",
        shards={
            "train": ("train-0.parquet", "train-1.parquet"),
            "validation": ("validation-0.parquet",),
        },
        num_utterances={"train": 6, "validation": 1},
        seconds={"train": 1.1, "validation": 0.2},
    )
    write_info(path, info)
    return path


def make_codec(folder, seed=0):
    config = CodecConfig(
        id="test",
        sample_rate=8000,
        n_fft=256,
        hop_length=80,
        n_mels=20,
        frames_per_token=4,
        levels=[4, 3],
        hidden_size=8,
        ffn_size=16,
        kernel_size=3,
        num_encoder_blocks=1,
        num_decoder_blocks=1,
    )
    torch.manual_seed(seed)
    save_codec(folder, config, build_codec(config).state_dict())
    return folder


@pytest.fixture
def codec(tmp_path):
    return make_codec(tmp_path / "codec")


def test_every_clip_gets_the_tokens_it_has_alone(corpus, codec):
    tokenize(corpus, codec)
    opened, tokenizer = Corpus.open(corpus), load_codec(codec)
    rows, clips = opened.tokenized("train"), opened.audio("train")
    assert len(rows) == 6
    for row, clip in zip(rows, clips, strict=True):
        assert_close(torch.from_numpy(row.semantic_tokens), tokenizer.encode([clip])[0])


def test_corpus_names_the_codec_and_its_rates(corpus, codec):
    tokenize(corpus, codec)
    opened, tokenizer = Corpus.open(corpus), load_codec(codec)
    assert opened.require_codec() == tokenizer.identity
    assert opened.audio_spec == tokenizer.audio_spec


def test_report_counts_tokens_and_speech(corpus, codec):
    progress: list[tuple[int, int]] = []
    report = tokenize(corpus, codec, lambda done, total: progress.append((done, total)))
    lengths = [length for row in LENGTHS.values() for length in row]
    assert report.num_clips == 7
    assert report.num_tokens == sum(-(-length // 320) for length in lengths)
    assert report.speech_seconds == pytest.approx(sum(lengths) / 8000)
    assert report.num_new_tokens == report.num_tokens
    assert progress == [(4, 7), (6, 7), (7, 7)]
    assert 1 <= report.perplexity <= report.codes_used <= report.codebook_size == 12
    assert report.mel_l1 is not None and report.mel_l1 > 0


def test_a_broken_call_continues_with_the_shards_left(corpus, codec, monkeypatch):
    whole = tokenize(corpus, codec)
    expected = Corpus.open(corpus).tokenized("train")
    make_codec(codec, seed=1)
    tokenize(corpus, codec)  # every shard now holds tokens of another codec
    make_codec(codec, seed=0)

    real_add_tokens = tokenize_module.add_tokens
    calls = []

    def add_one_then_stop(path, tokens, identity):
        if calls:
            raise KeyboardInterrupt
        calls.append(path)
        real_add_tokens(path, tokens, identity)

    monkeypatch.setattr(tokenize_module, "add_tokens", add_one_then_stop)
    with pytest.raises(KeyboardInterrupt):
        tokenize(corpus, codec)
    monkeypatch.setattr(tokenize_module, "add_tokens", real_add_tokens)

    report = tokenize(corpus, codec)
    assert report.skipped_shards == 1
    assert report.entropy_bits == whole.entropy_bits
    for row, expected_row in zip(Corpus.open(corpus).tokenized("train"), expected, strict=True):
        np.testing.assert_array_equal(row.semantic_tokens, expected_row.semantic_tokens)


def test_a_finished_corpus_is_left_alone(corpus, codec):
    tokenize(corpus, codec)
    before = (corpus / "train-0.parquet").stat().st_mtime_ns
    report = tokenize(corpus, codec)
    assert (report.skipped_shards, report.mel_l1, report.num_clips) == (3, None, 7)
    assert (report.num_new_tokens, report.num_tokens > 0) == (0, True)
    assert "round-trip mel error not measured" in report.describe()
    assert (corpus / "train-0.parquet").stat().st_mtime_ns == before


def test_another_sample_rate_is_refused_before_any_shard_changes(corpus, codec):
    info = Corpus.open(corpus).info
    write_info(corpus, dataclasses.replace(info, sample_rate=16000))
    with pytest.raises(DataError, match=r"sample_rate is 16000 Hz, codec test .* reads 8000 Hz"):
        tokenize(corpus, codec)
    assert shard_codec(corpus / "train-0.parquet") == ""


def test_a_folder_without_a_codec_is_refused(corpus, tmp_path):
    with pytest.raises(CheckpointError, match=r"codec.json: no such file"):
        tokenize(corpus, tmp_path)
