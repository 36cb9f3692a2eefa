"""Fixtures of all tests: one thread, the checkout, and the shared recordings where they exist."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch loads; child processes inherit it
ROOT = Path(__file__).resolve().parent.parent
SHARED_DATA = ROOT.parent / "shared" / "data"


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """Top of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder ../shared/data; a test that wants it is skipped where it does not exist."""
    if not SHARED_DATA.is_dir():
        pytest.skip("no recordings in ../shared/data on this machine")
    return SHARED_DATA
