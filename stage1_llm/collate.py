"""Prompts -> one right-padded batch."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from stage1_llm.prompt import GROUP_AUDIO, GROUP_NONE, Prompt
from tts_stack.contract import TokenMap
from tts_stack.errors import DataError

IGNORE_INDEX = -100  # positions cross_entropy skips


class LMBatch(NamedTuple):
    """What the LLM reads in one training step."""

    input_ids: Tensor  # [B, L] int64, right-padded
    attention_mask: Tensor  # [B, L] bool, False on padding
    position_ids: Tensor  # [B, L] float32
    labels: Tensor  # [B, L] int64, the token itself; IGNORE_INDEX on <|text|> and padding
    groups: Tensor  # [B, L] int64, GROUP_* of each label

    def to(self, device: torch.device) -> "LMBatch":
        """The batch on a device."""
        return LMBatch(*(tensor.to(device) for tensor in self))


def collate_prompts(prompts: Sequence[Prompt], *, pad_id: int) -> LMBatch:
    """Right-pad prompts to the longest one; padding never has a label.

    Args:
        prompts: B whole prompts.
        pad_id: token id written on padding; it may equal a real id.

    Raises:
        DataError: a prompt holds no semantic token, so it would train nothing.
    """
    for index, prompt in enumerate(prompts):
        if not (prompt.groups == GROUP_AUDIO).any():
            raise DataError(f"prompt {index}: {len(prompt)} tokens, none of them semantic")
    groups = _pad([torch.from_numpy(prompt.groups) for prompt in prompts], GROUP_NONE)
    input_ids = _pad([torch.from_numpy(prompt.token_ids) for prompt in prompts], pad_id)
    position_ids = _pad([torch.from_numpy(prompt.position_ids) for prompt in prompts], 0)
    lengths = torch.tensor([len(prompt) for prompt in prompts])  # [B]
    attention_mask = torch.arange(input_ids.shape[1]) < lengths[:, None]  # [B, L]
    labels = input_ids.masked_fill(groups == GROUP_NONE, IGNORE_INDEX)
    return LMBatch(input_ids, attention_mask, position_ids, labels, groups)


def replace_tokens(
    batch: LMBatch, tokens: TokenMap, *, share: float, generator: torch.Generator
) -> LMBatch:
    """Replace a share of the INPUT semantic tokens at random; labels stay as they are.

    At synthesis the model reads its own, sometimes wrong, tokens; this teaches it to go on.
    """
    if not share:
        return batch
    shape = batch.input_ids.shape
    is_hit = torch.rand(shape, generator=generator) < share
    random_ids = torch.randint(
        tokens.semantic_offset, tokens.semantic_stop, shape, generator=generator
    )
    replaced = torch.where(is_hit & (batch.groups == GROUP_AUDIO), random_ids, batch.input_ids)
    return batch._replace(input_ids=replaced)


def _pad(rows: list[Tensor], value: int) -> Tensor:
    return pad_sequence(rows, batch_first=True, padding_value=value)
