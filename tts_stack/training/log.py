"""A training's figures: metrics.jsonl, the writers that show them, and how they read."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tts_stack.processes import is_main_process
from tts_stack.training.config import TrainerConfig
from tts_stack.training.writers import MediaLog, Writer, open_writers

METRICS_FILE = "metrics.jsonl"


class RunLog:
    """Rows of figures by step; silent in all processes but the main one.

    Args:
        config: which writers there are.
        out_dir: the run folder.
        step: where the training stands; rows of later steps, left by a run that was killed, go.
    """

    def __init__(self, config: TrainerConfig, out_dir: Path, step: int) -> None:
        self._path = out_dir / METRICS_FILE
        self._is_main = is_main_process()
        self._writers: list[Writer] = []
        if self._is_main:
            self._forget_after(step)
            self._writers = open_writers(config, out_dir, step)

    def write(self, figures: Mapping[str, float], step: int) -> None:
        """Add one row."""
        if not self._is_main:
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **figures}) + "\n")
        for writer in self._writers:
            writer.add_figures(figures, step)

    def media(self, step: int) -> MediaLog:
        """Where sounds and pictures of a step go."""
        return MediaLog(self._writers, step)

    def close(self) -> None:
        """Write out what is still in memory."""
        for writer in self._writers:
            writer.close()

    def _forget_after(self, step: int) -> None:
        if not self._path.exists():
            return
        kept = []
        for line in self._path.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except ValueError:
                continue  # the kill came in the middle of a line
        self._path.write_text("".join(kept), encoding="utf-8")


def read_metrics(out_dir: Path) -> list[dict[str, float]]:
    """Rows of a run's `metrics.jsonl`."""
    lines = (out_dir / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def format_figures(figures: Mapping[str, float]) -> str:
    """`audio 3.210, text 1.100` for one line of a log."""
    return ", ".join(f"{name} {value:.4g}" for name, value in figures.items())


def count_above(values: Sequence[float], best: float) -> int:
    """How many of the last values, without a break, are not as good (low) as the best one."""
    count = 0
    for value in reversed(values):
        if value <= best:
            break
        count += 1
    return count
