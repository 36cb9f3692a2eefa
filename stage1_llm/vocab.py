"""The id space: text, special, tag, duration and semantic tokens, then rows of padding.

A model from scratch reads symbols; a base model keeps its tokenizer's ids and grows behind them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tts_stack.contract import MIN_RUN, TokenMap
from tts_stack.errors import DataError
from tts_stack.token_names import (
    SOUND_END,
    SOUND_MASK,
    SOUND_START,
    TASK_TOKEN,
    duration_name,
    sound_names,
)

VOCAB_MULTIPLE = 128  # rows of the embedding, for the matrix kernels


@dataclass(frozen=True)
class Extras:
    """What a vocabulary holds beside text, three markers and the semantic tokens."""

    has_mask: bool = False
    max_run: int = 1  # 2 or more: duration tokens of runs of 2 .. max_run
    speakers: tuple[str, ...] = ()
    languages: tuple[str, ...] = ()


def build_token_map(
    symbols: Sequence[str], codebook_size: int, extras: Extras | None = None
) -> TokenMap:
    """Lay out ids of a model from scratch: pad, specials, semantic tokens, text symbols.

    Args:
        symbols: the characters of the training text, in the order of their ids.
        codebook_size: semantic tokens.
        extras: mask, duration tokens, speaker and language tags.

    Raises:
        DataError: there is no symbol, one is longer than a character, or one occurs twice.
    """
    if not symbols:
        raise DataError(
            "symbols: none, expected the characters of the training text; re-run prepare"
        )
    for symbol in symbols:
        if len(symbol) != 1:
            raise DataError(f"symbols: {symbol!r} has {len(symbol)} characters, expected one")
    if len(set(symbols)) != len(symbols):
        twice = sorted(symbol for symbol in set(symbols) if list(symbols).count(symbol) > 1)
        raise DataError(f"symbols: {' '.join(twice)} found twice, expected each once")
    return _lay_out(1, codebook_size, extras or Extras(), pad=0, symbols=tuple(symbols))


def grow_token_map(
    num_text: int,
    codebook_size: int,
    extras: Extras | None = None,
    *,
    pad: int,
    num_rows: int,
) -> TokenMap:
    """Lay out the new ids of a base model behind those of its tokenizer.

    Args:
        num_text: ids of the tokenizer, 0 .. num_text - 1.
        codebook_size: semantic tokens.
        extras: mask, duration tokens, speaker and language tags.
        pad: the tokenizer's padding id.
        num_rows: embedding rows of the base model, never fewer afterwards.
    """
    return _lay_out(
        num_text, codebook_size, extras or Extras(), pad=pad, num_text=num_text, num_rows=num_rows
    )


def token_names(tokens: TokenMap, prompt_format: str) -> dict[int, str]:
    """Name of every id that is not text, as the tokenizer and `inspect` show it."""
    chat = prompt_format == "chat"
    names = {
        tokens.text_start: TASK_TOKEN if chat else "[TEXT]",
        tokens.audio_start: SOUND_START if chat else "[START]",
        tokens.audio_end: SOUND_END if chat else "[STOP]",
    }
    if tokens.mask >= 0:
        names[tokens.mask] = SOUND_MASK
    tags = [f"<|speaker:{name}|>" for name in tokens.speakers]
    tags += [f"<|language:{name}|>" for name in tokens.languages]
    names |= {tokens.tag_offset + i: name for i, name in enumerate(tags)}
    names |= {
        tokens.duration_offset + i: duration_name(i + MIN_RUN) for i in range(tokens.num_durations)
    }
    sounds = sound_names(tokens.codebook_size)
    return names | {tokens.semantic_offset + i: name for i, name in enumerate(sounds)}


def _lay_out(
    first: int,
    codebook_size: int,
    extras: Extras,
    *,
    pad: int,
    symbols: tuple[str, ...] = (),
    num_text: int = 0,
    num_rows: int = 0,
) -> TokenMap:
    """Ids from `first` on: three markers, mask, tags, durations, semantic tokens, symbols."""
    mask = first + 3 if extras.has_mask else -1
    tag_offset = first + 3 + extras.has_mask
    duration_offset = tag_offset + len(extras.speakers) + len(extras.languages)
    num_durations = max(0, extras.max_run - MIN_RUN + 1)
    semantic_offset = duration_offset + num_durations
    text_offset = semantic_offset + codebook_size
    num_ids = max(text_offset + len(symbols), num_rows)
    return TokenMap(
        vocab_size=-(-num_ids // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        pad=pad,
        text_start=first,
        audio_start=first + 1,
        audio_end=first + 2,
        semantic_offset=semantic_offset,
        codebook_size=codebook_size,
        text_offset=text_offset if symbols else 0,
        symbols=symbols,
        num_text=num_text,
        mask=mask,
        duration_offset=duration_offset if num_durations else 0,
        num_durations=num_durations,
        tag_offset=tag_offset if extras.speakers or extras.languages else 0,
        speakers=extras.speakers,
        languages=extras.languages,
    )
