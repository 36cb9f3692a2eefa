"""Device, seed, threads and run folders: what every long-running command sets up first."""

import json
import logging
import os
import random
import subprocess
import sys
from collections.abc import Collection
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
from omegaconf import OmegaConf

from tts_stack.errors import ConfigError
from tts_stack.processes import is_main_process
from tts_stack.run_lock import refuse_if_held
from tts_stack.settings import CONFIG_FILE, require_same_settings

_RECORDED_PACKAGES = ("tts-stack", "torch", "torchaudio", "transformers", "vocos", "lightning")


def choose_device(name: str = "auto") -> torch.device:
    """Pick "cuda", then "mps", then "cpu" for "auto"; otherwise check that `name` is usable.

    Raises:
        ConfigError: the name is not a device, or the device is not present.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device {name!r} cannot be used ({reason}); try cpu") from error
    return device


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def step_generator(seed: int, step: int, stream: int = 0) -> torch.Generator:
    """A generator that depends on (seed, step, stream) alone: resuming needs no saved state."""
    state = np.random.SeedSequence((seed, step, stream)).generate_state(2, np.uint32)
    return torch.Generator().manual_seed(int(state[0]) << 32 | int(state[1]))


def open_run_dir(path: Path, config: object, *, resume: bool, unused: Collection[str] = ()) -> Path:
    """Create a run folder and record in it the resolved config, versions and git commit.

    With several processes, each may call this; the main one writes.

    Args:
        path: the folder.
        config: a dataclass of settings.
        resume: continue the training that the folder holds, if any, with the same settings.
        unused: settings, or groups of them, that this run does not use: they may change.

    Raises:
        ConfigError: the folder already holds a run and `resume` is False, or that run had other
            settings (the message shows which), or another training is running in it, or it cannot
            be written.
    """
    require_free(path, resume=resume)
    if _has_run(path):
        require_same_settings(path, config, unused=unused)
    if not is_main_process():
        return path
    refuse_if_held(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_text(path / CONFIG_FILE, OmegaConf.to_yaml(OmegaConf.structured(config)))
        write_text(path / "versions.json", json.dumps(versions(), indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot write the run folder ({error.strerror})") from error
    return path


def require_free(path: Path, *, resume: bool) -> None:
    """Refuse to train anew in a folder that holds a training.

    Raises:
        ConfigError: it does, and `resume` is False.
    """
    if _has_run(path) and not resume:
        raise ConfigError(
            f"{path} already holds a training run; add --resume to continue it, "
            "or choose another folder with run=…"
        )


def _has_run(path: Path) -> bool:
    return (path / "checkpoints" / "last.ckpt").exists()


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide results, and the git commit if any."""
    found = {"python": sys.version.split()[0]}
    for package in _RECORDED_PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
        if commit.returncode == 0:
            found["git_commit"] = commit.stdout.strip()
    except OSError:
        logging.getLogger(__name__).debug("git is not installed")
    return found


def write_text(path: Path, text: str) -> None:
    """Write a text file under a temporary name, then rename it."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
