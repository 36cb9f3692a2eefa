"""Run jobs in worker processes, one thread each."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from typing import TypeVar

from tts_stack.errors import DataError

JobT = TypeVar("JobT")
ResultT = TypeVar("ResultT")


def num_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_jobs(
    function: Callable[[JobT], ResultT], jobs: Sequence[JobT], *, num_workers: int
) -> Iterator[tuple[JobT, ResultT]]:
    """Results in the order in which they are ready; one worker means this process.

    Args:
        function: a module-level function.
        jobs: its arguments; they and the results are pickled.
        num_workers: processes; 0 takes every core.

    Raises:
        DataError: a worker process was killed, mostly for want of memory.
    """
    num_workers = min(num_workers or num_cores(), len(jobs))
    if num_workers <= 1:
        yield from ((job, function(job)) for job in jobs)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_start_worker)
    try:
        futures = {pool.submit(function, job): job for job in jobs}
        for future in as_completed(futures):
            yield futures.pop(future), future.result()
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process was killed, mostly for want of memory; run the same command again "
            f"with num_workers={max(1, num_workers // 2)}: finished work is kept"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # for libraries loaded from here on
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops the pool in order
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """A worker that outlives a killed parent would write into the folder of the next run."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
