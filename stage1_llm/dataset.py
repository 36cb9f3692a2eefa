"""Tokenised utterances -> LLM samples: text encoded, empty and over-long ones counted out."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stage1_llm.prompt import Prompt, build_prompt
from stage1_llm.vocab import encode_text
from tts_stack.contract import LengthSpec, PromptSpec, TokenMap
from tts_stack.errors import DataError
from tts_stack.records import TokenizedUtterance

logger = logging.getLogger(__name__)
NUM_MARKERS = 3  # <|text|>, <|audio_start|>, <|audio_end|>
SHOWN_IDS = 5  # of left-out samples in a log line
LOW_QUANTILE, HIGH_QUANTILE = 0.001, 0.999


@dataclass(frozen=True)
class Sample:
    """Text and audio of one utterance as ids."""

    id: str
    text_ids: tuple[int, ...]
    semantic_tokens: NDArray[np.int64]  # [S]

    @property
    def length(self) -> int:
        """Tokens of its prompt."""
        return len(self.text_ids) + len(self.semantic_tokens) + NUM_MARKERS


def encode_samples(
    utterances: Sequence[TokenizedUtterance], tokens: TokenMap, *, max_length: int, split: str
) -> list[Sample]:
    """Encode a split; samples without text or audio, or over `max_length`, are left out and named.

    Raises:
        DataError: there are several codebooks, or no sample is left.
    """
    kept: list[Sample] = []
    empty: list[str] = []
    too_long: list[str] = []
    num_dropped = 0
    for utterance in utterances:
        if utterance.semantic_tokens.ndim != 1:
            raise DataError(
                f"{utterance.id}: {utterance.semantic_tokens.shape[1]} codebooks, stage 1 trains "
                "on one; tokenize with a single-codebook codec"
            )
        encoded = encode_text(utterance.model_text, tokens)
        num_dropped += encoded.num_dropped
        sample = Sample(utterance.id, encoded.ids, utterance.semantic_tokens)
        if not sample.text_ids or not len(sample.semantic_tokens):
            empty.append(sample.id)
        elif sample.length > max_length:
            too_long.append(sample.id)
        else:
            kept.append(sample)
    _report(split, "without text or audio", empty)
    _report(split, f"longer than {max_length} tokens", too_long)
    if num_dropped:
        logger.warning("%s: %d symbols unknown to the voice were dropped", split, num_dropped)
    if not kept:
        raise DataError(
            f"{split}: none of {len(utterances)} utterances is left for stage 1 ({len(too_long)} "
            f"longer than batching.max_length={max_length}, {len(empty)} empty)"
        )
    return kept


def sample_prompt(sample: Sample, tokens: TokenMap, spec: PromptSpec) -> Prompt:
    """The training prompt of a sample."""
    return build_prompt(sample.text_ids, sample.semantic_tokens, tokens, spec)


def measure_stride(samples: Sequence[Sample]) -> float:
    """Mean semantic tokens per text token."""
    num_audio = sum(len(sample.semantic_tokens) for sample in samples)
    return num_audio / sum(len(sample.text_ids) for sample in samples)


def measure_lengths(samples: Sequence[Sample]) -> LengthSpec:
    """Fit tokens = fixed_tokens + tokens_per_symbol * symbols, and the slopes seen around it."""
    num_text = np.array([len(sample.text_ids) for sample in samples], dtype=np.float64)
    num_audio = np.array([len(sample.semantic_tokens) for sample in samples], dtype=np.float64)
    slope, fixed = num_audio.mean() / num_text.mean(), 0.0
    if num_text.std() > 0:
        fitted = float(np.cov(num_text, num_audio, bias=True)[0, 1] / num_text.var())
        intercept = num_audio.mean() - fitted * num_text.mean()
        if fitted > 0 and intercept > 0:  # else a line through the origin
            slope, fixed = fitted, float(intercept)
    slopes = (num_audio - fixed) / num_text
    low, high = np.quantile(slopes, [LOW_QUANTILE, HIGH_QUANTILE])
    return LengthSpec(float(slope), float(low), float(high), fixed)


def _report(split: str, reason: str, ids: Sequence[str]) -> None:
    if ids:
        shown = ", ".join(ids[:SHOWN_IDS]) + (", …" if len(ids) > SHOWN_IDS else "")
        logger.warning("%s: %d samples %s left out: %s", split, len(ids), reason, shown)
