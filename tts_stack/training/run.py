"""The state of one training: one step, one validation, one checkpoint at a time."""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tts_stack.errors import CheckpointError, TTSStackError
from tts_stack.processes import is_main_process
from tts_stack.training.checkpoint import LAST_CHECKPOINT, load_checkpoint, save_checkpoint
from tts_stack.training.config import TrainerConfig
from tts_stack.training.interrupts import StopRequest
from tts_stack.training.log import RunLog, count_above, format_figures
from tts_stack.training.parallel import end_together, from_main, sum_over_processes, wait_for_all
from tts_stack.training.progress import SpeedMeter
from tts_stack.training.sharding import sharded_like, whole_state
from tts_stack.training.task import TrainingTask
from tts_stack.training.weights import BEST_WEIGHTS, FINAL_WEIGHTS, save_weights
from tts_stack.training.writers import MediaLog

logger = logging.getLogger(__name__)
RISING_VALIDATIONS = 3  # in a row above the best one: over-training, most likely
_FOR_THE_LOOP = ("num_tokens", "num_positions", "empty_batches")  # figures that are not losses
OnValidation = Callable[[int, MediaLog], None]


class Run:
    """Where a training stands; with several processes, each has one and the main one writes.

    Args:
        task: the stage's mathematics.
        out_dir: the run folder.
        config: intervals.
        fingerprint: what the weights are trained on.
        on_validation: called with (step, media) after each validation.
        warn_when_rising: say so when validation gets worse.
    """

    log: RunLog

    def __init__(
        self,
        task: TrainingTask[Any],
        out_dir: Path,
        config: TrainerConfig,
        fingerprint: str,
        *,
        on_validation: OnValidation | None,
        warn_when_rising: bool,
    ) -> None:
        self.task, self.config, self.fingerprint = task, config, fingerprint
        self.out_dir, self.checkpoints = out_dir, out_dir / "checkpoints"
        self.last_path = self.checkpoints / LAST_CHECKPOINT
        self.on_validation, self.warn_when_rising = on_validation, warn_when_rising
        self.step = 0
        self.best, self.best_step = math.inf, 0
        self.validations: list[dict[str, float]] = []
        self.latest: dict[str, float] = {}
        self.skipped_steps = self.empty_batches = self._nonfinite_in_a_row = 0
        self._speed = SpeedMeter()

    def begin(self, *, resume: bool, title: str) -> None:
        """Load the last checkpoint where there is one; make up for a validation it still owes."""
        if is_main_process():
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        is_validated = False
        has_checkpoint = from_main(self.last_path.exists())
        if resume and not has_checkpoint:
            self._say(
                logging.WARNING,
                "%s: nothing to resume in %s, starting from the beginning",
                title,
                self.out_dir,
            )
        if resume and has_checkpoint:
            is_validated = self._load()
            self._say(
                logging.INFO,
                "%s: continuing at step %d of %d",
                title,
                self.step,
                self.config.max_steps,
            )
        self.log = RunLog(self.config, self.out_dir, self.step)
        if not is_validated:
            self.validate()
        self._speed.start()

    def advance(self, batch: object, stop: StopRequest) -> None:
        """One step and what is due after it."""
        figures = self.task.train_step(batch, self.step)
        self.latest = {name: float(value) for name, value in figures.items()}
        self._speed.add(self.latest)
        self.empty_batches += self.latest.get("empty_batches", 0.0) > 0
        self.latest = {n: value for n, value in self.latest.items() if n not in _FOR_THE_LOOP}
        self.step += 1
        is_finite = all(math.isfinite(value) for value in self.latest.values())
        num_nonfinite, num_stops = sum_over_processes([not is_finite, stop.is_set])
        self._count_nonfinite(is_finite=not num_nonfinite)
        if self._is_due(self.config.log_every):
            self._log_step()
        is_validation_due = self._is_due(self.config.validate_every)
        if num_stops:
            self._stop(is_validation_due=is_validation_due)
        if is_validation_due:
            self.validate()
        if self.step % self.config.checkpoint_every == 0:
            self.save()
        self._speed.start()

    def validate(self) -> None:
        """Validate, log, and keep the weights when they are the best so far."""
        figures = {name: float(value) for name, value in self.task.validate().items()}
        figures = from_main(figures)  # all processes must agree on what is best
        self.validations.append(figures)
        self.log.write({f"validation/{name}": value for name, value in figures.items()}, self.step)
        self._say(logging.INFO, "step %d: %s", self.step, format_figures(figures))
        if figures[self.task.monitor] < self.best:
            self.best, self.best_step = figures[self.task.monitor], self.step
            self._save_weights(BEST_WEIGHTS)
        self._warn_when_rising()
        # A model that says NaN has nothing to show.
        if self.on_validation is not None and math.isfinite(figures[self.task.monitor]):
            self.on_validation(self.step, self.log.media(self.step))

    def save(self, *, is_validated: bool = True) -> None:
        """Write `last.ckpt`."""
        state = {
            "step": self.step,
            "best": self.best,
            "best_step": self.best_step,
            "validations": self.validations,
            "is_validated": is_validated,
            "skipped_steps": self.skipped_steps,
            "empty_batches": self.empty_batches,
            "fingerprint": self.fingerprint,
            "task": whole_state(self.task.state_dict()),
        }
        if is_main_process():
            save_checkpoint(state, self.last_path)

    def finish(self) -> None:
        """Save what is not saved yet; nobody goes on before it is there to be read.

        Raises:
            TTSStackError: no validation gave a finite figure, so that there are no best weights.
        """
        is_saved = self.step % self.config.checkpoint_every == 0 and self.last_path.exists()
        if not from_main(is_saved):
            self.save()
        self._save_weights(FINAL_WEIGHTS)
        self.log.close()
        if not math.isfinite(self.best):
            end_together(
                TTSStackError(
                    f"{self.out_dir}: no validation gave a finite {self.task.monitor}, so there "
                    "are no best weights; begin again with a lower learning rate and another run=…"
                )
            )
        wait_for_all()

    def _load(self) -> bool:
        try:
            state = load_checkpoint(
                self.last_path, fingerprint=self.fingerprint, max_steps=self.config.max_steps
            )
        except CheckpointError as error:
            end_together(error)
        own = self.task.state_dict()
        self.task.load_state_dict(sharded_like(state["task"], own))
        self.step, self.best, self.best_step = state["step"], state["best"], state["best_step"]
        self.validations, self.skipped_steps = state["validations"], state["skipped_steps"]
        self.empty_batches = state.get("empty_batches", 0)
        return bool(state.get("is_validated", True))

    def _is_due(self, interval: int) -> bool:
        return self.step % interval == 0 or self.step == self.config.max_steps

    def _log_step(self) -> None:
        self.log.write({f"train/{name}": value for name, value in self.latest.items()}, self.step)
        # A row of its own: what the clock says is never the same twice.
        speed = {f"speed/{name}": value for name, value in self._speed.read().items()}
        self.log.write(speed, self.step)

    def _save_weights(self, name: str) -> None:
        weights = whole_state(self.task.weights())
        if is_main_process():
            save_weights(weights, self.checkpoints / name)

    def _stop(self, *, is_validation_due: bool) -> None:
        self.save(is_validated=not is_validation_due)
        self.log.close()
        end_together(
            TTSStackError(
                f"stopped at step {self.step}; the checkpoint is saved: add --resume to continue"
            )
        )

    def _count_nonfinite(self, *, is_finite: bool) -> None:
        if is_finite:
            self._nonfinite_in_a_row = 0
            return
        self.skipped_steps += 1
        self._nonfinite_in_a_row += 1
        figures = format_figures(self.latest)
        self._say(logging.WARNING, "step %d skipped: %s", self.step, figures)
        if self._nonfinite_in_a_row >= self.config.max_nonfinite_steps:
            end_together(
                TTSStackError(
                    f"{self._nonfinite_in_a_row} steps in a row without a finite loss, last at "
                    f"step {self.step}; {self._what_is_kept()}begin again with a lower learning "
                    "rate and another run=…"
                )
            )

    def _what_is_kept(self) -> str:
        path = self.checkpoints / BEST_WEIGHTS
        return f"the best weights so far are in {path}: " if path.exists() else ""

    def _warn_when_rising(self) -> None:
        values = [figures[self.task.monitor] for figures in self.validations]
        if self.warn_when_rising and count_above(values, self.best) == RISING_VALIDATIONS:
            self._say(
                logging.WARNING,
                "step %d: validation %s is %.4g and has been above its best for %d validations; "
                "the best, %.4g at step %d, is kept in %s",
                self.step,
                self.task.monitor,
                values[-1],
                RISING_VALIDATIONS,
                self.best,
                self.best_step,
                self.checkpoints / BEST_WEIGHTS,
            )

    def _say(self, level: int, message: str, *values: object) -> None:
        if is_main_process():
            logger.log(level, message, *values)
