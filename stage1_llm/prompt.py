"""The one place where a prompt is built, for training and for synthesis alike.

    tagged   [TEXT] tags text [START] semantic tokens [STOP]
    chat     the model's own chat template: the user's turn holds <|text_to_semantic|> tags text,
             the assistant's <|sound_start|> semantic tokens <|sound_end|>

Position schemes: "plain" counts 0, 1, 2, ... "aligned" spaces everything before [START] by
`text_stride` (mean audio tokens per text token) and lets [START] begin at 0 again, so that a
symbol and the audio it is heard in have nearly the same rotary position.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stage1_llm.stream import IGNORE_INDEX, AudioStream, encode_stream
from tts_stack.contract import PromptSpec, TokenMap
from tts_stack.errors import DataError

# What predicting a token counts as; template, tags and masked tokens are never predicted.
GROUP_NONE, GROUP_TEXT, GROUP_AUDIO, GROUP_END = -1, 0, 1, 2
GROUP_NAMES = ("text", "audio", "end")


@dataclass(frozen=True)
class Prompt:
    """One row of the LLM's input, L positions."""

    token_ids: NDArray[np.int64]  # [L]
    position_ids: NDArray[np.float32]  # [L], fractional under "aligned"
    groups: NDArray[np.int64]  # [L], which group of labels a token belongs to
    codes: NDArray[np.int64]  # [L, C] the other codebooks of a semantic token, IGNORE_INDEX else
    run_lengths: NDArray[np.int64]  # [L] semantic tokens a position stands for, 0 on all others
    num_text: int  # everything before [START]: the audio part starts at this index

    def __len__(self) -> int:
        return len(self.token_ids)


def prompt_prefix(
    text_ids: Sequence[int], tokens: TokenMap, spec: PromptSpec, tag_ids: Sequence[int] = ()
) -> Prompt:
    """What synthesis starts from: text, then [START].

    Args:
        text_ids: ids of the text.
        tokens: the id space.
        spec: template and position scheme.
        tag_ids: speaker and language.

    Raises:
        DataError: the text has no symbol.
    """
    if not len(text_ids):
        raise DataError("prompt: no text symbol, expected at least one; give text to speak")
    before = (*(spec.before_text or (tokens.text_start,)), *tag_ids)
    token_ids = np.array([*before, *text_ids, *spec.after_text, tokens.audio_start], dtype=np.int64)
    num_text = len(token_ids) - 1
    position_ids = np.arange(len(token_ids), dtype=np.float32)
    if spec.position_scheme == "aligned":
        position_ids[:num_text] *= spec.text_stride
        position_ids[num_text] = 0
    groups = np.full(len(token_ids), GROUP_NONE, dtype=np.int64)
    groups[len(before) : len(before) + len(text_ids)] = GROUP_TEXT
    # After the text the reader predicts [START]: that ends the text, and a template is given.
    groups[num_text] = GROUP_TEXT if not spec.after_text else GROUP_NONE
    nothing = np.zeros(len(token_ids), dtype=np.int64)
    return Prompt(
        token_ids, position_ids, groups, np.zeros((len(token_ids), 0), np.int64), nothing, num_text
    )


def build_prompt(
    text_ids: Sequence[int],
    semantic_tokens: NDArray[np.int64],
    tokens: TokenMap,
    spec: PromptSpec,
    tag_ids: Sequence[int] = (),
) -> Prompt:
    """A whole sample, closed by [STOP].

    Args:
        text_ids: ids of the text.
        semantic_tokens: [S] or [S, K], 0 .. codebook_size - 1.
        tokens: the id space.
        spec: template, position scheme, collapsed runs.
        tag_ids: speaker and language.

    Raises:
        DataError: text or audio is empty, or a semantic token is outside the codebook.
    """
    prefix = prompt_prefix(text_ids, tokens, spec, tag_ids)
    stream = encode_stream(semantic_tokens, tokens, spec)
    num_audio = len(stream.token_ids)
    positions = next_position(prefix) + np.arange(num_audio + 1, dtype=np.float32)
    groups = np.where(stream.is_masked, GROUP_NONE, GROUP_AUDIO)
    return Prompt(
        np.concatenate([prefix.token_ids, stream.token_ids, [tokens.audio_end]]),
        np.concatenate([prefix.position_ids, positions]).astype(np.float32),
        np.concatenate([prefix.groups, groups, [GROUP_END]]),
        _codes(stream, len(prefix)),
        np.concatenate([prefix.run_lengths, stream.run_lengths, [0]]),
        prefix.num_text,
    )


def _codes(stream: AudioStream, num_prefix: int) -> NDArray[np.int64]:
    """[L, C]: nothing on the prefix and on [STOP]."""
    return np.pad(stream.codes, ((num_prefix, 1), (0, 0)), constant_values=IGNORE_INDEX)


def next_position(prefix: Prompt) -> float:
    """Position of the first semantic token; each later one adds 1."""
    return float(prefix.position_ids[-1]) + 1
