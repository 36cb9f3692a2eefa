"""The unit of work of preparation: one run of source lines -> a train and a validation shard.

`parts/00012.json` is written last and says that shard 12 is finished and what it left out.
"""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tts_stack.contract import TextSpec
from tts_stack.data.config import PrepareConfig
from tts_stack.data.plan import PARTS_FOLDER
from tts_stack.data.report import RejectedItem
from tts_stack.data.utterance import prepare_item
from tts_stack.errors import DataError
from tts_stack.records import SourceItem, Utterance
from tts_stack.runtime import write_text
from tts_stack.shards import SPLITS, write_shard

Frontend = Callable[[str], str]


@dataclass(frozen=True)
class PartJob:
    """Everything a worker process needs to know."""

    index: int
    items: tuple[SourceItem, ...]
    validation_ids: frozenset[str]  # of these items
    config: PrepareConfig
    config_hash: str
    build_frontend: Callable[[TextSpec], Frontend]


@dataclass(frozen=True)
class Part:
    """What became of one run of source lines."""

    config_hash: str
    validation_ids: tuple[str, ...]  # as planned, whether kept or not
    kept: dict[str, list[str]]  # split -> ids
    seconds: dict[str, float]  # split -> seconds of audio
    train_symbols: str  # every character of model_text in the training split, sorted
    rejected: tuple[RejectedItem, ...]


def shard_name(split: str, index: int) -> str:
    """File name of a shard."""
    return f"{split}-{index:05d}.parquet"


def prepare_part(job: PartJob) -> Part:
    """Prepare the lines of one shard and write it.

    Raises:
        DataError: the output folder cannot be written.
    """
    frontend = job.build_frontend(job.config.text.spec())
    found = [prepare_item(item, job.config, frontend) for item in job.items]
    utterances = [entry for entry in found if isinstance(entry, Utterance)]
    splits = {
        "train": [entry for entry in utterances if entry.id not in job.validation_ids],
        "validation": [entry for entry in utterances if entry.id in job.validation_ids],
    }
    rate = job.config.sample_rate
    part = Part(
        config_hash=job.config_hash,
        validation_ids=tuple(sorted(job.validation_ids)),
        kept={split: [entry.id for entry in entries] for split, entries in splits.items()},
        seconds={
            split: sum(len(entry.audio) for entry in entries) / rate
            for split, entries in splits.items()
        },
        train_symbols="".join(sorted({c for entry in splits["train"] for c in entry.model_text})),
        rejected=tuple(entry for entry in found if isinstance(entry, RejectedItem)),
    )
    _write(job, splits, part)
    return part


def finished_part(folder: Path, job: PartJob) -> Part | None:
    """The part as an earlier run finished it, or None when it is still to be done."""
    try:
        values = json.loads(_part_file(folder, job.index).read_text(encoding="utf-8"))
        rejected = tuple(RejectedItem(**item) for item in values.pop("rejected"))
        validation_ids = tuple(values.pop("validation_ids"))
        part = Part(rejected=rejected, validation_ids=validation_ids, **values)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    same = part.config_hash == job.config_hash and set(part.validation_ids) == job.validation_ids
    names = [shard_name(split, job.index) for split in SPLITS if part.kept[split]]
    return part if same and all((folder / name).is_file() for name in names) else None


def _write(job: PartJob, splits: dict[str, list[Utterance]], part: Part) -> None:
    folder = Path(job.config.corpus)
    try:
        for split, entries in splits.items():
            path = folder / shard_name(split, job.index)
            if entries:
                write_shard(
                    path,
                    entries,
                    sample_rate=job.config.sample_rate,
                    config_hash=job.config_hash,
                )
            else:
                path.unlink(missing_ok=True)
        text = json.dumps(dataclasses.asdict(part), ensure_ascii=False)
        write_text(_part_file(folder, job.index), text + "\n")
    except OSError as error:
        raise DataError(
            f"{folder}: shard {job.index} cannot be written ({error.strerror or error}); make room "
            "and run the same command again: finished shards are kept"
        ) from error


def _part_file(folder: Path, index: int) -> Path:
    return folder / PARTS_FOLDER / f"{index:05d}.json"
