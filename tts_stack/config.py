"""`load_config`: YAML files and command-line overrides in, one checked dataclass out.

It runs once, in the command. Past it no code sees Hydra or OmegaConf.
"""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar, cast

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tts_stack.errors import ConfigError

SchemaT = TypeVar("SchemaT")
# What Hydra reads as one plain value, a list, a mapping or a quoted string.
_PLAIN_VALUE = re.compile(r"[\w./:+@~-]*|\[.*\]|\{.*\}|'.*'|\".*\"", re.DOTALL | re.ASCII)


def config_dir() -> Path:
    """Folder of the YAML files: inside the installed package, or at the top of a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def config_groups() -> dict[str, list[str]]:
    """The groups under configs/ with their choices; every root file may use every group."""
    folders = sorted(path for path in config_dir().iterdir() if path.is_dir())
    return {folder.name: sorted(file.stem for file in folder.glob("*.yaml")) for folder in folders}


def load_config(schema: type[SchemaT], name: str, overrides: Sequence[str] = ()) -> SchemaT:
    """Compose `name`.yaml with overrides and check it against `schema`.

    Args:
        schema: the dataclass that owns types, units and checks.
        name: root file under configs/, without its extension.
        overrides: Hydra overrides: `trainer.max_steps=200`, `+lora=r_8_alpha_16`.

    Returns:
        An instance of `schema`; nested groups are instances of their dataclasses.

    Raises:
        ConfigError: an unknown key or group, a wrong type, a missing value, or a value that the
            schema itself rejects. An unknown key's message names the nearest valid key.
    """
    GlobalHydra.instance().clear()
    # The schema is merged before Hydra applies the overrides, so that an override may name any
    # of its keys, and every wrong key meets the same check.
    try:
        with initialize_config_dir(str(config_dir()), version_base=None):
            groups = _groups_of(name)
            _refuse_values_for_groups(overrides, groups, schema)
            composed = compose(name, [_force_add(override, groups) for override in overrides])
        merged = OmegaConf.merge(OmegaConf.structured(schema), composed)
        missing = sorted(OmegaConf.missing_keys(merged))
        if missing:
            raise ConfigError(f"{name}.yaml: {', '.join(missing)} must be given, as {missing[0]}=…")
        return cast(SchemaT, OmegaConf.to_object(merged))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{name}.yaml: {_explain(error, schema)}") from error


def _groups_of(name: str) -> set[str]:
    """The groups that a root file chooses from in its defaults list."""
    path = config_dir() / f"{name}.yaml"
    defaults = OmegaConf.select(OmegaConf.load(path), "defaults", default=[])
    return {str(group) for entry in defaults if isinstance(entry, DictConfig) for group in entry}


def _refuse_values_for_groups(overrides: Sequence[str], chosen: set[str], schema: type) -> None:
    """`loss.text_weight=0.5` is meant for a setting inside; OmegaConf would not say which."""
    keys = _all_keys(OmegaConf.structured(schema))
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        inside = [name for name in keys if name.startswith(f"{key}.")]
        if inside and key not in chosen and value != "null" and not value.startswith("{"):
            raise ConfigError(
                f"{key} is a group of settings, not a value; give one of them: {inside[0]}={value}"
            )


def _force_add(override: str, groups: set[str]) -> str:
    """`a.b=1` -> `++a.b=1`: an unknown value key reaches the schema's check, not Hydra's.

    A value with characters that Hydra's grammar reserves (a path with a space or a bracket) is
    quoted.
    """
    key, has_value, value = override.partition("=")
    if not has_value:
        raise ConfigError(f"override {override!r} has no value, expected key=value")
    if key[:1] in "+~" or key in groups:
        return override
    if not _PLAIN_VALUE.fullmatch(value):
        # Hydra's quoting: only a quote, and backslashes that stand before one, are escaped.
        value = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value)
        value = f"'{value}'"
    return f"++{key}={value}"


def _explain(error: Exception, schema: type) -> str:
    message = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    full_key = getattr(error, "full_key", None)
    unknown = re.search(r"Key '([^']+)' (?:not in|is not in struct)", str(error))
    if unknown and full_key:
        valid = _all_keys(OmegaConf.structured(schema))
        near = difflib.get_close_matches(str(full_key), valid, n=1, cutoff=0.0)
        return f"unknown key {full_key}; the nearest valid key is {near[0] if near else '(none)'}"
    option = re.search(r"Could not find '([^']+)'", str(error))
    if option:
        group, _, choice = option.group(1).partition("/")
        choices = config_groups().get(group, [])
        near = difflib.get_close_matches(choice, choices, n=1, cutoff=0.0)
        hint = f"; did you mean {group}={near[0]}? Choices: {', '.join(choices)}" if near else ""
        return f"no config {option.group(1)}{hint}"
    return f"{full_key}: {message}" if full_key and str(full_key) not in message else message


def _all_keys(node: DictConfig, prefix: str = "") -> list[str]:
    keys: list[str] = []
    for key in map(str, node):
        full = prefix + key
        keys.append(full)
        if not OmegaConf.is_missing(node, key) and isinstance(node[key], DictConfig):
            keys += _all_keys(node[key], full + ".")
    return keys
