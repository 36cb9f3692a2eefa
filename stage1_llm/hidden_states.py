"""Teacher-forced hidden states: the input of stage 2, from true tokens in one parallel pass."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stage1_llm.batching import plan_epoch
from stage1_llm.collate import collate_prompts
from stage1_llm.model import hidden_states
from stage1_llm.prompt import Prompt, build_prompt
from stage1_llm.vocab import encode_text
from tts_stack.contract import VoiceContract
from tts_stack.errors import DataError
from tts_stack.records import TokenizedUtterance

MAX_TOKENS = 4096  # positions of one batch


@torch.inference_mode()
def teacher_forced_states(
    model: PreTrainedModel,
    contract: VoiceContract,
    utterances: Sequence[TokenizedUtterance],
    *,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """States of every utterance's tokens, the same as generation gives for the same tokens.

    Args:
        model: in evaluation mode.
        contract: of the voice the model belongs to.
        utterances: text and semantic tokens.
        dtype: of the result; float16 halves a cache on disk.

    Returns:
        One [S, D] per utterance, in order, on the CPU.

    Raises:
        DataError: an utterance has no known symbol or no token, named by its id.
    """
    prompts = [_prompt(utterance, contract) for utterance in utterances]
    if not prompts:
        return []
    lengths = [len(prompt) for prompt in prompts]
    plan = plan_epoch(lengths, max_tokens=max(MAX_TOKENS, *lengths), seed=0, epoch=0)
    found: dict[int, Tensor] = {}
    for indices in plan.batches:
        rows = _batch_states(model, contract, [prompts[i] for i in indices])
        found.update(zip(indices, (row.to("cpu", dtype) for row in rows), strict=True))
    return [found[index] for index in range(len(prompts))]


def _batch_states(
    model: PreTrainedModel, contract: VoiceContract, prompts: Sequence[Prompt]
) -> list[Tensor]:
    batch = collate_prompts(prompts, pad_id=contract.tokens.pad).to(model.device)
    layer = contract.prompt.hidden_layer
    states = hidden_states(model, batch.input_ids, batch.position_ids, layer=layer)  # [B, L, D]
    return [
        states[row, audio_slice(prompt, contract.prompt.state_position)].clone()
        for row, prompt in enumerate(prompts)
    ]


def audio_slice(prompt: Prompt, state_position: str) -> slice:
    """Positions of a whole prompt whose states belong to its S semantic tokens."""
    first = prompt.num_text + (1 if state_position == "reads" else 0)
    num_audio = len(prompt) - prompt.num_text - 2  # <|audio_start|>, <|audio_end|>
    return slice(first, first + num_audio)


def _prompt(utterance: TokenizedUtterance, contract: VoiceContract) -> Prompt:
    text_ids = encode_text(utterance.model_text, contract.tokens).ids
    try:
        return build_prompt(text_ids, utterance.semantic_tokens, contract.tokens, contract.prompt)
    except DataError as error:
        raise DataError(f"{utterance.id}: {error}") from error
