"""What the processes of one training tell each other, and which micro-batches each one takes.

Everything here works, and costs nothing, in a process alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NoReturn, TypeVar, cast

import torch
from torch import distributed as dist

from tts_stack.errors import TTSStackError
from tts_stack.processes import is_main_process

if TYPE_CHECKING:
    from lightning.fabric import Fabric

ValueT = TypeVar("ValueT")
_SMALLEST_WEIGHT = 1e-12


@dataclass(frozen=True)
class Share:
    """The micro-batches of a step that one process computes.

    A step has accumulate x processes of them, numbered on from step to step; process r takes every
    one whose number leaves the rest r. So the same data make up a step however it is divided.
    """

    rank: int
    num_processes: int
    accumulate: int

    @classmethod
    def of(cls, fabric: Fabric, accumulate: int) -> Share:
        """This process's share."""
        return cls(fabric.global_rank, fabric.world_size, accumulate)

    @property
    def per_step(self) -> int:
        return self.num_processes * self.accumulate

    def steps(self, plan: Iterable[ValueT]) -> Iterator[list[ValueT]]:
        """This process's micro-batches, step by step, of a plan that begins where a step does."""
        rest = iter(plan)
        while len(step := list(islice(rest, self.per_step))) == self.per_step:
            yield step[self.rank :: self.num_processes]


def sum_over_processes(values: Sequence[float]) -> list[float]:
    """Each figure summed over all processes; every process must call it."""
    if not _has_company():
        return [float(value) for value in values]
    sums = torch.tensor(values, dtype=torch.float64, device=_device())
    dist.all_reduce(sums)
    return cast(list[float], sums.tolist())


def total_weight(weights: Iterable[float]) -> float:
    """Weight of all micro-batches of a step, over all processes: what its losses are divided by.

    Args:
        weights: of this process's micro-batches.

    Returns:
        Never quite zero, so that a step with nothing to learn has the loss 0 / weight = 0.
    """
    return max(sum_over_processes([sum(weights)])[0], _SMALLEST_WEIGHT)


def from_main(value: ValueT) -> ValueT:
    """The main process's value, in every process."""
    if not _has_company():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def gather_from_all(value: ValueT) -> list[ValueT]:
    """The value of every process, in order of rank, in every process."""
    if not _has_company():
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def wait_for_all() -> None:
    """Return when every process has come here."""
    if _has_company():
        sum_over_processes([0.0])  # unlike barrier(), it cannot pick another GPU than its own


def end_together(error: TTSStackError) -> NoReturn:
    """End every process: the main one reports, the others leave without a word.

    Every process must call it. A process that left with an exit code other than 0 would have its
    launcher kill the main one before that could report.

    Raises:
        TTSStackError: in the main process, the given one.
        SystemExit: in the others.
    """
    wait_for_all()
    if is_main_process():
        raise error
    raise SystemExit(0)


def _has_company() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _device() -> torch.device:
    is_cuda = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
