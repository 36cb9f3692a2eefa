"""A base model: any Hugging Face causal LM, from a folder or the hub, grown by a voice's tokens.

The tokenizer's merges stay as they are: the new tokens stand behind its own ids.
"""

import hashlib
import logging
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AddedToken,
    AutoConfig,
    PreTrainedModel,
)

from stage1_llm.chat import ChatTemplate as ChatTemplate
from stage1_llm.chat import render_chat as render_chat
from stage1_llm.llm_override import resolve_llm_override as resolve_llm_override
from stage1_llm.model import load_model
from stage1_llm.text import load_tokenizer
from stage1_llm.vocab import VOCAB_MULTIPLE, token_names
from tts_stack.contract import TokenMap, file_sha256
from tts_stack.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)
_DESCRIPTION = ("*.json", "*.model", "*.txt", "*.jinja")  # all but the weights
_WEIGHTS = "*.safetensors"
_NOT_WANTED = ("original/*", "onnx/*", "*.onnx*")
_SAMPLED_ROWS = 4096  # old rows that make up the noise of the new ones


class Base(NamedTuple):
    """What a voice is trained from."""

    model: PreTrainedModel  # float32
    tokenizer: Any  # transformers.PreTrainedTokenizerBase
    source: str  # folder or hub name
    sha256: str  # of its weights


def load_base(source: str) -> Base:
    """Read a base model and its tokenizer.

    Naming a hub model asks for its download; one that the local cache holds is taken from there.

    Args:
        source: a folder, or a hub name such as Qwen/Qwen2.5-0.5B.

    Raises:
        CheckpointError: it is not found, no causal LM, damaged, or has no tokenizer that fits.
    """
    folder = find_base(source)
    config = read_base_config(folder, source)
    tokenizer = load_tokenizer(folder)
    num_rows = int(config.get_text_config().vocab_size)
    check_tokenizer_fits(tokenizer, num_rows, source)
    model = load_model(folder, source=source)
    is_folder = Path(source).expanduser().is_dir()
    return Base(
        model, tokenizer, str(folder.resolve()) if is_folder else source, weights_sha256(folder)
    )


