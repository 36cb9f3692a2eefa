"""One update of the weights from the losses of a step's micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tts_stack.training.parallel import sum_over_processes

if TYPE_CHECKING:
    from lightning.fabric import Fabric

MicroLoss = Callable[[], Tensor]  # runs one micro-batch


def update(
    fabric: Fabric,
    loss: Tensor | Sequence[MicroLoss],
    module: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    max_grad_norm: float,
) -> float:
    """Backward, clip, step; a loss or gradient that is not finite changes nothing.

    Args:
        fabric: of the processes.
        loss: this process's part of the step's loss, or one function for each micro-batch that
            computes its part. The loss of the step is the SUM of all parts over all processes, so
            each is divided by the weight of the whole step (`total_weight`), not of its own batch.
        module: what the loss trains; set up by `fabric` when there are several processes.
        optimizer: one or several that together hold the weights.
        max_grad_norm: longer gradients are shortened to it.

    Returns:
        The gradient norm before clipping; NaN when the loss is not finite.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    for one in optimizers:
        one.zero_grad(set_to_none=True)
    (total,) = sum_over_processes([float(backward(fabric, loss, module))])
    if not math.isfinite(total):
        return math.nan
    return clip_and_step(optimizers, max_grad_norm)


def backward(fabric: Fabric, loss: Tensor | Sequence[MicroLoss], module: nn.Module) -> Tensor:
    """Add up the gradients of a step over micro-batches and processes; arguments as of `update`.

    The processes talk once, after the last micro-batch.

    Returns:
        This process's part of the loss.

    Raises:
        TypeError: several processes, but the module was not set up by `fabric`.
    """
    from lightning.fabric.wrappers import is_wrapped

    size = fabric.world_size
    if size > 1 and not is_wrapped(module):
        raise TypeError(f"{type(module).__name__} must come from fabric.setup in {size} processes")
    if isinstance(loss, Tensor):
        fabric.backward(_scaled(loss, size))
        return loss.detach()
    total = torch.zeros((), device=fabric.device)
    for index, compute in enumerate(loss):
        is_last = index == len(loss) - 1
        is_quiet = size > 1 and not is_last
        with fabric.no_backward_sync(module) if is_quiet else nullcontext():  # type: ignore[arg-type]
            part = compute()
            fabric.backward(_scaled(part, size))
        total = total + part.detach()
    return total


def clip_and_step(optimizers: Sequence[Optimizer], max_grad_norm: float) -> float:
    """Clip the gradients of all optimisers together and step; returns the norm before clipping.

    A non-finite norm changes nothing.

    Raises:
        RuntimeError: no weight has a gradient, so nothing would be learnt: most likely the
            optimisers were built before `fabric.setup_module`, which replaces weights it shards.
    """
    parameters = [
        parameter
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        raise RuntimeError(
            f"none of the {len(parameters)} weights of the optimisers has a gradient"
        )
    total = nn.utils.get_total_norm(gradients)
    if isinstance(total, DTensor):
        total = total.full_tensor()
    nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, total)
    norm = float(total)
    if math.isfinite(norm):
        for optimizer in optimizers:
            optimizer.step()
    return norm


def _scaled(loss: Tensor, num_processes: int) -> Tensor:
    # DDP and FSDP take the mean over the processes; the loss of a step is their sum.
    return loss * num_processes if num_processes > 1 else loss
