"""The one training loop of codec, LLM and vocoder: steps, validation, checkpoints, resume, logs.

The loop owns when things happen, a task owns the mathematics. Everything random in a task depends
on (seed, step) alone, so resuming needs the step, the weights and the optimiser states - nothing
else - and meets the unbroken run exactly. Lightning Fabric brings devices, precision and
processes; its Trainer is not used because it counts every optimiser's step and does not restore
the position in the data (LightningModule, `global_step`).
"""

import json
import logging
import math
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Protocol, TypeVar

import torch
from lightning.fabric import Fabric
from omegaconf import MISSING
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.tensorboard import SummaryWriter

from tts_stack.errors import CheckpointError, ConfigError, TTSStackError
from tts_stack.runtime import choose_device

logger = logging.getLogger(__name__)
BatchT = TypeVar("BatchT", contravariant=False)
LAST_CHECKPOINT = "last.ckpt"
BEST_WEIGHTS = "best.safetensors"
FINAL_WEIGHTS = "final.safetensors"
PRECISIONS = ("32-true", "bf16-mixed")
SCHEDULES = ("cosine", "wsd", "constant")


@dataclass
class ScheduleConfig:
    """Learning-rate factor over steps; values live in configs/."""

    kind: str = MISSING  # cosine, wsd (warm-up, stable, linear decay) or constant
    warmup_steps: int = MISSING
    min_factor: float = 0.0  # factor at the last step
    decay_fraction: float = 0.2  # share of the steps in which wsd falls

    def __post_init__(self) -> None:
        if self.kind not in (*SCHEDULES, MISSING):
            raise ConfigError(f"schedule.kind is {self.kind!r}, expected {', '.join(SCHEDULES)}")

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


@dataclass
class TrainerConfig:
    """How long and how often; values live in configs/trainer/*.yaml."""

    max_steps: int = MISSING
    validate_every: int = MISSING  # steps
    checkpoint_every: int = MISSING  # steps
    log_every: int = 10  # steps
    seed: int = 0
    device: str = "auto"
    precision: str = "32-true"  # or bf16-mixed
    num_threads: int = 0  # 0 leaves torch's choice
    max_nonfinite_steps: int = 20  # in a row, before training stops

    def __post_init__(self) -> None:
        for name in ("max_steps", "validate_every", "checkpoint_every", "log_every"):
            value = getattr(self, name)
            if value != MISSING and value < 1:
                raise ConfigError(f"trainer.{name} is {value}, expected at least 1")
        if self.precision not in PRECISIONS:
            raise ConfigError(
                f"trainer.precision is {self.precision!r}, expected {' or '.join(PRECISIONS)}"
            )


