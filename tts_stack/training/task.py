"""`TrainingTask`: what a stage hands to the loop."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeVar

from torch import Tensor

BatchT = TypeVar("BatchT", contravariant=False)


class TrainingTask(Protocol[BatchT]):
    """The mathematics of a training; the loop decides when each part happens.

    With several processes every method is called in all of them, in the same order.
    """

    monitor: str  # the validation figure, lower is better, that chooses `best.safetensors`

    def batches(self, start_step: int, stop_step: int) -> Iterable[BatchT]:
        """This process's share of steps start..stop-1; that of step s depends on (seed, s) alone.

        A task that accumulates gives all micro-batches of a step as one batch; see `Share`.
        """

    def train_step(self, batch: BatchT, step: int) -> Mapping[str, float | Tensor]:
        """Set learning rates, update the weights once, return figures to log.

        Three figures mean something to the loop: `num_tokens` and `num_positions` (with padding)
        that this process computed, for the speed, and `empty_batches`, 1 when the whole step held
        nothing to learn.
        """

    def validate(self) -> Mapping[str, float]:
        """Figures on the validation split, `monitor` among them; the main process's count."""

    def state_dict(self) -> dict[str, Any]:
        """Models, optimisers and whatever else resuming needs; may hold sharded tensors."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""

    def weights(self) -> dict[str, Tensor]:
        """What inference needs; may hold sharded tensors."""
