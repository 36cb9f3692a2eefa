"""The progress bar, and how fast a training goes."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tts_stack.processes import is_main_process
from tts_stack.training.log import format_figures
from tts_stack.training.parallel import sum_over_processes

NUM_SHOWN = 1  # figures beside the bar, the first ones; the log has all
Show = Callable[[int, Mapping[str, float]], None]  # (step, figures)


@contextmanager
def progress_bar(title: str, step: int, max_steps: int) -> Iterator[Show]:
    """A bar that a call moves; none in all processes but the main one."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}"),  # few of them, or they push the bar off the line
    )
    with Progress(*columns, disable=not is_main_process()) as progress:
        bar = progress.add_task(title, total=max_steps, completed=step, figures="")

        def show(step: int, figures: Mapping[str, float]) -> None:
            shown = dict(list(figures.items())[:NUM_SHOWN])
            progress.update(bar, completed=step, figures=format_figures(shown))

        yield show


class SpeedMeter:
    """Steps and tokens a second since the last reading; validation and saving do not count."""

    def __init__(self) -> None:
        self._start_over()
        self.start()

    def start(self) -> None:
        """The clock runs from here on."""
        self._mark = time.monotonic()

    def add(self, figures: Mapping[str, float]) -> None:
        """One step is done; the clock stops."""
        self._seconds += time.monotonic() - self._mark
        self._steps += 1
        self._tokens += figures.get("num_tokens", 0.0)
        self._positions += figures.get("num_positions", 0.0)

    def read(self) -> dict[str, float]:
        """Figures over all processes, every one of which must call it."""
        tokens, positions = sum_over_processes([self._tokens, self._positions])
        seconds = max(self._seconds, 1e-9)
        figures = {"steps_per_second": self._steps / seconds}
        if tokens:
            figures["tokens_per_second"] = tokens / seconds
        if positions:
            figures["padding_waste"] = 1 - tokens / positions
        self._start_over()
        return figures

    def _start_over(self) -> None:
        self._seconds = self._tokens = self._positions = 0.0
        self._steps = 0
