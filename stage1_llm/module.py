"""The LLM's training task: one update, one validation, and the state that resuming needs."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from stage1_llm.batching import iterate_batches
from stage1_llm.collate import LMBatch, collate_prompts, replace_tokens
from stage1_llm.config import LLMTrainConfig
from stage1_llm.dataset import Sample, sample_prompt
from stage1_llm.loss import group_means, group_sums, supervised_positions, weighted_loss
from stage1_llm.model import embedded_states, head, load_saved_weights, saved_weights
from stage1_llm.optimizer import build_optimizers, parameters_of
from stage1_llm.validation import Validator
from tts_stack.contract import PromptSpec, TokenMap
from tts_stack.runtime import step_generator
from tts_stack.training import set_learning_rate

_NOISE_STREAM, _DROPOUT_STREAM = 11, 12


class LLMTask:
    """Next-token prediction over prompts; see tts_stack.training.TrainingTask."""

    monitor = "audio"

    def __init__(
        self,
        model: PreTrainedModel,
        samples: Sequence[Sample],
        validation_samples: Sequence[Sample],
        tokens: TokenMap,
        spec: PromptSpec,
        config: LLMTrainConfig,
        fabric: Fabric,
    ) -> None:
        self.config, self.fabric, self.tokens = config, fabric, tokens
        self.model = model.to(fabric.device).train()
        choose_attention(self.model, fabric.device)
        self.optimizers = build_optimizers(self.model, config.optimizer)
        self.prompts = [sample_prompt(sample, tokens, spec) for sample in samples]
        self.validator = Validator(
            validation_samples,
            tokens,
            spec,
            max_tokens=config.batching.max_tokens,
            device=fabric.device,
        )
        weights = [config.loss.text_weight, config.loss.audio_weight, config.loss.end_weight]
        self.group_weights = torch.tensor(weights, device=fabric.device)

    def batches(self, start_step: int, stop_step: int) -> Iterator[LMBatch]:
        """Batches of steps start..stop-1, with their input noise."""
        lengths = [len(prompt) for prompt in self.prompts]
        seed = self.config.trainer.seed
        plan = iterate_batches(
            lengths,
            max_tokens=self.config.batching.max_tokens,
            seed=seed,
            start_step=start_step,
        )
        for step, indices in zip(range(start_step, stop_step), plan, strict=False):
            batch = collate_prompts([self.prompts[i] for i in indices], pad_id=self.tokens.pad)
            generator = step_generator(seed, step, _NOISE_STREAM)
            share = self.config.token_noise
            yield replace_tokens(batch, self.tokens, share=share, generator=generator)

    def train_step(self, batch: LMBatch, step: int) -> Mapping[str, float | Tensor]:
        """One update; a non-finite gradient changes nothing and is counted by the loop."""
        factor = self.config.schedule.factor(step, self.config.trainer.max_steps)
        for optimizer in self.optimizers:
            set_learning_rate(optimizer, factor)
        self._seed_dropout(step)
        loss, figures = self.loss(batch.to(self.fabric.device))
        norm = self._update(loss)
        return {"loss": float(loss.detach()), "grad_norm": norm, **figures}

    def loss(self, batch: LMBatch) -> tuple[Tensor, dict[str, float]]:
        """Weighted loss and figures per group of one batch."""
        labelled = supervised_positions(batch.labels, batch.groups, self.group_weights)
        with self.fabric.autocast():
            embeddings = self.model.get_input_embeddings()(batch.input_ids)  # [B, L, D]
            if self.config.llm.dropout:
                embeddings = functional.dropout(embeddings, self.config.llm.dropout)
            states = embedded_states(self.model, embeddings, batch.position_ids)
            logits = head(self.model)(states.flatten(0, 1)[labelled.positions])  # [N, V]
        sums = group_sums(logits, labelled.labels, labelled.groups)
        return weighted_loss(sums, self.group_weights), group_means(sums.losses, sums.counts)

    def validate(self) -> Mapping[str, float]:
        """Figures on the validation split."""
        with self.fabric.autocast():
            return self.validator.figures(self.model)

    def state_dict(self) -> dict[str, Any]:
        """Weights and optimiser states."""
        return {
            "model": saved_weights(self.model),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        load_saved_weights(self.model, state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    def weights(self) -> dict[str, Tensor]:
        """The model alone."""
        return saved_weights(self.model)

    def _update(self, loss: Tensor) -> float:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        self.fabric.backward(loss)
        parameters = parameters_of(self.optimizers)
        max_norm = self.config.optimizer.max_grad_norm
        norm = float(nn.utils.clip_grad_norm_(parameters, max_norm))
        if math.isfinite(norm):
            for optimizer in self.optimizers:
                optimizer.step()
        return norm

    def _seed_dropout(self, step: int) -> None:
        if self.config.llm.dropout:
            generator = step_generator(self.config.trainer.seed, step, _DROPOUT_STREAM)
            torch.manual_seed(generator.initial_seed())


def choose_attention(model: PreTrainedModel, device: torch.device) -> None:
    """On a CPU plain matrix products train a fifth faster than torch's fused attention."""
    if device.type == "cpu":
        model.set_attn_implementation("eager")
