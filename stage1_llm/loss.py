"""Group-weighted cross-entropy and its figures; pure functions of logits and labels."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from stage1_llm.prompt import GROUP_NAMES
from stage1_llm.stream import IGNORE_INDEX

TOP = 5  # a label among so many highest logits counts as a top-5 hit


class Supervised(NamedTuple):
    """The N positions that predict something, flattened over the batch."""

    positions: Tensor  # [N] into the flattened [B * L] positions of the states
    labels: Tensor  # [N]
    groups: Tensor  # [N]


class StepSums(NamedTuple):
    """Sums over the labels of a batch; those of several batches are added."""

    losses: Tensor  # [3] nats, one entry a group (text, audio, end)
    counts: Tensor  # [3]
    hits: Tensor  # [3] labels that have the highest logit
    hits_5: Tensor  # [3] ... one of the five highest
    code_loss: Tensor  # [] nats, over the codes of every other codebook
    code_count: Tensor  # []
    code_hits_5: Tensor  # []

    def __add__(self, other: "StepSums") -> "StepSums":  # type: ignore[override]
        """Sums over both."""
        return StepSums._make(mine + theirs for mine, theirs in zip(self, other, strict=True))


class Denominators(NamedTuple):
    """What the losses of a whole step are divided by, micro-batches and processes together."""

    weight: Tensor  # [] sum of the labels' weights
    codes: Tensor  # [] codes with a label


def supervised_positions(labels: Tensor, groups: Tensor, weights: Tensor) -> Supervised:
    """Positions whose NEXT token has a label of positive weight.

    Args:
        labels: [B, L], unshifted.
        groups: [B, L], GROUP_*; negative on positions without a label.
        weights: [3], weight of each group.
    """
    found = _is_used(groups, weights).flatten().nonzero().squeeze(1)  # [N]
    return Supervised(found - 1, labels.flatten()[found], groups.flatten()[found])


def denominators(groups: Tensor, codes: Tensor, weights: Tensor) -> Denominators:
    """Weights and codes of one batch, known before the network has run.

    Args:
        groups: [B, L].
        codes: [B, L, C].
        weights: [3], weight of each group.
    """
    is_used = _is_used(groups, weights)
    num_codes = (codes[is_used] != IGNORE_INDEX).sum()
    return Denominators(weights[groups[is_used]].sum(), num_codes.to(weights.dtype))


def step_sums(
    logits: Tensor, labels: Tensor, groups: Tensor, code_logits: Sequence[Tensor], codes: Tensor
) -> StepSums:
    """Losses, counts and hits per group, and those of the other codebooks.

    Args:
        logits: [N, V], any float type.
        labels: [N].
        groups: [N], 0 .. 2.
        code_logits: of each other codebook, [N, size].
        codes: [N, C]; IGNORE_INDEX counts nowhere.
    """
    losses = functional.cross_entropy(logits.float(), labels, reduction="none")  # [N]
    rank = _rank(logits, labels)
    one = torch.ones_like(losses)
    totals = [
        losses.new_zeros(len(GROUP_NAMES)).index_add(0, groups, values)
        for values in (losses, one, (rank < 1).to(one), (rank < TOP).to(one))
    ]
    zero = losses.new_zeros(())
    code_loss, code_count, code_hits = zero, zero, zero
    for index, logits_of_one in enumerate(code_logits):
        of_one = codes[:, index]
        is_code = of_one != IGNORE_INDEX
        chosen, target = logits_of_one[is_code], of_one[is_code]
        code_loss = code_loss + functional.cross_entropy(chosen.float(), target, reduction="sum")
        code_count = code_count + is_code.sum()
        code_hits = code_hits + (_rank(chosen, target) < TOP).sum()
    return StepSums._make([*totals, code_loss, code_count, code_hits])


def step_loss(
    sums: StepSums, weights: Tensor, codebook_weight: float, totals: Denominators
) -> Tensor:
    """Token loss + codebook_weight * codebook loss; zero, never NaN, with nothing to learn.

    Args:
        sums: of one micro-batch.
        weights: [3], weight of each group.
        codebook_weight: of the mean loss of the other codebooks.
        totals: of the whole step, so that the micro-batches' losses add up to its loss.
    """
    return base_loss(sums, weights, totals) + codebook_weight * (
        sums.code_loss / totals.codes.clamp(min=1)
    )


def base_loss(sums: StepSums, weights: Tensor, totals: Denominators) -> Tensor:
    """Weighted mean of the token stream's losses."""
    smallest = torch.finfo(weights.dtype).tiny
    return (weights * sums.losses).sum() / totals.weight.clamp(min=smallest)


def figures(sums: StepSums) -> dict[str, float]:
    """Loss, top-1 and top-5 accuracy of each group that occurred, and of the codebooks."""
    found: dict[str, float] = {}
    for index, name in enumerate(GROUP_NAMES):
        count = float(sums.counts[index])
        if count:
            found[name] = float(sums.losses[index].detach()) / count
            found[f"{name}_accuracy"] = float(sums.hits[index]) / count
            found[f"{name}_top5"] = float(sums.hits_5[index]) / count
    if sums.code_count:
        found["codebooks"] = float(sums.code_loss.detach()) / float(sums.code_count)
        found["codebooks_top5"] = float(sums.code_hits_5) / float(sums.code_count)
    return found


def _is_used(groups: Tensor, weights: Tensor) -> Tensor:
    is_used = (groups >= 0) & (weights[groups.clamp(min=0)] > 0)  # [B, L]
    is_used[:, 0] = False  # nothing stands before the first token
    return is_used


def _rank(logits: Tensor, labels: Tensor) -> Tensor:
    """Other classes whose logit is not below the label's: [N, V], [N] -> [N].

    Ties count against the label, and so does NaN: a broken model is never right.
    """
    logits = logits.detach()
    own = logits.gather(1, labels[:, None])
    return logits.shape[1] - 1 - (logits < own).sum(1)
