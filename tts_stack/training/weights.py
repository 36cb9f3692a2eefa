"""Weights on disk as safetensors."""

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from tts_stack.errors import CheckpointError

BEST_WEIGHTS = "best.safetensors"
FINAL_WEIGHTS = "final.safetensors"


def load_weights(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    try:
        return load_file(path)
    except Exception as error:  # noqa: BLE001 - safetensors raises its own untyped errors
        raise CheckpointError(f"{path}: not a readable safetensors file ({error})") from error


def save_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors as safetensors; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    save_file(
        {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()},
        partial,
    )
    os.replace(partial, path)
