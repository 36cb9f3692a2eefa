"""Embedding and head whose rows behind the base model's own are trained while all others stay.

peft's `trainable_token_indices` does the same, but not on an embedding that LoRA adapts too (peft
0.21 raises a TypeError), and it makes a gradient for every row of the vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class GrownEmbedding(nn.Embedding):
    """`nn.Embedding` with trained rows.

    Args:
        embedding: gives the frozen rows; its weight is shared, not copied.
        new_rows: [N, D], stand in for the last N rows.
    """

    def __init__(self, embedding: nn.Embedding, new_rows: nn.Parameter) -> None:
        num_rows, width = embedding.weight.shape
        super().__init__(
            num_rows, width, padding_idx=embedding.padding_idx, _weight=embedding.weight.detach()
        )
        self.weight = embedding.weight  # the parameter itself: a tied head holds it too
        self.new_rows = new_rows
        self.first = num_rows - len(new_rows)

    def forward(self, input: Tensor) -> Tensor:
        """Ids [...] -> [..., D]."""
        old = super().forward(input)
        new = functional.embedding((input - self.first).clamp(min=0), self.new_rows)
        return torch.where((input >= self.first).unsqueeze(-1), new, old)


class GrownHead(nn.Linear):
    """`nn.Linear` with trained rows, the output half of `GrownEmbedding`.

    Args:
        head: gives the frozen rows; its weight is shared, not copied.
        new_rows: [N, D], the embedding's own parameter where the two are tied.
    """

    def __init__(self, head: nn.Linear, new_rows: nn.Parameter) -> None:
        num_rows, width = head.weight.shape
        super().__init__(width, num_rows, bias=False, device="meta")
        self.weight, self.bias = head.weight, head.bias
        self.new_rows = new_rows
        self.first = num_rows - len(new_rows)
        self._tied: tuple[Any, ...] = ()  # in a tuple, so that it is no submodule of this one

    def share_lora(self, embedding: Any) -> None:
        """Adapt this head by the adapter of the embedding that it is tied to.

        peft would give a tied head an adapter of its own; merging then adds both to the one matrix.

        Args:
            embedding: a peft LoRA layer around a `GrownEmbedding`.
        """
        self._tied = (embedding,)

    def forward(self, input: Tensor) -> Tensor:
        """States [..., D] -> [..., V].

        The trained rows come in as their difference from the frozen ones: the untrained model's
        logits are the base model's to the last bit, whatever kernel multiplies the matrices.
        """
        logits = functional.linear(input, self.weight, self.bias)
        difference = functional.linear(input, self.new_rows - self.weight[self.first :])
        logits = _AddToLast.apply(logits, difference)
        for layer in self._tied:
            for name in layer.active_adapters:
                reduced = input @ layer.lora_embedding_B[name] * layer.scaling[name]  # [..., r]
                logits = logits + reduced @ layer.lora_embedding_A[name]
        return logits


class _AddToLast(torch.autograd.Function):
    """Add [..., N] to the last N of [..., V] in place: no second matrix of all logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, difference: Tensor) -> Tensor:
        ctx.mark_dirty(logits)
        ctx.num_last = difference.shape[-1]
        logits[..., -ctx.num_last :] += difference
        return logits

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,) = gradients
        return gradient, gradient[..., -ctx.num_last :]
