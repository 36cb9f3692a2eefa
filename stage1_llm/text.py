"""Text -> ids: symbol by symbol for a model from scratch, the base model's tokenizer otherwise."""

import re
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tts_stack.contract import TokenMap
from tts_stack.errors import CheckpointError

# Without one of these transformers 5 makes up a tokenizer of a single token.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
_CONTROL_FORM = re.compile(r"<\S+>|\[\S+\]")


class EncodedText(NamedTuple):
    """Text as ids, and what could not be encoded."""

    ids: tuple[int, ...]
    num_dropped: int  # symbols the voice never saw


class TextEncoder(Protocol):
    """What turns the text of a voice into ids; text that looks like a control token is text."""

    def __call__(self, text: str) -> EncodedText:
        """Ids of a text."""


class SymbolEncoder:
    """One id a character; unknown characters are dropped and counted."""

    def __init__(self, tokens: TokenMap) -> None:
        self._ids = {symbol: tokens.text_offset + i for i, symbol in enumerate(tokens.symbols)}

    def __call__(self, text: str) -> EncodedText:
        """See TextEncoder."""
        found = tuple(self._ids[symbol] for symbol in text if symbol in self._ids)
        return EncodedText(found, len(text) - len(found))


class TokenizerEncoder:
    """A base model's own tokenizer, its control tokens switched off inside text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        # split_special_tokens leaves those alone that are not marked special, as Qwen3's <think>.
        others = [
            re.escape(token.content)
            for token in tokenizer.added_tokens_decoder.values()
            if not token.special and _CONTROL_FORM.fullmatch(token.content)
        ]
        self._control = re.compile("|".join(others)) if others else None

    def __call__(self, text: str) -> EncodedText:
        """See TextEncoder."""
        ids: list[int] = []
        for part in self._parts(text.strip()):
            ids += self._tokenizer.encode(part, add_special_tokens=False, split_special_tokens=True)
        return EncodedText(tuple(ids), 0)

    def _parts(self, text: str) -> list[str]:
        """The text, cut inside every control token."""
        if self._control is None:
            return [text]
        cuts = [0, *(match.start() + 1 for match in self._control.finditer(text)), len(text)]
        return [text[start:stop] for start, stop in pairwise(cuts)]


def load_tokenizer(source: str | Path, *, local_only: bool = True) -> Any:
    """A Hugging Face tokenizer from a folder or the hub.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    folder = Path(source)
    if folder.is_dir() and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise CheckpointError(
            f"{source}: no tokenizer, expected tokenizer.json and tokenizer_config.json as a base "
            "model's folder holds them; copy the whole folder"
        )
    try:
        return AutoTokenizer.from_pretrained(str(source), local_files_only=local_only)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{source}: no readable tokenizer ({reason}); a base model's folder holds "
            "tokenizer.json and tokenizer_config.json"
        ) from error


def load_text_encoder(folder: Path, tokens: TokenMap) -> TextEncoder:
    """The encoder of an LLM folder.

    Raises:
        CheckpointError: the voice needs a tokenizer and the folder holds none.
    """
    return SymbolEncoder(tokens) if tokens.symbols else TokenizerEncoder(load_tokenizer(folder))
