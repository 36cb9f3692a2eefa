"""LoRA through peft: a frozen base model, adapters on it, and the rows of the voice's own tokens.

A voice trained so is kept as an adapter folder:

    adapter_config.json, adapter_model.safetensors   as peft reads them
    new_rows.safetensors                             the last rows of the embeddings, by their names
    base.json                                        the base model's source and hash, the settings
    voice.json                                       the contract
"""

import dataclasses
import json
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from stage1_llm.base import Base, grow_model
from stage1_llm.lora_config import ALL_LINEAR, LoraSettings
from stage1_llm.rows import GrownEmbedding, GrownHead
from tts_stack.contract import CONTRACT_FILE, TokenMap, VoiceContract
from tts_stack.errors import CheckpointError, ConfigError
from tts_stack.runtime import write_text
from tts_stack.training import load_weights, save_weights

logger = logging.getLogger(__name__)
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NEW_ROWS, BASE_FILE = "new_rows.safetensors", "base.json"
ROWS_PREFIX = "new_rows."
_PEFT_PREFIX = "base_model.model."  # of every name in a peft file
_ADAPTER = "default"  # peft's name for the only adapter


class AdapterOrigin(NamedTuple):
    """What an adapter was trained on, and how."""

    source: str
    sha256: str
    settings: LoraSettings


def apply_lora(
    model: PreTrainedModel, settings: LoraSettings, tokens: TokenMap, *, seed: int = 0
) -> PreTrainedModel:
    """Freeze a grown base model and put adapters on it; its logits stay what they are.

    Args:
        model: after `grow_model`; changed in place.
        settings: which projections, and how large.
        tokens: the id space; rows behind the tokenizer's ids are trained as they are.
        seed: of the adapters' first values.

    Returns:
        The same model.

    Raises:
        ConfigError: it has no projection of that name, or embeddings of a form not known here.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = _is_tied(model)
    targets = _target_names(model, settings)
    model.requires_grad_(False)
    _grow_embeddings(model, embedding, head, tokens.num_text, is_tied=is_tied)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(seed)
        # It advises against a tied embedding, whose head it does not know to share the adapter.
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
        inject_adapter_in_model(_peft_config(settings, targets), model, _ADAPTER)
    if settings.embeddings and is_tied:
        model.get_output_embeddings().share_lora(model.get_input_embeddings())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_is_adapter(name))
    return model


def has_adapter(model: nn.Module) -> bool:
    """True after `apply_lora`."""
    return any(isinstance(module, GrownEmbedding) for module in model.modules())


def adapter_weights(model: nn.Module) -> dict[str, Tensor]:
    """All that training changes: LoRA under peft's names, new rows under "new_rows.WEIGHT"."""
    return {name: weight.detach() for name, weight in _adapters(model)}


