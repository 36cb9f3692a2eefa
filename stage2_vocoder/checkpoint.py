"""A trained vocoder as a folder: `config.json` and `model.safetensors` (float16)."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from stage2_vocoder.config import VocoderConfig
from stage2_vocoder.model import Vocoder, build_vocoder
from tts_stack.contract import AudioSpec
from tts_stack.errors import CheckpointError, ConfigError
from tts_stack.runtime import write_text
from tts_stack.training import load_weights, save_weights

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class VocoderIdentity:
    """What a vocoder folder says of itself."""

    vocoder: VocoderConfig
    audio: AudioSpec
    hidden_size: int  # D of the LLM
    llm_sha256: str  # of the LLM whose hidden states it reads
    phase: str  # the phase that ended with these weights
    num_mixed_layers: int = 1  # of the LLM
    format_version: int = FORMAT_VERSION


def save_vocoder(folder: Path, identity: VocoderIdentity, weights: Mapping[str, Tensor]) -> None:
    """Write a vocoder folder, weights first."""
    folder.mkdir(parents=True, exist_ok=True)
    halves = {name: tensor.to(torch.float16) for name, tensor in weights.items()}
    save_weights(halves, folder / WEIGHTS_FILE)
    values = json.dumps(dataclasses.asdict(identity), indent=2)
    write_text(folder / CONFIG_FILE, values + "\n")


def read_identity(folder: Path) -> VocoderIdentity:
    """Read `config.json` of a vocoder folder.

    Raises:
        CheckpointError: it is missing, damaged, or of another version.
    """
    path = folder / CONFIG_FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format_version"] != FORMAT_VERSION:
            raise CheckpointError(
                f"{path}: format_version is {values['format_version']}, this release reads "
                f"{FORMAT_VERSION}"
            )
        return VocoderIdentity(
            vocoder=VocoderConfig(**values.pop("vocoder")),
            audio=AudioSpec(**values.pop("audio")),
            **values,
        )
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder}: no {CONFIG_FILE} in it, so it holds no finished vocoder"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
        raise CheckpointError(f"{path}: not a vocoder's configuration ({error})") from error


def load_vocoder(folder: Path, device: torch.device | str = "cpu") -> Vocoder:
    """Load a vocoder in float32, ready to decode.

    Raises:
        CheckpointError: a file is missing or damaged, or the weights do not fit `config.json`.
    """
    identity = read_identity(folder)
    try:
        vocoder = build_vocoder(
            identity.vocoder,
            hidden_size=identity.hidden_size,
            audio=identity.audio,
            num_mixed_layers=identity.num_mixed_layers,
        )
        weights = load_weights(folder / WEIGHTS_FILE)
        vocoder.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    except (ConfigError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{folder}: {WEIGHTS_FILE} does not fit {CONFIG_FILE} ({reason[:200]})"
        ) from error
    return vocoder.to(device).eval()
