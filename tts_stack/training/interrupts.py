"""Ctrl-C and SIGTERM: stop after the step that is running, so that what is saved is whole."""

import signal
from types import FrameType, TracebackType
from typing import Self


class StopRequest:
    """Inside its context a signal is only noted; a second Ctrl-C stops at once, unsaved."""

    def __init__(self) -> None:
        self.is_set = False

    def __enter__(self) -> Self:
        self._previous = {
            number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)
        }
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.is_set and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self.is_set = True
