"""`tts-stack check resume`: a training that was stopped and continued equals an unbroken one."""

import signal
from collections.abc import Iterator, Mapping
from numbers import Number
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stage1_llm.checks.report import Claim, Report, identical
from stage1_llm.checks.setup import Setup
from stage1_llm.checks.shrink import NUM_STEPS, STOP_STEP
from stage1_llm.checks.training import make_task
from stage1_llm.module import LLMTask, MicroBatches
from tts_stack.errors import TTSStackError
from tts_stack.training import (
    BEST_WEIGHTS,
    LAST_CHECKPOINT,
    load_weights,
    read_metrics,
    train,
)

_CHECKPOINTS = "checkpoints"


class StoppedTask(LLMTask):
    """A training that somebody ends in its middle."""

    def train_step(self, batch: MicroBatches, step: int) -> Mapping[str, float | Tensor]:
        """One update; with the last one before the stop, the signal that `kill` sends."""
        figures = super().train_step(batch, step)
        if step + 1 == STOP_STEP:
            signal.raise_signal(signal.SIGTERM)
        return figures


def check_resume(setup: Setup) -> Report:
    """Train without a break, and with one; compare everything that training left behind."""
    unbroken, broken = setup.folder / "unbroken", setup.folder / "broken"
    _train(setup, unbroken, LLMTask, title=f"{NUM_STEPS} steps")
    _train_until_stopped(setup, broken)
    middle = _checkpoint(broken)
    _train(setup, broken, LLMTask, title=f"{NUM_STEPS - STOP_STEP} more", resume=True)
    wanted, found = _checkpoint(unbroken), _checkpoint(broken)
    after = f"after {STOP_STEP} + {NUM_STEPS - STOP_STEP} steps"
    claims = [_progress(middle, wanted)]
    for part, name in (
        ("network", "weights"),
        ("optimizers", "optimiser states"),
        ("average", "averaged weights"),
    ):
        if part in wanted["task"]:
            claims.append(
                identical(
                    f"{after} the {name} are those of {NUM_STEPS} steps",
                    dict(_tensors(found["task"].get(part))),
                    dict(_tensors(wanted["task"][part])),
                )
            )
    best = (load_weights(run / _CHECKPOINTS / BEST_WEIGHTS) for run in (broken, unbroken))
    claims += [
        identical(f"{after} the best weights are those of {NUM_STEPS} steps", *best),
        _figures(broken, unbroken),
    ]
    return Report(setup.describe(), tuple(claims))


def _train(
    setup: Setup, folder: Path, kind: type[LLMTask], *, title: str, resume: bool = False
) -> None:
    """With a network and a task of its own, as after a restart."""
    train(
        make_task(setup, setup.network(), kind),
        folder,
        setup.config.trainer,
        resume=resume,
        fingerprint="check",
        title=title,
        warn_when_rising=False,
    )


def _train_until_stopped(setup: Setup, folder: Path) -> None:
    try:
        _train(setup, folder, StoppedTask, title=f"{STOP_STEP} steps")
    except TTSStackError:
        if not (folder / _CHECKPOINTS / LAST_CHECKPOINT).exists():
            raise


def _checkpoint(folder: Path) -> dict[str, Any]:
    path = folder / _CHECKPOINTS / LAST_CHECKPOINT
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def _progress(middle: Mapping[str, Any], end: Mapping[str, Any]) -> Claim:
    """Without this a training that learns nothing would prove everything."""
    before, after = (dict(_tensors(state["task"]["network"])) for state in (middle, end))
    num_moved = sum(not torch.equal(before[name], value) for name, value in after.items())
    return Claim(
        f"the training stopped at step {STOP_STEP}, and learnt after it",
        middle["step"] == STOP_STEP and end["step"] == NUM_STEPS and num_moved > 0,
        f"stopped at step {middle['step']}, ended at {end['step']}; {num_moved} of {len(after)} "
        "tensors moved in between",
    )


def _figures(broken: Path, unbroken: Path) -> Claim:
    found, wanted = (dict(_metrics(run)) for run in (broken, unbroken))
    differing = [key for key, value in wanted.items() if found.get(key) != value]
    differing += sorted(found.keys() - wanted.keys())
    last = {name: value for (step, name), value in wanted.items() if step == NUM_STEPS}
    difference = max((abs(found.get(k, float("inf")) - wanted[k]) for k in wanted), default=0.0)
    shown = f"; first at step {differing[0][0]}: {differing[0][1]}" if differing else ""
    return Claim(
        "every figure of the log is the same: losses, gradient norms, rates, validation",
        not differing,
        f"{len(wanted)} figures, {len(differing)} differ, largest difference {difference:.2g}; "
        f"loss of step {NUM_STEPS} {last.get('train/loss', float('nan')):.6g}{shown}",
    )


def _metrics(run: Path) -> Iterator[tuple[tuple[int, str], float]]:
    """Figures by step and name; what the clock says is never the same twice."""
    for row in read_metrics(run):
        for name, value in row.items():
            if name != "step" and not name.startswith("speed/"):
                yield (int(row["step"]), name), value


def _tensors(state: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors and numbers of a nested state, by their path."""
    if isinstance(state, Tensor):
        yield name, state
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from _tensors(value, f"{name}/{key}")
    elif isinstance(state, (list, tuple)):
        for index, value in enumerate(state):
            yield from _tensors(value, f"{name}/{index}")
    elif isinstance(state, Number):
        yield name, torch.tensor(state, dtype=torch.float64)
