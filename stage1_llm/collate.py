"""Prompts -> one batch: right-padded rows, or one row with the samples one after the other."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from stage1_llm.prompt import GROUP_NONE, Prompt
from stage1_llm.stream import IGNORE_INDEX
from tts_stack.contract import TokenMap
from tts_stack.errors import DataError


class LMBatch(NamedTuple):
    """What the LLM reads in one training step."""

    input_ids: Tensor  # [B, L] int64, right-padded
    attention_mask: Tensor  # [B, L] bool, False on padding
    position_ids: Tensor  # [B, L] float32
    labels: Tensor  # [B, L] int64, the token itself; IGNORE_INDEX without a label
    groups: Tensor  # [B, L] int64, GROUP_* of each label
    codes: Tensor  # [B, L, C] int64, other codebooks of a semantic token, IGNORE_INDEX else
    segment_lengths: Tensor | None = None  # [N] of a packed row (B = 1), whose sum is L

    def to(self, device: torch.device) -> "LMBatch":
        """The batch on a device."""
        moved = {name: x.to(device) for name, x in self._asdict().items() if x is not None}
        return LMBatch(**moved)

    @property
    def num_tokens(self) -> int:
        """Positions that are not padding."""
        return int(self.attention_mask.sum())


def collate_prompts(prompts: Sequence[Prompt], *, pad_id: int) -> LMBatch:
    """Right-pad prompts to the longest one; padding never has a label.

    Args:
        prompts: B whole prompts.
        pad_id: token id written on padding; it may equal a real id.

    Raises:
        DataError: a prompt holds no semantic token, so it would train nothing.
    """
    _check(prompts)
    groups = _pad([prompt.groups for prompt in prompts], GROUP_NONE)
    input_ids = _pad([prompt.token_ids for prompt in prompts], pad_id)
    position_ids = _pad([prompt.position_ids for prompt in prompts], 0)
    codes = _pad([prompt.codes for prompt in prompts], IGNORE_INDEX)
    lengths = torch.tensor([len(prompt) for prompt in prompts])  # [B]
    attention_mask = torch.arange(input_ids.shape[1]) < lengths[:, None]  # [B, L]
    labels = input_ids.masked_fill(groups == GROUP_NONE, IGNORE_INDEX)
    return LMBatch(input_ids, attention_mask, position_ids, labels, groups, codes)


def pack_prompts(prompts: Sequence[Prompt]) -> LMBatch:
    """One row, sample after sample, without padding; positions start again with each sample.

    Args:
        prompts: N whole prompts. The attention must keep them apart by `segment_lengths`.

    Raises:
        DataError: a prompt holds no semantic token, so it would train nothing.
    """
    _check(prompts)
    groups = _join([prompt.groups for prompt in prompts])  # [1, L]
    input_ids = _join([prompt.token_ids for prompt in prompts])
    return LMBatch(
        input_ids,
        torch.ones_like(input_ids, dtype=torch.bool),
        _join([prompt.position_ids for prompt in prompts]),
        input_ids.masked_fill(groups == GROUP_NONE, IGNORE_INDEX),
        groups,
        _join([prompt.codes for prompt in prompts]),
        torch.tensor([len(prompt) for prompt in prompts]),
    )


def replace_tokens(
    batch: LMBatch, tokens: TokenMap, *, share: float, generator: torch.Generator
) -> LMBatch:
    """Replace a share of the INPUT semantic tokens at random; labels stay as they are.

    At synthesis the model reads its own, sometimes wrong, tokens; this teaches it to go on.
    """
    if not share:
        return batch
    ids = batch.input_ids
    is_hit = torch.rand(ids.shape, generator=generator) < share
    random_ids = torch.randint(
        tokens.semantic_offset, tokens.semantic_stop, ids.shape, generator=generator
    )
    is_semantic = (ids >= tokens.semantic_offset) & (ids < tokens.semantic_stop)
    return batch._replace(input_ids=torch.where(is_hit & is_semantic, random_ids, ids))


def _check(prompts: Sequence[Prompt]) -> None:
    for index, prompt in enumerate(prompts):
        if not prompt.run_lengths.any():
            raise DataError(f"prompt {index}: {len(prompt)} tokens, none of them semantic")


def _pad(rows: Sequence[np.ndarray], value: int) -> Tensor:
    tensors = [torch.from_numpy(row) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=value)


def _join(rows: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(rows))[None]
