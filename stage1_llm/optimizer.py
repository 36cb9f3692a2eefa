"""Optimisers of stage 1: Muon on hidden matrices and AdamW on the rest, or AdamW alone."""

from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from transformers import PreTrainedModel

from stage1_llm.config import OptimizerConfig


def build_optimizers(model: PreTrainedModel, config: OptimizerConfig) -> list[Optimizer]:
    """One or two optimisers that together hold every trainable weight once.

    Muon (https://kellerjordan.github.io/posts/muon/) orthogonalises the update of a matrix; its
    rate is scaled to AdamW's size of update ("match_rms_adamw", arXiv:2502.16982), so that one
    rate suits both optimisers.
    """
    matrices, others = split_parameters(model)
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


def split_parameters(model: PreTrainedModel) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(hidden matrices, embeddings and norms and biases); frozen weights are in neither."""
    embeddings = {
        id(parameter)
        for module in (model.get_input_embeddings(), model.get_output_embeddings())
        if module is not None
        for parameter in module.parameters()
    }
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in model.parameters():  # a tied matrix comes once
        if parameter.requires_grad:
            is_matrix = parameter.ndim == 2 and id(parameter) not in embeddings
            (matrices if is_matrix else others).append(parameter)
    return matrices, others


def parameters_of(optimizers: list[Optimizer]) -> list[Tensor]:
    """Every weight the optimisers update."""
    return [
        parameter
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
