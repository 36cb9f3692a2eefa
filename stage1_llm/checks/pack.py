"""`tts-stack check pack`: a row of several samples computes what each sample computes alone."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from stage1_llm.checks.collate import all_logits
from stage1_llm.checks.report import Claim, Report, close
from stage1_llm.checks.setup import Setup, disturb, training_form
from stage1_llm.collate import LMBatch, collate_prompts, pack_prompts
from stage1_llm.loss import Denominators, denominators, step_loss, step_sums
from stage1_llm.network import Predictions, TextToSemantic
from stage1_llm.prompt import GROUP_NAMES, GROUP_NONE, Prompt
from stage1_llm.stream import IGNORE_INDEX
from tts_stack.errors import ConfigError, DataError

KINDS = {"dynamic": "padded batch", "packing": "packed row"}


class Learnt(NamedTuple):
    """What a network says of some samples, and which way they would move it."""

    logits: list[Tensor]
    gradients: list[Tensor]


def check_pack(setup: Setup) -> Report:
    """Compare both kinds of batches with each sample alone, in plain transformers attention.

    Raises:
        DataError: a single sample, beside which nothing can be padded or packed.
    """
    prompts, pad = setup.prompts(), setup.contract.tokens.pad
    if len(prompts) < 2:
        raise DataError(
            f"{setup.user.corpus}: train: 1 utterance of at most batching.max_length="
            f"{setup.user.batching.max_length} tokens, check pack needs 2; add some or raise it"
        )
    network = setup.network()
    disturb(network)
    singles = [collate_prompts([prompt], pad_id=pad) for prompt in prompts]
    alone = _learn(network, singles, setup)
    claims: list[Claim] = []
    for kind in KINDS:
        try:
            training_form(network, setup.config, kind)
        except ConfigError as error:
            claims.append(Claim("the model keeps packed samples apart", False, str(error)))
            continue
        batch = pack_prompts(prompts) if kind == "packing" else collate_prompts(prompts, pad_id=pad)
        claims += _compare(kind, _learn(network, [batch], setup), alone)
        claims.append(_apart(kind, network, batch, prompts))
    return Report(setup.describe(), tuple(claims))


def _learn(network: TextToSemantic, batches: Sequence[LMBatch], setup: Setup) -> Learnt:
    """Logits, and gradients of the loss of all batches together."""
    loss = setup.config.loss
    weights, every = torch.tensor(loss.weights(0)), torch.ones(len(GROUP_NAMES))
    parts = [denominators(batch.groups, batch.codes, weights) for batch in batches]
    totals = Denominators(*(torch.stack(values).sum(0) for values in zip(*parts, strict=True)))
    network.zero_grad(set_to_none=True)
    for batch in batches:
        sums = step_sums(*network(batch, weights))
        step_loss(sums, weights, loss.codebook_weight, totals).backward()
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    with torch.no_grad():
        logits = all_logits([network(batch, every) for batch in batches])
    return Learnt(logits, gradients)


def _compare(kind: str, found: Learnt, alone: Learnt) -> list[Claim]:
    name = KINDS[kind]
    return [
        close(f"logits of a {name} equal those of each sample alone", found.logits, alone.logits),
        close(
            f"gradients of a {name} equal those of the samples alone, added up",
            found.gradients,
            alone.gradients,
        ),
    ]


def _apart(kind: str, network: TextToSemantic, batch: LMBatch, prompts: Sequence[Prompt]) -> Claim:
    every = torch.ones(len(GROUP_NAMES))
    with _watched_embeddings(network) as seen:
        predictions = network(batch, every)
    embeddings = seen[0]  # [B, L, D]; a network with codebooks looks up labels after it
    largest = own = 0.0
    for index, loss in enumerate(_losses(predictions, prompts)):
        (gradient,) = torch.autograd.grad(loss, embeddings, retain_graph=True)
        mine = _positions(batch, prompts, index)
        size = gradient.abs().amax(-1)  # [B, L]
        own = max(own, float(size[mine].max()))
        largest = max(largest, float(size.masked_fill(mine, 0).max()))
    return Claim(
        f"in a {KINDS[kind]} no sample's loss depends on its neighbours or on padding",
        largest == 0 and own > 0,
        f"{len(prompts)} losses; largest gradient {largest:.2g} at the others' embeddings, "
        f"{own:.2g} at their own",
    )


@contextmanager
def _watched_embeddings(network: TextToSemantic) -> Iterator[list[Tensor]]:
    """Collect what the embedding gives, as leaves that gradients may be asked for."""
    seen: list[Tensor] = []

    def watch(module: object, inputs: object, output: Tensor) -> Tensor:
        seen.append(output.detach().requires_grad_())
        return seen[-1]

    handle = network.llm.get_input_embeddings().register_forward_hook(watch)
    try:
        yield seen
    finally:
        handle.remove()


def _losses(predictions: Predictions, prompts: Sequence[Prompt]) -> Iterator[Tensor]:
    """Loss of each sample; the predictions stand in the order of the samples."""
    counts = [int((prompt.groups != GROUP_NONE).sum()) for prompt in prompts]
    parts = [predictions.logits.split(counts), predictions.labels.split(counts)]
    codes = predictions.codes.split(counts)
    code_logits = [logits.split(counts) for logits in predictions.code_logits]
    for index, (logits, labels) in enumerate(zip(*parts, strict=True)):
        loss = functional.cross_entropy(logits, labels)
        for codebook, of_codebook in enumerate(code_logits):
            loss = loss + functional.cross_entropy(
                of_codebook[index],
                codes[index][:, codebook],
                ignore_index=IGNORE_INDEX,
                reduction="sum",  # a mean of nothing would be NaN
            )
        yield loss


def _positions(batch: LMBatch, prompts: Sequence[Prompt], index: int) -> Tensor:
    """[B, L], true on one sample."""
    mine = torch.zeros_like(batch.attention_mask)
    length = len(prompts[index])
    if batch.segment_lengths is None:
        mine[index, :length] = True
    else:
        start = sum(len(prompt) for prompt in prompts[:index])
        mine[0, start : start + length] = True
    return mine
