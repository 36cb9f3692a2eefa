"""An LLM on disk: a Hugging Face folder with the voice contract beside it."""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from stage1_llm.model import load_model, save_model
from tts_stack.contract import CONTRACT_FILE, VoiceContract, file_sha256
from tts_stack.errors import CheckpointError

WEIGHTS_FILE = "model.safetensors"
MODEL_CONFIG_FILE = "config.json"


class LoadedLLM(NamedTuple):
    """A model in evaluation mode and the contract it was trained under."""

    model: PreTrainedModel
    contract: VoiceContract


def save_llm(
    model: PreTrainedModel,
    contract: VoiceContract,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
) -> VoiceContract:
    """Write the folder; returns the contract with the weights' hash in it."""
    save_model(model, folder, dtype=dtype)
    sealed = dataclasses.replace(contract, llm_sha256=file_sha256(folder / WEIGHTS_FILE))
    sealed.save(folder / CONTRACT_FILE)
    return sealed


def load_llm(folder: Path, *, device: torch.device | None = None) -> LoadedLLM:
    """Read an LLM folder, checked against its contract before the weights load.

    Raises:
        CheckpointError: a file is missing or damaged, or the weights are not the contract's.
    """
    for name in (CONTRACT_FILE, MODEL_CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{folder}: no {name}, expected the folder that tts-stack train-llm writes "
                "(<run>/llm/model)"
            )
    contract = VoiceContract.load(folder / CONTRACT_FILE)
    found = file_sha256(folder / WEIGHTS_FILE)
    if contract.llm_sha256 != found:
        raise CheckpointError(
            f"{folder / WEIGHTS_FILE}: hash {found[:12]}, {CONTRACT_FILE} names "
            f"{contract.llm_sha256[:12] or '(none)'}; the two files are not of one voice: "
            "copy the whole folder again"
        )
    model = load_model(folder)
    rows = model.get_input_embeddings().num_embeddings
    if rows != contract.tokens.vocab_size:
        raise CheckpointError(
            f"{folder}: the model has {rows} embedding rows, {CONTRACT_FILE} says "
            f"{contract.tokens.vocab_size}; export the voice again"
        )
    return LoadedLLM(model.to(device or "cpu"), contract)
