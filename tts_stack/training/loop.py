"""The one training loop of codec, LLM and vocoder: steps, validation, checkpoints, resume, logs.

The loop owns when things happen, a task owns the mathematics. Everything random in a task depends
on (seed, step) alone, so resuming needs the step, the weights and the optimiser states - nothing
else - and meets the unbroken run exactly. Lightning Fabric brings devices, precision and
processes; its Trainer is not used because it counts every optimiser's step and does not restore
the position in the data (LightningModule, `global_step`).
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tts_stack.errors import ConfigError
from tts_stack.processes import is_main_process
from tts_stack.run_lock import hold
from tts_stack.training.config import TrainerConfig
from tts_stack.training.interrupts import StopRequest
from tts_stack.training.parallel import end_together, from_main
from tts_stack.training.progress import progress_bar
from tts_stack.training.run import OnValidation, Run
from tts_stack.training.system import write_system
from tts_stack.training.task import BatchT, TrainingTask


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
    empty_batches: int = 0  # steps that held nothing to learn


def train(
    task: TrainingTask[BatchT],
    out_dir: Path,
    config: TrainerConfig,
    *,
    resume: bool,
    fingerprint: str,
    title: str,
    on_validation: OnValidation | None = None,
    warn_when_rising: bool = True,
) -> TrainSummary:
    """Run a task to `config.max_steps`, from the last checkpoint when `resume` is set.

    Writes under `out_dir`: `checkpoints/last.ckpt` (all state), `checkpoints/best.safetensors`
    and `final.safetensors` (weights), `metrics.jsonl`, `system.json` and TensorBoard events. An
    interrupt (Ctrl-C, SIGTERM) lets the step finish and saves a checkpoint. With several
    processes, all call this and the main one writes.

    Args:
        task: the stage's mathematics.
        out_dir: the run folder.
        config: steps and intervals.
        resume: continue from `last.ckpt` when there is one.
        fingerprint: what the weights were trained on; a checkpoint of another is refused.
        title: label of the progress bar.
        on_validation: called with (step, media) after each validation, in every process, to show
            more than figures.
        warn_when_rising: say so when validation gets worse; not where that is expected.

    Returns:
        Step count, first and last validation figures, best value.

    Raises:
        ConfigError: another training is running in the folder.
        CheckpointError: the checkpoint is damaged or belongs to something else.
        TTSStackError: too many non-finite steps in a row, or interrupted.
    """
    started = time.monotonic()
    run = Run(
        task,
        out_dir,
        config,
        fingerprint,
        on_validation=on_validation,
        warn_when_rising=warn_when_rising,
    )
    with StopRequest() as stop, _alone_in(out_dir):
        run.begin(resume=resume, title=title)
        with progress_bar(title, run.step, config.max_steps) as show:
            for batch in task.batches(run.step, config.max_steps):
                run.advance(batch, stop)
                show(run.step, run.latest)
        run.finish()
    seconds = time.monotonic() - started
    write_system(config, out_dir, steps=run.step, seconds=seconds)
    return TrainSummary(
        run.step,
        run.validations[0],
        run.validations[-1],
        run.best,
        run.best_step,
        run.skipped_steps,
        seconds,
        run.empty_batches,
    )


@contextmanager
def _alone_in(out_dir: Path) -> Iterator[None]:
    """The main process holds the folder; all leave together when another training has it."""
    with ExitStack() as stack:
        refused = None
        if is_main_process():
            out_dir.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(hold(out_dir))
            except ConfigError as error:
                refused = error
        refused = from_main(refused)
        if refused is not None:
            end_together(refused)
        yield