def load_adapter_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Inverse of `adapter_weights`.

    Raises:
        CheckpointError: a weight is missing, unknown or of another shape.
    """
    own = dict(_adapters(model))
    wrong = sorted(own.keys() ^ weights.keys())
    if wrong:
        raise CheckpointError(
            f"weights do not fit the adapter: {', '.join(wrong[:3])} missing or unknown; load them "
            "with the settings and the base model they were trained with"
        )
    for name, parameter in own.items():
        if parameter.shape != weights[name].shape:
            raise CheckpointError(
                f"weights do not fit the adapter: {name} is {list(weights[name].shape)}, expected "
                f"{list(parameter.shape)}; load them with the settings and the base model they "
                "were trained with"
            )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(weights[name])


@torch.no_grad()
def merge_lora(model: PreTrainedModel) -> PreTrainedModel:
    """Add adapters and new rows to the base weights, in place; tied embeddings stay tied.

    peft's own `merge_and_unload` does not do: with LoRA on both halves of a tied matrix it adds two
    adapters to the one, and the model then repeats a token (transformers issue 45127). Here the
    halves share one adapter, and it is added once.
    """
    modules = list(model.named_modules())
    for _, module in modules:
        if isinstance(module, (GrownEmbedding, GrownHead)):
            module.weight[module.first :] = module.new_rows
    for name, module in modules:
        if isinstance(module, BaseTunerLayer):
            module.merge(safe_merge=True)
            model.set_submodule(name, module.get_base_layer())
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    num_rows, width = embedding.weight.shape
    plain = nn.Embedding(num_rows, width, padding_idx=embedding.padding_idx, device="meta")
    plain.weight = embedding.weight
    model.set_input_embeddings(plain)
    linear = nn.Linear(width, num_rows, bias=False, device="meta")
    linear.weight, linear.bias = head.weight, head.bias
    model.set_output_embeddings(linear)
    del model.peft_config  # peft leaves it on a model that it injects into
    return model.requires_grad_(True)


def save_adapter(
    model: PreTrainedModel,
    folder: Path,
    contract: VoiceContract,
    base: Base,
    settings: LoraSettings,
) -> None:
    """Write the adapter folder; see the module.

    plain peft reads it too, on the base model grown to `voice.json`'s vocab_size with new_rows in.
    """
    weights = adapter_weights(model)
    rows = {n.removeprefix(ROWS_PREFIX): w for n, w in weights.items() if n.startswith(ROWS_PREFIX)}
    lora = {_PEFT_PREFIX + n: w for n, w in weights.items() if not n.startswith(ROWS_PREFIX)}
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(lora, folder / ADAPTER_WEIGHTS)
    save_weights(rows, folder / NEW_ROWS)
    _save_peft_config(model, folder, base, settings)
    origin = {
        "source": base.source,
        "sha256": base.sha256,
        "lora": dataclasses.asdict(settings),
    }
    write_text(folder / BASE_FILE, json.dumps(origin, indent=2) + "\n")
    contract.save(folder / CONTRACT_FILE)
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    logger.info(
        "%s: %.1f MB, of which %.1f MB adapters and %.1f MB new rows (the base model has %.1f MB)",
        folder,
        size / 1e6,
        _num_bytes(lora.values()) / 1e6,
        _num_bytes(rows.values()) / 1e6,
        _num_bytes(p for name, p in model.named_parameters() if not _is_adapter(name)) / 1e6,
    )


def read_origin(folder: Path) -> AdapterOrigin:
    """What the adapter of a folder was trained on.

    Raises:
        CheckpointError: the folder is not that of an adapter, or is damaged.
    """
    try:
        values = json.loads((folder / BASE_FILE).read_text(encoding="utf-8"))
        return AdapterOrigin(values["source"], values["sha256"], LoraSettings(**values["lora"]))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder}: no {BASE_FILE}, expected the folder that tts-stack train-llm writes with "
            "+lora=... (<run>/llm/adapter)"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder / BASE_FILE}: cannot be read ({error}); copy the whole folder again"
        ) from error


def load_adapter(folder: Path, base: Base) -> VoiceContract:
    """Grow a base model and put the adapter of a folder on it, in place.

    Raises:
        CheckpointError: the adapter was trained on another base model, or is damaged.
    """
    origin = read_origin(folder)
    if origin.sha256 != base.sha256:
        raise CheckpointError(
            f"{folder}: the adapter was trained on {origin.source} ({origin.sha256[:12]}), not on "
            f"{base.source} ({base.sha256[:12]}); give the right base model with --base"
        )
    contract = VoiceContract.load(folder / CONTRACT_FILE)
    grow_model(base.model, contract.tokens, seed=0)  # the rows are replaced below
    apply_lora(base.model, origin.settings, contract.tokens)
    lora, rows = load_weights(folder / ADAPTER_WEIGHTS), load_weights(folder / NEW_ROWS)
    weights = {name.removeprefix(_PEFT_PREFIX): weight for name, weight in lora.items()}
    load_adapter_weights(
        base.model, weights | {ROWS_PREFIX + name: weight for name, weight in rows.items()}
    )
    return contract


def _target_names(model: PreTrainedModel, settings: LoraSettings) -> set[str]:
    """Names of the modules that get an adapter, as peft matches them: the last part."""
    head = model.get_output_embeddings()
    names = {module: name.rpartition(".")[2] for name, module in model.named_modules()}
    linear = {
        name
        for module, name in names.items()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head
    }
    asked = set(settings.target_modules)
    unknown = sorted(asked - linear - {ALL_LINEAR})
    if unknown:
        raise ConfigError(
            f"lora.target_modules: the model has no projection {unknown[0]}; choose from "
            f"{', '.join(sorted(linear))}, or {ALL_LINEAR}"
        )
    targets = linear if ALL_LINEAR in asked else asked
    if settings.embeddings:
        targets = targets | {names[model.get_input_embeddings()]}
        if not _is_tied(model):
            targets = targets | {names[head]}
    return targets


def _grow_embeddings(
    model: PreTrainedModel, embedding: nn.Module, head: nn.Module, first: int, *, is_tied: bool
) -> None:
    if type(embedding) is not nn.Embedding or type(head) is not nn.Linear:
        raise ConfigError(
            f"lora: {type(model).__name__} has a {type(embedding).__name__} and a "
            f"{type(head).__name__}, expected a plain Embedding and Linear; train without lora"
        )
    rows = nn.Parameter(embedding.weight[first:].detach().clone())
    head_rows = rows if is_tied else nn.Parameter(head.weight[first:].detach().clone())
    model.set_input_embeddings(GrownEmbedding(embedding, rows))
    model.set_output_embeddings(GrownHead(head, head_rows))


def _peft_config(settings: LoraSettings, targets: set[str], **others: Any) -> LoraConfig:
    return LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        use_rslora=settings.use_rslora,
        target_modules=sorted(targets),
        task_type="CAUSAL_LM",
        **others,
    )


def _save_peft_config(
    model: PreTrainedModel, folder: Path, base: Base, settings: LoraSettings
) -> None:
    targets = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, BaseTunerLayer)
    }
    _peft_config(
        settings,
        targets,
        ensure_weight_tying=settings.embeddings and _is_tied(model),
        base_model_name_or_path=base.source,
        inference_mode=True,
    ).save_pretrained(folder)


def _is_tied(model: PreTrainedModel) -> bool:
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


def _is_adapter(name: str) -> bool:
    return ".lora_" in name or name.endswith(".new_rows")


def _adapters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Trained parameters, each once, under their names in files."""
    for name, parameter in model.named_parameters():
        if name.endswith(".new_rows"):
            owner = name.removesuffix(".new_rows").removesuffix(".base_layer")
            yield f"{ROWS_PREFIX}{owner}.weight", parameter
        elif _is_adapter(name):
            yield re.sub(rf"\.{_ADAPTER}(?=\.|$)", "", name), parameter


def _num_bytes(weights: Any) -> int:
    return sum(weight.numel() * weight.element_size() for weight in weights)
