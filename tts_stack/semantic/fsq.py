"""Finite scalar quantisation (arXiv:2309.15505): a codebook that is a grid, not learnt."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

_MARGIN = 1e-3  # keeps the outermost grid values inside the range of tanh, section 3.1


class FSQ(nn.Module):
    """Rounds each of D dimensions to one of its `levels`; the combination is the code.

    A grid value is stored as digit / (level // 2) - 1, so that all lie within -1..1. The index
    of a code reads its digits as a number with mixed bases, first dimension fastest.

    Args:
        levels: number of values per dimension, each at least 3.
    """

    def __init__(self, levels: Sequence[int]) -> None:
        super().__init__()
        self.codebook_size = math.prod(levels)
        self._levels: Tensor
        self._bases: Tensor
        bases = [math.prod(levels[:i]) for i in range(len(levels))]
        self.register_buffer("_levels", torch.tensor(levels), persistent=False)
        self.register_buffer("_bases", torch.tensor(bases), persistent=False)

    def forward(self, z: Tensor) -> Tensor:
        """Nearest grid values of z [..., D]; gradients pass as if nothing were rounded."""
        half_width = self._levels // 2
        bounded = self._bound(z.float())
        # Straight-through: the value is the rounded one, the gradient that of `bounded`.
        rounded = bounded + (bounded.round() - bounded).detach()
        return rounded / half_width

    def indices(self, values: Tensor) -> Tensor:
        """Grid values [..., D] -> codes [...] in 0 .. codebook_size - 1, int64."""
        half_width = self._levels // 2
        digits = (values.detach() * half_width).round().long() + half_width
        return (digits * self._bases).sum(-1)

    def values(self, indices: Tensor) -> Tensor:
        """Codes [...] -> grid values [..., D]; inverse of `indices`."""
        half_width = self._levels // 2
        digits = indices[..., None] // self._bases % self._levels
        return (digits - half_width) / half_width

    def _bound(self, z: Tensor) -> Tensor:
        """Squash so that rounding gives exactly `levels` values; 0 stays 0.

        An even level has its grid at -L/2 .. L/2 - 1, so tanh is moved by half a step. Differs
        from the paper's listing in using atanh for that shift, which makes 0 -> 0 exact.
        """
        reach = (self._levels - 1) * (1 - _MARGIN) / 2
        offset = (self._levels % 2 == 0) * 0.5
        return torch.tanh(z + torch.atanh(offset / reach)) * reach - offset
