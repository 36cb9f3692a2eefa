"""An LLM on disk: a Hugging Face folder with the voice contract beside it."""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import torch

from stage1_llm.model import load_model, save_model
from stage1_llm.network import TextToSemantic, load_codebooks
from stage1_llm.text import TextEncoder, load_text_encoder
from tts_stack.contract import (
    CODEBOOKS_FILE,
    CONTRACT_FILE,
    LLM_WEIGHTS_FILE,
    VoiceContract,
    llm_sha256,
)
from tts_stack.errors import CheckpointError
from tts_stack.training import save_weights

MODEL_CONFIG_FILE = "config.json"
MODEL_FOLDER, ADAPTER_FOLDER = "model", "adapter"  # in a run's folder of stage 1


class LoadedLLM(NamedTuple):
    """A network in evaluation mode, the contract it was trained under, and its text encoder."""

    network: TextToSemantic
    contract: VoiceContract
    encode: TextEncoder


def save_llm(
    network: TextToSemantic,
    contract: VoiceContract,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
) -> VoiceContract:
    """Write the folder; returns the contract with the weights' hash in it."""
    save_model(network.llm, folder, dtype=dtype)
    if network.codebooks is not None:
        save_weights(network.codebooks.state_dict(), folder / CODEBOOKS_FILE)
    sealed = dataclasses.replace(contract, llm_sha256=llm_sha256(folder))
    sealed.save(folder / CONTRACT_FILE)
    return sealed


def load_llm(
    folder: Path, *, contract: VoiceContract | None = None, device: torch.device | None = None
) -> LoadedLLM:
    """Read an LLM folder, checked against its contract before the weights load.

    Args:
        folder: the folder.
        contract: of the voice the LLM belongs to; None reads it from the folder.
        device: where the network goes; the CPU without.

    Raises:
        CheckpointError: a file is missing or damaged, or the weights are not the contract's.
    """
    for name in (MODEL_CONFIG_FILE, LLM_WEIGHTS_FILE, *(() if contract else (CONTRACT_FILE,))):
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{folder}: no {name}, expected the folder that tts-stack train-llm writes "
                "(<run>/llm/model)"
            )
    contract = contract or VoiceContract.load(folder / CONTRACT_FILE)
    found = llm_sha256(folder)
    if contract.llm_sha256 != found:
        raise CheckpointError(
            f"{folder / LLM_WEIGHTS_FILE}: hash {found[:12]}, {CONTRACT_FILE} names "
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
    codebooks = load_codebooks(folder, contract.codebook_sizes, model.config.hidden_size)
    network = TextToSemantic(model, codebooks).eval().to(device or torch.device("cpu"))
    return LoadedLLM(network, contract, load_text_encoder(folder, contract.tokens))
