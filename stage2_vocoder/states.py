"""Hidden states on disk: written once per LLM, read row by row by vocoder training.

    states/
      states.json                  whose states these are, sizes, rows per shard
      train-00000.safetensors      states [sum of S, W], offsets [rows + 1] int64
      validation-00000.safetensors

W is the LLM's hidden size, or that of each mixed layer, one after the other. Rows follow the
corpus's order; one that the LLM could not read is empty. A shard appears whole or not at all, so
an interrupted extraction goes on with the shards that are missing.
"""

import dataclasses
import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tts_stack.errors import CheckpointError, ConfigError, DataError
from tts_stack.runtime import write_text
from tts_stack.shards import Corpus

STATES_FILE = "states.json"
FORMAT_VERSION = 1
ROWS_PER_SHARD = 256
MAX_OPEN_FILES = 64
STATE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_METADATA_KEY = "tts_stack.states"


@dataclass(frozen=True)
class StateIdentity:
    """Whose states of which corpus: a store of anything else is refused."""

    llm_sha256: str
    corpus_hash: str
    reading: str = ""  # which layers and position, as the contract's prompt section says
    dtype: str = "float16"  # one of STATE_DTYPES

    def __post_init__(self) -> None:
        if self.dtype not in STATE_DTYPES:
            raise ConfigError(
                f"data.states_dtype is {self.dtype!r}, expected {' or '.join(STATE_DTYPES)}"
            )

    def check(self, found: "StateIdentity", place: Path) -> None:
        """Compare with what a store says of itself.

        Raises:
            CheckpointError: LLM, corpus, reading or type differ; the message names both.
        """
        for name, label in (
            ("llm_sha256", "the LLM"),
            ("corpus_hash", "the corpus"),
            ("reading", "the reading"),
            ("dtype", "the type"),
        ):
            stored, wanted = getattr(found, name), getattr(self, name)
            if stored != wanted:
                raise CheckpointError(
                    f"{place}: hidden states of {label} {stored}, expected {label} {wanted}; "
                    "delete the folder and extract the states again"
                )


@dataclass(frozen=True)
class StatesInfo:
    """What `states.json` says."""

    identity: StateIdentity
    hidden_size: int  # D of one layer
    num_rows: dict[str, int]  # split -> utterances
    rows_per_shard: int = ROWS_PER_SHARD
    num_mixed_layers: int = 1
    format_version: int = FORMAT_VERSION

    @property
    def width(self) -> int:
        """W: values of one token's state."""
        return self.hidden_size * self.num_mixed_layers


class SplitReader(Protocol):
    """States of one split by row number."""

    def __len__(self) -> int:
        """Rows of the split."""

    def num_tokens(self, index: int) -> int:
        """S of row `index`; 0 where the LLM could not read the row."""

    def read(self, index: int, start: int, stop: int) -> NDArray[Any]:
        """States [stop - start, W] of tokens start .. stop - 1 of row `index`."""


class StatesReader(Protocol):
    """Hidden states of a corpus, from disk (`StateStore`) or computed (`LiveStates`)."""

    @property
    def folder(self) -> Path:
        """Names the states in messages."""

    @property
    def info(self) -> StatesInfo:
        """Whose they are, and their sizes."""

    def split(self, name: str) -> SplitReader:
        """Random access to the states of a split."""


def corpus_hash(corpus: Corpus) -> str:
    """Short hash of what decides a corpus's rows: its settings, shards, codec and counts."""
    info = corpus.info
    facts = [info.config_hash, corpus.require_codec().weights_sha256, info.num_utterances]
    facts += [{split: list(names) for split, names in info.shards.items()}]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


