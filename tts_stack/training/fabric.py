"""`make_fabric`: the device, the precision and the processes of a training.

Lightning is imported when a training starts: a command that only speaks does without that second.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Literal

import torch

from tts_stack.errors import ConfigError
from tts_stack.processes import num_started_processes
from tts_stack.runtime import choose_device
from tts_stack.training.config import TrainerConfig
from tts_stack.training.sharding import shard_module
from tts_stack.training.writers import require_writers

if TYPE_CHECKING:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies.strategy import Strategy

_WATCH_EVERY_S = 1.0


def make_fabric(config: TrainerConfig) -> Fabric:
    """Fabric on the configured devices, all processes running; sets the thread count.

    With several devices and no launcher, this process starts the others: they run the same
    command from its beginning up to here. torchrun and srun start them all before.

    Raises:
        ConfigError: the devices cannot be used, or a launcher started another number of processes.
        MissingDependencyError: a logger is configured whose package is missing.
    """
    from lightning.fabric import Fabric

    require_writers(config)
    device = choose_device(config.device)
    _check_processes(config, device)
    accelerator = {"cuda": "cuda", "mps": "mps"}.get(device.type, "cpu")
    precision: Literal["bf16-mixed", "32-true"] = (
        "bf16-mixed" if config.precision == "bf16-mixed" else "32-true"
    )
    fabric = Fabric(
        accelerator=accelerator,
        devices=config.devices if device.index is None else [device.index],
        num_nodes=config.num_nodes,
        strategy=_strategy(config),
        precision=precision,
    )
    fabric.launch()
    if _is_started_by_lightning(fabric):
        end_with_parent()
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    return fabric


def _strategy(config: TrainerConfig) -> str | Strategy:
    from lightning.fabric.strategies.model_parallel import ModelParallelStrategy

    if config.num_processes == 1:
        return "auto"
    if config.strategy == "fsdp":
        # Lightning's "fsdp" is the older FSDP1 and refuses a CPU; this is its FSDP2.
        return ModelParallelStrategy(
            shard_module, data_parallel_size=config.num_processes, tensor_parallel_size=1
        )
    return "ddp"


def _check_processes(config: TrainerConfig, device: torch.device) -> None:
    started = num_started_processes()
    if started is not None and started != config.num_processes:
        raise ConfigError(
            f"trainer.devices x trainer.num_nodes is {config.num_processes}, but the launcher "
            f"started {started} processes; make both the same"
        )
    if config.num_processes == 1:
        return
    if config.num_nodes > 1 and started is None and "NODE_RANK" not in os.environ:
        raise ConfigError(
            f"trainer.num_nodes is {config.num_nodes}, but nothing says which machine this is; "
            "start the command with torchrun or srun on each, or set NODE_RANK and MASTER_ADDR"
        )
    if device.type == "mps" or device.index is not None:
        raise ConfigError(
            f"trainer.device is {config.device!r}, expected cuda or cpu for "
            f"{config.num_processes} processes"
        )
    if device.type == "cuda" and config.devices > torch.cuda.device_count():
        raise ConfigError(
            f"trainer.devices is {config.devices}, this machine has "
            f"{torch.cuda.device_count()} GPUs"
        )


def end_with_parent() -> None:
    """End this process once its parent is gone, however that ended.

    A process that waits for a message from the main one could otherwise wait for hours.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_EVERY_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="end-with-parent").start()


def _is_started_by_lightning(fabric: Fabric) -> bool:
    from lightning.fabric.plugins.environments.lightning import LightningEnvironment
    from lightning.fabric.strategies.parallel import ParallelStrategy

    strategy = fabric.strategy
    return (
        isinstance(strategy, ParallelStrategy)
        and isinstance(strategy.cluster_environment, LightningEnvironment)
        and fabric.local_rank > 0
    )
