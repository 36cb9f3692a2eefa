"""`tts-stack check lora`: adapters start as nothing, learn alone, and are all that is saved."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from stage1_llm.base import Base
from stage1_llm.checks.collate import all_logits
from stage1_llm.checks.report import Claim, Report, identical
from stage1_llm.checks.setup import Setup
from stage1_llm.checks.training import make_task, take_steps
from stage1_llm.collate import collate_prompts
from stage1_llm.config import LLMTrainConfig
from stage1_llm.lora import apply_lora
from stage1_llm.lora_config import LoraSettings
from stage1_llm.loss import step_sums
from stage1_llm.network import TextToSemantic
from stage1_llm.prompt import GROUP_NAMES
from stage1_llm.weights import network_weights
from tts_stack.contract import TokenMap
from tts_stack.errors import ConfigError
from tts_stack.training import save_weights

NUM_STEPS = 3
_TRAINED = (".lora_", "new_rows")  # parts of the names of adapters and of new rows
_CODEBOOKS = "codebooks."


def require_adapter(config: LLMTrainConfig, check: str) -> None:
    """Refuse settings that train no adapter.

    Raises:
        ConfigError: the model is built from scratch, or there are no settings of LoRA.
    """
    if config.llm.base_model is None:
        raise ConfigError(
            f"check {check}: llm is built from scratch, but LoRA adapts a base model; give one "
            "with llm=FOLDER or llm=HUB/NAME"
        )
    if config.lora is None:
        raise ConfigError(
            f"check {check}: lora is null, expected settings of an adapter; give +lora=r_8_alpha_16"
        )


def base_of(setup: Setup) -> Base:
    """The tiny base model, not yet grown."""
    assert setup.language.base is not None  # require_adapter refused it otherwise
    return setup.language.base


def lora_of(setup: Setup) -> LoraSettings:
    """The user's settings of LoRA."""
    assert setup.config.lora is not None  # require_adapter refused it otherwise
    return setup.config.lora


def check_lora(setup: Setup) -> Report:
    """Put adapters on the grown base model, train some steps, look at what moved."""
    grown, adapted = setup.network(with_lora=False), setup.network()
    base_weights = _weights(grown.llm)
    claims = [_old_rows(setup, grown), _step_0(setup, grown, adapted)]
    task = make_task(setup, adapted)
    take_steps(task, NUM_STEPS)
    claims += [
        _gradients(adapted, next(task.batches(NUM_STEPS, NUM_STEPS + 1))[0]),
        identical(
            f"after {NUM_STEPS} steps the weights of the base model are what they were",
            _weights(adapted.llm),
            base_weights,
        ),
        _saved(setup, adapted),
    ]
    return Report(setup.describe(), tuple(claims))


def _weights(llm: nn.Module) -> dict[str, Tensor]:
    """Copies of the base model's own weights, under the names that they had without adapters."""
    return {
        name.replace(".base_layer", ""): weight.detach().clone()
        for name, weight in llm.named_parameters(remove_duplicate=False)
        if not _is_trained(name)
    }


def _is_trained(name: str) -> bool:
    return name.startswith(_CODEBOOKS) or any(part in name for part in _TRAINED)


def _old_rows(setup: Setup, grown: TextToSemantic) -> Claim:
    count = setup.contract.tokens.num_text
    claim = identical(
        "growing the vocabulary keeps the rows of the tokenizer's own ids",
        _rows(grown.llm, count),
        _rows(base_of(setup).model, count),
    )
    return claim._replace(detail=f"{count:,} ids: {claim.detail}")


def _rows(llm: Any, count: int) -> dict[str, Tensor]:
    parts = {"embedding": llm.get_input_embeddings(), "head": llm.get_output_embeddings()}
    return {name: part.weight[:count].detach() for name, part in parts.items()}


@torch.no_grad()
def _step_0(setup: Setup, grown: TextToSemantic, adapted: TextToSemantic) -> Claim:
    batch = collate_prompts(setup.prompts(), pad_id=setup.contract.tokens.pad)
    every = torch.ones(len(GROUP_NAMES))
    found, wanted = (all_logits([network(batch, every)]) for network in (adapted, grown))
    return identical(
        "at step 0 the logits are those of the base model, bit for bit",
        _named(found),
        _named(wanted),
    )


def _named(logits: list[Tensor]) -> dict[str, Tensor]:
    return {f"logits of codebook {index}": one for index, one in enumerate(logits)}


def _gradients(network: TextToSemantic, batch: Any) -> Claim:
    """Not at step 0: there one half of an adapter is zero, and the other half learns nothing."""
    network.zero_grad(set_to_none=True)
    sums = step_sums(*network(batch, torch.ones(len(GROUP_NAMES))))
    (sums.losses.sum() + sums.code_loss).backward()
    reached, wrong = 0, []
    for name, parameter in network.named_parameters():
        has_gradient = parameter.grad is not None and bool(parameter.grad.any())
        reached += has_gradient
        if has_gradient != _is_trained(name):
            wrong.append(f"{name} {'has one' if has_gradient else 'has none'}")
    total = sum(1 for _ in network.parameters())
    return Claim(
        "gradients reach every adapter, the new rows and codebook heads, and nothing else",
        not wrong,
        f"{reached} of {total} tensors have a gradient"
        + (f"; {len(wrong)} wrong: {wrong[0]}" if wrong else ""),
    )


def _saved(setup: Setup, network: TextToSemantic) -> Claim:
    weights = network_weights(network)
    path = setup.folder / "checkpoint.safetensors"
    save_weights(weights, path)
    others = [name for name in weights if not _is_trained(name)]
    trained = sum(p.numel() for name, p in network.named_parameters() if _is_trained(name))
    is_complete = sum(weight.numel() for weight in weights.values()) == trained
    size, whole = path.stat().st_size, _num_bytes(_weights(network.llm))
    return Claim(
        "a checkpoint holds the adapters and the new rows, whole, and nothing of the base model",
        is_complete and not others,
        f"{len(weights)} tensors, {size / 1e6:.2f} MB (the tiny model: {whole / 1e6:.2f} MB); "
        f"{full_size(setup.shape, setup.contract.tokens, lora_of(setup))}"
        + (f"; not its own: {others[0]}" if others else ""),
    )


def full_size(shape: Any, tokens: TokenMap, settings: LoraSettings) -> str:
    """Size of checkpoint and model at the user's own size, counted without making weights."""
    shape.get_text_config().vocab_size = tokens.vocab_size
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
        whole = sum(p.numel() * p.element_size() for p in model.parameters())
        apply_lora(model, settings, tokens)
    part = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return (
        f"at full size {part / 1e6:,.1f} MB of {whole / 1e6:,.1f} MB ({part / whole:.2%}), float32"
    )


def _num_bytes(weights: Mapping[str, Tensor]) -> int:
    shared = {id(weight): weight for weight in weights.values()}
    return sum(weight.numel() * weight.element_size() for weight in shared.values())
