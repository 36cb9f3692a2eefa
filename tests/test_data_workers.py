import os

import pytest

from tts_stack.data.workers import num_cores, run_jobs
from tts_stack.errors import DataError


def square(x: int) -> int:
    return x * x


def die(x: int) -> int:
    os._exit(9)


def refuse(x: int) -> int:
    raise DataError(f"job {x} is bad")


def test_one_worker_runs_in_this_process_in_order():
    assert list(run_jobs(lambda x: (x, os.getpid()), [3, 4], num_workers=1)) == [
        (3, (3, os.getpid())),
        (4, (4, os.getpid())),
    ]


def test_no_jobs_give_no_results():
    assert list(run_jobs(square, [], num_workers=0)) == []


def test_several_workers_return_each_job_with_its_result():
    assert sorted(run_jobs(square, [1, 2, 3], num_workers=2)) == [(1, 1), (2, 4), (3, 9)]


def test_an_error_in_a_worker_reaches_the_caller():
    with pytest.raises(DataError, match="job [12] is bad"):
        list(run_jobs(refuse, [1, 2], num_workers=2))


def test_a_killed_worker_is_an_error_that_says_what_to_do():
    with pytest.raises(DataError, match="worker process was killed.*num_workers=1: finished work"):
        list(run_jobs(die, [1, 2], num_workers=2))


def test_there_is_at_least_one_core():
    assert num_cores() >= 1
