"""Records handed from step to step, in the order in which an utterance meets them.

Shape letters used everywhere: B batch, L LLM positions, S semantic tokens, V vocabulary,
D hidden size, C channels, F frames, K frequency bins, T samples.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class SourceItem:
    """One line of a user's corpus, before anything is read or checked."""

    id: str
    audio_path: str  # absolute
    text: str  # as the user wrote it
    place: str  # where the line stands, for messages: "metadata.csv:17"
    speaker: str = ""
    language: str = ""


@dataclass(frozen=True)
class Utterance:
    """A prepared recording with its transcript: one row of a corpus shard."""

    id: str
    text: str  # as the user wrote it
    model_text: str  # what the LLM reads: phonemes, normalised text, or the raw text
    speaker: str
    language: str
    audio: NDArray[np.float32]  # [T], mono, at the corpus's sample rate


@dataclass(frozen=True)
class TokenizedUtterance:
    """What stage 1 trains on: the text and the semantic tokens of one recording."""

    id: str
    model_text: str
    semantic_tokens: NDArray[np.int64]  # [S], or [S, num_codebooks] for several codebooks
    speaker: str = ""
    language: str = ""
