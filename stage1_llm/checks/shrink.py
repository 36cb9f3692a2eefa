"""A user's settings made small: the same architecture and choices, a model that runs in seconds."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from stage1_llm.base import find_base, read_base_config
from stage1_llm.config import BatchingConfig, CurriculumConfig, LLMConfig, LLMTrainConfig
from stage1_llm.model import save_model
from stage1_llm.text import load_tokenizer
from tts_stack.training import TrainerConfig

NUM_STEPS = 20  # of a whole training; all counts of steps are scaled to it
STOP_STEP = 10  # where the interrupted training stops
HEAD_DIM = 16
MAX_GROUPS = 2  # query heads that share a key
MAX_MICRO_BATCHES = 4
MIN_LAYERS = 2
ROWS = 3  # a batch holds about so many of the longest samples


class Heads(NamedTuple):
    """Of one attention layer."""

    query: int
    key: int


def tiny_heads(num_heads: int, num_kv_heads: int) -> Heads:
    """One or two keys, each shared by one or two queries, where the model shares them."""
    key = min(2, num_kv_heads)
    return Heads(key * min(MAX_GROUPS, num_heads // num_kv_heads), key)


def shrink_llm(llm: LLMConfig) -> LLMConfig:
    """A model from scratch, of the same form."""
    heads = tiny_heads(llm.num_heads, llm.num_kv_heads)
    return dataclasses.replace(
        llm,
        hidden_size=HEAD_DIM * heads.query,
        num_layers=MIN_LAYERS,
        num_heads=heads.query,
        num_kv_heads=heads.key,
        head_dim=HEAD_DIM,
        intermediate_size=2 * HEAD_DIM * heads.query,
    )


def shrink_base(source: str, folder: Path, *, seed: int) -> Any:
    """Write a tiny random model of a base model's architecture, with its tokenizer.

    Args:
        source: folder or hub name of the base model; its weights are not read.
        folder: to write.
        seed: of the weights.

    Returns:
        The base model's own transformers configuration.

    Raises:
        CheckpointError: the base model is not found, is no causal LM, or has no tokenizer.
    """
    found = find_base(source, with_weights=False)
    config = read_base_config(found, source)
    tokenizer = load_tokenizer(found)
    tiny = type(config).from_dict({**config.to_dict(), **_tiny_sizes(config)})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny, dtype=torch.float32)
    save_model(model, folder)
    tokenizer.save_pretrained(folder)
    return config


def shrink_settings(
    config: LLMTrainConfig, lengths: Sequence[int], llm: LLMConfig, run: Path
) -> LLMTrainConfig:
    """Settings of a training of NUM_STEPS steps, on the CPU and in one process.

    Args:
        config: the user's.
        lengths: tokens of the samples that it will see.
        llm: the tiny model.
        run: folder to write to.
    """
    steps = config.trainer.max_steps
    loss = dataclasses.replace(
        config.loss,
        **{
            name: dataclasses.replace(weight, steps=_scaled(weight.steps, steps))
            for name in ("text_weight", "audio_weight", "end_weight")
            for weight in [getattr(config.loss, name)]
        },
    )
    warmup = _scaled(config.schedule.warmup_steps, steps)
    return dataclasses.replace(
        config,
        run=str(run),
        llm=llm,
        prompt=dataclasses.replace(config.prompt, hidden_layer=-1, num_mixed_layers=1),
        batching=_shrink_batching(config.batching, lengths, steps),
        loss=loss,
        schedule=dataclasses.replace(config.schedule, warmup_steps=warmup),
        trainer=_shrink_trainer(config.trainer),
        num_listened=0,
    )


def _shrink_batching(
    batching: BatchingConfig, lengths: Sequence[int], max_steps: int
) -> BatchingConfig:
    shortest, longest = min(lengths), max(lengths)
    max_tokens = min(batching.max_tokens, ROWS * longest)
    third = sorted(lengths)[len(lengths) // 3]  # so that the limit grows here too
    start = max(shortest, min(batching.curriculum.start_length, third))
    return dataclasses.replace(
        batching,
        max_tokens=max_tokens,
        max_length=min(batching.max_length, max_tokens),
        curriculum=CurriculumConfig(start, _scaled(batching.curriculum.steps, max_steps)),
    )


def _shrink_trainer(trainer: TrainerConfig) -> TrainerConfig:
    return dataclasses.replace(
        trainer,
        max_steps=NUM_STEPS,
        validate_every=STOP_STEP,
        checkpoint_every=STOP_STEP,
        log_every=1,
        device="cpu",
        devices=1,
        num_nodes=1,
        strategy="auto",
        accumulate=min(MAX_MICRO_BATCHES, trainer.num_micro_batches),
        compile=False,
        wandb_project=None,
    )


def _scaled(steps: int, max_steps: int) -> int:
    """0 stays 0, and nothing else becomes 0."""
    return math.ceil(steps * NUM_STEPS / max_steps)


def _tiny_sizes(config: Any) -> dict[str, Any]:
    """Small values of the fields that a configuration has, under its own names."""
    heads = tiny_heads(
        config.num_attention_heads,
        getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
    )
    width = HEAD_DIM * heads.query
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or []))
    num_layers = max(MIN_LAYERS, len(kinds))
    sizes = {
        "hidden_size": width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads.query,
        "num_key_value_heads": heads.key,
        "head_dim": HEAD_DIM,
        "intermediate_size": 2 * width,
        "layer_types": (kinds * num_layers)[:num_layers] or None,  # each kind of layer once
        "moe_intermediate_size": width,
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    names = {name: config.attribute_map.get(name, name) for name in sizes}
    given = config.to_dict()
    return {
        names[name]: value for name, value in sizes.items() if given.get(names[name]) is not None
    }
