import logging

import numpy as np
import pytest
from stage1_support import TOKENS, make_samples
from torch.testing import assert_close

from stage1_llm.dataset import Sample, encode_samples, measure_lengths, measure_stride
from tts_stack.errors import DataError
from tts_stack.records import TokenizedUtterance


def utterance(id, text, num_tokens):
    return TokenizedUtterance(id, text, np.zeros(num_tokens, dtype=np.int64))


def sample(num_text, num_audio):
    return Sample("x", (TOKENS.text_offset,) * num_text, np.zeros(num_audio, dtype=np.int64))


def test_empty_and_over_long_samples_are_left_out_and_named(caplog):
    utterances = [
        utterance("good", "abc", 4),
        utterance("silent", "abc", 0),
        utterance("wordless", "XYZ", 4),
        utterance("long", "abc", 8),
    ]
    with caplog.at_level(logging.WARNING):
        kept = encode_samples(utterances, TOKENS, max_length=10, split="train")
    assert [sample.id for sample in kept] == ["good"]
    assert kept[0].length == 10
    assert "2 samples without text or audio left out: silent, wordless" in caplog.text
    assert "1 samples longer than 10 tokens left out: long" in caplog.text
    assert "3 symbols unknown to the voice were dropped" in caplog.text


def test_a_split_with_nothing_left_is_an_error():
    with pytest.raises(DataError, match=r"train: none of 1 utterances .*batching.max_length=5"):
        encode_samples([utterance("long", "abc", 8)], TOKENS, max_length=5, split="train")


def test_several_codebooks_are_refused():
    many = TokenizedUtterance("x", "abc", np.zeros((4, 2), dtype=np.int64))
    with pytest.raises(DataError, match="x: 2 codebooks, stage 1 trains on one"):
        encode_samples([many], TOKENS, max_length=99, split="train")


def test_stride_is_audio_tokens_per_symbol():
    assert measure_stride([sample(2, 3), sample(2, 5)]) == 2.0
    assert measure_stride(make_samples()) == 2.0


def test_lengths_are_a_fixed_part_and_a_slope():
    spec = measure_lengths([sample(n, 4 + 2 * n) for n in (1, 3, 5, 9)])
    assert_close([spec.fixed_tokens, spec.tokens_per_symbol], [4.0, 2.0])
    assert_close([spec.low, spec.high], [2.0, 2.0])


def test_lengths_of_equal_texts_go_through_the_origin():
    spec = measure_lengths([sample(2, 3), sample(2, 5)])
    assert (spec.fixed_tokens, spec.tokens_per_symbol) == (0.0, 2.0)
