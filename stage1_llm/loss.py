"""Group-weighted cross-entropy and its figures; pure functions of logits and labels."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from stage1_llm.prompt import GROUP_NAMES


class Supervised(NamedTuple):
    """The N positions that predict something, flattened over the batch."""

    positions: Tensor  # [N] into the flattened [B * L] positions of the states
    labels: Tensor  # [N]
    groups: Tensor  # [N]


class GroupSums(NamedTuple):
    """Sums over labels, one entry a group (text, audio, end)."""

    losses: Tensor  # [3], nats
    counts: Tensor  # [3]


def supervised_positions(labels: Tensor, groups: Tensor, weights: Tensor) -> Supervised:
    """Positions whose NEXT token has a label of positive weight.

    Args:
        labels: [B, L], unshifted.
        groups: [B, L], GROUP_*; negative on positions without a label.
        weights: [3], weight of each group.
    """
    is_used = (groups >= 0) & (weights[groups.clamp(min=0)] > 0)  # [B, L]
    is_used[:, 0] = False  # nothing stands before the first token
    found = is_used.flatten().nonzero().squeeze(1)  # [N]
    return Supervised(found - 1, labels.flatten()[found], groups.flatten()[found])


def group_sums(logits: Tensor, labels: Tensor, groups: Tensor) -> GroupSums:
    """Cross-entropy and counts per group.

    Args:
        logits: [N, V], any float type.
        labels: [N].
        groups: [N], 0 .. 2.
    """
    losses = functional.cross_entropy(logits.float(), labels, reduction="none")  # [N]
    zeros = losses.new_zeros(len(GROUP_NAMES))
    return GroupSums(
        zeros.index_add(0, groups, losses), zeros.index_add(0, groups, torch.ones_like(losses))
    )


def group_hits(logits: Tensor, labels: Tensor, groups: Tensor) -> Tensor:
    """Labels that have the highest logit, per group: [3]."""
    is_correct = (logits.argmax(-1) == labels).float()
    return is_correct.new_zeros(len(GROUP_NAMES)).index_add(0, groups, is_correct)


def weighted_loss(sums: GroupSums, weights: Tensor) -> Tensor:
    """Weighted mean over all labels; zero, never NaN, when there is nothing to learn."""
    total_weight = (weights * sums.counts).sum()
    if total_weight == 0:
        return (sums.losses * 0).sum()
    return (weights * sums.losses).sum() / total_weight


def group_means(sums: Tensor, counts: Tensor, suffix: str = "") -> dict[str, float]:
    """Mean of each group that occurred: {"text": 1.2, "audio": 3.4, ...}."""
    return {
        name + suffix: float(total) / float(count)
        for name, total, count in zip(GROUP_NAMES, sums.detach(), counts, strict=True)
        if count
    }
