"""The one place where a prompt is built, for training and for synthesis alike.

    <|text|> symbols <|audio_start|> semantic tokens <|audio_end|>

Position schemes: "plain" counts 0, 1, 2, ... "aligned" spaces <|text|> and the symbols by
`text_stride` (mean audio tokens per text token) and lets <|audio_start|> begin at 0 again, so that
a symbol and the audio it is heard in have nearly the same rotary position.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tts_stack.contract import PromptSpec, TokenMap
from tts_stack.errors import DataError

# What predicting a token counts as; <|text|> is never predicted.
GROUP_NONE, GROUP_TEXT, GROUP_AUDIO, GROUP_END = -1, 0, 1, 2
GROUP_NAMES = ("text", "audio", "end")


@dataclass(frozen=True)
class Prompt:
    """One row of the LLM's input, L positions."""

    token_ids: NDArray[np.int64]  # [L]
    position_ids: NDArray[np.float32]  # [L], fractional under "aligned"
    groups: NDArray[np.int64]  # [L], which group of labels a token belongs to
    num_text: int  # <|text|> and symbols: the audio part starts at this index

    def __len__(self) -> int:
        return len(self.token_ids)


def prompt_prefix(text_ids: Sequence[int], tokens: TokenMap, spec: PromptSpec) -> Prompt:
    """What synthesis starts from: text, then <|audio_start|>.

    Raises:
        DataError: the text has no symbol.
    """
    if not len(text_ids):
        raise DataError("prompt: no text symbol, expected at least one; give text to speak")
    token_ids = np.array([tokens.text_start, *text_ids, tokens.audio_start], dtype=np.int64)
    num_text = len(text_ids) + 1
    position_ids = np.arange(len(token_ids), dtype=np.float32)
    if spec.position_scheme == "aligned":
        position_ids[:num_text] *= spec.text_stride
        position_ids[num_text] = 0
    groups = np.full(len(token_ids), GROUP_TEXT, dtype=np.int64)
    groups[0] = GROUP_NONE
    return Prompt(token_ids, position_ids, groups, num_text)


def build_prompt(
    text_ids: Sequence[int],
    semantic_tokens: NDArray[np.int64],
    tokens: TokenMap,
    spec: PromptSpec,
) -> Prompt:
    """A whole sample, closed by <|audio_end|>.

    Args:
        text_ids: ids of the text symbols.
        semantic_tokens: [S], 0 .. codebook_size - 1.
        tokens: the id space.
        spec: the position scheme.

    Raises:
        DataError: text or audio is empty, or a semantic token is outside the codebook.
    """
    if semantic_tokens.ndim != 1 or not len(semantic_tokens):
        raise DataError(
            f"prompt: semantic tokens of shape {list(semantic_tokens.shape)}, expected [S], S >= 1"
        )
    if semantic_tokens.min() < 0 or semantic_tokens.max() >= tokens.codebook_size:
        raise DataError(
            f"prompt: semantic tokens {semantic_tokens.min()} .. {semantic_tokens.max()}, "
            f"expected 0 .. {tokens.codebook_size - 1}; tokenize with the voice's own codec"
        )
    prefix = prompt_prefix(text_ids, tokens, spec)
    num_audio = len(semantic_tokens)
    first = next_position(prefix)
    return Prompt(
        np.concatenate(
            [prefix.token_ids, semantic_tokens + tokens.semantic_offset, [tokens.audio_end]]
        ),
        np.concatenate(
            [prefix.position_ids, first + np.arange(num_audio + 1, dtype=np.float32)]
        ).astype(np.float32),
        np.concatenate([prefix.groups, np.full(num_audio, GROUP_AUDIO), [GROUP_END]]),
        prefix.num_text,
    )


def next_position(prefix: Prompt) -> float:
    """Position of the first semantic token; each later one adds 1."""
    return float(prefix.position_ids[-1]) + 1
