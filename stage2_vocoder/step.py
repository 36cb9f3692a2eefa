"""Parts of a training step that both phases share."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from stage2_vocoder.config import OptimizerConfig, VocoderTrainConfig
from stage2_vocoder.dataset import VocoderBatch
from stage2_vocoder.losses import is_silent
from stage2_vocoder.model import Vocoder
from stage2_vocoder.segment import slice_audio
from tts_stack.training import sum_over_processes


class Tally:
    """Figures of a step, added up over its micro-batches and processes."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, figures: Mapping[str, Tensor], weight: float = 1.0) -> None:
        """Add one micro-batch's figures; its weight is its share of the whole step."""
        for name, value in figures.items():
            # In float64 the sum does not depend on who adds it up.
            part = value.detach().double() * weight
            self._sums[name] = self._sums[name] + part if name in self._sums else part

    def totals(self) -> dict[str, float]:
        """Sums over all processes; every process must call it."""
        values = torch.stack(list(self._sums.values())).tolist()
        return dict(zip(self._sums, sum_over_processes(values), strict=True))


def decode(vocoder: Vocoder, batch: VocoderBatch) -> Tensor:
    """Generated audio [B, T] for a batch's audio: the window decoded and the margin cut off."""
    audio_hat: Tensor = vocoder(batch.hidden_states, batch.lengths)
    size = vocoder.audio.samples_per_token
    return slice_audio(
        audio_hat, batch.starts * size, batch.audio.shape[1], batch.num_tokens * size
    )


def make_optimizer(module: nn.Module, config: OptimizerConfig) -> AdamW:
    """AdamW over all parameters of a module."""
    beta_1, beta_2 = config.betas
    return AdamW(
        module.parameters(),
        lr=config.learning_rate,
        betas=(beta_1, beta_2),
        weight_decay=config.weight_decay,
        fused=True,
    )


def margin_tokens(configured: int | None, vocoder: Vocoder) -> int:
    """The configured margin; without one, the margin that makes a crop's audio exact."""
    return vocoder.receptive_field_tokens() if configured is None else configured


def is_quality_due(config: VocoderTrainConfig, step: int, max_steps: int) -> bool:
    """Whether the validation after `step` steps measures quality too: the first, the last, ..."""
    every = config.data.quality_every
    if not every:
        return False
    return step == max_steps or step // config.trainer.validate_every % every == 0


def learning_rates(**optimizers: Optimizer) -> dict[str, float]:
    """The rate of each optimiser, by name."""
    return {name: optimizer.param_groups[0]["lr"] for name, optimizer in optimizers.items()}


def sizes(batch: Sequence[VocoderBatch]) -> dict[str, float]:
    """Tokens this process computed, for the loop's speed figures."""
    return {
        "num_tokens": float(sum(num_real_tokens(batch))),
        "num_positions": float(
            sum(micro.lengths.numel() * micro.hidden_states.shape[-1] for micro in batch)
        ),
    }


def num_real_tokens(batch: Iterable[VocoderBatch]) -> list[int]:
    """Tokens of each micro-batch's audio, padding excluded."""
    return [int(micro.num_tokens.sum()) for micro in batch]


def num_silent(micro: VocoderBatch) -> Tensor:
    """How many items are silent: []."""
    return is_silent(micro.audio).sum()
