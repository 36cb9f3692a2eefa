"""`tts-stack inspect`: id map, prompt and size of a voice, or of one yet to be trained."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from stage1_llm.base import (
    add_token_names,
    check_tokenizer_fits,
    find_base,
    num_text_ids,
    read_base_config,
    render_chat,
)
from stage1_llm.lora import BASE_FILE, read_origin
from stage1_llm.prompt import GROUP_NAMES, GROUP_NONE, Prompt, build_prompt
from stage1_llm.text import SymbolEncoder, TextEncoder, TokenizerEncoder, load_tokenizer
from stage1_llm.vocab import Extras, grow_token_map, token_names
from tts_stack.contract import CONTRACT_FILE, PromptSpec, TokenMap, VoiceContract
from tts_stack.errors import CheckpointError, ConfigError
from tts_stack.text.frontend import build_frontend

_CONFIG = "config.json"
_NUM_SHOWN = 3  # semantic tokens of the example
# Where the LLM of a target may lie, and the contract of the voice it belongs to.
_PLACES = (
    (".", "."),
    ("llm", "."),
    ("llm/model", "llm/model"),
    ("llm/adapter", "llm/adapter"),
    ("voice/llm", "voice"),
)


class IdRange(NamedTuple):
    """Neighbouring ids of one kind."""

    kind: str
    first: int
    last: int  # inclusive
    names: str


class Position(NamedTuple):
    """One position of the example prompt."""

    token_id: int
    name: str
    position: float
    group: str


class Inspection(NamedTuple):
    """What `tts-stack inspect` shows."""

    title: str
    facts: tuple[tuple[str, str], ...]
    ids: tuple[IdRange, ...]
    example: tuple[Position, ...]


class _Subject(NamedTuple):
    title: str
    tokens: TokenMap
    spec: PromptSpec
    encode: TextEncoder
    tokenizer: Any  # None: from scratch
    text: str  # as the LLM reads it
    shape: Any  # transformers configuration; None where the base model is not at hand
    facts: tuple[tuple[str, str], ...]


def inspect_target(
    target: str,
    *,
    codebook_size: int | None = None,
    prompt_format: str = "tagged",
    text: str = "Hello there.",
) -> Inspection:
    """Look at a trained voice, or at what a base model would become.

    Args:
        target: a run, voice, LLM or adapter folder; or a base model's folder or hub name.
        codebook_size: of the semantic tokens that a base model would get.
        prompt_format: of a base model, "tagged" or "chat".
        text: of the example prompt.

    Raises:
        ConfigError: a base model was named without `codebook_size`, or cannot speak the format.
        CheckpointError: the target is none of these, or is damaged.
    """
    found = _find_voice(Path(target).expanduser())
    subject = (
        _voice(*found, text)
        if found
        else _grown_base(target, codebook_size, prompt_format, text.strip())
    )
    tokens, spec = subject.tokens, subject.spec
    semantic = np.arange(min(_NUM_SHOWN, tokens.codebook_size), dtype=np.int64)
    tags = tokens.tag_ids((*tokens.speakers, "")[0], (*tokens.languages, "")[0])
    prompt = build_prompt(subject.encode(subject.text).ids, semantic, tokens, spec, tags)
    facts = (*subject.facts, *_shape_facts(subject.shape, tokens), *_prompt_facts(spec))
    return Inspection(
        subject.title,
        facts,
        tuple(id_ranges(tokens, spec.format)),
        tuple(_positions(prompt, _names(subject))),
    )


def id_ranges(tokens: TokenMap, prompt_format: str) -> list[IdRange]:
    """The whole id space, in order: every id is in exactly one range."""
    names = token_names(tokens, prompt_format)
    singles = {tokens.text_start, tokens.audio_start, tokens.audio_end, tokens.mask} - {-1}
    ranges = [IdRange("special", i, i, names[i]) for i in singles]
    starts = {
        "tags": (tokens.tag_offset, len(tokens.speakers) + len(tokens.languages)),
        "durations": (tokens.duration_offset, tokens.num_durations),
        "semantic": (tokens.semantic_offset, tokens.codebook_size),
    }
    for kind, (first, count) in starts.items():
        if count:
            ranges.append(
                IdRange(kind, first, first + count - 1, _ends(names, first, first + count - 1))
            )
    if tokens.symbols:
        ranges.append(IdRange("padding", tokens.pad, tokens.pad, ""))
        last = tokens.text_offset + len(tokens.symbols) - 1
        ranges.append(IdRange("text", tokens.text_offset, last, "".join(tokens.symbols)))
    else:
        shown = f"of the base model's tokenizer; padding is {tokens.pad}"
        ranges.append(IdRange("text", 0, tokens.num_text - 1, shown))
    used = max(part.last for part in ranges) + 1
    if used < tokens.vocab_size:
        ranges.append(IdRange("padding rows", used, tokens.vocab_size - 1, ""))
    return sorted(ranges, key=lambda part: part.first)


def _find_voice(target: Path) -> tuple[Path, VoiceContract] | None:
    """The LLM folder of a target and its contract; None for what is no voice."""
    for llm, contract in _PLACES:
        has_llm = any((target / llm / name).is_file() for name in (_CONFIG, BASE_FILE))
        if has_llm and (target / contract / CONTRACT_FILE).is_file():
            return target / llm, VoiceContract.load(target / contract / CONTRACT_FILE)
    return None


def _voice(folder: Path, contract: VoiceContract, text: str) -> _Subject:
    tokens = contract.tokens
    is_adapter = (folder / BASE_FILE).is_file()
    facts = [("voice", contract.name), ("codec", contract.codec.describe())]
    if contract.codec.num_codebooks > 1:
        facts.append(("codebooks", str(contract.codec.num_codebooks)))
    source = str(folder)
    if is_adapter:
        origin = read_origin(folder)
        source = origin.source
        where = "embeddings and " if origin.settings.embeddings else ""
        facts += [
            ("base model", f"{origin.source} ({origin.sha256[:12]})"),
            (
                "LoRA",
                f"r {origin.settings.r}, alpha {origin.settings.alpha}, on {where}"
                f"{', '.join(origin.settings.target_modules)}",
            ),
        ]
    tokenizer = None if tokens.symbols else _voice_tokenizer(folder, source, contract)
    return _Subject(
        f"{'adapter' if is_adapter else 'LLM'} {folder}",
        tokens,
        contract.prompt,
        SymbolEncoder(tokens) if tokenizer is None else TokenizerEncoder(tokenizer),
        tokenizer,
        build_frontend(contract.text)(text),
        _adapted_shape(source) if is_adapter else read_base_config(folder, source),
        tuple(facts),
    )


def _voice_tokenizer(folder: Path, source: str, contract: VoiceContract) -> Any:
    """Of the LLM folder; an adapter that came without one takes the base model's."""
    try:
        return load_tokenizer(folder)
    except CheckpointError:
        if source == str(folder):
            raise
    tokenizer = load_tokenizer(find_base(source, with_weights=False))
    add_token_names(tokenizer, contract.tokens, contract.prompt.format)
    return tokenizer


