"""The network that stage 1 trains: an LLM, and codebook heads where there are several codebooks."""

from pathlib import Path
from typing import NamedTuple, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from stage1_llm.codebooks import Codebooks
from stage1_llm.collate import LMBatch
from stage1_llm.loss import supervised_positions
from stage1_llm.model import embedded_states, head
from tts_stack.contract import CODEBOOKS_FILE
from tts_stack.errors import CheckpointError


class Predictions(NamedTuple):
    """What the network says at the N positions that predict something, and what is true there."""

    logits: Tensor  # [N, V]
    labels: Tensor  # [N]
    groups: Tensor  # [N]
    code_logits: tuple[Tensor, ...]  # of each other codebook, [N, size]
    codes: Tensor  # [N, C], IGNORE_INDEX where the label is no semantic token


class TextToSemantic(nn.Module):
    """LLM and codebook heads; forward is the one step that training and validation share.

    Args:
        llm: a causal LM whose vocabulary holds the voice's tokens.
        codebooks: None for a single codebook.
        dropout: on the input embeddings, in training.
    """

    def __init__(
        self, llm: PreTrainedModel, codebooks: Codebooks | None = None, *, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.llm, self.codebooks, self.dropout = llm, codebooks, dropout

    def forward(self, batch: LMBatch, group_weights: Tensor) -> Predictions:
        """Predict every label whose group has a weight.

        Args:
            batch: B rows, or one packed row.
            group_weights: [3]; a group of weight 0 costs nothing.
        """
        labelled = supervised_positions(batch.labels, batch.groups, group_weights)
        embeddings = self.embed(batch.input_ids, batch.codes)
        embeddings = functional.dropout(embeddings, self.dropout, self.training)
        states = embedded_states(
            self.llm, embeddings, batch.position_ids, segment_lengths=batch.segment_lengths
        )
        states = states.flatten(0, 1)[labelled.positions]  # [B, L, D] -> [N, D]
        codes = batch.codes.flatten(0, 1)[labelled.positions + 1]  # [N, C]
        code_logits: tuple[Tensor, ...] = ()
        if self.codebooks is not None:
            token_embeddings = self.llm.get_input_embeddings()(labelled.labels)
            code_logits = tuple(self.codebooks(states, token_embeddings, codes))
        logits = head(self.llm)(states)
        return Predictions(logits, labelled.labels, labelled.groups, code_logits, codes)

    def embed(self, input_ids: Tensor, codes: Tensor) -> Tensor:
        """[B, L] tokens and [B, L, C] codes -> [B, L, D]."""
        embeddings: Tensor = self.llm.get_input_embeddings()(input_ids)
        return embeddings if self.codebooks is None else embeddings + self.codebooks.embed(codes)

    def hidden_states(self, batch: LMBatch, *, layer: int, num_mixed: int = 1) -> Tensor:
        """States [B, L, D] of one layer, or [B, L, num_mixed * D] of it and those below it."""
        embeddings = self.embed(batch.input_ids, batch.codes)
        return embedded_states(
            self.llm, embeddings, batch.position_ids, layer=layer, num_mixed=num_mixed
        )

    @property
    def device(self) -> torch.device:
        """Where the network runs."""
        return cast(torch.device, self.llm.device)


def build_network(
    llm: PreTrainedModel, codebook_sizes: tuple[int, ...], *, dropout: float = 0.0, seed: int = 0
) -> TextToSemantic:
    """Put untrained codebook heads beside an LLM, where the voice has any."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        hidden_size = llm.config.hidden_size
        codebooks = Codebooks(codebook_sizes, hidden_size) if codebook_sizes else None
    return TextToSemantic(llm, codebooks, dropout=dropout)


def load_codebooks(folder: Path, sizes: tuple[int, ...], hidden_size: int) -> Codebooks | None:
    """The codebook heads of an LLM folder; None for a voice with one codebook.

    Raises:
        CheckpointError: they are missing or damaged.
    """
    if not sizes:
        return None
    codebooks = Codebooks(sizes, hidden_size)
    path = folder / CODEBOOKS_FILE
    try:
        codebooks.load_state_dict(load_file(path))
    except Exception as error:  # noqa: BLE001 - safetensors raises its own untyped errors
        raise CheckpointError(
            f"{path}: no readable heads of {len(sizes)} codebooks ({error}); copy the whole folder"
        ) from error
    return codebooks.eval()
