"""Losses of codec training: mel distance, and the transcript read back from the codes."""

import torch
from torch import Tensor, nn
from torch.nn import functional

BLANK = 0  # CTC's "no symbol"; symbol i of the corpus is class i + 1


class CTCHead(nn.Module):
    """Predicts the transcript's symbols from token features; used in training only.

    Without it the codes describe sound but not which phoneme is spoken, and speech rebuilt from
    them is hard to understand.

    Args:
        hidden_size: width of the features.
        num_symbols: symbols of the corpus.
        steps_per_token: predictions per token; fast speech has more symbols than tokens.
    """

    def __init__(self, hidden_size: int, num_symbols: int, steps_per_token: int) -> None:
        super().__init__()
        self.steps_per_token = steps_per_token
        self.project = nn.Linear(hidden_size, steps_per_token * (num_symbols + 1))

    def forward(self, features: Tensor) -> Tensor:
        """[B, S, D] -> log-probabilities [B, S * steps_per_token, 1 + num_symbols], float32."""
        logits = self.project(features).float()
        return logits.view(
            logits.shape[0], features.shape[1] * self.steps_per_token, -1
        ).log_softmax(-1)


def mel_l1(mel_hat: Tensor, mel: Tensor, frame_mask: Tensor) -> Tensor:
    """Mean |difference| of [B, K, F] in nats over the frames where frame_mask [B, F] is 1."""
    distance = (mel_hat - mel).abs().mean(1)  # [B, K, F] -> [B, F]
    return (distance * frame_mask).sum() / frame_mask.sum()


def transcript_loss(
    log_probs: Tensor, num_steps: Tensor, symbols: Tensor, num_symbols: Tensor
) -> Tensor:
    """CTC loss (Graves et al., 2006) per symbol, averaged over clips.

    A clip whose transcript does not fit into its steps gives 0.

    Args:
        log_probs: [B, steps, classes].
        num_steps: [B], the clip's own steps.
        symbols: [B, longest transcript] classes, padded with BLANK.
        num_symbols: [B], the transcript's own length.
    """
    return functional.ctc_loss(
        log_probs.transpose(0, 1),
        symbols,
        num_steps,
        num_symbols,
        blank=BLANK,
        reduction="mean",
        zero_infinity=True,
    )


def code_entropy_bits(counts: Tensor) -> float:
    """Entropy of the code distribution, in bits; counts [codebook_size]."""
    share = counts.double() / counts.sum().clamp(min=1)
    return float(-(share * torch.log2(share.clamp(min=1e-12))).sum())
