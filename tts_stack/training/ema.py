"""An exponential moving average of weights, which often does better than the last weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class EMA:
    """average <- decay * average + (1 - decay) * weight, for every weight that trains.

    Args:
        module: its present trainable weights are the first average.
        decay: 0 .. 1, share of the old average.
        warm_start: average over a short past at first: the decay of update n = 1, 2, ... is
            min(decay, n / (n + 9)), so that the untrained weights are soon forgotten.
    """

    def __init__(self, module: nn.Module, decay: float, *, warm_start: bool = True) -> None:
        self.decay, self.warm_start = decay, warm_start
        self.num_updates = 0
        self.weights = {name: weight.detach().clone() for name, weight in _trainable(module)}

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        """Move the average towards the module's weights."""
        decay = self.decay
        if self.warm_start:
            decay = min(decay, (1 + self.num_updates) / (10 + self.num_updates))
        self.num_updates += 1
        for name, weight in _trainable(module):
            self.weights[name].lerp_(weight, 1 - decay)

    @contextmanager
    def applied_to(self, module: nn.Module) -> Iterator[None]:
        """Inside, the module has the averaged weights; afterwards its own, bit for bit."""
        self._exchange(module)
        try:
            yield
        finally:
            self._exchange(module)

    def state_dict(self) -> dict[str, Any]:
        """Average and number of updates."""
        return {"num_updates": self.num_updates, "weights": dict(self.weights)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.num_updates = state["num_updates"]
        for name, weight in self.weights.items():
            weight.copy_(state["weights"][name])

    @torch.no_grad()
    def _exchange(self, module: nn.Module) -> None:
        for name, weight in _trainable(module):
            average = self.weights[name]
            own = weight.detach().clone()
            weight.copy_(average)
            average.copy_(own)


def _trainable(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, weight) for name, weight in module.named_parameters() if weight.requires_grad]
