"""Optimisers of stage 1: Muon on hidden matrices and AdamW on the rest, or AdamW alone."""

import logging
from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from stage1_llm.config import OptimizerConfig
from stage1_llm.network import TextToSemantic

logger = logging.getLogger(__name__)


def build_optimizers(network: TextToSemantic, config: OptimizerConfig) -> list[Optimizer]:
    """One or two optimisers that together hold every trainable weight once.

    Muon (https://kellerjordan.github.io/posts/muon/) orthogonalises the update of a matrix; its
    rate is scaled to AdamW's size of update ("match_rms_adamw", arXiv:2502.16982), so that one
    rate suits both optimisers.
    """
    matrices, others = split_parameters(network)
    logger.info(
        "optimiser %s: weight decay %g on %d matrices (%s parameters), none on %d embeddings, "
        "norms and biases (%s parameters)",
        config.kind,
        config.weight_decay,
        len(matrices),
        _count(matrices),
        len(others),
        _count(others),
    )
    betas = (config.beta1, config.beta2)
    if config.kind == "adamw":
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        return [AdamW(groups, lr=config.lr, betas=betas)]
    return [
        Muon(
            matrices,
            lr=config.matrix_lr,
            weight_decay=config.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        AdamW(others, lr=config.lr, betas=betas, weight_decay=0.0),
    ]


def split_parameters(network: TextToSemantic) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(hidden matrices, embeddings and heads and norms and biases); frozen weights are in neither.

    A head counts with the embeddings: it is the same matrix where they are tied.
    """
    llm = network.llm
    outer = [llm.get_input_embeddings(), llm.get_output_embeddings(), network.codebooks]
    embeddings = {
        id(parameter) for module in outer if module is not None for parameter in module.parameters()
    }
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in network.parameters():  # a tied matrix comes once
        if parameter.requires_grad:
            is_matrix = parameter.ndim == 2 and id(parameter) not in embeddings
            (matrices if is_matrix else others).append(parameter)
    return matrices, others


def _count(parameters: Iterable[Tensor]) -> str:
    return f"{sum(parameter.numel() for parameter in parameters):,}"
