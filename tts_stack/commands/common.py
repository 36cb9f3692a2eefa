"""What commands share: the terminal, progress bars, defaults for what the user left out.

Heavy imports stand inside the commands, so that `--help` answers at once.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from tts_stack.training import TrainSummary

console = Console(stderr=True)
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Settings as key=value: corpus=work/corpus trainer.max_steps=200"),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint.")]


class Phase(StrEnum):
    """Phases of the vocoder's training."""

    reconstruction = "reconstruction"
    adversarial = "adversarial"


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar that a function moves by calling it with (done, total)."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(title, total=None)

        def advance(done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total)

        yield advance


def is_demo(overrides: list[str] | None) -> bool:
    """True when no corpus was named: the demonstration corpus is meant."""
    return not any(override.startswith("corpus=") for override in overrides or [])


def default_run(corpus: str) -> Path:
    """Run folder of a corpus when the user named none."""
    return Path("runs") / Path(corpus).resolve().name


def with_defaults(overrides: list[str] | None, demo_experiment: str) -> list[str]:
    """Fill in what the user left out: the demonstration corpus and preset, and the run folder."""
    given = list(overrides or [])
    if is_demo(given):
        from tts_stack.demo import DEMO_RUN, ensure_demo_corpus

        has_experiment = any(override.startswith("experiment=") for override in given)
        preset = [] if has_experiment else [f"experiment={demo_experiment}"]
        return [*preset, f"corpus={ensure_demo_corpus()}", f"run={DEMO_RUN}", *given]
    corpus = next(item for item in given if item.startswith("corpus=")).removeprefix("corpus=")
    return [f"run={default_run(corpus)}", *given]


def print_summary(summary: "TrainSummary", folder: Path) -> None:
    """How a training ended."""
    from tts_stack.training import format_figures

    console.print(
        f"{folder}: {summary.steps} steps in {summary.seconds:.0f} s "
        f"({summary.skipped_steps} skipped)",
        markup=False,
    )
    console.print(f"  first validation: {format_figures(summary.first_validation)}", markup=False)
    console.print(f"  last validation:  {format_figures(summary.last_validation)}", markup=False)
    console.print(f"  best {summary.best:.4g} at step {summary.best_step}", markup=False)


def next_step(command: str) -> None:
    """Name the command that follows."""
    console.print(f"next: {command}", markup=False, soft_wrap=True)


def quiet_libraries() -> None:
    """Keep the transformers progress bar for loading weights off a one-second command."""
    import os

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
