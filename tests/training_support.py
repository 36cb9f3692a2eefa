"""A toy training, and processes that run one together, for the tests of the training loop."""

import json
import math
import multiprocessing
import os
import socket
import traceback
from functools import partial
from pathlib import Path

import torch
from torch import nn

from tts_stack.runtime import step_generator
from tts_stack.training import (
    EMA,
    Share,
    TrainerConfig,
    load_optimizer,
    make_fabric,
    set_learning_rate,
    sum_over_processes,
    total_weight,
    train,
    update,
)

JOIN_S = 60


class Network(nn.Module):
    """Two layers in a list, as a language model has them; forward gives the sum of the losses."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        y = x
        for layer in self.layers:
            y = torch.tanh(layer(y))
        return (self.head(y) - x.flip(1)).square().sum(1).sum()


class ToyTask:
    """Mirror rows of numbers; micro-batches differ in size, so that their weights matter."""

    monitor = "loss"

    def __init__(self, config, *, poison=(), on_step=None):
        self.config, self.fabric = config, make_fabric(config)
        torch.manual_seed(0)
        self.network = Network()
        self.model = self.fabric.setup_module(self.network)
        self.optimizer = self.fabric.setup_optimizers(
            torch.optim.AdamW(self.network.parameters(), lr=0.1)
        )
        self.average = EMA(self.network, 0.9)
        self.poison, self.on_step = poison, on_step

    def batches(self, start_step, stop_step):
        share = Share.of(self.fabric, self.config.accumulate)
        plan = map(micro_batch, range(start_step * share.per_step, stop_step * share.per_step))
        return share.steps(plan)

    def train_step(self, batch, step):
        if self.on_step:
            self.on_step(self, step)
        set_learning_rate(self.optimizer, 1 / (step + 1))
        rows = total_weight(len(micro) for micro in batch)
        losses = []

        def loss_of(micro):
            loss = self.model(micro) / rows
            losses.append(float(loss.detach()))
            return loss * math.nan if step in self.poison else loss

        micro_losses = [partial(loss_of, micro) for micro in batch]
        norm = update(self.fabric, micro_losses, self.model, self.optimizer, 1.0)
        if math.isfinite(norm):
            self.average.update(self.network)
        (loss,) = sum_over_processes([sum(losses)])
        size = float(sum(len(micro) for micro in batch))
        return {"loss": loss, "grad_norm": norm, "num_tokens": size, "num_positions": 2 * size}

    @torch.no_grad()
    def validate(self):
        with self.average.applied_to(self.network):
            return {"loss": float(self.model(micro_batch(-1)))}

    def state_dict(self):
        return {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": self.average.state_dict(),
        }

    def load_state_dict(self, state):
        self.network.load_state_dict(state["network"])
        load_optimizer(self.optimizer, state["optimizer"])
        self.average.load_state_dict(state["average"])

    def weights(self):
        return self.network.state_dict()


def micro_batch(number):
    generator = step_generator(0, number + 1)
    return torch.randn(2 + number % 3, 4, generator=generator)


def toy_config(max_steps=20, **changes):
    intervals = {"validate_every": 5, "checkpoint_every": 5, "log_every": 1, "device": "cpu"}
    return TrainerConfig(max_steps, **{**intervals, **changes})


def train_toy(folder, config, *, resume=False, **changes):
    """Train a toy; returns (task, summary)."""
    task = ToyTask(config, **changes)
    summary = train(task, Path(folder), config, resume=resume, fingerprint="toy", title="toy")
    return task, summary


def in_processes(count, function, *arguments):
    """Run function(*arguments) in `count` processes that find each other as under torchrun.

    Returns:
        (exit code, text of the error) of every process.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    context = multiprocessing.get_context("fork")  # no second import of torch
    queue = context.Queue()
    processes = [
        context.Process(target=_run, args=(rank, count, port, queue, function, arguments))
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    try:
        errors = dict(queue.get(timeout=JOIN_S) for _ in processes)
        for process in processes:
            process.join(JOIN_S)
    finally:
        for process in processes:
            process.kill()  # nothing to kill, unless one hangs
    return [(process.exitcode, errors[rank]) for rank, process in enumerate(processes)]


def _run(rank, count, port, queue, function, arguments):
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(count),
        LOCAL_WORLD_SIZE=str(count),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="test",
    )
    torch.set_num_threads(1)
    text = ""
    try:
        function(*arguments)
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        if not isinstance(error, SystemExit):
            text += "\n" + traceback.format_exc()
        raise
    finally:
        queue.put((rank, text))
        queue.close()
        queue.join_thread()


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))