class StateWriter:
    """Writes a store shard by shard.

    writer = StateWriter(folder, identity, hidden_size=256, num_rows={"train": 900})
    for rows in writer.missing("train"):
        writer.write("train", rows, [extract(row) for row in rows])  # each [S, W]
    writer.finish()
    """

    def __init__(
        self,
        folder: Path,
        identity: StateIdentity,
        *,
        hidden_size: int,
        num_rows: Mapping[str, int],
        rows_per_shard: int = ROWS_PER_SHARD,
        num_mixed_layers: int = 1,
    ) -> None:
        """Open a folder for writing, keeping the finished shards that it holds.

        A shard that cannot be read counts as missing.

        Raises:
            CheckpointError: the folder holds shards of another LLM or corpus.
        """
        self.folder = folder
        self.info = StatesInfo(
            identity, hidden_size, dict(num_rows), rows_per_shard, num_mixed_layers
        )
        folder.mkdir(parents=True, exist_ok=True)
        for path in filter(_is_readable, sorted(folder.glob("*.safetensors"))):
            identity.check(shard_identity(path), path)

    def missing(self, split: str) -> list[range]:
        """Row ranges whose shard is not there yet, in order."""
        ranges = _shard_ranges(self.info, split)
        paths = (shard_path(self.folder, split, shard) for shard in range(len(ranges)))
        pairs = zip(paths, ranges, strict=True)
        return [rows for path, rows in pairs if not _holds(path, len(rows))]

    def write(self, split: str, rows: range, states: Sequence[Tensor | NDArray[Any]]) -> None:
        """Write one shard: `states[i]` [S, W] belongs to corpus row `rows[i]`.

        Raises:
            DataError: a wrong number of rows, a wrong width, or a value that is not finite in
                the store's type.
        """
        path = shard_path(self.folder, split, rows.start // self.info.rows_per_shard)
        if len(states) != len(rows):
            raise DataError(f"{path}: {len(states)} rows given, expected {len(rows)}")
        halves = [
            self._half(state, f"{path}: row {row}") for row, state in zip(rows, states, strict=True)
        ]
        offsets = torch.tensor([0, *(len(half) for half in halves)]).cumsum(0)
        partial = path.with_name(path.name + ".partial")
        identity = json.dumps(dataclasses.asdict(self.info.identity))
        tensors = {"states": torch.cat(halves), "offsets": offsets}
        save_file(tensors, partial, metadata={_METADATA_KEY: identity})
        os.replace(partial, path)

    def finish(self) -> None:
        """Write `states.json`, which makes the store readable.

        Raises:
            DataError: a shard is missing.
        """
        for split in self.info.num_rows:
            missing = self.missing(split)
            if missing:
                raise DataError(
                    f"{self.folder}: {len(missing)} shards of split {split} are missing, first "
                    f"rows {missing[0].start} to {missing[0].stop - 1}; extract them again"
                )
        values = json.dumps(dataclasses.asdict(self.info), indent=1)
        write_text(self.folder / STATES_FILE, values + "\n")

    def _half(self, state: Tensor | NDArray[Any], place: str) -> Tensor:
        """A row in the store's type, checked."""
        dtype = self.info.identity.dtype
        half = torch.as_tensor(state).to(STATE_DTYPES[dtype])
        if half.ndim != 2 or half.shape[1] != self.info.width:
            raise DataError(
                f"{place}: states of shape {list(half.shape)}, expected [S, {self.info.width}]"
            )
        if not half.isfinite().all():
            raise DataError(
                f"{place}: states are not finite in {dtype}; "
                + ("try data.states_dtype=bfloat16, or " if dtype == "float16" else "")
                + "train the LLM again"
            )
        return half


class SplitStates(Sequence[NDArray[Any]]):
    """States of one split by row number, [S, W]; only the rows asked for leave the disk.

    float16 comes as it is stored, bfloat16, which NumPy does not have, as float32.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)
        self._files: OrderedDict[int, Any] = OrderedDict()
        shards, starts, counts = [], [], []
        for shard, path in enumerate(self._paths):
            offsets = self._open(shard).get_tensor("offsets").numpy()
            shards.append(np.full(len(offsets) - 1, shard, dtype=np.int32))
            starts.append(offsets[:-1])
            counts.append(np.diff(offsets))
            if int(offsets[-1]) != self._open(shard).get_slice("states").get_shape()[0]:
                raise CheckpointError(f"{path}: offsets and states disagree; extract again")
        empty = [np.zeros(0, dtype=np.int64)]  # a split may have no row at all
        self._shards = np.concatenate(shards or empty)
        self._starts, self._counts = (
            np.concatenate(starts or empty),
            np.concatenate(counts or empty),
        )

    def __len__(self) -> int:
        return len(self._counts)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": OrderedDict()}  # open files do not travel

    def __getitem__(self, index: Any) -> Any:
        """States [S, W] of row `index`."""
        return self.read(index, 0, self.num_tokens(index))

    def num_tokens(self, index: int) -> int:
        """S of row `index`; 0 where the LLM could not read the row."""
        return int(self._counts[index])

    def read(self, index: int, start: int, stop: int) -> NDArray[Any]:
        """States [stop - start, W] of tokens start .. stop - 1 of row `index`."""
        first = int(self._starts[index])
        found = self._open(int(self._shards[index])).get_slice("states")
        return as_array(found[first + start : first + stop])

    def _open(self, shard: int) -> Any:
        if shard not in self._files:
            if len(self._files) == MAX_OPEN_FILES:
                self._files.popitem(last=False)
            self._files[shard] = _open_shard(self._paths[shard])
        self._files.move_to_end(shard)
        return self._files[shard]


@dataclass(frozen=True)
class StateStore:
    """A finished store, opened and checked."""

    folder: Path
    info: StatesInfo

    @classmethod
    def open(cls, folder: Path, corpus: Corpus, *, llm_sha256: str | None = None) -> Self:
        """Read `states.json` and check that the store belongs to the corpus and the LLM.

        Args:
            folder: the states folder of a run.
            corpus: the corpus whose rows the store follows.
            llm_sha256: hash of the LLM that must have made it; None accepts any.

        Raises:
            CheckpointError: the store is missing, unfinished, damaged, or made by another LLM or
                from another corpus.
        """
        info = read_info(folder)
        wanted = dataclasses.replace(
            info.identity,
            llm_sha256=info.identity.llm_sha256 if llm_sha256 is None else llm_sha256,
            corpus_hash=corpus_hash(corpus),
        )
        wanted.check(info.identity, folder)
        return cls(folder, info)

    def split(self, name: str) -> SplitStates:
        """Random access to the states of a split.

        Raises:
            CheckpointError: a shard is missing, damaged, or made by another LLM.
        """
        paths = [
            shard_path(self.folder, name, shard)
            for shard in range(len(_shard_ranges(self.info, name)))
        ]
        for path in paths:
            self.info.identity.check(shard_identity(path), path)
        return SplitStates(paths)


def as_array(states: Tensor) -> NDArray[Any]:
    """float16 as it is, every other type as float32."""
    found: NDArray[Any] = (
        states.numpy() if states.dtype == torch.float16 else states.float().numpy()
    )
    return found


def shard_path(folder: Path, split: str, shard: int) -> Path:
    """File of one shard."""
    return folder / f"{split}-{shard:05d}.safetensors"


def read_info(folder: Path) -> StatesInfo:
    """Read `states.json` of a states folder.

    Raises:
        CheckpointError: it is missing, damaged, or of another version.
    """
    file = folder / STATES_FILE
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        if values["format_version"] != FORMAT_VERSION:
            raise CheckpointError(
                f"{file}: format_version is {values['format_version']}, this release reads "
                f"{FORMAT_VERSION}; extract the states again"
            )
        return StatesInfo(identity=StateIdentity(**values.pop("identity")), **values)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder}: no {STATES_FILE} in it, so the hidden states are not extracted yet; "
            "run tts-stack extract-states"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error}); extract again") from error


def _shard_ranges(info: StatesInfo, split: str) -> list[range]:
    num_rows, step = info.num_rows.get(split, 0), info.rows_per_shard
    return [range(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


def _open_shard(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path}: not a readable shard of hidden states ({error}); extract them again"
        ) from error


def _is_readable(path: Path) -> bool:
    try:
        _open_shard(path)
    except CheckpointError:
        return False
    return True


def _holds(path: Path, num_rows: int) -> bool:
    """Whether a shard is there; one cut for another number of rows a shard is not the one meant."""
    if not _is_readable(path):
        return False
    return int(_open_shard(path).get_slice("offsets").get_shape()[0]) == num_rows + 1


def shard_identity(path: Path) -> StateIdentity:
    """Whose states a shard holds.

    Raises:
        CheckpointError: it cannot be read, or does not say.
    """
    metadata = _open_shard(path).metadata() or {}
    try:
        return StateIdentity(**json.loads(metadata[_METADATA_KEY]))
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise CheckpointError(
            f"{path}: does not say which LLM made it; delete the folder and extract again"
        ) from error
