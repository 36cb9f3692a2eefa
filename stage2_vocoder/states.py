"""Hidden states on disk: written once per LLM, read row by row by vocoder training.

    states/
      states.json                  whose states these are, sizes, rows per shard
      train-00000.safetensors      states [sum of S, D] float16, offsets [rows + 1] int64
      validation-00000.safetensors

Rows follow the corpus's order. A shard appears whole or not at all, so an interrupted extraction
goes on with the shards that are missing.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tts_stack.errors import CheckpointError, DataError
from tts_stack.runtime import write_text
from tts_stack.shards import Corpus

STATES_FILE = "states.json"
FORMAT_VERSION = 1
ROWS_PER_SHARD = 256
_METADATA_KEY = "tts_stack.states"


@dataclass(frozen=True)
class StateIdentity:
    """Whose states of which corpus: a store of anything else is refused."""

    llm_sha256: str
    corpus_hash: str
    reading: str = ""  # which layer and position, as the contract's prompt section says

    def check(self, found: "StateIdentity", place: Path) -> None:
        """Compare with what a store says of itself.

        Raises:
            CheckpointError: LLM, corpus or reading differ; the message names both.
        """
        for name, label in (
            ("llm_sha256", "the LLM"),
            ("corpus_hash", "the corpus"),
            ("reading", "the reading"),
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
    hidden_size: int
    num_rows: dict[str, int]  # split -> utterances
    rows_per_shard: int = ROWS_PER_SHARD
    format_version: int = FORMAT_VERSION


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
        writer.write("train", rows, [extract(row) for row in rows])  # each [S, D]
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
    ) -> None:
        """Open a folder for writing, keeping the finished shards that it holds.

        Raises:
            CheckpointError: the folder holds shards of another LLM or corpus.
        """
        self.folder = folder
        self.info = StatesInfo(identity, hidden_size, dict(num_rows), rows_per_shard)
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.glob("*.safetensors")):
            identity.check(_shard_identity(path), path)

    def missing(self, split: str) -> list[range]:
        """Row ranges whose shard is not there yet, in order."""
        ranges = _shard_ranges(self.info, split)
        return [
            rows
            for shard, rows in enumerate(ranges)
            if not shard_path(self.folder, split, shard).exists()
        ]

    def write(self, split: str, rows: range, states: Sequence[NDArray[Any]]) -> None:
        """Write one shard: `states[i]` [S, D] belongs to corpus row `rows[i]`.

        Raises:
            DataError: a wrong number of rows, a wrong hidden size, or a value that is not finite
                in float16.
        """
        path = shard_path(self.folder, split, rows.start // self.info.rows_per_shard)
        if len(states) != len(rows):
            raise DataError(f"{path}: {len(states)} rows given, expected {len(rows)}")
        halves = [np.asarray(row).astype(np.float16) for row in states]
        for row, half in zip(rows, halves, strict=True):
            self._check(half, f"{path}: row {row}")
        offsets = np.cumsum([0] + [len(half) for half in halves], dtype=np.int64)
        tensors: dict[str, NDArray[Any]] = {"states": np.concatenate(halves), "offsets": offsets}
        partial = path.with_name(path.name + ".partial")
        identity = json.dumps(dataclasses.asdict(self.info.identity))
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

    def _check(self, half: NDArray[np.float16], place: str) -> None:
        if half.ndim != 2 or half.shape[1] != self.info.hidden_size:
            raise DataError(
                f"{place}: states of shape {list(half.shape)}, "
                f"expected [S, {self.info.hidden_size}]"
            )
        if not np.isfinite(half).all():
            raise DataError(f"{place}: states are not finite in float16; train the LLM again")


class SplitStates(Sequence[NDArray[np.float16]]):
    """States of one split by row number, [S, D]; only the rows asked for leave the disk."""

    def __init__(self, paths: Sequence[Path], hidden_size: int) -> None:
        self.hidden_size = hidden_size
        self._paths = list(paths)
        self._files: dict[int, Any] = {}
        self._places: list[tuple[int, int, int]] = []  # row -> (shard, start, stop)
        for shard, path in enumerate(self._paths):
            offsets = self._open(shard).get_tensor("offsets")
            pairs = zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
            self._places += [(shard, start, stop) for start, stop in pairs]
            if int(offsets[-1]) != self._open(shard).get_slice("states").get_shape()[0]:
                raise CheckpointError(f"{path}: offsets and states disagree; extract again")

    def __len__(self) -> int:
        return len(self._places)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}  # open files do not travel

    def __getitem__(self, index: Any) -> Any:
        """States [S, D] of row `index`, float16."""
        return self.read(index, 0, self.num_tokens(index))

    def num_tokens(self, index: int) -> int:
        """S of row `index`."""
        _, start, stop = self._places[index]
        return stop - start

    def read(self, index: int, start: int, stop: int) -> NDArray[np.float16]:
        """States [stop - start, D] of tokens start .. stop - 1 of row `index`."""
        shard, first, _ = self._places[index]
        found = self._open(shard).get_slice("states")[first + start : first + stop]
        return np.asarray(found)

    def _open(self, shard: int) -> Any:
        if shard not in self._files:
            self._files[shard] = _open_shard(self._paths[shard])
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
        wanted = StateIdentity(
            info.identity.llm_sha256 if llm_sha256 is None else llm_sha256,
            corpus_hash(corpus),
            info.identity.reading,
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
            self.info.identity.check(_shard_identity(path), path)
        return SplitStates(paths, self.info.hidden_size)


def shard_path(folder: Path, split: str, shard: int) -> Path:
    """File of one shard."""
    return folder / f"{split}-{shard:05d}.safetensors"


def _shard_ranges(info: StatesInfo, split: str) -> list[range]:
    num_rows, step = info.num_rows.get(split, 0), info.rows_per_shard
    return [range(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


def _open_shard(path: Path) -> Any:
    try:
        return safe_open(path, framework="np")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path}: not a readable shard of hidden states ({error}); extract them again"
        ) from error


def _shard_identity(path: Path) -> StateIdentity:
    metadata = _open_shard(path).metadata() or {}
    try:
        return StateIdentity(**json.loads(metadata[_METADATA_KEY]))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: does not say which LLM made it; delete the folder and extract again"
        ) from error


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
            "run tts-stack train-vocoder, which extracts them first"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error}); extract again") from error
