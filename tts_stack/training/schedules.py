"""Learning rates over the steps."""

import logging
import math
from dataclasses import dataclass

from omegaconf import MISSING
from torch.optim import Optimizer

from tts_stack.ranges import check_choice, check_number

logger = logging.getLogger(__name__)
SCHEDULES = ("cosine", "wsd", "constant")


@dataclass
class ScheduleConfig:
    """Learning-rate factor over steps; values live in configs/."""

    kind: str = MISSING  # cosine, wsd (warm-up, stable, linear decay) or constant
    warmup_steps: int = MISSING
    min_factor: float = 0.0  # factor at the last step
    decay_fraction: float = 0.2  # share of the steps in which wsd falls

    def __post_init__(self) -> None:
        check_choice("schedule.kind", self.kind, SCHEDULES)
        check_number("schedule.warmup_steps", self.warmup_steps, at_least=0)
        check_number("schedule.min_factor", self.min_factor, at_least=0, at_most=1)
        check_number("schedule.decay_fraction", self.decay_fraction, above=0, at_most=1)

    def warn_when_never_warm(self, max_steps: int) -> None:
        """Say that the training ends before its learning rate has risen."""
        if self.warmup_steps >= max_steps > 0:
            logger.warning(
                "schedule.warmup_steps is %d, the training has %d steps: the learning rate never "
                "reaches its value; take fewer",
                self.warmup_steps,
                max_steps,
            )

    def factor(self, step: int, max_steps: int) -> float:
        """Factor for step 0 .. max_steps - 1; the warm-up's first step is not zero."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.kind == "constant":
            return 1.0
        if self.kind == "cosine":
            progress = (step - self.warmup_steps) / max(1, max_steps - self.warmup_steps)
            wave = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
            return self.min_factor + (1 - self.min_factor) * wave
        decay_steps = max(1, round(max_steps * self.decay_fraction))
        falling = min(1.0, max(0.0, (step - (max_steps - decay_steps)) / decay_steps))
        return 1 - (1 - self.min_factor) * falling


def set_learning_rate(optimizer: Optimizer, factor: float) -> None:
    """Scale every group's base rate, kept as `initial_lr`, by `factor`."""
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
        group["lr"] = group["initial_lr"] * factor
