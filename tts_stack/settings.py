"""Whether a resumed training has the settings it began with."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from tts_stack.errors import ConfigError

logger = logging.getLogger(__name__)
CONFIG_FILE = "config.yaml"
# They say where, how long and how closely watched, not what is computed; the corpus is known by
# its fingerprint, which the checkpoint holds.
_MAY_CHANGE = {
    "corpus",
    "run",
    "trainer.validate_every",
    "trainer.checkpoint_every",
    "trainer.log_every",
    "trainer.device",
    "trainer.num_threads",
    "trainer.strategy",
    "trainer.compile",
    "trainer.gradient_checkpointing",
    "trainer.max_nonfinite_steps",
    "trainer.wandb_project",
    "data.cache_mb",
    "data.quality_every",
    "data.num_shown",
}
_MAX_STEPS = "max_steps"  # of the trainer, and of each phase that has its own
# Their product is the number of micro-batches in a step, and must stay.
_DIVISION = ("trainer.accumulate", "trainer.devices", "trainer.num_nodes")
_SCHEDULES_TO_THE_END = ("cosine", "wsd")
_NOT_SET = "not set"


@dataclass(frozen=True)
class Change:
    """One setting that differs."""

    key: str
    was: object
    now: object

    def __str__(self) -> str:
        return f"{self.key} was {_shown(self.was)}, is {_shown(self.now)}"


def require_same_settings(folder: Path, config: object, *, unused: Collection[str] = ()) -> None:
    """Refuse to resume the training in a folder with settings that change what it computes.

    Args:
        folder: with the config.yaml that the training began with; without one, all is accepted.
        config: a dataclass of settings.
        unused: settings, or groups of them, that this training does not use.

    Raises:
        ConfigError: settings differ, or config.yaml cannot be read.
    """
    path = folder / CONFIG_FILE
    if not path.exists():
        return
    try:
        old = flatten(OmegaConf.to_container(OmegaConf.load(path)))
    except Exception as error:  # noqa: BLE001 - a damaged file raises many kinds
        raise ConfigError(f"{path}: cannot be read ({type(error).__name__})") from error
    new = flatten(OmegaConf.to_container(OmegaConf.structured(config)))
    defaults = flatten(OmegaConf.to_container(OmegaConf.structured(type(config))))
    found = [change for change in changes(old, new, defaults) if not _is_in(change.key, unused)]
    is_same_division = _micro_batches({**defaults, **old}) == _micro_batches(new)
    refused = [change for change in found if not _may_change(change.key, is_same_division)]
    if refused:
        separator = " " if len(refused) == 1 else "\n  "
        raise ConfigError(
            f"{folder}: --resume with other settings:"
            + "".join(f"{separator}{change};" for change in refused)
            + f"{separator}use the old values or another run=…"
        )
    _warn_of_schedules(folder, found, new)


def changes(
    old: Mapping[str, object], new: Mapping[str, object], defaults: Mapping[str, object]
) -> list[Change]:
    """Settings that differ; one that the old settings do not know had its default."""
    return [
        Change(key, old.get(key, defaults.get(key, _NOT_SET)), new.get(key, _NOT_SET))
        for key in sorted(old.keys() | new.keys())
        if old.get(key, defaults.get(key, _NOT_SET)) != new.get(key, _NOT_SET)
    ]


def flatten(values: Any, prefix: str = "") -> dict[str, object]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    found: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            found |= flatten(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _may_change(key: str, is_same_division: bool) -> bool:
    if key in _DIVISION:
        return is_same_division
    return key in _MAY_CHANGE or key.rpartition(".")[2] == _MAX_STEPS


def _micro_batches(settings: Mapping[str, object]) -> int:
    return prod(int(str(settings.get(key, 1))) for key in _DIVISION)


def _is_in(key: str, groups: Collection[str]) -> bool:
    return any(key == group or key.startswith(f"{group}.") for group in groups)


def _warn_of_schedules(folder: Path, found: list[Change], settings: Mapping[str, object]) -> None:
    kinds = {
        str(value)
        for key, value in settings.items()
        if key.endswith("schedule.kind") and value in _SCHEDULES_TO_THE_END
    }
    for change in found:
        if kinds and change.key.endswith(_MAX_STEPS):
            logger.warning(
                "%s: %s; a %s schedule depends on the last step, so the learning rate jumps here "
                "and the end will differ from that of an unbroken run",
                folder,
                change,
                " or ".join(sorted(kinds)),
            )


def _shown(value: object) -> str:
    return "null" if value is None else str(value)
