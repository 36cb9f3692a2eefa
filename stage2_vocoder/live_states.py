"""Hidden states computed when a batch asks for them: no cache on disk, for small runs."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stage2_vocoder.states import STATE_DTYPES, StatesInfo, as_array
from tts_stack.errors import DataError

ComputeStates = Callable[[str, int], Tensor]  # (split, row) -> [S, W]


@dataclass(frozen=True)
class LiveStates:
    """What `StateStore` offers, computed row by row; the rows used last stay in memory.

    A row's states do not depend on the rows before it, so a resumed training reads the same.
    """

    folder: Path  # named in messages
    info: StatesInfo
    counts: Mapping[str, NDArray[np.int64]]  # split -> S of each row, 0 for one without states
    compute: ComputeStates
    max_bytes: int  # of states in memory, for each split

    def split(self, name: str) -> "LiveSplit":
        """Random access to the states of a split."""
        return LiveSplit(self, name)


class LiveSplit:
    """States of one split by row number, rounded as the cache on disk would round them."""

    def __init__(self, states: LiveStates, name: str) -> None:
        self._states, self._name = states, name
        self._counts = states.counts[name]
        self._rows: OrderedDict[int, NDArray[Any]] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._counts)

    def num_tokens(self, index: int) -> int:
        """S of row `index`; 0 where the LLM could not read the row."""
        return int(self._counts[index])

    def read(self, index: int, start: int, stop: int) -> NDArray[Any]:
        """States [stop - start, W] of tokens start .. stop - 1 of row `index`.

        Raises:
            DataError: what was computed has another shape than the row's tokens and the LLM say,
                or is not finite.
        """
        if index in self._rows:
            self._rows.move_to_end(index)
        else:
            self._keep(index, self._compute(index))
        found: NDArray[Any] = self._rows[index][start:stop]
        return found

    def _compute(self, index: int) -> NDArray[Any]:
        info = self._states.info
        states = self._states.compute(self._name, index)
        wanted = (self.num_tokens(index), info.width)
        if tuple(states.shape) != wanted:
            raise DataError(
                f"{self._name} row {index}: hidden states of shape {list(states.shape)}, expected "
                f"{list(wanted)}; the corpus changed while it was read, start again"
            )
        half = states.to("cpu", STATE_DTYPES[info.identity.dtype])
        if not torch.isfinite(half).all():
            raise DataError(
                f"{self._name} row {index}: states are not finite in {info.identity.dtype}; "
                "train the LLM again"
            )
        return as_array(half)

    def _keep(self, index: int, states: NDArray[Any]) -> None:
        """Keep a row, and let those used longest ago go; the row itself always stays."""
        self._rows[index] = states
        self._num_bytes += states.nbytes
        while self._num_bytes > self._states.max_bytes and len(self._rows) > 1:
            _, old = self._rows.popitem(last=False)
            self._num_bytes -= old.nbytes
