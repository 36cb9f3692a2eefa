"""The command line: each command loads a config and calls one function; see tts_stack.commands."""

import logging
import sys
from typing import NoReturn

import typer
from rich.logging import RichHandler

from tts_stack.commands import check, corpus, instructions, llm, speech, train, vocoder
from tts_stack.commands.common import console
from tts_stack.errors import TTSStackError
from tts_stack.processes import is_main_process

QUIETED = (
    "httpx",
    "lightning",
    "lightning.fabric",
    "lightning.fabric.utilities",
    "lightning.fabric.utilities.rank_zero",
    "lightning.pytorch.utilities.rank_zero",  # the parents' levels are set again on import
    "matplotlib",
    "numba",
)
INTERRUPTED = 130  # what click makes of Ctrl-C
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Recordings into a voice, and text into speech with it.",
)
for group in (speech, corpus, instructions, llm, train, vocoder, check):
    group.register(app)


def main() -> NoReturn:
    """Run a command; an error meant for the user is one line and exit code 1."""
    logging.basicConfig(
        level=logging.INFO if is_main_process() else logging.WARNING,
        format="%(message)s",
        handlers=[RichHandler(console=console, show_path=False)],
    )
    console.quiet = not is_main_process()
    for name in QUIETED:
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        code = app(standalone_mode=False)  # what typer.Exit(code) gave, or None
    except TTSStackError as error:
        fail(str(error))
    except (typer.Abort, KeyboardInterrupt):
        fail("interrupted")
    except Exception as error:
        show = getattr(error, "show", None)  # click's usage errors print themselves
        if show is None:
            raise
        show()
        sys.exit(2)
    if code == INTERRUPTED:
        fail("interrupted")
    sys.exit(code or 0)


def fail(message: str) -> NoReturn:
    """Print one error line and leave with code 1."""
    console.quiet = False
    console.print(
        f"error: {message}", style="bold red", markup=False, highlight=False, soft_wrap=True
    )
    sys.exit(1)
