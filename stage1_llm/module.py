"""The LLM's training task: one update, one validation, and the state that resuming needs."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial, reduce
from operator import add
from typing import Any, cast

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.optim import Optimizer

from stage1_llm.attention import set_packed_attention, use_packed_attention
from stage1_llm.batching import Lengths, plan_steps
from stage1_llm.collate import LMBatch, collate_prompts, pack_prompts, replace_tokens
from stage1_llm.config import LLMTrainConfig
from stage1_llm.dataset import Sample, sample_prompt
from stage1_llm.loss import (
    Denominators,
    StepSums,
    base_loss,
    denominators,
    figures,
    step_loss,
    step_sums,
)
from stage1_llm.network import TextToSemantic
from stage1_llm.optimizer import build_optimizers
from stage1_llm.validation import Validator
from stage1_llm.weights import load_network_weights, network_weights
from tts_stack.contract import PromptSpec, TokenMap
from tts_stack.runtime import step_generator
from tts_stack.training import EMA, load_optimizer, set_learning_rate, sharded_like, update

_NOISE_STREAM, _DROPOUT_STREAM = 11, 12
MicroBatches = tuple[LMBatch, ...]  # of one step and one process


class LLMTask:
    """Next-token prediction over prompts; see tts_stack.training.TrainingTask."""

    monitor = "audio"

    def __init__(
        self,
        network: TextToSemantic,
        samples: Sequence[Sample],
        lengths: Lengths,
        validation_samples: Sequence[Sample],
        tokens: TokenMap,
        spec: PromptSpec,
        config: LLMTrainConfig,
        fabric: Fabric,
    ) -> None:
        self.config, self.fabric, self.tokens, self.spec = config, fabric, tokens, spec
        self.samples, self.lengths = samples, lengths
        self.network = network
        prepare_network(network, config, fabric.device)
        self.model = fabric.setup_module(network)
        self.optimizers = [
            cast(Optimizer, fabric.setup_optimizers(optimizer))
            for optimizer in build_optimizers(network, config.optimizer)
        ]
        decay = config.optimizer.ema_decay
        self.average = EMA(network, decay) if decay else None
        self.validator = Validator(
            validation_samples, tokens, spec, max_tokens=config.batching.max_tokens, fabric=fabric
        )

    def batches(self, start_step: int, stop_step: int) -> Iterator[MicroBatches]:
        """Micro-batches of steps start..stop-1 for this process, with their input noise."""
        batching, trainer = self.config.batching, self.config.trainer
        world_size, rank = self.fabric.world_size, self.fabric.global_rank
        plan = plan_steps(
            self.lengths,
            kind=batching.kind,
            max_tokens=batching.max_tokens,
            curriculum=batching.curriculum,
            seed=trainer.seed,
            num_micro=trainer.accumulate * world_size,
            start_step=start_step,
        )
        for step, micro in zip(range(start_step, stop_step), plan, strict=False):
            yield tuple(
                self._batch(indices, step, place)
                for place, indices in enumerate(micro)
                if place % world_size == rank
            )

    def train_step(self, batch: MicroBatches, step: int) -> Mapping[str, float | Tensor]:
        """One update; a non-finite gradient changes nothing and is counted by the loop."""
        factor = self.config.schedule.factor(step, self.config.trainer.max_steps)
        for optimizer in self.optimizers:
            set_learning_rate(optimizer, factor)
        self._seed_dropout(step)
        weights = torch.tensor(self.config.loss.weights(step), device=self.fabric.device)
        totals = self._totals(batch, weights)
        done: list[StepSums] = []
        norm = update(
            self.fabric,
            [partial(self._micro_loss, micro, weights, totals, done) for micro in batch],
            self.model,
            self.optimizers,
            self.config.optimizer.max_grad_norm,
        )
        if self.average and math.isfinite(norm):
            self.average.update(self.network)
        sums = cast(StepSums, self.fabric.all_reduce(reduce(add, done), reduce_op="sum"))
        loss = step_loss(sums, weights, self.config.loss.codebook_weight, totals)
        base = base_loss(sums, weights, totals)
        codes = {"base": float(base), "semantic": float(loss - base)} if totals.codes else {}
        return {
            "loss": float(loss),
            **codes,
            "grad_norm": norm,
            "learning_rate": self.optimizers[-1].param_groups[0]["lr"],
            **figures(sums),
            **({} if totals.weight else {"empty_batches": 1.0}),
            **_sizes(batch),
        }

    def validate(self) -> Mapping[str, float]:
        """Figures on the validation split, of the averaged weights where there are any."""
        if self.average is None:
            return self.validator.figures(self.model)
        with self.average.applied_to(self.network):
            return self.validator.figures(self.model)

    def state_dict(self) -> dict[str, Any]:
        """Trained weights, optimiser states, averaged weights."""
        state = {
            "network": network_weights(self.network),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        return state | ({"average": self.average.state_dict()} if self.average else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        mine = network_weights(self.network)
        load_network_weights(self.network, sharded_like(state["network"], mine))
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            load_optimizer(optimizer, saved)
        if self.average:
            average = sharded_like(state["average"], self.average.state_dict())
            self.average.load_state_dict(average)

    def weights(self) -> dict[str, Tensor]:
        """What was trained: the whole network, or adapters and new rows alone."""
        if self.average is None:
            return network_weights(self.network)
        with self.average.applied_to(self.network):
            return {name: value.clone() for name, value in network_weights(self.network).items()}

    def _batch(self, indices: Sequence[int], step: int, place: int) -> LMBatch:
        prompts = [sample_prompt(self.samples[i], self.tokens, self.spec) for i in indices]
        batch = (
            pack_prompts(prompts)
            if self.config.batching.kind == "packing"
            else collate_prompts(prompts, pad_id=self.tokens.pad)
        )
        # Of the place in the step, so that it does not matter which process has it.
        generator = step_generator(self.config.trainer.seed, step, _NOISE_STREAM + 1000 * place)
        share = self.config.token_noise
        batch = replace_tokens(batch, self.tokens, share=share, generator=generator)
        return batch.to(self.fabric.device)

    def _totals(self, batch: MicroBatches, weights: Tensor) -> Denominators:
        """Of the whole step, so that the loss does not depend on how it was divided."""
        parts = [denominators(micro.groups, micro.codes, weights) for micro in batch]
        mine = torch.stack([torch.stack(list(part)) for part in parts]).sum(0)
        return Denominators(*self.fabric.all_reduce(mine, reduce_op="sum"))

    def _micro_loss(
        self, micro: LMBatch, weights: Tensor, totals: Denominators, done: list[StepSums]
    ) -> Tensor:
        sums = step_sums(*self.model(micro, weights))
        done.append(StepSums(*(value.detach() for value in sums)))
        return step_loss(sums, weights, self.config.loss.codebook_weight, totals)

    def _seed_dropout(self, step: int) -> None:
        stream = _DROPOUT_STREAM + 1000 * self.fabric.global_rank
        generator = step_generator(self.config.trainer.seed, step, stream)
        torch.manual_seed(generator.initial_seed())


def prepare_network(network: TextToSemantic, config: LLMTrainConfig, device: torch.device) -> None:
    """Put the network in training form: attention kernel, checkpointing, compilation."""
    llm = network.llm
    network.to(device).train()
    if config.batching.kind == "packing":
        use_packed_attention(llm)
    elif device.type == "cpu":
        set_packed_attention(llm)  # trains a quarter faster there, or more, than torch's own
    if config.trainer.gradient_checkpointing:
        # transformers 5 has had two names for it.
        is_new = hasattr(llm, "activation_checkpointing_enable")
        name = "activation_checkpointing_enable" if is_new else "gradient_checkpointing_enable"
        getattr(llm, name)({"use_reentrant": False})
        llm.enable_input_require_grads()
    if config.trainer.compile:
        llm.get_decoder().compile()


def _sizes(batch: MicroBatches) -> dict[str, float]:
    return {
        "num_tokens": float(sum(micro.num_tokens for micro in batch)),
        "num_positions": float(sum(micro.input_ids.numel() for micro in batch)),
    }
