import numpy as np
import pytest
from stage1_support import TOKENS

from stage1_llm.prompt import (
    GROUP_AUDIO,
    GROUP_END,
    GROUP_NONE,
    GROUP_TEXT,
    build_prompt,
    next_position,
    prompt_prefix,
)
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
        ([A], [[1, 2]], r"shape \[1, 2\]"),
    ],
)
def test_impossible_prompts_are_refused(text_ids, audio, message):
    with pytest.raises(DataError, match=message):
        build_prompt(text_ids, np.array(audio, dtype=np.int64), TOKENS, PLAIN)
