"""Several codebooks: the token stream says the semantic token, heads here say the rest.

As in Fish Speech's text-to-semantic model, the codes of a token are summed into its input embedding
and are predicted where the token is predicted. Unlike there, each code also sees the semantic token
and the codes before it, through their embeddings.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from stage1_llm.stream import IGNORE_INDEX

INIT_STD = 0.02


class Codebooks(nn.Module):
    """Embedding and head of each codebook beside the token stream.

    Args:
        sizes: codes of each, C of them.
        hidden_size: D of the LLM.
    """

    def __init__(self, sizes: Sequence[int], hidden_size: int) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(size, hidden_size) for size in sizes)
        self.heads = nn.ModuleList(nn.Linear(hidden_size, size, bias=False) for size in sizes)
        for embedding in self.embeddings.parameters():
            nn.init.zeros_(embedding)  # the first step reads what the LLM alone would read
        for head in self.heads.parameters():
            nn.init.normal_(head, std=INIT_STD)

    def embed(self, codes: Tensor) -> Tensor:
        """Sum of the embeddings of each position's codes: [..., C] -> [..., D].

        A code of IGNORE_INDEX adds nothing.
        """
        return torch.stack(
            [self._embed_one(index, codes[..., index]) for index in range(len(self.embeddings))]
        ).sum(0)

    def forward(self, states: Tensor, token_embeddings: Tensor, codes: Tensor) -> list[Tensor]:
        """Logits of each codebook.

        Args:
            states: [N, D] after the final norm, where the semantic token is predicted.
            token_embeddings: [N, D] of the semantic tokens.
            codes: [N, C] true codes; codebook c sees those before c.

        Returns:
            C tensors [N, size].
        """
        known = states + token_embeddings
        logits = []
        for index, head in enumerate(self.heads):
            logits.append(head(known))
            known = known + self._embed_one(index, codes[:, index])
        return logits

    def choose(
        self, state: Tensor, token_embedding: Tensor, pick: Callable[[Tensor], int]
    ) -> list[int]:
        """Codes of one token, one after the other.

        Args:
            state: [D].
            token_embedding: [D].
            pick: logits [size] -> code.
        """
        known = state + token_embedding
        codes = []
        for index, head in enumerate(self.heads):
            codes.append(pick(head(known)))
            chosen = torch.tensor([codes[-1]], device=known.device)
            known = known + self._embed_one(index, chosen)[0]
        return codes

    def _embed_one(self, index: int, codes: Tensor) -> Tensor:
        is_code = codes != IGNORE_INDEX
        embedded = self.embeddings[index](codes.clamp(min=0))
        return embedded * is_code.unsqueeze(-1)