class TrainingTask(Protocol[BatchT]):
    """What a stage hands to the loop."""

    monitor: str  # the validation figure, lower is better, that chooses `best.safetensors`

    def batches(self, start_step: int, stop_step: int) -> Iterable[BatchT]:
        """Batches of steps start..stop-1; batch s depends on (seed, s) alone."""

    def train_step(self, batch: BatchT, step: int) -> Mapping[str, float | Tensor]:
        """Set learning rates, update the weights once, return figures to log."""

    def validate(self) -> Mapping[str, float]:
        """Figures on the validation split, `monitor` among them."""

    def state_dict(self) -> dict[str, Any]:
        """Models, optimisers and whatever else resuming needs."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""

    def weights(self) -> dict[str, Tensor]:
        """What inference needs."""


@dataclass(frozen=True)
class TrainSummary:
    """How a training ended."""

    steps: int
    first_validation: dict[str, float]
    last_validation: dict[str, float]
    best: float
    best_step: int
    skipped_steps: int
    seconds: float


def make_fabric(config: TrainerConfig) -> Fabric:
    """Fabric on one device; sets the thread count when the config names one.

    Raises:
        ConfigError: the device cannot be used.
    """
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    device = choose_device(config.device)
    accelerator = {"cuda": "cuda", "mps": "mps"}.get(device.type, "cpu")
    precision: Literal["bf16-mixed", "32-true"] = (
        "bf16-mixed" if config.precision == "bf16-mixed" else "32-true"
    )
    return Fabric(accelerator=accelerator, devices=1, precision=precision)


def train(
    task: TrainingTask[BatchT],
    out_dir: Path,
    config: TrainerConfig,
    *,
    resume: bool,
    fingerprint: str,
    title: str,
) -> TrainSummary:
    """Run a task to `config.max_steps`, from the last checkpoint when `resume` is set.

    Writes under `out_dir`: `checkpoints/last.ckpt` (all state), `checkpoints/best.safetensors`
    and `final.safetensors` (weights), `metrics.jsonl`, and TensorBoard events. An interrupt
    (Ctrl-C, SIGTERM) saves a checkpoint first.

    Args:
        task: the stage's mathematics.
        out_dir: the run folder.
        config: steps and intervals.
        resume: continue from `last.ckpt` when there is one.
        fingerprint: what the weights were trained on; a checkpoint of another is refused.
        title: label of the progress bar.

    Returns:
        Step count, first and last validation figures, best value.

    Raises:
        CheckpointError: the checkpoint is damaged or belongs to something else.
        TTSStackError: too many non-finite steps in a row, or interrupted.
    """
    started = time.monotonic()
    run = _Run(task, out_dir, config, fingerprint)
    if resume and run.last_path.exists():
        run.load()
        logger.info("%s: continuing at step %d of %d", title, run.step, config.max_steps)
    if not run.validations:
        run.validate()
    with _progress(title, run.step, config.max_steps) as show, _interrupts(run):
        for batch in task.batches(run.step, config.max_steps):
            run.advance(batch)
            show(run)
        if run.step % config.checkpoint_every or not run.last_path.exists():
            run.save()
    run.finish()
    return TrainSummary(
        run.step,
        run.validations[0],
        run.validations[-1],
        run.best,
        run.best_step,
        run.skipped_steps,
        time.monotonic() - started,
    )


def update(
    fabric: Fabric, loss: Tensor, module: nn.Module, optimizer: Optimizer, max_grad_norm: float
) -> float:
    """Backward, clip, step; a non-finite gradient changes nothing. Returns the gradient norm."""
    optimizer.zero_grad(set_to_none=True)
    fabric.backward(loss)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    norm = float(nn.utils.clip_grad_norm_(parameters, max_grad_norm))
    if math.isfinite(norm):
        optimizer.step()
    return norm


def set_learning_rate(optimizer: Optimizer, factor: float) -> None:
    """Scale every group's base rate, kept as `initial_lr`, by `factor`."""
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
        group["lr"] = group["initial_lr"] * factor


