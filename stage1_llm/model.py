"""The language model: built from configuration or read from a folder; states and logits of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging as hf_logging

from stage1_llm.attention import Segments
from stage1_llm.config import LLMConfig
from tts_stack.contract import TokenMap
from tts_stack.errors import CheckpointError, ConfigError


def build_llm(config: LLMConfig, tokens: TokenMap, *, seed: int) -> PreTrainedModel:
    """A model from scratch: random weights that depend on `seed` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if config.architecture == "llama":
            return LlamaForCausalLM(LlamaConfig(**_shape(config, tokens)))
        return Qwen3ForCausalLM(Qwen3Config(**_shape(config, tokens)))


def load_model(folder: Path, *, source: str | None = None) -> PreTrainedModel:
    """Read a Hugging Face causal LM folder in float32, for inference.

    Args:
        folder: where it lies.
        source: what the user called it, for messages; None is the folder.

    Raises:
        CheckpointError: the folder is not one, or is damaged.
    """
    place = source or str(folder)
    try:
        with no_progress_bars():
            model, loading = AutoModelForCausalLM.from_pretrained(
                folder,
                attn_implementation="sdpa",
                dtype=torch.float32,
                local_files_only=True,
                output_loading_info=True,
            )
    except Exception as error:  # noqa: BLE001 - transformers and safetensors raise any kind
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise CheckpointError(
            f"{place}: cannot be read as a causal LM ({reason}); copy it again"
        ) from error
    missing = sorted(loading["missing_keys"])  # transformers only warns, and draws them anew
    if missing:
        raise CheckpointError(
            f"{place}: {len(missing)} weights are missing, {missing[0]} among them; copy it again"
        )
    return cast(PreTrainedModel, model).eval()


def hidden_states(
    model: PreTrainedModel, input_ids: Tensor, position_ids: Tensor, *, layer: int = -1
) -> Tensor:
    """States of one layer for right-padded rows, [B, L] -> [B, L, D].

    Args:
        model: a causal LM.
        input_ids: [B, L].
        position_ids: [B, L], may be fractional.
        layer: index into the model's hidden states; -1 is after the final norm.
    """
    return embedded_states(
        model, model.get_input_embeddings()(input_ids), position_ids, layer=layer
    )


def embedded_states(
    model: PreTrainedModel,
    embeddings: Tensor,
    position_ids: Tensor,
    *,
    segment_lengths: Tensor | None = None,
    layer: int = -1,
    num_mixed: int = 1,
) -> Tensor:
    """`hidden_states` from input embeddings [B, L, D].

    `segment_lengths` [N] marks a packed row (see stage1_llm.attention). With `num_mixed` above 1
    the result [B, L, num_mixed * D] holds that many layers, `layer` last.

    Padding stands right of everything real, so the causal order alone hides it. An all-ones mask
    is passed all the same: without one, transformers 5 reads restarted positions as packed
    documents and audio no longer sees its text; with one it takes the fast causal kernel.
    """
    mask = torch.ones(embeddings.shape[:2], dtype=torch.bool, device=embeddings.device)
    layers = mixed_layers(model, layer, num_mixed)
    needs_all = layers != range(num_layers(model), num_layers(model) + 1)
    packing = {} if segment_lengths is None else {"segments": Segments.of(segment_lengths)}
    output = model.get_decoder()(
        inputs_embeds=embeddings,
        attention_mask=mask,
        position_ids=position_ids,
        use_cache=False,
        output_hidden_states=needs_all,
        **packing,
    )
    if not needs_all:
        return cast(Tensor, output.last_hidden_state)
    return torch.cat([output.hidden_states[index] for index in layers], dim=-1)


def save_model(model: PreTrainedModel, folder: Path, *, dtype: torch.dtype = torch.float32) -> None:
    """Write a Hugging Face folder; the model itself is left with weights rounded to `dtype`."""
    folder.mkdir(parents=True, exist_ok=True)
    with no_progress_bars():
        model.to(dtype).save_pretrained(folder)
    model.to(torch.float32)


def num_layers(model: PreTrainedModel) -> int:
    """Transformer blocks; a model has one more hidden state than blocks."""
    return int(model.config.num_hidden_layers)


def layer_index(model: PreTrainedModel, layer: int) -> int:
    """`layer` as a non-negative index into the num_layers + 1 hidden states.

    Raises:
        ConfigError: the model has no such layer.
    """
    count = num_layers(model) + 1
    if not -count <= layer < count:
        raise ConfigError(
            f"prompt.hidden_layer is {layer}, expected {-count} .. {count - 1} for a model of "
            f"{count - 1} layers"
        )
    return layer % count


def mixed_layers(model: PreTrainedModel, layer: int, num_mixed: int) -> range:
    """Indices of `layer` and of the layers below it, `num_mixed` in all, lowest first.

    Raises:
        ConfigError: the model has no such layers.
    """
    top = layer_index(model, layer)
    if not 1 <= num_mixed <= top + 1:
        raise ConfigError(
            f"prompt.num_mixed_layers is {num_mixed}, expected 1 .. {top + 1}: hidden_layer "
            f"{layer} is state {top} of the model, counted from the embedding"
        )
    return range(top - num_mixed + 1, top + 1)


def head(model: PreTrainedModel) -> nn.Module:
    """States [..., D] -> logits [..., V]."""
    return cast(nn.Module, model.get_output_embeddings())


def saved_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The state dict without aliases of tied matrices."""
    tied = set(model.all_tied_weights_keys)
    return {name: value for name, value in model.state_dict().items() if name not in tied}


def load_saved_weights(model: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    """Inverse of `saved_weights`.

    Raises:
        CheckpointError: a weight is missing, unknown or of another shape.
    """
    tied = set(model.all_tied_weights_keys)
    try:
        result = model.load_state_dict(weights, strict=False)
    except RuntimeError as error:
        raise CheckpointError(
            f"weights do not fit the model: {str(error).splitlines()[-1].strip()}"
        ) from error
    wrong = [*(name for name in result.missing_keys if name not in tied), *result.unexpected_keys]
    if wrong:
        raise CheckpointError(
            f"weights do not fit the model: {', '.join(wrong[:3])} missing or unknown"
        )
    model.tie_weights()


def _shape(config: LLMConfig, tokens: TokenMap) -> dict[str, object]:
    return {
        "vocab_size": tokens.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim or config.hidden_size // config.num_heads,
        "max_position_embeddings": config.max_positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
        "pad_token_id": tokens.pad,
        "bos_token_id": tokens.text_start,
        "eos_token_id": tokens.audio_end,
        "attn_implementation": "sdpa",
    }


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Silence transformers' bars, which would break into ours."""
    was_enabled = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            hf_logging.enable_progress_bar()
