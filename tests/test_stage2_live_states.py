from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal

from stage2_vocoder.live_states import LiveStates
from stage2_vocoder.states import StateIdentity, StatesInfo
from tts_stack.errors import DataError

COUNTS = {"train": np.array([4, 0, 3, 5]), "validation": np.array([2])}


def live(compute=None, max_bytes=1000, dtype="float16", calls=None):
    def states(split, row):
        if calls is not None:
            calls.append(row)
        return torch.full((int(COUNTS[split][row]), 2), float(row) + 0.123456)

    info = StatesInfo(StateIdentity("llm", "corpus", dtype=dtype), 2, {"train": 4, "validation": 1})
    return LiveStates(Path("run"), info, COUNTS, compute or states, max_bytes)


def test_a_row_is_computed_once_while_it_fits_in_memory():
    calls = []
    rows = live(calls=calls).split("train")
    assert rows.read(3, 1, 4).shape == (3, 2)
    assert_array_equal(rows.read(3, 0, 5), np.full((5, 2), 3.123456, np.float16))
    rows.read(0, 0, 4)
    assert calls == [3, 0]


def test_the_row_used_longest_ago_goes_first():
    calls = []
    rows = live(max_bytes=(4 + 5 + 1) * 2 * 2, calls=calls).split("train")
    for row in (0, 2, 0, 3, 0, 2):  # 3 does not fit beside both: 2 goes, then 3 for 2
        rows.read(row, 0, 1)
    assert calls == [0, 2, 3, 2]


def test_a_row_larger_than_the_memory_is_read_all_the_same():
    calls = []
    rows = live(max_bytes=1, calls=calls).split("train")
    assert len(rows.read(0, 0, 4)) == 4
    rows.read(2, 0, 1)
    rows.read(0, 0, 4)
    assert calls == [0, 2, 0]


def test_num_tokens_needs_no_computation():
    rows = live(compute=None, calls=(calls := [])).split("train")
    assert [rows.num_tokens(row) for row in range(len(rows))] == [4, 0, 3, 5]
    assert calls == []


def test_states_are_rounded_as_on_disk():
    found = live(dtype="bfloat16").split("train").read(0, 0, 1)
    assert_array_equal(found, torch.full((1, 2), 0.123456).bfloat16().float().numpy())


@pytest.mark.parametrize(
    ("states", "message"),
    [
        (torch.zeros(4, 3), r"train row 0: hidden states of shape \[4, 3\], expected \[4, 2\]"),
        (torch.zeros(3, 2), r"shape \[3, 2\], expected \[4, 2\]"),
        (torch.full((4, 2), 1e6), "train row 0: states are not finite in float16"),
    ],
)
def test_wrong_states_are_refused(states, message):
    with pytest.raises(DataError, match=message):
        live(lambda split, row: states).split("train").read(0, 0, 4)