def load_weights(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    try:
        return load_file(path)
    except Exception as error:  # noqa: BLE001 - safetensors raises its own untyped errors
        raise CheckpointError(f"{path}: not a readable safetensors file ({error})") from error


def save_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors as safetensors; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    save_file(
        {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()},
        partial,
    )
    os.replace(partial, path)


def read_metrics(out_dir: Path) -> list[dict[str, float]]:
    """Rows of a run's `metrics.jsonl`."""
    lines = (out_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


class _Run:
    """State of one call of `train`."""

    def __init__(
        self, task: TrainingTask[Any], out_dir: Path, config: TrainerConfig, fingerprint: str
    ) -> None:
        self.task, self.config, self.fingerprint = task, config, fingerprint
        self.checkpoints = out_dir / "checkpoints"
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self.last_path = self.checkpoints / LAST_CHECKPOINT
        self.metrics_path = out_dir / "metrics.jsonl"
        self.writer = SummaryWriter(str(out_dir / "tensorboard"))
        self.step = 0
        self.best, self.best_step = math.inf, 0
        self.validations: list[dict[str, float]] = []
        self.latest: dict[str, float] = {}
        self.skipped_steps = self._nonfinite_in_a_row = 0

    def advance(self, batch: object) -> None:
        """One step and what is due after it."""
        figures = self.task.train_step(batch, self.step)
        self.latest = {name: float(value) for name, value in figures.items()}
        self.step += 1
        self._count_nonfinite()
        if self.step % self.config.log_every == 0 or self.step == self.config.max_steps:
            self._log({f"train/{name}": value for name, value in self.latest.items()})
        if self.step % self.config.validate_every == 0 or self.step == self.config.max_steps:
            self.validate()
        if self.step % self.config.checkpoint_every == 0:
            self.save()

    def validate(self) -> None:
        figures = {name: float(value) for name, value in self.task.validate().items()}
        self.validations.append(figures)
        self._log({f"validation/{name}": value for name, value in figures.items()})
        logger.info("step %d: %s", self.step, format_figures(figures))
        if figures[self.task.monitor] < self.best:
            self.best, self.best_step = figures[self.task.monitor], self.step
            save_weights(self.task.weights(), self.checkpoints / BEST_WEIGHTS)

    def save(self) -> None:
        state = {
            "step": self.step,
            "best": self.best,
            "best_step": self.best_step,
            "validations": self.validations,
            "skipped_steps": self.skipped_steps,
            "fingerprint": self.fingerprint,
            "task": self.task.state_dict(),
        }
        partial = self.last_path.with_name(LAST_CHECKPOINT + ".partial")
        torch.save(state, partial)
        os.replace(partial, self.last_path)

    def load(self) -> None:
        try:
            state = torch.load(self.last_path, map_location="cpu", weights_only=True)
        except Exception as error:  # noqa: BLE001 - torch raises many kinds for a damaged file
            raise CheckpointError(
                f"{self.last_path}: damaged checkpoint ({type(error).__name__}); delete the run "
                "folder and start again"
            ) from error
        if state["fingerprint"] != self.fingerprint:
            raise CheckpointError(
                f"{self.last_path}: trained on {state['fingerprint']}, this run is on "
                f"{self.fingerprint}; choose another folder with run=…"
            )
        if state["step"] > self.config.max_steps:
            raise CheckpointError(
                f"{self.last_path}: already at step {state['step']}, trainer.max_steps is "
                f"{self.config.max_steps}; give a larger one"
            )
        self.task.load_state_dict(state["task"])
        self.step, self.best, self.best_step = state["step"], state["best"], state["best_step"]
        self.validations, self.skipped_steps = state["validations"], state["skipped_steps"]
        self._forget_later_metrics()

    def finish(self) -> None:
        save_weights(self.task.weights(), self.checkpoints / FINAL_WEIGHTS)
        self.writer.close()

    def _count_nonfinite(self) -> None:
        if all(math.isfinite(value) for value in self.latest.values()):
            self._nonfinite_in_a_row = 0
            return
        self.skipped_steps += 1
        self._nonfinite_in_a_row += 1
        logger.warning("step %d skipped: %s", self.step, format_figures(self.latest))
        if self._nonfinite_in_a_row >= self.config.max_nonfinite_steps:
            raise TTSStackError(
                f"{self._nonfinite_in_a_row} steps in a row without a finite loss, last at step "
                f"{self.step}; the last good checkpoint is {self.last_path}: lower the learning "
                "rate and add --resume"
            )

    def _log(self, figures: Mapping[str, float]) -> None:
        with self.metrics_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": self.step, **figures}) + "\n")
        for name, value in figures.items():
            self.writer.add_scalar(name, value, self.step)

    def _forget_later_metrics(self) -> None:
        if not self.metrics_path.exists():
            return
        kept = []
        for line in self.metrics_path.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= self.step:
                    kept.append(line + "\n")
            except ValueError:
                continue  # the kill came in the middle of a line
        self.metrics_path.write_text("".join(kept), encoding="utf-8")


def format_figures(figures: Mapping[str, float]) -> str:
    """`audio 3.210, text 1.100` for one line of a log."""
    return ", ".join(f"{name} {value:.4g}" for name, value in figures.items())


@contextmanager
def _progress(title: str, step: int, max_steps: int) -> Iterator[Any]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    with Progress(*columns) as progress:
        bar = progress.add_task(title, total=max_steps, completed=step, figures="")

        def show(run: _Run) -> None:
            progress.update(bar, completed=run.step, figures=format_figures(run.latest))

        yield show


@contextmanager
def _interrupts(run: _Run) -> Iterator[None]:
    """Turn SIGTERM into KeyboardInterrupt, and save once when either comes."""

    def raise_interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, raise_interrupt)
    try:
        yield
    except KeyboardInterrupt as error:
        run.save()
        raise TTSStackError(
            f"stopped at step {run.step}; the checkpoint is saved: add --resume to continue"
        ) from error
    finally:
        signal.signal(signal.SIGTERM, previous)
