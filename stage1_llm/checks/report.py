"""What a check found: claims, each with what was compared and the largest difference."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

TOLERANCE = 1e-5  # of the largest value compared: float32 sums taken in another order


class Claim(NamedTuple):
    """One statement about the code, and whether it holds here."""

    name: str
    is_met: bool
    detail: str


class ShownToken(NamedTuple):
    """One position of a sample, as training reads it."""

    token_id: int
    name: str
    group: str  # text, audio, end; empty for what is given and never predicted
    label: int | None
    weight: float  # of the label at step 0
    position: float
    codes: tuple[int, ...]  # of the other codebooks; empty where there are none


class Report(NamedTuple):
    """All that `tts-stack check` prints."""

    settings: tuple[str, ...]  # what the claims were tried on
    claims: tuple[Claim, ...]
    sample: tuple[ShownToken, ...] = ()

    @property
    def failed(self) -> tuple[Claim, ...]:
        """The claims that do not hold."""
        return tuple(claim for claim in self.claims if not claim.is_met)


def close(
    name: str, found: Sequence[Tensor], wanted: Sequence[Tensor], *, tolerance: float = TOLERANCE
) -> Claim:
    """The claim that tensors are equal but for rounding.

    Args:
        name: of the claim.
        found: the tensors.
        wanted: what they should be.
        tolerance: largest difference allowed, as a share of the largest value wanted.
    """
    for one, other in zip(found, wanted, strict=True):
        if one.shape != other.shape:
            return Claim(name, False, f"shape {list(one.shape)}, expected {list(other.shape)}")
    pairs = [(f, w) for f, w in zip(found, wanted, strict=True) if w.numel()]
    # Of tensors, not of floats: there a NaN would be lost.
    difference = float(torch.stack([(f - w).abs().max() for f, w in pairs]).max())
    largest = float(torch.stack([w.abs().max() for _, w in pairs]).max())
    count = sum(w.numel() for _, w in pairs)
    return Claim(
        name,
        difference <= tolerance * largest,  # a NaN is refused too
        f"{count:,} values, largest difference {difference:.2g} (allowed "
        f"{tolerance * largest:.2g}, largest value {largest:.2g})",
    )


def identical(name: str, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> Claim:
    """The claim that named tensors are equal bit for bit."""
    wrong = sorted(found.keys() ^ wanted.keys())
    if wrong:
        return Claim(name, False, f"{wrong[0]} is on one side alone")
    changed = [key for key, value in wanted.items() if not torch.equal(found[key], value)]
    if not changed:
        count = sum(value.numel() for value in wanted.values())
        return Claim(name, True, f"{len(wanted)} tensors, {count:,} values, largest difference 0")
    difference = max(_difference(found[key], wanted[key]) for key in changed)
    return Claim(
        name,
        False,
        f"{len(changed)} of {len(wanted)} tensors differ, {changed[0]} among them; largest "
        f"difference {difference:.2g}",
    )


def _difference(found: Tensor, wanted: Tensor) -> float:
    if found.shape != wanted.shape:
        return float("inf")
    return float((found.double() - wanted.double()).abs().max())
