"""Validation of stage 1: losses and accuracies per group, stop figures, and the text-swap probe."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from stage1_llm.batching import Lengths, plan_epoch
from stage1_llm.collate import LMBatch, collate_prompts
from stage1_llm.dataset import Sample, sample_prompt
from stage1_llm.loss import StepSums, figures, step_sums
from stage1_llm.network import Predictions
from stage1_llm.prompt import GROUP_AUDIO, GROUP_END, GROUP_NAMES, build_prompt
from stage1_llm.store import SampleStore
from tts_stack.contract import PromptSpec, TokenMap

NUM_SWAPPED = 32  # samples of the text-swap probe


class StopSums(NamedTuple):
    """How well the end of audio is foreseen; sums over samples."""

    samples: Tensor  # []
    first_audio_hits: Tensor  # [] first audio tokens that had the highest logit
    true_stops: Tensor  # [] the end had the highest logit where it belongs
    false_stops: Tensor  # [] ... and where it does not
    length_error: Tensor  # [] |expected length - length| / length

    def __add__(self, other: "StopSums") -> "StopSums":  # type: ignore[override]
        """Sums over both."""
        return StopSums(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class Validator:
    """A fixed set of batches, divided among the processes, and a network's figures on it."""

    def __init__(
        self,
        samples: Sequence[Sample],
        tokens: TokenMap,
        spec: PromptSpec,
        *,
        max_tokens: int,
        fabric: Fabric,
    ) -> None:
        self.samples, self.tokens, self.spec, self.fabric = samples, tokens, spec, fabric
        lengths: Lengths = (
            samples.lengths  # known without reading the samples
            if isinstance(samples, SampleStore)
            else [sample.length for sample in samples]
        )
        self.plan = plan_epoch(lengths, max_tokens=max_tokens, seed=0, epoch=0).batches
        self.probe = _probe_pair(samples[:NUM_SWAPPED], tokens, spec)

    @torch.no_grad()
    def figures(self, model: nn.Module) -> dict[str, float]:
        """Loss and accuracies of each group, stop figures, audio loss with other texts.

        `audio_swapped_text` far above `audio_own_text` (the same samples) shows that the model
        listens to the text; near it, that it only continues audio.
        """
        was_training = model.training
        model.eval()
        every = torch.ones(len(GROUP_NAMES), device=self.fabric.device)
        sums, stops = self._sums(model, every)
        found = figures(sums) | _stop_figures(stops)
        if self.probe:
            own, swapped = (self._audio_loss(model, batch, every) for batch in self.probe)
            found.update(audio_own_text=own, audio_swapped_text=swapped)
        model.train(was_training)
        return found

    def _sums(self, model: nn.Module, every: Tensor) -> tuple[StepSums, StopSums]:
        """Over all batches and processes. A process without a batch of its own adds zeros."""
        size, rank = self.fabric.world_size, self.fabric.global_rank
        # Tensors of their own: a sum over processes is written in place.
        zeros = torch.zeros(8, device=self.fabric.device).unbind()
        sums = StepSums(*(torch.zeros_like(every) for _ in range(4)), *zeros[:3])
        stops = StopSums(*zeros[3:])
        # Every process runs equally often: sharded weights are gathered by all of them at once.
        for start in range(0, len(self.plan), size):
            place = start + rank
            predictions = model(self._batch(self.plan[min(place, len(self.plan) - 1)]), every)
            if place < len(self.plan):
                sums = sums + step_sums(*predictions)
                stops = stops + stop_sums(predictions, self.tokens.audio_end)
        return (
            StepSums(*self.fabric.all_reduce(sums, reduce_op="sum")),
            StopSums(*self.fabric.all_reduce(stops, reduce_op="sum")),
        )

    def _batch(self, indices: Sequence[int]) -> LMBatch:
        prompts = [sample_prompt(self.samples[i], self.tokens, self.spec) for i in indices]
        return collate_prompts(prompts, pad_id=self.tokens.pad).to(self.fabric.device)

    def _audio_loss(self, model: nn.Module, batch: LMBatch, every: Tensor) -> float:
        return figures(step_sums(*model(batch.to(self.fabric.device), every)))["audio"]


def stop_sums(predictions: Predictions, audio_end: int) -> StopSums:
    """Stop figures of one batch; its labels stand in reading order, sample after sample."""
    logits, labels, groups = predictions.logits, predictions.labels, predictions.groups
    is_heard = groups >= GROUP_AUDIO  # audio and its end
    best, labels, groups = logits[is_heard].argmax(-1), labels[is_heard], groups[is_heard]
    is_end = groups == GROUP_END
    is_first = torch.cat([is_end.new_ones(1), is_end[:-1]]) & (groups == GROUP_AUDIO)
    is_stop = best == audio_end
    stop_probability = logits[is_heard].float().softmax(-1)[:, audio_end]
    errors = [
        length_error(part)
        for part in stop_probability.tensor_split(is_end.nonzero().squeeze(1).cpu() + 1)
        if len(part)
    ]
    return StopSums(
        is_end.sum().float(),
        (is_first & (best == labels)).sum().float(),
        (is_stop & is_end).sum().float(),
        (is_stop & ~is_end).sum().float(),
        torch.stack(errors).sum(),
    )


def length_error(stop_probability: Tensor) -> Tensor:
    """|E[length] - length| / length under the model's own stops along the true audio.

    Past the true end the last stop probability is taken to stay, and the overrun is capped at one
    whole length.

    Args:
        stop_probability: [length + 1], of stopping before each true token and after the last.
    """
    length = len(stop_probability) - 1
    survival = (1 - stop_probability).cumprod(0)  # [length + 1] not stopped up to and with here
    last = stop_probability[-1].clamp(min=1 / max(1, length))
    expected = survival[:-1].sum() + survival[-1] / last
    return (expected - length).abs() / max(1, length)


def _stop_figures(stops: StopSums) -> dict[str, float]:
    samples = float(stops.samples.clamp(min=1))
    predicted = float((stops.true_stops + stops.false_stops).clamp(min=1))
    return {
        "first_audio_accuracy": float(stops.first_audio_hits) / samples,
        "end_precision": float(stops.true_stops) / predicted,
        "end_recall": float(stops.true_stops) / samples,
        "length_error": float(stops.length_error) / samples,
    }


def _probe_pair(
    samples: Sequence[Sample], tokens: TokenMap, spec: PromptSpec
) -> tuple[LMBatch, LMBatch] | None:
    """The same audio with its own text, and with the text of the next sample."""
    if len({sample.text_ids for sample in samples}) < 2:
        return None
    texts = [sample.text_ids for sample in samples]
    own, swapped = (
        collate_prompts(
            [
                build_prompt(text, sample.semantic_tokens, tokens, spec, sample.tag_ids)
                for text, sample in zip(chosen, samples, strict=True)
            ],
            pad_id=tokens.pad,
        )
        for chosen in (texts, texts[1:] + texts[:1])
    )
    return own, swapped
