"""A codec on disk: `codec.json` (settings and identity) beside `model.safetensors` (float16)."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tts_stack.contract import AudioSpec, CodecIdentity, file_sha256
from tts_stack.errors import CheckpointError, ConfigError
from tts_stack.runtime import write_text
from tts_stack.semantic.config import CodecConfig
from tts_stack.semantic.model import build_codec, build_log_mel
from tts_stack.semantic.tokenizer import MelCodecTokenizer
from tts_stack.training import load_weights, save_weights

CODEC_FILE = "codec.json"
WEIGHTS_FILE = "model.safetensors"
FORMAT_VERSION = 1


def save_codec(folder: Path, config: CodecConfig, weights: Mapping[str, Tensor]) -> CodecIdentity:
    """Write a codec folder; `codec.json` comes last, so a folder that has it is complete.

    Args:
        folder: created when absent.
        config: what the weights were trained with.
        weights: state of `MelCodec`, any float type.

    Returns:
        The identity under which its tokens are known.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CODEC_FILE).unlink(missing_ok=True)
    save_weights({name: tensor.half() for name, tensor in weights.items()}, folder / WEIGHTS_FILE)
    identity = CodecIdentity(
        config.id, file_sha256(folder / WEIGHTS_FILE), codebook_size=config.codebook_size
    )
    record = {
        "format_version": FORMAT_VERSION,
        "identity": dataclasses.asdict(identity),
        "audio": dataclasses.asdict(config.audio_spec),
        "config": dataclasses.asdict(config),
    }
    write_text(folder / CODEC_FILE, json.dumps(record, indent=2) + "\n")
    return identity


def load_codec(folder: Path, *, device: str = "cpu") -> MelCodecTokenizer:
    """Read a codec folder.

    Args:
        folder: written by `save_codec`: <run>/codec/codec, or a voice's codec/.
        device: where the model runs.

    Returns:
        A tokenizer ready to encode.

    Raises:
        CheckpointError: a file is missing, damaged, of another version, or the weights are not
            those that `codec.json` names.
    """
    record = _read_record(folder / CODEC_FILE)
    config, identity, audio = _parse_record(record, folder / CODEC_FILE)
    weights_path = folder / WEIGHTS_FILE
    if not weights_path.exists():
        raise CheckpointError(f"{weights_path}: no such file; copy the whole codec folder again")
    found = file_sha256(weights_path)
    if found != identity.weights_sha256:
        raise CheckpointError(
            f"{weights_path}: SHA-256 is {found[:12]}, {CODEC_FILE} says "
            f"{identity.weights_sha256[:12]}; the file is damaged or of another codec: copy the "
            "whole codec folder again"
        )
    codec = build_codec(config)
    try:
        codec.load_state_dict(
            {name: tensor.float() for name, tensor in load_weights(weights_path).items()}
        )
    except RuntimeError as error:
        raise CheckpointError(
            f"{weights_path}: does not fit the model that {CODEC_FILE} describes ({error})"
        ) from error
    codec.requires_grad_(False).to(torch.device(device))
    return MelCodecTokenizer(codec, build_log_mel(config), identity, audio)


def read_codec_config(folder: Path) -> CodecConfig:
    """Settings of a codec folder, its weights left on disk.

    Raises:
        CheckpointError: `codec.json` is missing, damaged or of another version.
    """
    return _parse_record(_read_record(folder / CODEC_FILE), folder / CODEC_FILE)[0]


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path}: no such file; a codec folder holds {CODEC_FILE} and {WEIGHTS_FILE}, "
            "train-codec writes one to <run>/codec/codec"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error})") from error
    version = record.get("format_version") if isinstance(record, dict) else None
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: format_version is {version}, this release reads {FORMAT_VERSION}"
        )
    return dict(record)


def _parse_record(
    record: dict[str, Any], path: Path
) -> tuple[CodecConfig, CodecIdentity, AudioSpec]:  # three records of one file
    try:
        config = CodecConfig(**record["config"])
        identity = CodecIdentity(**record["identity"])
        audio = AudioSpec(**record["audio"])
    except (KeyError, TypeError, ConfigError) as error:
        raise CheckpointError(f"{path}: not a codec description ({error})") from error
    if audio != config.audio_spec or identity.codebook_size != config.codebook_size:
        raise CheckpointError(
            f"{path}: audio {audio} with {identity.codebook_size} codes does not follow from its "
            f"config ({config.audio_spec}, {config.codebook_size} codes); copy the folder again"
        )
    return config, identity, audio