def find_base(source: str, *, with_weights: bool = True) -> Path:
    """The folder of a base model: itself, the hub's local cache, or a fresh download.

    Args:
        source: a folder or a hub name.
        with_weights: False asks for the configuration and the tokenizer alone.

    Raises:
        CheckpointError: there is no such folder, or the hub has no such model or cannot be reached.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise CheckpointError(
            f"{source}: no such folder; give the folder of a Hugging Face causal LM, or a hub name "
            "such as Qwen/Qwen2.5-0.5B"
        )
    cached = _cached(source)
    if cached is not None and (not with_weights or any(cached.glob(_WEIGHTS))):
        return cached
    logger.info("%s: not in the local cache, downloading from the Hugging Face hub", source)
    wanted = [*_DESCRIPTION, *([_WEIGHTS] if with_weights else [])]
    try:
        return Path(
            snapshot_download(source, allow_patterns=wanted, ignore_patterns=list(_NOT_WANTED))
        )
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{source}: neither a folder, nor in the local cache, nor can it be downloaded "
            f"({_first_line(error)}); check the name, or give the folder of a model"
        ) from error


def read_base_config(folder: Path, source: str) -> Any:
    """A base model's transformers configuration.

    Raises:
        CheckpointError: there is none, or it is not that of a causal LM.
    """
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{source}: no config.json, expected the folder of a Hugging Face causal LM"
        )
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{source}: config.json cannot be read ({_first_line(error)}); copy the model again"
        ) from error
    if not _is_causal_lm(config):
        found = ", ".join(config.architectures or [type(config).__name__])
        raise CheckpointError(
            f"{source}: {found} is not a causal language model; give one such as Qwen2.5, Qwen3 or "
            "Llama 3 (its config.json names a ...ForCausalLM)"
        )
    return config


def num_text_ids(tokenizer: Any) -> int:
    """One past the highest id of a tokenizer, its special tokens included."""
    return max(tokenizer.get_vocab().values()) + 1


def check_tokenizer_fits(tokenizer: Any, num_rows: int, source: str) -> None:
    """Refuse a tokenizer that writes ids which the model has no row for.

    Raises:
        CheckpointError: it does.
    """
    if num_text_ids(tokenizer) > num_rows:
        raise CheckpointError(
            f"{source}: the tokenizer has {num_text_ids(tokenizer)} ids, the model "
            f"{num_rows} embedding rows; give the tokenizer that the model was trained with"
        )


def weights_sha256(folder: Path) -> str:
    """Hash of a model's weights, in however many files they are.

    Raises:
        CheckpointError: there is no safetensors file.
    """
    paths = sorted(folder.glob(_WEIGHTS))
    if not paths:
        raise CheckpointError(
            f"{folder}: no *.safetensors file, expected the weights of a Hugging Face model"
        )
    hashes = [file_sha256(path) for path in paths]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def add_token_names(tokenizer: Any, tokens: TokenMap, prompt_format: str) -> None:
    """Teach a tokenizer the names of a voice's tokens, as special tokens behind its own ids.

    Args:
        tokenizer: changed in place; ordinary text encodes as before.
        tokens: from `grow_token_map(num_text_ids(tokenizer), ...)`.
        prompt_format: "tagged" or "chat" decides the names.

    Raises:
        ConfigError: the tokenizer has one of the names, or gives it another id.
    """
    names = token_names(tokens, prompt_format)
    known = tokenizer.get_vocab()
    taken = [name for name in names.values() if name in known]
    if taken:
        raise ConfigError(
            f"{tokenizer.name_or_path}: the tokenizer already has {taken[0]} (id "
            f"{known[taken[0]]}) and {len(taken) - 1} more of the voice's tokens; start from the "
            "model that was not yet grown"
        )
    added = [AddedToken(names[i], special=True, normalized=False) for i in sorted(names)]
    tokenizer.add_tokens(added, special_tokens=True)
    for token_id, name in names.items():
        found = tokenizer.convert_tokens_to_ids(name)
        if found != token_id:
            raise ConfigError(
                f"{tokenizer.name_or_path}: the tokenizer gives {name} the id {found}, expected "
                f"{token_id}; its ids have gaps, re-save it with consecutive ids"
            )


def grow_model(model: PreTrainedModel, tokens: TokenMap, *, seed: int) -> None:
    """Give a base model a row for every id of a voice, in place.

    Every row behind the tokenizer's ids is new, also those that the base kept unused: it is drawn
    around the mean of the old rows with their covariance (Hewitt 2021,
    https://nlp.stanford.edu/~johnhew/vocab-expansion.html, but with the whole variance: a thousand
    equal embeddings would have to be told apart first). Tied embeddings stay tied.

    Args:
        model: a causal LM.
        tokens: the id space, from `grow_token_map`.
        seed: of the new rows.

    Raises:
        ConfigError: the model has more rows than the id space.
    """
    num_rows = model.get_input_embeddings().num_embeddings
    if tokens.vocab_size < num_rows:
        raise ConfigError(
            f"the base model has {num_rows} embedding rows, the voice {tokens.vocab_size} ids; "
            "rows are never taken away: lay out the ids for this model"
        )
    model.resize_token_embeddings(
        tokens.vocab_size, pad_to_multiple_of=VOCAB_MULTIPLE, mean_resizing=False
    )
    generator = torch.Generator().manual_seed(seed)
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    for weight in {id(module.weight): module.weight for module in embeddings}.values():
        _draw_new_rows(weight, tokens.num_text, generator)
    for config in (model.config, model.generation_config):
        config.pad_token_id, config.eos_token_id = tokens.pad, tokens.audio_end


@torch.no_grad()
def _draw_new_rows(weight: Tensor, first: int, generator: torch.Generator) -> None:
    """Fill rows `first` .. of [V, D] from the statistics of those before.

    A random mixture of centred old rows has their covariance, and costs no D x D matrix.
    """
    old = weight[:first]
    mean = old.mean(0)
    sample = old[torch.randperm(first, generator=generator)[:_SAMPLED_ROWS]] - mean
    mixture = torch.randn(len(weight) - first, len(sample), generator=generator)
    weight[first:] = mean + mixture @ sample / math.sqrt(len(sample))


def _cached(name: str) -> Path | None:
    try:
        folder = Path(snapshot_download(name, local_files_only=True))
    except (OSError, ValueError):
        return None
    return folder if (folder / "config.json").is_file() else None


def _is_causal_lm(config: Any) -> bool:
    """True when transformers' causal LM of this family is what the weights were saved from.

    The family alone does not say: BERT has a causal class too, which nobody trained.
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return False
    name = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__
    return name in config.architectures if config.architectures else name.endswith("ForCausalLM")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
