"""The two training phases of stage 2 as tasks of `tts_stack.training.train`.

Reconstruction teaches the vocoder with spectral losses; the adversarial phase starts from its
weights and adds discriminators on crops.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.optim import AdamW

from stage2_vocoder.config import OptimizerConfig, VocoderTrainConfig
from stage2_vocoder.dataset import VocoderBatch, VocoderData, crop_batches, whole_batches
from stage2_vocoder.discriminators import Discriminators, scores, split_outputs
from stage2_vocoder.losses import (
    ADVERSARIAL_LOSSES,
    ReconstructionLoss,
    ReconstructionLosses,
    feature_matching,
)
from stage2_vocoder.metrics import num_samples, validate_vocoder, validation_rows
from stage2_vocoder.model import Vocoder
from stage2_vocoder.segment import crop_tokens, slice_audio
from tts_stack.training import EMA, set_learning_rate, update


class ReconstructionTask:
    """Phase 1: whole utterances (or crops), spectral losses."""

    monitor = "mel"

    def __init__(
        self,
        fabric: Fabric,
        vocoder: Vocoder,
        config: VocoderTrainConfig,
        train_data: VocoderData,
        validation_data: VocoderData,
    ) -> None:
        self.fabric, self.config = fabric, config
        self.phase = config.reconstruction
        self.max_steps = self.phase.max_steps or config.trainer.max_steps
        self.train_data = train_data
        self.vocoder = vocoder.to(fabric.device)
        self.loss = ReconstructionLoss(config.losses, vocoder.audio).to(fabric.device)
        self.optimizer = make_optimizer(self.vocoder, self.phase.optimizer)
        self.validation = validation_batches(validation_data, config)

    def batches(self, start_step: int, stop_step: int) -> Iterator[VocoderBatch]:
        """Whole utterances, or crops when `crop_seconds` is set, of `batch_seconds` in all."""
        phase, seed, spec = self.phase, self.config.trainer.seed, self.train_data.spec
        if phase.crop_seconds is None:
            return whole_batches(
                self.train_data,
                batch_tokens=round(phase.batch_seconds * spec.token_rate),
                seed=seed,
                start_step=start_step,
                stop_step=stop_step,
            )
        return crop_batches(
            self.train_data,
            batch_size=max(1, round(phase.batch_seconds / phase.crop_seconds)),
            crop=crop_tokens(phase.crop_seconds, spec),
            margin=margin_tokens(phase.margin_tokens, self.vocoder),
            seed=seed,
            start_step=start_step,
            stop_step=stop_step,
        )

    def train_step(self, batch: VocoderBatch, step: int) -> dict[str, float | Tensor]:
        """One update of the vocoder."""
        factor = self.phase.schedule.factor(step, self.max_steps)
        set_learning_rate(self.optimizer, factor)
        batch = batch.to(self.fabric.device)
        with self.fabric.autocast():
            audio_hat = decode(self.vocoder, batch)
        losses = self.loss(audio_hat, batch.audio, num_samples(batch, self.vocoder.audio))
        max_norm = self.phase.optimizer.max_grad_norm
        norm = update(self.fabric, losses.total, self.vocoder, self.optimizer, max_norm)
        return {**_figures(losses), "grad_norm": norm, **_rates(factor, self.optimizer)}

    def validate(self) -> dict[str, float]:
        """Spectral figures on the fixed validation utterances."""
        return validate_vocoder(self.vocoder, self.validation, self.loss, self.fabric.device)

    def state_dict(self) -> dict[str, Any]:
        """Vocoder and optimiser."""
        return {"vocoder": self.vocoder.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.vocoder.load_state_dict(state["vocoder"])
        self.optimizer.load_state_dict(state["optimizer"])

    def weights(self) -> dict[str, Tensor]:
        """The vocoder."""
        return self.vocoder.state_dict()


class AdversarialTask:
    """Phase 2: generator and discriminators in turn, on the same random crops."""

    monitor = "mel"

    def __init__(
        self,
        fabric: Fabric,
        vocoder: Vocoder,
        config: VocoderTrainConfig,
        train_data: VocoderData,
        validation_data: VocoderData,
    ) -> None:
        self.fabric, self.config = fabric, config
        self.phase = config.adversarial
        self.max_steps = self.phase.max_steps or config.trainer.max_steps
        self.train_data = train_data
        self.vocoder = vocoder.to(fabric.device)
        self.average = EMA(self.vocoder, self.phase.ema_decay, warm_start=False)
        self.discriminators = Discriminators(config.discriminator).to(fabric.device)
        self.loss = ReconstructionLoss(config.losses, vocoder.audio).to(fabric.device)
        self.adversarial = ADVERSARIAL_LOSSES[config.losses.adversarial_kind]
        self.generator_optimizer = make_optimizer(self.vocoder, self.phase.generator)
        self.discriminator_optimizer = make_optimizer(self.discriminators, self.phase.discriminator)
        self.validation = validation_batches(validation_data, config)

    def batches(self, start_step: int, stop_step: int) -> Iterator[VocoderBatch]:
        """Crops, decoded with a margin or inside their whole utterance."""
        phase = self.phase
        margin = margin_tokens(phase.margin_tokens, self.vocoder)
        return crop_batches(
            self.train_data,
            batch_size=phase.batch_size,
            crop=crop_tokens(phase.crop_seconds, self.train_data.spec),
            margin=None if phase.decode == "full" else margin,
            seed=self.config.trainer.seed,
            start_step=start_step,
            stop_step=stop_step,
        )

    def train_step(self, batch: VocoderBatch, step: int) -> dict[str, float | Tensor]:
        """Update the discriminators on detached audio, then the generator."""
        factor = self.phase.schedule.factor(step, self.max_steps)
        set_learning_rate(self.generator_optimizer, factor)
        set_learning_rate(self.discriminator_optimizer, factor)
        batch = batch.to(self.fabric.device)
        is_warmup = step < self.phase.warmup_steps
        with torch.set_grad_enabled(not is_warmup), self.fabric.autocast():
            audio_hat = decode(self.vocoder, batch)
        figures = self.update_discriminators(batch, audio_hat.detach())
        if not is_warmup:
            figures |= self.update_generator(batch, audio_hat)
        return {**figures, **_rates(factor, self.generator_optimizer)}

    def update_discriminators(
        self, batch: VocoderBatch, audio_hat: Tensor
    ) -> dict[str, float | Tensor]:
        """Teach the discriminators to tell recordings from generated audio."""
        with self.fabric.autocast():
            both = self.discriminators(torch.cat([batch.audio, audio_hat]))
        real, fake = split_outputs(both)
        loss = self.adversarial.discriminator(scores(real), scores(fake))
        max_norm = self.phase.discriminator.max_grad_norm
        norm = update(
            self.fabric, loss, self.discriminators, self.discriminator_optimizer, max_norm
        )
        return {"discriminator/loss": loss.detach(), "discriminator/grad_norm": norm}

    def update_generator(self, batch: VocoderBatch, audio_hat: Tensor) -> dict[str, float | Tensor]:
        """Teach the generator to match the spectra and to pass the discriminators."""
        weights = self.config.losses
        self.discriminators.requires_grad_(False)  # their gradient would be computed in vain
        with self.fabric.autocast():
            fake = self.discriminators(audio_hat)
            with torch.no_grad():
                real = self.discriminators(batch.audio)
        adversarial = self.adversarial.generator(scores(fake))
        features = feature_matching(real, fake)
        losses = self.loss(audio_hat, batch.audio, num_samples(batch, self.vocoder.audio))
        total = (
            losses.total
            + weights.adversarial_weight * adversarial
            + weights.feature_weight * features
        )
        max_norm = self.phase.generator.max_grad_norm
        norm = update(self.fabric, total, self.vocoder, self.generator_optimizer, max_norm)
        self.discriminators.requires_grad_(True)
        if math.isfinite(norm):
            self.average.update(self.vocoder)
        return {
            **{f"generator/{name}": value for name, value in _figures(losses).items()},
            "generator/adversarial": adversarial.detach(),
            "generator/features": features.detach(),
            "generator/grad_norm": norm,
        }

    def validate(self) -> dict[str, float]:
        """Spectral figures of the averaged generator on the fixed validation utterances."""
        with self.average.applied_to(self.vocoder):
            return validate_vocoder(self.vocoder, self.validation, self.loss, self.fabric.device)

    def state_dict(self) -> dict[str, Any]:
        """Generator, its average, discriminators and both optimisers."""
        return {name: part.state_dict() for name, part in self._parts().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        for name, part in self._parts().items():
            part.load_state_dict(state[name])

    def weights(self) -> dict[str, Tensor]:
        """The averaged generator."""
        with self.average.applied_to(self.vocoder):
            return {name: weight.clone() for name, weight in self.vocoder.state_dict().items()}

    def _parts(self) -> dict[str, Any]:
        return {
            "vocoder": self.vocoder,
            "average": self.average,
            "discriminators": self.discriminators,
            "generator_optimizer": self.generator_optimizer,
            "discriminator_optimizer": self.discriminator_optimizer,
        }


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
    )


def margin_tokens(configured: int | None, vocoder: Vocoder) -> int:
    """The configured margin; without one, the margin that makes a crop's audio exact."""
    return vocoder.receptive_field_tokens() if configured is None else configured


def validation_batches(data: VocoderData, config: VocoderTrainConfig) -> list[VocoderBatch]:
    """The fixed validation utterances, one a batch."""
    rows = validation_rows(data, config.data.num_validation, config.data.validation_seconds)
    return [data.whole([row]) for row in rows]


def _figures(losses: ReconstructionLosses) -> dict[str, float | Tensor]:
    return {name: value.detach() for name, value in losses._asdict().items()}


def _rates(factor: float, optimizer: AdamW) -> dict[str, float]:
    return {"learning_rate_factor": factor, "learning_rate": optimizer.param_groups[0]["lr"]}
