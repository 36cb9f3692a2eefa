"""The id space of a model built from scratch: specials, semantic tokens, then text symbols."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from tts_stack.contract import TokenMap
from tts_stack.errors import DataError

NUM_SPECIAL = 4  # pad, <|text|>, <|audio_start|>, <|audio_end|>
VOCAB_MULTIPLE = 64  # rows of the embedding, for the matrix kernels


class EncodedText(NamedTuple):
    """Text as ids, and what could not be encoded."""

    ids: tuple[int, ...]
    num_dropped: int  # symbols the voice never saw


def build_token_map(symbols: Sequence[str], codebook_size: int) -> TokenMap:
    """Lay out ids: 0 pad, 1 text, 2 audio start, 3 audio end, semantic tokens, text symbols.

    Args:
        symbols: the characters of the training text, in the order of their ids.
        codebook_size: semantic tokens.

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
    text_offset = NUM_SPECIAL + codebook_size
    num_ids = text_offset + len(symbols)
    return TokenMap(
        vocab_size=-(-num_ids // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        pad=0,
        text_start=1,
        audio_start=2,
        audio_end=3,
        semantic_offset=NUM_SPECIAL,
        codebook_size=codebook_size,
        text_offset=text_offset,
        symbols=tuple(symbols),
    )


def encode_text(text: str, tokens: TokenMap) -> EncodedText:
    """Ids of the known symbols; unknown ones are dropped and counted.

    Text is looked up symbol by symbol, so that "<|audio_end|>" in a text is only letters.
    """
    ids = _ids_of_symbols(tokens)
    found = tuple(ids[symbol] for symbol in text if symbol in ids)
    return EncodedText(found, len(text) - len(found))


@lru_cache(maxsize=8)
def _ids_of_symbols(tokens: TokenMap) -> dict[str, int]:
    return {symbol: tokens.text_offset + i for i, symbol in enumerate(tokens.symbols)}
