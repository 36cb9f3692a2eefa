"""Utterances -> LLM samples, and what a voice learns from their lengths."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stage1_llm.prompt import Prompt, build_prompt
from stage1_llm.stream import encode_stream
from stage1_llm.text import TextEncoder
from tts_stack.contract import LengthSpec, PromptSpec, TokenMap
from tts_stack.errors import DataError
from tts_stack.records import TokenizedUtterance

NUM_MARKERS = 2  # [START] and [STOP]
LOW_QUANTILE, HIGH_QUANTILE = 0.001, 0.999


@dataclass(frozen=True)
class Sample:
    """Text and audio of one utterance as ids."""

    id: str
    text_ids: tuple[int, ...]
    semantic_tokens: NDArray[np.int64]  # [S] or [S, K]
    length: int  # tokens of its prompt
    tag_ids: tuple[int, ...] = ()
    num_dropped: int = 0  # symbols of the text that the voice does not know


def make_sample(
    utterance: TokenizedUtterance, encode: TextEncoder, tokens: TokenMap, spec: PromptSpec
) -> Sample:
    """Encode one utterance; a sample without text or audio has length 0 and cannot be trained on.

    Raises:
        DataError: a semantic token is outside the codebook, named by the utterance.
    """
    encoded = encode(utterance.model_text)
    tag_ids = tokens.tag_ids(utterance.speaker, utterance.language)
    length = 0
    if encoded.ids and len(utterance.semantic_tokens):
        try:
            num_audio = len(encode_stream(utterance.semantic_tokens, tokens, spec).token_ids)
        except DataError as error:
            raise DataError(f"{utterance.id}: {error}") from error
        length = num_markers(spec) + len(tag_ids) + len(encoded.ids) + num_audio
    return Sample(
        utterance.id,
        encoded.ids,
        utterance.semantic_tokens,
        length,
        tag_ids,
        encoded.num_dropped,
    )


def sample_prompt(sample: Sample, tokens: TokenMap, spec: PromptSpec) -> Prompt:
    """The training prompt of a sample."""
    return build_prompt(sample.text_ids, sample.semantic_tokens, tokens, spec, sample.tag_ids)


def num_markers(spec: PromptSpec) -> int:
    """Tokens of a prompt that are neither text, tag nor audio."""
    return max(1, len(spec.before_text)) + len(spec.after_text) + NUM_MARKERS


def measure_stride(
    num_text: NDArray[np.integer], lengths: NDArray[np.integer], spec: PromptSpec
) -> float:
    """Mean audio positions per text position; tags count as audio, one in hundreds.

    Args:
        num_text: text ids of each sample.
        lengths: of each whole prompt.
        spec: the template.
    """
    return float((lengths - num_text - num_markers(spec)).sum() / num_text.sum())


def measure_lengths(num_text: NDArray[np.integer], num_audio: NDArray[np.integer]) -> LengthSpec:
    """Fit tokens = fixed_tokens + tokens_per_symbol * symbols, and the slopes seen around it.

    Args:
        num_text: text ids of each sample.
        num_audio: semantic tokens of each sample.
    """
    text, audio = num_text.astype(np.float64), num_audio.astype(np.float64)
    slope, fixed = audio.mean() / text.mean(), 0.0
    if text.std() > 0:
        fitted = float(np.cov(text, audio, bias=True)[0, 1] / text.var())
        intercept = audio.mean() - fitted * text.mean()
        if fitted > 0 and intercept > 0:  # else a line through the origin
            slope, fixed = fitted, float(intercept)
    slopes = (audio - fixed) / text
    low, high = np.quantile(slopes, [LOW_QUANTILE, HIGH_QUANTILE])
    return LengthSpec(float(slope), float(low), float(high), fixed)
