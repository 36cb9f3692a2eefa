"""`tts-stack check merge`: base and adapter, merged and read back by plain transformers."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from stage1_llm.checkpoint import ADAPTER_FOLDER
from stage1_llm.checks.adapter import NUM_STEPS, base_of, lora_of
from stage1_llm.checks.report import Claim, Report, close
from stage1_llm.checks.setup import Setup, disturb
from stage1_llm.checks.training import make_task, take_steps
from stage1_llm.collate import collate_prompts
from stage1_llm.lora import save_adapter
from stage1_llm.merge import TOLERANCES, merge_adapter
from stage1_llm.model import no_progress_bars
from tts_stack.contract import LLM_WEIGHTS_FILE
from tts_stack.errors import CheckpointError

NUM_CONTINUED = 16  # tokens
_DTYPE = "float32"


def check_merge(setup: Setup) -> Report:
    """Train and merge an adapter, then compare with the folder that it became."""
    network = setup.network()
    take_steps(make_task(setup, network), NUM_STEPS)
    disturb(network)  # a few steps move an adapter too little for a wrong merge to show
    adapted = network.llm.eval()
    run = setup.folder / "merge"
    save_adapter(
        adapted, run / "llm" / ADAPTER_FOLDER, setup.contract, base_of(setup), lora_of(setup)
    )
    name = "merge-lora accepts its own result"
    try:
        merged = merge_adapter(run, dtype=_DTYPE)
    except CheckpointError as error:
        return Report(setup.describe(), (Claim(name, False, str(error)),))
    with no_progress_bars():
        plain = AutoModelForCausalLM.from_pretrained(merged.folder, dtype=torch.float32).eval()
    claims = (
        Claim(name, True, merged.describe()),
        _logits(setup, adapted, plain),
        _continuation(setup, adapted, plain),
        _tied(setup, plain, merged.folder),
    )
    return Report(setup.describe(), claims)


@torch.no_grad()
def _logits(setup: Setup, adapted: PreTrainedModel, plain: PreTrainedModel) -> Claim:
    ids = collate_prompts(setup.prompts(), pad_id=setup.contract.tokens.pad).input_ids
    return close(
        "read back by plain transformers, the merged model gives the logits of base + adapter",
        [plain(input_ids=ids).logits],
        [adapted(input_ids=ids).logits],
        tolerance=TOLERANCES[_DTYPE],
    )


def _continuation(setup: Setup, adapted: PreTrainedModel, plain: PreTrainedModel) -> Claim:
    num_equal, prompts = 0, setup.prompts()
    for prompt in prompts:
        start = torch.from_numpy(prompt.token_ids[: prompt.num_text + 1])[None]
        num_equal += bool(torch.equal(_continue(plain, start), _continue(adapted, start)))
    return Claim(
        "the greedy continuation of a text is the same",
        num_equal == len(prompts),
        f"{num_equal} of {len(prompts)} texts, {NUM_CONTINUED} tokens each",
    )


@torch.no_grad()
def _continue(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The likeliest tokens [1, NUM_CONTINUED] after ids [1, L], without a cache."""
    length = ids.shape[1]
    for _ in range(NUM_CONTINUED):
        ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[:, length:]


def _tied(setup: Setup, plain: PreTrainedModel, folder: Path) -> Claim:
    """One matrix that became two is what ails transformers issue 45127."""
    is_tied = bool(base_of(setup).model.config.tie_word_embeddings)
    weights = [plain.get_input_embeddings().weight, plain.get_output_embeddings().weight]
    is_one = weights[0] is weights[1]
    num_in_file = sum(
        weight.shape == weights[0].shape for weight in load_file(folder / LLM_WEIGHTS_FILE).values()
    )
    return Claim(
        f"embedding and head are {'one matrix' if is_tied else 'two matrices'}, as in the base "
        "model",
        is_one == is_tied and num_in_file == (1 if is_tied else 2),
        f"{1 if is_one else 2} after reading, {num_in_file} in the file",
    )
