import dataclasses
import functools
import logging
import pickle

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from stage1_support import CODEC, ENCODE, TOKENS

from stage1_llm.dataset import make_sample
from stage1_llm.store import SampleCache, open_store
from tts_stack.contract import AudioSpec, PromptSpec, TextSpec
from tts_stack.errors import DataError
from tts_stack.shards import Corpus, CorpusInfo, TokenRow, write_info, write_token_shard

AUDIO = AudioSpec(24000, 240, 4)
make = functools.partial(make_sample, encode=ENCODE, tokens=TOKENS, spec=PromptSpec())


def row(id, text, num_tokens) -> TokenRow:
    tokens = np.arange(num_tokens) % CODEC.codebook_size
    return TokenRow(id, text, text, "", "en-us", tokens, "{}")


def corpus_of(path, shards, codec=CODEC) -> Corpus:
    """A corpus whose training split has one shard for each list of rows."""
    names = [f"train-{index:05d}.parquet" for index in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        write_token_shard(path / name, rows, codec=codec, audio=AUDIO, config_hash="h")
    info = CorpusInfo(
        sample_rate=24000,
        text=TextSpec("raw", "en-us"),
        symbols=("a", "b", "c"),
        config_hash="h",
        shards={"train": tuple(names), "validation": ()},
        num_utterances={"train": sum(map(len, shards)), "validation": 0},
        seconds={"train": 1.0, "validation": 0.0},
        codec=codec,
        codec_audio=AUDIO,
        has_audio=False,
    )
    write_info(path, info)
    return Corpus.open(path)


@pytest.fixture
def corpus(tmp_path):
    """17 usable rows in three shards; s3 and s9 cannot be trained on, s12 is long."""
    rows = [row(f"s{index}", "abc"[: 1 + index % 3], 4 + index) for index in range(20)]
    rows[3], rows[9], rows[12] = row("s3", "a", 0), row("s9", "XYZ", 5), row("s12", "abc", 60)
    return corpus_of(tmp_path, [rows[:7], rows[7:8], rows[8:]])


def opened(corpus, cache_tokens=10**6, encode=make):
    return open_store(corpus, "train", encode, max_length=40, cache_tokens=cache_tokens)


def eager(corpus):
    samples = [make(utterance) for utterance in corpus.tokenized("train")]
    return [sample for sample in samples if 0 < sample.length <= 40]


def assert_same(sample, expected):
    assert_array_equal(sample.semantic_tokens, expected.semantic_tokens)
    assert dataclasses.replace(sample, semantic_tokens=expected.semantic_tokens) == expected


@pytest.mark.parametrize("cache_tokens", [0, 60, 10**6])
def test_samples_and_their_order_equal_those_read_at_once(corpus, cache_tokens):
    store, expected = opened(corpus, cache_tokens), eager(corpus)
    assert len(store) == len(expected) == 17
    for sample, wanted in zip(store, expected, strict=True):
        assert_same(sample, wanted)


@pytest.mark.parametrize("cache_tokens", [0, 60, 10**6])
def test_any_sample_is_read_in_any_order(corpus, cache_tokens):
    store, expected = opened(corpus, cache_tokens), eager(corpus)
    for index in np.random.default_rng(0).integers(-17, 17, 100):
        assert_same(store[index], expected[index])
    with pytest.raises(IndexError):
        store[17]


def test_statistics_are_those_of_the_kept_samples(corpus):
    store, expected = opened(corpus), eager(corpus)
    assert_array_equal(store.lengths, [sample.length for sample in expected])
    assert_array_equal(store.num_text, [len(sample.text_ids) for sample in expected])
    assert_array_equal(store.num_audio, [len(sample.semantic_tokens) for sample in expected])
    assert {store.lengths.dtype, store.num_text.dtype, store.num_audio.dtype} == {np.dtype("i4")}


def test_a_part_is_a_store_of_its_own_samples(corpus):
    part, expected = opened(corpus)[2:5], eager(corpus)[2:5]
    assert [sample.id for sample in part] == [sample.id for sample in expected]
    assert_array_equal(part.lengths, [sample.length for sample in expected])
    assert len(opened(corpus)[:None]) == 17


def test_samples_of_several_codebooks_keep_their_shape(tmp_path):
    codec = dataclasses.replace(CODEC, num_codebooks=2)
    tokens = np.arange(6).reshape(3, 2)
    rows = [TokenRow("x", "ab", "ab", "", "en-us", tokens.reshape(-1), "{}")]
    store = opened(corpus_of(tmp_path, [rows], codec), encode=keep_tokens)
    assert_array_equal(store[0].semantic_tokens, tokens)
    assert_array_equal(store.num_audio, [3])


def keep_tokens(utterance):
    plain = dataclasses.replace(utterance, semantic_tokens=utterance.semantic_tokens[:, 0])
    return dataclasses.replace(make(plain), semantic_tokens=utterance.semantic_tokens)


def test_a_large_cache_reads_every_row_once(corpus):
    calls = []

    def encode(utterance):
        calls.append(utterance.id)
        return make(utterance)

    store = opened(corpus, encode=encode)
    assert calls == [f"s{index}" for index in range(20)]
    assert len(list(store)) == 17
    assert len(calls) == 20


@pytest.mark.parametrize("cache_tokens", [0, 30, 100])
def test_memory_is_bounded_by_the_cache(corpus, cache_tokens):
    store = opened(corpus, cache_tokens)
    for index in np.random.default_rng(0).integers(0, 17, 200):
        store[index]
        held = store._cache._samples.values()
        size = sum(len(sample.text_ids) + len(sample.semantic_tokens) for sample in held)
        assert store._cache.num_tokens == size <= cache_tokens
    assert bool(store._cache) == (cache_tokens > 0)


def test_the_least_recently_used_sample_goes_out_first(corpus):
    samples = eager(corpus)  # of 5, 7, 9, ... ids
    cache = SampleCache(21)
    for number in range(3):
        cache.put(number, samples[number])
    assert cache.get(0) is samples[0]
    cache.put(3, samples[0])
    assert [number for number in range(4) if cache.get(number)] == [0, 2, 3]
    cache.put(4, samples[16])  # over the limit alone
    assert len(cache) == 3


def test_left_out_samples_are_counted_and_named(corpus, caplog):
    with caplog.at_level(logging.WARNING):
        opened(corpus)
    assert "train: 2 samples without text or audio left out: s3, s9" in caplog.text
    assert "train: 1 samples longer than 40 tokens left out: s12" in caplog.text
    assert "train: 3 symbols unknown to the voice were dropped" in caplog.text


def test_only_the_first_few_left_out_samples_are_named(tmp_path, caplog):
    rows = [row(f"s{index}", "a", 0) for index in range(9)] + [row("good", "a", 3)]
    opened(corpus_of(tmp_path, [rows]))
    assert "9 samples without text or audio left out: s0, s1, s2, s3, s4, …" in caplog.text


def test_a_corpus_over_the_cache_is_said_to_be_read_from_disk(corpus, caplog):
    with caplog.at_level(logging.INFO):
        opened(corpus, cache_tokens=30)
    assert "train: 3 of 17 samples fit in batching.cache_tokens=30" in caplog.text


def test_a_split_with_nothing_left_is_an_error(tmp_path):
    rows = [row("long", "abc", 60), row("empty", "", 5), row("long2", "abc", 70)]
    message = (
        r"train: none of 3 utterances is left for stage 1 \(2 longer than "
        r"batching\.max_length=40, 1 empty\)"
    )
    with pytest.raises(DataError, match=message):
        opened(corpus_of(tmp_path, [rows]))


def test_an_empty_split_is_an_error(corpus):
    with pytest.raises(DataError, match="the validation split is empty, expected at least one"):
        open_store(corpus, "validation", make, max_length=40, cache_tokens=0)


def test_tokens_of_another_codec_are_refused(corpus):
    other = dataclasses.replace(CODEC, weights_sha256="cd" * 32)
    write_info(corpus.path, dataclasses.replace(corpus.info, codec=other))
    with pytest.raises(DataError, match="tokens from codec abababababab"):
        opened(Corpus.open(corpus.path))


def test_a_store_travels_to_other_processes_without_its_cache(corpus):
    store = opened(corpus)
    store[3]
    copy = pickle.loads(pickle.dumps(store))
    assert len(copy._cache) == 0
    for sample, expected in zip(copy, store, strict=True):
        assert_same(sample, expected)
