"""One training at a time in a run folder: two would write over each other's checkpoints."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from tts_stack.errors import ConfigError

LOCK_FILE = "run.lock"  # the system frees it when its holder ends, however that ends


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Hold a run folder as long as the context lasts.

    Raises:
        ConfigError: another process holds it.
    """
    lock = FileLock(folder / LOCK_FILE)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ConfigError(
            f"{folder}: another training is running in it; wait for it, or choose another folder "
            "with run=…"
        ) from error
    try:
        yield
    finally:
        lock.release()


def refuse_if_held(folder: Path) -> None:
    """Check before anything in the folder is written.

    Raises:
        ConfigError: another process holds it.
    """
    if (folder / LOCK_FILE).exists():
        with hold(folder):
            pass
