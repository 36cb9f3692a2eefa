import numpy as np
import pytest
import torch
from stage1_support import TOKENS, make_samples
from torch.testing import assert_close

from stage1_llm.collate import IGNORE_INDEX, collate_prompts, replace_tokens
from stage1_llm.dataset import sample_prompt
from stage1_llm.prompt import build_prompt, prompt_prefix
from tts_stack.contract import PromptSpec
from tts_stack.errors import DataError

A = TOKENS.text_offset
SPEC = PromptSpec()


def two_prompts():
    return [
        build_prompt([A, A], np.array([5]), TOKENS, SPEC),
        build_prompt([A], np.array([6]), TOKENS, SPEC),
    ]


def test_labels_are_everything_but_the_first_token_and_padding():
    batch = collate_prompts(two_prompts(), pad_id=TOKENS.pad)
    ignored = IGNORE_INDEX
    assert batch.input_ids.tolist() == [[1, A, A, 2, 9, 3], [1, A, 2, 10, 3, 0]]
    assert batch.labels.tolist() == [[ignored, A, A, 2, 9, 3], [ignored, A, 2, 10, 3, ignored]]
    assert batch.attention_mask.tolist() == [[True] * 6, [True] * 5 + [False]]
    assert batch.groups.tolist() == [[-1, 0, 0, 0, 1, 2], [-1, 0, 0, 1, 2, -1]]


def test_padding_never_carries_a_label_even_when_pad_equals_the_end():
    batch = collate_prompts(two_prompts(), pad_id=TOKENS.audio_end)
    assert batch.labels[1].tolist() == [IGNORE_INDEX, A, 2, 10, 3, IGNORE_INDEX]


def test_a_prompt_without_semantic_tokens_is_refused():
    with pytest.raises(DataError, match="prompt 0: 3 tokens, none of them semantic"):
        collate_prompts([prompt_prefix([A], TOKENS, SPEC)], pad_id=0)


def test_noise_replaces_input_audio_only_and_leaves_labels():
    prompts = [sample_prompt(sample, TOKENS, SPEC) for sample in make_samples(40)]
    batch = collate_prompts(prompts, pad_id=TOKENS.pad)
    noisy = replace_tokens(batch, TOKENS, share=0.5, generator=torch.Generator().manual_seed(0))
    is_changed = noisy.input_ids != batch.input_ids
    assert 0.3 < is_changed[batch.groups == 1].float().mean() < 0.6
    assert not is_changed[batch.groups != 1].any()
    changed = noisy.input_ids[is_changed]
    assert TOKENS.semantic_offset <= changed.min()
    assert changed.max() < TOKENS.semantic_stop
    assert_close(noisy.labels, batch.labels)
