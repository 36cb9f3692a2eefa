"""Run a command in the test's own process."""

import sys

import pytest


def call_main(args: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Exit code of `tts-stack ARGS`."""
    from tts_stack.cli import main

    monkeypatch.setattr(sys, "argv", ["tts-stack", *args])
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)
