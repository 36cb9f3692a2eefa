import dataclasses

import numpy as np
import pytest
from stage1_support import ENCODE, TOKENS, make_samples, sample_of

from stage1_llm.dataset import make_sample, measure_lengths, measure_stride, sample_prompt
from stage1_llm.vocab import Extras, build_token_map
from tts_stack.contract import PromptSpec
from tts_stack.errors import DataError
from tts_stack.records import TokenizedUtterance

TAGGED = build_token_map("abc", 10, Extras(max_run=9, speakers=("ann",)))


def test_the_length_of_a_sample_is_that_of_its_prompt():
    specs = [
        (TOKENS, PromptSpec()),
        (TOKENS, PromptSpec(format="chat", before_text=(1, 2, 3), after_text=(4, 5))),
        (TAGGED, PromptSpec(durations="tokens", max_run=9)),
        (TAGGED, PromptSpec(durations="codebook", max_run=2)),
    ]
    for tokens, spec in specs:
        utterance = TokenizedUtterance("x", "abc", np.array([3, 3, 3, 4]), speaker="ann")
        sample = make_sample(utterance, ENCODE, tokens, spec)
        assert sample.length == len(sample_prompt(sample, tokens, spec))


def test_unknown_symbols_are_counted_and_an_empty_sample_has_no_length():
    assert sample_of("aXbY", [1]).num_dropped == 2
    assert sample_of("XYZ", [1]).length == 0
    assert sample_of("abc", []).length == 0


def test_a_token_outside_the_codebook_is_named_with_its_utterance():
    with pytest.raises(DataError, match=r"s7: prompt: semantic tokens 3 .. 10, expected 0 .. 9"):
        sample_of("abc", [3, 10], id="s7")


def test_the_speaker_and_language_of_an_utterance_become_tags():
    utterance = TokenizedUtterance("x", "abc", np.array([3]), speaker="ann", language="de")
    assert make_sample(utterance, ENCODE, TAGGED, PromptSpec()).tag_ids == (TAGGED.tag_offset,)
    stranger = dataclasses.replace(utterance, speaker="bob")
    assert make_sample(stranger, ENCODE, TAGGED, PromptSpec()).tag_ids == ()


def test_stride_is_audio_positions_per_symbol():
    spec = PromptSpec()
    assert measure_stride(np.array([2, 2]), np.array([2 + 3 + 3, 2 + 5 + 3]), spec) == 2.0
    samples = make_samples()
    num_text = np.array([len(sample.text_ids) for sample in samples])
    assert measure_stride(num_text, np.array([s.length for s in samples]), spec) == 2.0


def test_lengths_are_a_fixed_part_and_a_slope():
    num_text = np.array([1, 3, 5, 9])
    spec = measure_lengths(num_text, 4 + 2 * num_text)
    assert (spec.fixed_tokens, spec.tokens_per_symbol) == pytest.approx((4.0, 2.0))
    assert (spec.low, spec.high) == pytest.approx((2.0, 2.0))


def test_lengths_of_equal_texts_go_through_the_origin():
    spec = measure_lengths(np.array([2, 2]), np.array([3, 5]))
    assert (spec.fixed_tokens, spec.tokens_per_symbol) == (0.0, 2.0)
