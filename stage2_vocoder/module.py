"""The two training phases of stage 2 as tasks of `tts_stack.training.train`.

Reconstruction teaches the vocoder with spectral losses; the adversarial phase starts from its
weights and adds discriminators on crops. A step is divided into micro-batches, over processes and
one after the other, and does not depend on how.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.optim import Optimizer

from stage2_vocoder.batches import BatchReader, StateNoise, plan_crops, plan_whole
from stage2_vocoder.config import VocoderTrainConfig
from stage2_vocoder.dataset import VocoderBatch, VocoderData
from stage2_vocoder.discriminators import (
    DiscriminatorOutput,
    Discriminators,
    require_crop,
    scores,
    split_outputs,
)
from stage2_vocoder.losses import ADVERSARIAL_LOSSES, ReconstructionLoss, feature_matching
from stage2_vocoder.metrics import Validator, num_samples
from stage2_vocoder.model import Vocoder
from stage2_vocoder.segment import crop_tokens, slice_audio
from stage2_vocoder.step import (
    Tally,
    decode,
    is_quality_due,
    learning_rates,
    make_optimizer,
    margin_tokens,
    num_real_tokens,
    num_silent,
    sizes,
)
from tts_stack.errors import CheckpointError
from tts_stack.training import (
    EMA,
    Share,
    load_optimizer,
    set_learning_rate,
    total_weight,
    update,
)


class ReconstructionTask:
    """Phase 1: whole utterances (or crops), spectral losses."""

    name, monitor = "reconstruction", "mel"

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
        self.step = 0  # steps done
        self.train_data = train_data
        self.reader = make_reader(fabric, config, train_data)
        self.vocoder = vocoder.to(fabric.device)
        self.model = cast(Vocoder, fabric.setup_module(self.vocoder))
        self.loss = ReconstructionLoss(config.losses, vocoder.audio).to(fabric.device)
        optimizer = make_optimizer(self.vocoder, self.phase.optimizer)
        self.optimizer = cast(Optimizer, fabric.setup_optimizers(optimizer))
        self.validator = Validator(validation_data, config.data, self.loss, fabric.device)

    def batches(self, start_step: int, stop_step: int) -> Iterator[list[VocoderBatch]]:
        """Whole utterances, or crops when `crop_seconds` is set, of `batch_seconds` in all."""
        phase, seed, spec = self.phase, self.config.trainer.seed, self.train_data.spec
        counts, start = self.train_data.num_tokens(), start_step * self.reader.share.per_step
        if phase.crop_seconds is None:
            batch_tokens = round(phase.batch_seconds * spec.token_rate)
            plan = plan_whole(counts, batch_tokens=batch_tokens, seed=seed, start=start)
        else:
            plan = plan_crops(
                counts,
                batch_size=max(1, round(phase.batch_seconds / phase.crop_seconds)),
                crop=crop_tokens(phase.crop_seconds, spec),
                margin=margin_tokens(phase.margin_tokens, self.vocoder),
                samples_per_token=spec.samples_per_token,
                seed=seed,
                start=start,
            )
        return self.reader.steps(plan, stop_step - start_step)

    def train_step(self, batch: Sequence[VocoderBatch], step: int) -> dict[str, float]:
        """One update of the vocoder."""
        factor = self.phase.schedule.factor(step, self.max_steps)
        set_learning_rate(self.optimizer, factor)
        total, tally = total_weight(num_real_tokens(batch)), Tally()

        def loss_of(micro: VocoderBatch, weight: float) -> Tensor:
            micro = micro.to(self.fabric.device)
            audio_hat = decode(self.model, micro)
            losses = self.loss(audio_hat, micro.audio, num_samples(micro, self.vocoder.audio))
            tally.add(losses._asdict(), weight)
            tally.add({"silent_items": num_silent(micro)})
            return losses.total * weight

        norm = update(
            self.fabric,
            [
                partial(loss_of, micro, tokens / total)
                for micro, tokens in zip(batch, num_real_tokens(batch), strict=True)
            ],
            self.model,
            self.optimizer,
            self.phase.optimizer.max_grad_norm,
        )
        self.step = step + 1
        rates = learning_rates(learning_rate=self.optimizer)
        return {**tally.totals(), "grad_norm": norm, **rates, **sizes(batch)}

    def validate(self) -> dict[str, float]:
        """Figures on the fixed validation utterances."""
        with_quality = is_quality_due(self.config, self.step, self.max_steps)
        return self.validator.figures(self.vocoder, with_quality=with_quality)

    @contextmanager
    def validated_vocoder(self) -> Iterator[Vocoder]:
        """Inside, the vocoder whose figures `validate` gives."""
        yield self.vocoder

    def state_dict(self) -> dict[str, Any]:
        """Phase, step, vocoder and optimiser; the schedule is a function of the step."""
        return {
            "phase": self.name,
            "step": self.step,
            "vocoder": self.vocoder.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.step = load_step(state, self.name)
        self.vocoder.load_state_dict(state["vocoder"])
        load_optimizer(self.optimizer, state["optimizer"])

    def weights(self) -> dict[str, Tensor]:
        """The vocoder."""
        return self.vocoder.state_dict()


class AdversarialTask:
    """Phase 2: generator and discriminators in turn, on the same random crops."""

    name, monitor = "adversarial", "mel"

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
        self.step = 0  # steps done
        self.train_data = train_data
        self.crop = crop_tokens(self.phase.crop_seconds, train_data.spec)
        require_crop(config.discriminator, self.crop * train_data.spec.samples_per_token)
        self.reader = make_reader(fabric, config, train_data)
        self.vocoder = vocoder.to(fabric.device)
        self.discriminators = Discriminators(config.discriminator).to(fabric.device)
        self.model = cast(Vocoder, fabric.setup_module(self.vocoder))
        self.judge = fabric.setup_module(self.discriminators)
        self.average = EMA(self.vocoder, self.phase.ema_decay, warm_start=False)
        self.loss = ReconstructionLoss(config.losses, vocoder.audio).to(fabric.device)
        self.adversarial = ADVERSARIAL_LOSSES[config.losses.adversarial_kind]
        generator = make_optimizer(self.vocoder, self.phase.generator)
        discriminator = make_optimizer(self.discriminators, self.phase.discriminator)
        self.generator_optimizer = cast(Optimizer, fabric.setup_optimizers(generator))
        self.discriminator_optimizer = cast(Optimizer, fabric.setup_optimizers(discriminator))
        self.validator = Validator(validation_data, config.data, self.loss, fabric.device)

    def batches(self, start_step: int, stop_step: int) -> Iterator[list[VocoderBatch]]:
        """Crops decoded with a margin, or whole utterances and the crop of each to be judged."""
        phase = self.phase
        margin = margin_tokens(phase.margin_tokens, self.vocoder)
        plan = plan_crops(
            self.train_data.num_tokens(),
            batch_size=phase.batch_size,
            crop=self.crop,
            margin=None if phase.decode == "full" else margin,
            samples_per_token=self.train_data.spec.samples_per_token,
            seed=self.config.trainer.seed,
            start=start_step * self.reader.share.per_step,
        )
        return self.reader.steps(plan, stop_step - start_step)

    def train_step(self, batch: Sequence[VocoderBatch], step: int) -> dict[str, float]:
        """Update the discriminators on detached audio, then the generator."""
        is_warmup = step < self.phase.warmup_steps
        self.set_learning_rates(step)
        self.discriminators.refine_norms()
        micros = [micro.to(self.fabric.device) for micro in batch]
        # One micro-batch keeps its graph for the generator's update; of several, which are there
        # to save memory, only the audio is kept.
        keeps_graph = len(micros) == 1 and not is_warmup
        with torch.set_grad_enabled(keeps_graph):
            decoded = [decode(self.model, micro) for micro in micros]
        figures = self.update_discriminators(micros, [audio.detach() for audio in decoded])
        if not is_warmup:
            figures |= self.update_generator(micros, decoded if keeps_graph else None)
        self.step = step + 1
        rates = learning_rates(
            learning_rate=self.generator_optimizer,
            discriminator_learning_rate=self.discriminator_optimizer,
        )
        return {**figures, **rates, **sizes(batch)}

    def crop_of(self, audio: Tensor, micro: VocoderBatch) -> Tensor:
        """What the discriminators judge of a batch's audio: [B, T] -> [B, samples of a crop]."""
        size = self.vocoder.audio.samples_per_token
        return slice_audio(
            audio, micro.crop_starts * size, self.crop * size, micro.crop_tokens * size
        )

    def set_learning_rates(self, step: int) -> None:
        """By each network's own steps: the generator's begin after the warm-up."""
        schedule, warmup = self.phase.schedule, self.phase.warmup_steps
        factor = schedule.factor(max(0, step - warmup), max(1, self.max_steps - warmup))
        set_learning_rate(self.generator_optimizer, factor)
        set_learning_rate(self.discriminator_optimizer, schedule.factor(step, self.max_steps))

    def update_discriminators(
        self, batch: Sequence[VocoderBatch], decoded: Sequence[Tensor]
    ) -> dict[str, float]:
        """Teach the discriminators to tell recordings from generated audio [B, T]."""
        tally, weight = Tally(), 1 / self.reader.share.per_step

        def loss_of(micro: VocoderBatch, audio_hat: Tensor) -> Tensor:
            heard = torch.cat([self.crop_of(micro.audio, micro), self.crop_of(audio_hat, micro)])
            real, fake = split_outputs(self.judge(heard))
            loss = self.adversarial.discriminator(scores(real), scores(fake))
            figures = {"loss": loss, "real": _mean_score(real), "fake": _mean_score(fake)}
            tally.add({f"discriminator/{name}": value for name, value in figures.items()}, weight)
            return loss * weight

        norm = update(
            self.fabric,
            [partial(loss_of, *pair) for pair in zip(batch, decoded, strict=True)],
            self.judge,
            self.discriminator_optimizer,
            self.phase.discriminator.max_grad_norm,
        )
        return {**tally.totals(), "discriminator/grad_norm": norm}

    def update_generator(
        self, batch: Sequence[VocoderBatch], decoded: Sequence[Tensor] | None
    ) -> dict[str, float]:
        """Teach the generator to match the spectra and to pass the discriminators.

        Args:
            batch: micro-batches.
            decoded: their audio with its graph; None decodes them anew.
        """
        tokens, tally = num_real_tokens(batch), Tally()
        total = total_weight(tokens)
        given: Sequence[Tensor | None] = [None] * len(batch) if decoded is None else decoded
        self.discriminators.requires_grad_(False)  # their gradient would be computed in vain
        norm = update(
            self.fabric,
            [
                partial(self._generator_loss, micro, audio_hat, count / total, tally)
                for micro, audio_hat, count in zip(batch, given, tokens, strict=True)
            ],
            self.model,
            self.generator_optimizer,
            self.phase.generator.max_grad_norm,
        )
        self.discriminators.requires_grad_(True)
        if math.isfinite(norm):
            self.average.update(self.vocoder)
        figures = {f"generator/{name}": value for name, value in tally.totals().items()}
        return {**figures, "generator/grad_norm": norm}

    def validate(self) -> dict[str, float]:
        """Figures of the averaged generator on the fixed validation utterances."""
        with_quality = is_quality_due(self.config, self.step, self.max_steps)
        with self.validated_vocoder() as vocoder:
            return self.validator.figures(vocoder, with_quality=with_quality)

    @contextmanager
    def validated_vocoder(self) -> Iterator[Vocoder]:
        """Inside, the generator with its averaged weights."""
        with self.average.applied_to(self.vocoder):
            yield self.vocoder

    def state_dict(self) -> dict[str, Any]:
        """Phase, step, generator, its average, discriminators and both optimisers.

        Both schedules are functions of the step.
        """
        parts = {name: part.state_dict() for name, part in self._parts().items()}
        return {"phase": self.name, "step": self.step, **parts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.step = load_step(state, self.name)
        for name, part in self._parts().items():
            if isinstance(part, Optimizer):
                load_optimizer(part, state[name])
            else:
                part.load_state_dict(state[name])

    def weights(self) -> dict[str, Tensor]:
        """The averaged generator."""
        with self.average.applied_to(self.vocoder):
            return {name: weight.clone() for name, weight in self.vocoder.state_dict().items()}

    def _generator_loss(
        self, micro: VocoderBatch, audio_hat: Tensor | None, weight: float, tally: Tally
    ) -> Tensor:
        """One micro-batch's part of the generator's loss; `weight` is its share of the tokens."""
        weights, share = self.config.losses, 1 / self.reader.share.per_step
        if audio_hat is None:
            audio_hat = decode(self.model, micro)
        # Not through `judge`: these weights learn nothing here, so no process waits for them.
        with self.fabric.autocast():
            fake = self.discriminators(self.crop_of(audio_hat, micro))
            with torch.no_grad():
                real = self.discriminators(self.crop_of(micro.audio, micro))
        adversarial = self.adversarial.generator(scores(fake))
        features = feature_matching(real, fake)
        losses = self.loss(audio_hat, micro.audio, num_samples(micro, self.vocoder.audio))
        tally.add(losses._asdict(), weight)
        tally.add({"adversarial": adversarial, "features": features}, share)
        tally.add({"silent_items": num_silent(micro)})
        judged = weights.adversarial_weight * adversarial + weights.feature_weight * features
        total: Tensor = losses.total * weight + judged * share
        return total

    def _parts(self) -> dict[str, Any]:
        return {
            "vocoder": self.vocoder,
            "average": self.average,
            "discriminators": self.discriminators,
            "generator_optimizer": self.generator_optimizer,
            "discriminator_optimizer": self.discriminator_optimizer,
        }


def make_reader(fabric: Fabric, config: VocoderTrainConfig, data: VocoderData) -> BatchReader:
    """This process's batches of the training split, with noise on the states when configured."""
    return BatchReader(
        data,
        Share.of(fabric, config.trainer.accumulate),
        StateNoise.of(data, config.data.state_noise, config.trainer.seed),
    )


def load_step(state: Mapping[str, Any], phase: str) -> int:
    """Steps done, of a task's checkpoint.

    Raises:
        CheckpointError: it is of another phase.
    """
    found = state.get("phase", phase)
    if found != phase:
        raise CheckpointError(
            f"checkpoint of phase {found}, expected {phase}; give each phase its own folder"
        )
    return int(state.get("step", 0))


def _mean_score(outputs: Sequence[DiscriminatorOutput]) -> Tensor:
    return torch.stack([score.float().mean() for score in scores(outputs)]).mean()
