import numpy as np
import pytest
from stage1_support import SYMBOLS, TOKENS

from stage1_llm.prompt import (
    GROUP_AUDIO,
    GROUP_END,
    GROUP_NONE,
    GROUP_TEXT,
    build_prompt,
    next_position,
    prompt_prefix,
)
from stage1_llm.vocab import Extras, build_token_map
from tts_stack.contract import PromptSpec
from tts_stack.errors import DataError

A, B = TOKENS.text_offset, TOKENS.text_offset + 1
PLAIN = PromptSpec()
ALIGNED = PromptSpec(position_scheme="aligned", text_stride=1.5)


def test_a_prompt_is_text_start_symbols_audio_start_tokens_audio_end():
    prompt = build_prompt([A, B], np.array([7, 0, 9]), TOKENS, PLAIN)
    assert prompt.token_ids.tolist() == [1, A, B, 2, 11, 4, 13, 3]
    assert prompt.num_text == 3
    assert prompt.groups.tolist() == [
        GROUP_NONE,
        *[GROUP_TEXT] * 3,
        *[GROUP_AUDIO] * 3,
        GROUP_END,
    ]


def test_plain_positions_count_up():
    prompt = build_prompt([A, B], np.array([7, 0]), TOKENS, PLAIN)
    assert prompt.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_aligned_positions_space_the_text_and_restart_at_audio_start():
    prompt = build_prompt([A, B], np.array([7, 0]), TOKENS, ALIGNED)
    assert prompt.position_ids.tolist() == [0, 1.5, 3.0, 0, 1, 2, 3]


@pytest.mark.parametrize("spec", [PLAIN, ALIGNED])
def test_the_prefix_of_synthesis_is_the_beginning_of_the_training_prompt(spec):
    whole = build_prompt([A, B, A], np.array([5, 6]), TOKENS, spec)
    prefix = prompt_prefix([A, B, A], TOKENS, spec)
    count = len(prefix)
    np.testing.assert_array_equal(whole.token_ids[:count], prefix.token_ids)
    np.testing.assert_array_equal(whole.position_ids[:count], prefix.position_ids)
    assert whole.position_ids[count] == next_position(prefix)


@pytest.mark.parametrize(
    ("text_ids", "audio", "message"),
    [
        ([], [1], "no text symbol"),
        ([A], [], r"shape \[0\], expected \[S\]"),
        ([A], [10], "10 .. 10, expected 0 .. 9"),
        ([A], [[[1, 2]]], r"shape \[1, 1, 2\]"),
    ],
)
def test_impossible_prompts_are_refused(text_ids, audio, message):
    with pytest.raises(DataError, match=message):
        build_prompt(text_ids, np.array(audio, dtype=np.int64), TOKENS, PLAIN)


FULL = build_token_map(
    SYMBOLS, 10, Extras(has_mask=True, max_run=9, speakers=("ann",), languages=("de",))
)
SOUND = FULL.semantic_offset


def test_tags_stand_between_the_marker_and_the_text_and_are_never_predicted():
    tags = FULL.tag_ids("ann", "de")
    prompt = build_prompt([A], np.array([3]), FULL, PLAIN, tags)
    assert prompt.token_ids.tolist() == [1, *tags, A, 2, SOUND + 3, 3]
    assert prompt.groups.tolist() == [-1, -1, -1, 0, 0, 1, 2]


def test_a_template_surrounds_the_text_and_is_never_predicted():
    spec = PromptSpec(format="chat", before_text=(90, 91), after_text=(92, 93))
    prompt = build_prompt([A], np.array([3]), FULL, spec)
    assert prompt.token_ids.tolist() == [90, 91, A, 92, 93, 2, SOUND + 3, 3]
    assert prompt.groups.tolist() == [-1, -1, 0, -1, -1, -1, 1, 2]
    assert prompt.num_text == 5


def test_the_other_codebooks_stand_beside_their_semantic_token():
    prompt = build_prompt([A], np.array([[3, 7], [4, 8]]), TOKENS, PLAIN)
    assert prompt.token_ids.tolist() == [1, A, 2, 7, 8, 3]
    assert prompt.codes.tolist() == [[-100], [-100], [-100], [7], [8], [-100]]
    assert prompt.run_lengths.tolist() == [0, 0, 0, 1, 1, 0]


def test_a_run_becomes_a_duration_token_and_one_token():
    spec = PromptSpec(durations="tokens", max_run=9)
    prompt = build_prompt([A], np.array([3, 3, 3, 5]), FULL, spec)
    three = FULL.duration_offset + 1
    assert prompt.token_ids[3:].tolist() == [three, SOUND + 3, SOUND + 5, 3]
    assert prompt.run_lengths[3:].tolist() == [0, 3, 1, 0]
    assert prompt.groups[3:].tolist() == [GROUP_AUDIO] * 3 + [GROUP_END]


def test_a_run_becomes_one_token_with_its_length_in_a_codebook():
    spec = PromptSpec(durations="codebook", max_run=9)
    prompt = build_prompt([A], np.array([[3, 1], [3, 1], [3, 2], [5, 2]]), TOKENS, spec)
    assert prompt.token_ids[3:].tolist() == [7, 7, 9, 3]
    assert prompt.codes[3:].tolist() == [[1, 1], [2, 0], [2, 0], [-100, -100]]
    assert prompt.run_lengths[3:].tolist() == [2, 1, 1, 0]


def test_a_masked_token_is_read_but_never_predicted():
    prompt = build_prompt([A], np.array([3, 10, 4]), FULL, PLAIN)
    assert prompt.token_ids[3:].tolist() == [SOUND + 3, FULL.mask, SOUND + 4, 3]
    assert prompt.groups[3:].tolist() == [GROUP_AUDIO, GROUP_NONE, GROUP_AUDIO, GROUP_END]
    several = build_prompt([A], np.array([[3, 1], [10, 10]]), FULL, PLAIN)
    assert several.codes[3:].tolist() == [[1], [-100], [-100]]  # nor are its other codes
