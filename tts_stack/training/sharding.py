"""Fully sharded data parallelism (FSDP): each process holds a share of every weight.

Checkpoints hold whole tensors whatever the number of processes: gathered on the way out, cut on
the way in.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer


def shard_module(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard a module, each element of its outermost module lists (the layers) on its own."""
    data_parallel = mesh["data_parallel"]
    for layer in _layers(module):
        fully_shard(layer, mesh=data_parallel)
    # By default the outermost module stays whole after a forward without backward, as validation
    # is, and its weights would then be of another kind than their averages and updates.
    fully_shard(module, mesh=data_parallel, reshard_after_forward=True)
    return module


def whole_state(state: Any) -> Any:
    """A state with every sharded tensor put together on the CPU; every process must call it."""
    if isinstance(state, DTensor):
        return state.full_tensor().cpu()
    if isinstance(state, Mapping):
        return {key: whole_state(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(whole_state(value) for value in state)
    return state


def sharded_like(state: Any, model: Any) -> Any:
    """Inverse of `whole_state`: tensors that are sharded in `model` are cut in the same way."""
    if isinstance(model, DTensor):
        return _cut(state, model)
    if isinstance(model, Mapping) and isinstance(state, Mapping):
        return {key: sharded_like(value, model.get(key)) for key, value in state.items()}
    if isinstance(model, list | tuple) and len(model) == len(state):
        return type(state)(map(sharded_like, state, model))
    return state


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """`optimizer.load_state_dict` that also fits sharded weights."""
    optimizer.load_state_dict(dict(state))
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(parameter, DTensor) and _is_whole(value, parameter):
                values[name] = _cut(value, parameter)


def _is_whole(value: object, parameter: Tensor) -> bool:
    if not isinstance(value, Tensor) or isinstance(value, DTensor):
        return False
    return value.shape == parameter.shape  # a count of steps has no such shape


def _cut(whole: Tensor, like: DTensor) -> DTensor:
    device = like.device_mesh.device_type
    whole = whole.to(torch.device(device), like.dtype)
    return distribute_tensor(whole, like.device_mesh, like.placements)


def _layers(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, nn.ModuleList):
        return list(module)
    return [layer for child in module.children() for layer in _layers(child)]
