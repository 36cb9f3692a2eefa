"""`last.ckpt`: everything that resuming needs, in one file that is whole or not there."""

import os
from pathlib import Path
from typing import Any

import torch

from tts_stack.errors import CheckpointError

LAST_CHECKPOINT = "last.ckpt"


def save_checkpoint(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint in place of the last one."""
    partial = path.with_name(path.name + ".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def load_checkpoint(path: Path, *, fingerprint: str, max_steps: int) -> dict[str, Any]:
    """Read a checkpoint.

    Args:
        path: of the file.
        fingerprint: what the weights must have been trained on.
        max_steps: steps at which the training is to end.

    Raises:
        CheckpointError: it is damaged, belongs to something else, or is past the wanted steps.
    """
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - torch raises many kinds for a damaged file
        raise CheckpointError(
            f"{path}: damaged checkpoint ({type(error).__name__}); delete the run "
            "folder and start again"
        ) from error
    if state["fingerprint"] != fingerprint:
        raise CheckpointError(
            f"{path}: trained on {state['fingerprint']}, this run is on "
            f"{fingerprint}; choose another folder with run=…"
        )
    if state["step"] > max_steps:
        raise CheckpointError(
            f"{path}: already at step {state['step']}, trainer.max_steps is "
            f"{max_steps}; give a larger one"
        )
    return state
