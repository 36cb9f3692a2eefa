"""Teacher-forced hidden states: the input of stage 2, from true tokens in one parallel pass."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stage1_llm.batching import plan_epoch
from stage1_llm.collate import collate_prompts
from stage1_llm.dataset import make_sample, sample_prompt
from stage1_llm.network import TextToSemantic
from stage1_llm.prompt import Prompt
from stage1_llm.text import TextEncoder
from tts_stack.contract import VoiceContract
from tts_stack.errors import DataError
from tts_stack.records import TokenizedUtterance

MAX_TOKENS = 4096  # positions of one batch


@torch.inference_mode()
def teacher_forced_states(
    network: TextToSemantic,
    contract: VoiceContract,
    encode: TextEncoder,
    utterances: Sequence[TokenizedUtterance],
    *,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """States of every utterance's tokens, the same as generation gives for the same tokens.

    Args:
        network: in evaluation mode.
        contract: of the voice the network belongs to.
        encode: of the voice.
        utterances: text and semantic tokens.
        dtype: of the result; float16 halves a cache on disk.

    Returns:
        One [S, W] per utterance, in order, on the CPU; W is D, or D of each mixed layer, lowest
        first. The state of a collapsed run stands for each of its tokens.

    Raises:
        DataError: an utterance has no known symbol or no token, named by its id.
    """
    prompts = [_prompt(utterance, contract, encode) for utterance in utterances]
    if not prompts:
        return []
    lengths = [len(prompt) for prompt in prompts]
    plan = plan_epoch(lengths, max_tokens=max(MAX_TOKENS, *lengths), seed=0, epoch=0)
    found: dict[int, Tensor] = {}
    for indices in plan.batches:
        rows = _batch_states(network, contract, [prompts[i] for i in indices])
        found.update(zip(indices, (row.to("cpu", dtype) for row in rows), strict=True))
    return [found[index] for index in range(len(prompts))]


def state_positions(prompt: Prompt, state_position: str) -> NDArray[np.int64]:
    """Positions [S] of a whole prompt whose states belong to its S semantic tokens."""
    reads = np.repeat(np.arange(len(prompt)), prompt.run_lengths)
    return reads if state_position == "reads" else reads - 1


def _batch_states(
    network: TextToSemantic, contract: VoiceContract, prompts: Sequence[Prompt]
) -> list[Tensor]:
    batch = collate_prompts(prompts, pad_id=contract.tokens.pad).to(network.device)
    spec = contract.prompt
    states = network.hidden_states(  # [B, L, W]
        batch, layer=spec.hidden_layer, num_mixed=spec.num_mixed_layers
    )
    return [
        states[row, torch.from_numpy(state_positions(prompt, spec.state_position))]
        for row, prompt in enumerate(prompts)
    ]


def _prompt(utterance: TokenizedUtterance, contract: VoiceContract, encode: TextEncoder) -> Prompt:
    try:
        sample = make_sample(utterance, encode, contract.tokens, contract.prompt)
        return sample_prompt(sample, contract.tokens, contract.prompt)
    except DataError as error:
        message = str(error)
        place = "" if message.startswith(f"{utterance.id}:") else f"{utterance.id}: "
        raise DataError(f"{place}{message}") from error
