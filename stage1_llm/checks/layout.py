"""Where everything stands in a prompt, found from its form alone, and what its audio says."""

import numpy as np
from numpy.typing import NDArray

from stage1_llm.dataset import Sample, sample_prompt
from stage1_llm.prompt import GROUP_AUDIO, GROUP_END, GROUP_NONE, GROUP_TEXT
from stage1_llm.runs import Runs, durations_from_codebook, expand_runs, read_durations
from tts_stack.contract import MIN_RUN, PromptSpec, TokenMap

Ints = NDArray[np.int64]


def expected_groups(sample: Sample, tokens: TokenMap, spec: PromptSpec) -> Ints:
    """Group of each position of a sample's prompt, from the form of a prompt alone.

    Args:
        sample: text, tags and audio.
        tokens: the id space.
        spec: the template.
    """
    before = (spec.before_text or (tokens.text_start,)) + sample.tag_ids
    asked = 1 if spec.after_text else 0  # a template is given, and [START] with it
    text = [GROUP_NONE] * len(before) + [GROUP_TEXT] * len(sample.text_ids)
    after = [GROUP_NONE] * len(spec.after_text) + [GROUP_NONE if asked else GROUP_TEXT]
    ids = sample_prompt(sample, tokens, spec).token_ids
    audio = ids[len(text) + len(after) : -1]
    is_masked = (audio == tokens.mask) & (tokens.mask >= 0)
    is_duration = (audio >= tokens.duration_offset) & (audio < tokens.duration_stop)
    is_masked |= is_duration & np.append(is_masked[1:], False)  # of a masked token
    heard = np.where(is_masked, GROUP_NONE, GROUP_AUDIO).tolist()
    return np.array([*text, *after, *heard, GROUP_END], dtype=np.int64)


def decode_audio(ids: Ints, codes: Ints, tokens: TokenMap, spec: PromptSpec) -> Ints:
    """Speech tokens [S] or [S, K] of the audio positions of one prompt.

    Args:
        ids: [M].
        codes: [M, C].
        tokens: the id space.
        spec: whether and how runs were collapsed.
    """
    rows = np.concatenate([ids[:, None] - tokens.semantic_offset, codes], axis=1)
    if spec.durations == "codebook":
        return expand_runs(durations_from_codebook(rows))
    is_duration = (ids >= tokens.duration_offset) & (ids < tokens.duration_stop)
    lengths = np.where(is_duration, ids - tokens.duration_offset + MIN_RUN, 0)
    runs = read_durations(rows, lengths)
    found = runs.tokens[:, 0] if runs.tokens.shape[1] == 1 else runs.tokens
    return expand_runs(Runs(found, runs.lengths))
