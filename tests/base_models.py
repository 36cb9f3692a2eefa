"""Tiny base models for the tests: random weights, a byte-level BPE tokenizer, a chat template."""

from pathlib import Path

import torch
from stage1_support import CODEC
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from stage1_llm.base import Base, add_token_names, grow_model, load_base, num_text_ids, render_chat
from stage1_llm.vocab import Extras, grow_token_map
from tts_stack.contract import AudioSpec, PromptSpec, TextSpec, TokenMap, VoiceContract

CODEBOOK_SIZE = CODEC.codebook_size
ARCHITECTURES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}
SENTENCES = (
    "Hello, this is a tiny tokenizer that learns from a handful of sentences.",
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "She said that speech is sound which carries words from one head to another.",
    "in being comparatively modern, the earliest book printed with movable types",
)
# ChatML, with a system turn that the user never wrote, as Qwen2.5 has it.
CHATML = (
    "{%- if messages[0].role != 'system' %}"
    "{{- '<|im_start|>system\\nYou are a helpful model.<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
# The same without a system turn, and with an empty thought before the answer, as Qwen3 has it.
THINKING = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.role == 'assistant' %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{{- message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
# Headers, a date in the system turn, and trimmed contents, as Llama 3 has them.
LLAMA3 = (
    "{{- bos_token }}"
    "{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + strftime_now('%d %b %Y') }}"
    "{{- '\\n\\n<|eot_id|>' }}"
    "{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}"
    "{{- message.content | trim + '<|eot_id|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
TEMPLATES = {"chatml": CHATML, "thinking": THINKING, "llama3": LLAMA3}


def write_tiny_base(
    folder: Path,
    kind: str = "qwen2",
    *,
    tie: bool = True,
    template: str | None = "chatml",
    vocab: int = 320,
    num_rows: int | None = None,
    hidden_size: int = 32,
    seed: int = 0,
) -> Path:
    """A Hugging Face folder of a random causal LM with two layers.

    Args:
        folder: made when it does not exist.
        kind: of ARCHITECTURES.
        tie: one matrix for input and output embeddings.
        template: of TEMPLATES, or None for a tokenizer without a chat template.
        vocab: ids of the byte-pair part of the tokenizer; its special tokens come behind.
        num_rows: embedding rows; None: some more than the tokenizer has, as Qwen2.5 does.
        hidden_size: D.
        seed: of the weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer(template, vocab)
    tokenizer.save_pretrained(folder)
    config_class, model_class = ARCHITECTURES[kind]
    config = config_class(
        vocab_size=num_rows or len(tokenizer) + 21,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=hidden_size // 2,
        max_position_embeddings=2048,
        tie_word_embeddings=tie,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
    with torch.no_grad():  # as in a trained model, rows differ much from each other and from zero
        model.get_input_embeddings().weight.mul_(10).add_(0.1)
    model.save_pretrained(folder)
    return folder


def tiny_tokenizer(template: str | None = "chatml", vocab: int = 320) -> PreTrainedTokenizerFast:
    """Byte-level BPE over a few sentences, with the special tokens of the template's family."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES, trainer)
    if template == "llama3":
        tokenizer = _llama3_tokenizer(backend)
    else:
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend,
            eos_token="<|im_end|>",
            pad_token="<|endoftext|>",
            additional_special_tokens=["<|im_start|>"],
        )
        tokenizer.add_tokens(["<think>", "</think>"])  # not special: as in Qwen3
    if template is not None:
        tokenizer.chat_template = TEMPLATES[template]
    return tokenizer


def _llama3_tokenizer(backend: Tokenizer) -> PreTrainedTokenizerFast:
    """No padding token, and <|begin_of_text|> before everything encoded."""
    bos = "<|begin_of_text|>"
    backend.add_special_tokens([bos])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token="<|eot_id|>",
        additional_special_tokens=["<|start_header_id|>", "<|end_header_id|>"],
    )


def tokens_for(base: Base, prompt_format: str = "tagged") -> TokenMap:
    """The id space of a voice on a base model."""
    return grow_token_map(
        num_text_ids(base.tokenizer),
        CODEBOOK_SIZE,
        Extras(has_mask=prompt_format == "chat"),
        pad=base.tokenizer.pad_token_id or 0,
        num_rows=base.model.get_input_embeddings().num_embeddings,
    )


def load_grown(folder: Path, prompt_format: str = "tagged", seed: int = 0) -> tuple[Base, TokenMap]:
    """A base model with a voice's rows, its tokenizer with their names."""
    base = load_base(str(folder))
    tokens = tokens_for(base, prompt_format)
    add_token_names(base.tokenizer, tokens, prompt_format)
    grow_model(base.model, tokens, seed=seed)
    return base, tokens


def contract_for(base: Base, tokens: TokenMap, prompt_format: str = "tagged") -> VoiceContract:
    """The contract of a voice on a base model."""
    template = render_chat(base.tokenizer, tokens) if prompt_format == "chat" else ((), ())
    return VoiceContract(
        name="test",
        audio=AudioSpec(24000, 240, 4),
        text=TextSpec("raw", "en-us"),
        codec=CODEC,
        tokens=tokens,
        prompt=PromptSpec(format=prompt_format, before_text=template[0], after_text=template[1]),
    )


def random_ids(num_rows: int, shape: tuple[int, int] = (2, 12), seed: int = 0) -> torch.Tensor:
    """Ids of the whole id space."""
    return torch.randint(0, num_rows, shape, generator=torch.Generator().manual_seed(seed))
