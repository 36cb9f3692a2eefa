"""Where figures, sounds and pictures of a training are shown: TensorBoard, and W&B by config."""

import html
import importlib
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tts_stack.errors import MissingDependencyError
from tts_stack.training.config import TrainerConfig

WANDB_ID_FILE = "wandb_id.txt"


class Writer(Protocol):
    """One place that shows a training."""

    def add_figures(self, figures: Mapping[str, float], step: int) -> None:
        """Scalars by name."""

    def add_audio(
        self, name: str, samples: NDArray[np.float32], sample_rate: int, step: int
    ) -> None:
        """Samples [T] in -1 .. 1."""

    def add_image(self, name: str, pixels: NDArray[np.uint8], step: int) -> None:
        """Pixels [H, W, 3]."""

    def add_text(self, name: str, text: str, step: int) -> None:
        """Plain text."""

    def close(self) -> None:
        """Write out what is still in memory."""


class TensorBoardWriter:
    """Events under `<run>/tensorboard`; those after `step` of an earlier run are hidden."""

    def __init__(self, out_dir: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        purge = {"purge_step": step + 1} if step else {}
        self._writer = SummaryWriter(str(out_dir / "tensorboard"), **purge)

    def add_figures(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def add_audio(
        self, name: str, samples: NDArray[np.float32], sample_rate: int, step: int
    ) -> None:
        self._writer.add_audio(name, np.clip(samples, -1, 1)[None], step, sample_rate)

    def add_image(self, name: str, pixels: NDArray[np.uint8], step: int) -> None:
        self._writer.add_image(name, pixels, step, dataformats="HWC")

    def add_text(self, name: str, text: str, step: int) -> None:
        self._writer.add_text(name, f"<pre>{html.escape(text)}</pre>", step)

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    """A Weights & Biases run; a resumed training continues it."""

    def __init__(self, project: str, out_dir: Path) -> None:
        self._wandb = _import_wandb()
        id_path = out_dir / WANDB_ID_FILE
        if not id_path.exists():
            id_path.write_text(uuid.uuid4().hex[:8], encoding="utf-8")
        self._run: Any = self._wandb.init(
            project=project,
            name=str(out_dir),
            dir=str(out_dir),
            id=id_path.read_text(encoding="utf-8"),
            resume="allow",
        )

    def add_figures(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log(dict(figures), step=step)

    def add_audio(
        self, name: str, samples: NDArray[np.float32], sample_rate: int, step: int
    ) -> None:
        self._run.log({name: self._wandb.Audio(samples, sample_rate=sample_rate)}, step=step)

    def add_image(self, name: str, pixels: NDArray[np.uint8], step: int) -> None:
        self._run.log({name: self._wandb.Image(pixels)}, step=step)

    def add_text(self, name: str, text: str, step: int) -> None:
        self._run.log({name: self._wandb.Html(f"<pre>{html.escape(text)}</pre>")}, step=step)

    def close(self) -> None:
        self._run.finish()


class MediaLog:
    """What a validation shows beside its figures; in all processes but the main one, nothing."""

    def __init__(self, writers: Sequence[Writer], step: int) -> None:
        self._writers, self._step = writers, step

    @property
    def is_shown(self) -> bool:
        """Whether anything added here goes anywhere."""
        return bool(self._writers)

    def add_audio(self, name: str, samples: NDArray[np.float32], sample_rate: int) -> None:
        """Sound [T] in -1 .. 1."""
        for writer in self._writers:
            writer.add_audio(name, samples, sample_rate, self._step)

    def add_image(self, name: str, pixels: NDArray[np.uint8]) -> None:
        """Picture [H, W, 3]."""
        for writer in self._writers:
            writer.add_image(name, pixels, self._step)

    def add_text(self, name: str, text: str) -> None:
        """Plain text."""
        for writer in self._writers:
            writer.add_text(name, text, self._step)


def require_writers(config: TrainerConfig) -> None:
    """Find out before anything is loaded that a configured logger cannot be used.

    Raises:
        MissingDependencyError: its package is not installed.
    """
    if config.wandb_project is not None:
        _import_wandb()


def open_writers(config: TrainerConfig, out_dir: Path, step: int) -> list[Writer]:
    """Everything that the configuration asks for, TensorBoard always."""
    writers: list[Writer] = [TensorBoardWriter(out_dir, step)]
    if config.wandb_project is not None:
        writers.append(WandbWriter(config.wandb_project, out_dir))
    return writers


def _import_wandb() -> ModuleType:
    try:
        return importlib.import_module("wandb")
    except ImportError as error:
        raise MissingDependencyError(
            "trainer.wandb_project is set, but the package wandb is not installed; "
            "pip install wandb, or leave wandb_project out"
        ) from error
