"""What a preparation will do, fixed before work starts: shard membership, split, fingerprints.

A killed run that starts again makes the same plan, so finished shards can be kept.
"""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tts_stack.data.config import PrepareConfig
from tts_stack.errors import DataError
from tts_stack.records import SourceItem
from tts_stack.runtime import open_run_dir, write_text
from tts_stack.settings import flatten

PLAN_FILE = "plan.json"
PARTS_FOLDER = "parts"
_HASH_LENGTH = 16
_NOT_SETTINGS = ("source", "corpus", "num_workers")  # change where and how fast, not what
# What a preparation that kept nothing leaves behind; everything else is somebody's work.
_REPLACEABLE = {PLAN_FILE, PARTS_FOLDER, "config.yaml", "versions.json", "rejected.jsonl"}


@dataclass(frozen=True)
class Plan:
    """Work to do, and what makes it the same work as last time."""

    items: tuple[SourceItem, ...]
    shard_size: int  # shard k covers items k * shard_size and following
    config_hash: str  # of settings, texts and names of recordings; shards carry it
    source_stamp: str  # of sizes and times of the recordings: detects edited ones
    settings: dict[str, Any]

    @property
    def num_shards(self) -> int:
        return -(-len(self.items) // self.shard_size)

    def shard_items(self, index: int) -> tuple[SourceItem, ...]:
        """Source lines that shard `index` covers."""
        return self.items[index * self.shard_size : (index + 1) * self.shard_size]


def make_plan(config: PrepareConfig, items: Sequence[SourceItem]) -> Plan:
    """Plan the preparation of `items`."""
    settings = dataclasses.asdict(config)
    settings = {key: value for key, value in settings.items() if key not in _NOT_SETTINGS}
    source = Path(config.source).resolve()
    source_folder = source if source.is_dir() else source.parent
    rows = [
        (item.id, os.path.relpath(item.audio_path, source_folder), item.text, item.speaker)
        + (item.language,)
        for item in items
    ]
    return Plan(
        items=tuple(items),
        shard_size=config.shard_size,
        config_hash=_hash([settings, rows]),
        source_stamp=_hash([_stamp(item.audio_path) for item in items]),
        settings=settings,
    )


def choose_validation(
    ids: Sequence[str], *, seed: int, fraction: float, max_count: int
) -> frozenset[str]:
    """The ids of the validation split.

    Each id draws a number from a hash of (seed, id), so adding recordings never moves old ones
    between the splits, up to `max_count`. Of two ids or more, each split gets one at least.
    """
    draws = sorted((draw(seed, id), id) for id in ids)
    chosen = [id for draw, id in draws if draw < fraction][:max_count]
    if not chosen:
        chosen = [id for _, id in draws[:1]]
    if len(chosen) == len(draws):
        chosen = chosen[:-1]
    return frozenset(chosen)


def open_output(folder: Path, plan: Plan, config: PrepareConfig) -> None:
    """Create the output folder, or check that it was made by the same plan.

    Raises:
        DataError: it holds something else, or shards made with other settings or recordings.
        ConfigError: it cannot be written.
    """
    if folder.is_dir() and any(folder.iterdir()):
        _check_same_plan(folder, plan)
    open_run_dir(folder, config, resume=True)
    (folder / PARTS_FOLDER).mkdir(exist_ok=True)
    values = {
        "config_hash": plan.config_hash,
        "source_stamp": plan.source_stamp,
        "num_items": len(plan.items),
        "settings": plan.settings,
    }
    write_text(folder / PLAN_FILE, json.dumps(values, indent=1) + "\n")


def _check_same_plan(folder: Path, plan: Plan) -> None:
    remedy = "choose another folder with corpus=… or delete this one"
    try:
        old = json.loads((folder / PLAN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        old = None
    if old and (old["config_hash"], old["source_stamp"]) == (plan.config_hash, plan.source_stamp):
        return
    if {path.name for path in folder.iterdir()} <= _REPLACEABLE:
        shutil.rmtree(folder / PARTS_FOLDER, ignore_errors=True)
        return
    if old is None:
        raise DataError(f"{folder}: is not empty and holds no {PLAN_FILE}; {remedy}")
    raise DataError(f"{folder}: was made from {_difference(old, plan)}; {remedy}")


def _difference(old: dict[str, Any], plan: Plan) -> str:
    before, now = flatten(old["settings"]), flatten(plan.settings)
    changed = [
        f"{key}={before.get(key)} there, {now.get(key)} here"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    if changed:
        return f"other settings ({'; '.join(changed)})"
    if old["num_items"] != len(plan.items):
        return f"another source ({old['num_items']} lines there, {len(plan.items)} here)"
    if old["config_hash"] != plan.config_hash:
        return "another source (texts or file names differ)"
    return "other recordings (their sizes or times have changed)"


def draw(seed: int, id: str) -> float:
    """A number in 0..1 that depends on (seed, id) alone."""
    digest = hashlib.blake2b(f"{seed}:{id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _hash(values: object) -> str:
    data = json.dumps(values, sort_keys=True).encode()
    return hashlib.sha256(data).hexdigest()[:_HASH_LENGTH]


def _stamp(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return (0, 0)
    return (status.st_size, status.st_mtime_ns)
