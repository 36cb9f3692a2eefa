"""From a corpus and settings to the id space, the text encoder, the prompt form and the network."""

import dataclasses
import logging
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from stage1_llm.base import Base, add_token_names, grow_model, load_base, num_text_ids, render_chat
from stage1_llm.config import LLMTrainConfig
from stage1_llm.dataset import measure_stride
from stage1_llm.lora import apply_lora
from stage1_llm.model import build_llm, mixed_layers
from stage1_llm.network import TextToSemantic, build_network
from stage1_llm.text import SymbolEncoder, TextEncoder, TokenizerEncoder
from stage1_llm.vocab import Extras, build_token_map, grow_token_map
from tts_stack.contract import PromptSpec, TokenMap, VoiceContract
from tts_stack.errors import ConfigError
from tts_stack.shards import Corpus

logger = logging.getLogger(__name__)


class Language(NamedTuple):
    """How this voice writes: ids, text encoder, prompt form, and the base model behind them."""

    tokens: TokenMap
    encode: TextEncoder
    spec: PromptSpec  # text_stride is not measured yet
    base: Base | None  # None: from scratch


def build_language(config: LLMTrainConfig, corpus: Corpus) -> Language:
    """Lay out the id space of a voice and render its prompt template.

    Raises:
        ConfigError: the prompt form needs a base model, or its tokenizer lacks what it needs.
        CheckpointError: the base model cannot be read.
    """
    prompt = config.prompt
    extras = Extras(
        has_mask=prompt.format == "chat",
        max_run=prompt.max_run if prompt.durations == "tokens" else 1,
        speakers=corpus.tags("speaker") if prompt.speaker_tags else (),
        languages=corpus.tags("language") if prompt.language_tags else (),
    )
    _check_tags(config, corpus, extras)
    codebook_size = corpus.require_codec().codebook_size
    if config.llm.base_model is None:
        if prompt.format == "chat":
            raise ConfigError(
                "prompt.format is chat, but a model from scratch has no chat template; give a base "
                "model with llm=FOLDER, or prompt.format=tagged"
            )
        tokens = build_token_map(corpus.info.symbols, codebook_size, extras)
        return Language(tokens, SymbolEncoder(tokens), _spec(config), None)
    base = load_base(config.llm.base_model)
    if corpus.info.text.kind == "phonemes":
        logger.warning(
            "%s: holds phonemes, which the tokenizer of %s cuts into bytes; re-run tts-stack "
            "prepare with text.kind=normalized for a base model",
            corpus.path,
            base.source,
        )
    tokens = grow_token_map(
        num_text_ids(base.tokenizer),
        codebook_size,
        extras,
        pad=_pad_id(base.tokenizer),
        num_rows=base.model.get_input_embeddings().num_embeddings,
    )
    add_token_names(base.tokenizer, tokens, prompt.format)
    spec = _spec(config)
    if prompt.format == "chat":
        template = render_chat(base.tokenizer, tokens)
        spec = _spec(config, before_text=template.before, after_text=template.after)
    return Language(tokens, TokenizerEncoder(base.tokenizer), spec, base)


def build_contract(
    name: str,
    corpus: Corpus,
    language: Language,
    num_text: NDArray[np.integer],
    lengths: NDArray[np.integer],
) -> VoiceContract:
    """The voice contract as far as the samples of a corpus decide it.

    Args:
        name: of the voice.
        corpus: tokenised.
        language: its id space and prompt.
        num_text: text ids of each sample.
        lengths: tokens of each whole prompt.
    """
    stride = measure_stride(num_text, lengths, language.spec)
    return VoiceContract(
        name=name,
        audio=corpus.audio_spec,
        text=corpus.info.text,
        codec=corpus.require_codec(),
        tokens=language.tokens,
        prompt=dataclasses.replace(language.spec, text_stride=round(stride, 4)),
    )


def build_trained_network(
    config: LLMTrainConfig, language: Language, codebook_sizes: tuple[int, ...]
) -> TextToSemantic:
    """The network as training starts: from scratch, or the grown base model, with adapters.

    Raises:
        ConfigError: the model has no such hidden layer or too short a context, or LoRA was asked
            for without a base.
    """
    seed = config.trainer.seed
    llm: PreTrainedModel
    if language.base is None:
        if config.lora is not None:
            raise ConfigError(
                "lora adapts a base model, but llm is built from scratch; give llm=FOLDER, or "
                "leave lora out"
            )
        llm = build_llm(config.llm, language.tokens, seed=seed)
    else:
        llm = language.base.model
        grow_model(llm, language.tokens, seed=seed)
        if config.lora is not None:
            llm = apply_lora(llm, config.lora, language.tokens, seed=seed)
    # Refuse wrong ones before training.
    mixed_layers(llm, config.prompt.hidden_layer, config.prompt.num_mixed_layers)
    _check_context(llm, config)
    return build_network(llm, codebook_sizes, dropout=config.llm.dropout, seed=seed)


def save_tokenizer(language: Language, folder: Path) -> None:
    """Keep a base model's tokenizer beside the LLM; a model from scratch has none."""
    if language.base is not None:
        language.base.tokenizer.save_pretrained(folder)


def _spec(config: LLMTrainConfig, **template: Any) -> PromptSpec:
    prompt = config.prompt
    return PromptSpec(
        position_scheme=prompt.position_scheme,
        hidden_layer=prompt.hidden_layer,
        num_mixed_layers=prompt.num_mixed_layers,
        state_position=prompt.state_position,
        format=prompt.format,
        durations=prompt.durations,
        max_run=1 if prompt.durations == "none" else prompt.max_run,
        **template,
    )


def _check_tags(config: LLMTrainConfig, corpus: Corpus, extras: Extras) -> None:
    asked = (
        ("speaker", config.prompt.speaker_tags, extras.speakers),
        ("language", config.prompt.language_tags, extras.languages),
    )
    for kind, is_asked, found in asked:
        if is_asked and not found:
            raise ConfigError(
                f"prompt.{kind}_tags is true, but no utterance of {corpus.path} names its {kind}; "
                f"prepare the corpus from a manifest with a {kind} field, or leave the tags out"
            )


def _check_context(llm: PreTrainedModel, config: LLMTrainConfig) -> None:
    context = getattr(llm.config, "max_position_embeddings", None)
    if context is not None and config.batching.max_length > context:
        raise ConfigError(
            f"batching.max_length is {config.batching.max_length}, but the model's context is "
            f"{context} tokens; lower batching.max_length: longer samples are left out and listed"
        )


def _pad_id(tokenizer: Any) -> int:
    """Padding never counts, so any id will do where a tokenizer has none."""
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    return 0