def _adapted_shape(source: str) -> Any:
    try:
        return read_base_config(find_base(source, with_weights=False), source)
    except CheckpointError:
        return None


def _grown_base(source: str, codebook_size: int | None, prompt_format: str, text: str) -> _Subject:
    folder = find_base(source, with_weights=False)
    config = read_base_config(folder, source)
    if codebook_size is None:
        raise ConfigError(
            f"{source}: a base model has no semantic tokens yet; say how many it would get with "
            "--codebook-size"
        )
    num_rows = int(config.get_text_config().vocab_size)
    tokenizer = load_tokenizer(folder)
    check_tokenizer_fits(tokenizer, num_rows, source)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    tokens = grow_token_map(
        num_text_ids(tokenizer),
        codebook_size,
        Extras(has_mask=prompt_format == "chat"),
        pad=pad or 0,
        num_rows=num_rows,
    )
    add_token_names(tokenizer, tokens, prompt_format)
    spec = PromptSpec(format=prompt_format)
    if prompt_format == "chat":
        template = render_chat(tokenizer, tokens)
        spec = PromptSpec(
            format=prompt_format, before_text=template.before, after_text=template.after
        )
    facts = (("rows of the base model", f"{num_rows:,}"),)
    encode = TokenizerEncoder(tokenizer)
    return _Subject(
        f"{source}, grown for training", tokens, spec, encode, tokenizer, text, config, facts
    )


def _shape_facts(shape: Any, tokens: TokenMap) -> list[tuple[str, str]]:
    if shape is None:
        return [("model", "the base model is not at hand")]
    config = shape.get_text_config()
    width, is_tied = config.hidden_size, bool(config.tie_word_embeddings)
    config.vocab_size = tokens.vocab_size
    with torch.device("meta"):  # counts without making weights
        model = AutoModelForCausalLM.from_config(config)
    total = sum(parameter.numel() for parameter in model.parameters())
    embeddings = tokens.vocab_size * width * (1 if is_tied else 2)
    return [
        ("model", f"{type(model).__name__}, {config.num_hidden_layers} layers, {width} wide"),
        ("parameters", f"{total / 1e6:,.2f} M, {embeddings / 1e6:,.2f} M of them embeddings"),
        ("embedding rows", f"{tokens.vocab_size:,} = {tokens.vocab_size // 128} x 128"),
        ("embeddings", "tied: input and output share one matrix" if is_tied else "untied"),
    ]


def _prompt_facts(spec: PromptSpec) -> list[tuple[str, str]]:
    positions = spec.position_scheme
    if positions == "aligned":
        positions += f", {spec.text_stride:g} audio tokens a text token"
    durations = "" if spec.durations == "none" else f", runs up to {spec.max_run}"
    return [
        ("prompt", spec.format),
        ("positions", positions),
        ("durations", spec.durations + durations),
        ("states for stage 2", f"layer {spec.hidden_layer}, where a token {_verb(spec)}"),
    ]


def _verb(spec: PromptSpec) -> str:
    return "is read" if spec.state_position == "reads" else "is predicted"


def _names(subject: _Subject) -> dict[int, str]:
    tokens = subject.tokens
    names = {tokens.text_offset + i: symbol for i, symbol in enumerate(tokens.symbols)}
    return token_names(tokens, subject.spec.format) | names | _tokenizer_names(subject)


def _tokenizer_names(subject: _Subject) -> dict[int, str]:
    if subject.tokenizer is None:
        return {}
    return {
        token_id: subject.tokenizer.decode([token_id])
        for token_id in (
            *subject.spec.before_text,
            *subject.spec.after_text,
            *subject.encode(subject.text).ids,
        )
    }


def _positions(prompt: Prompt, names: dict[int, str]) -> Iterator[Position]:
    groups = {GROUP_NONE: ""} | dict(enumerate(GROUP_NAMES))
    rows = zip(
        prompt.token_ids.tolist(), prompt.position_ids.tolist(), prompt.groups.tolist(), strict=True
    )
    for token_id, position, group in rows:
        yield Position(token_id, names[token_id], position, groups[group])


def _ends(names: dict[int, str], first: int, last: int) -> str:
    return names[first] if first == last else f"{names[first]} .. {names[last]}"
