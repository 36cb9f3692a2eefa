"""Validation of stage 1: losses and accuracies per group, stop figures, and the text-swap probe."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stage1_llm.batching import plan_epoch
from stage1_llm.collate import LMBatch, collate_prompts
from stage1_llm.dataset import Sample, sample_prompt
from stage1_llm.loss import (
    GroupSums,
    group_hits,
    group_means,
    group_sums,
    supervised_positions,
)
from stage1_llm.model import head, hidden_states
from stage1_llm.prompt import GROUP_AUDIO, GROUP_END, GROUP_NAMES, build_prompt
from tts_stack.contract import PromptSpec, TokenMap

NUM_SWAPPED = 32  # samples of the text-swap probe


@dataclass
class _Totals:
    """Sums over the split."""

    groups: GroupSums
    hits: Tensor  # [3]
    first_audio: list[bool]  # per sample: was the first audio token right
    true_stops: int = 0  # <|audio_end|> had the highest logit where it belongs
    false_stops: int = 0  # ... and where it does not
    num_stops: int = 0


class Validator:
    """A fixed set of batches, and the figures of a model on it."""

    def __init__(
        self,
        samples: Sequence[Sample],
        tokens: TokenMap,
        spec: PromptSpec,
        *,
        max_tokens: int,
        device: torch.device,
    ) -> None:
        prompts = [sample_prompt(sample, tokens, spec) for sample in samples]
        plan = plan_epoch([len(p) for p in prompts], max_tokens=max_tokens, seed=0, epoch=0)
        self.tokens = tokens
        self.batches = [
            collate_prompts([prompts[i] for i in indices], pad_id=tokens.pad).to(device)
            for indices in plan.batches
        ]
        self.probe = _probe_pair(samples[:NUM_SWAPPED], tokens, spec, device)

    @torch.no_grad()
    def figures(self, model: PreTrainedModel) -> dict[str, float]:
        """Loss and accuracy of each group, stop precision and recall, audio loss with other texts.

        `audio_swapped_text` far above `audio_own_text` (the same samples) shows that the model
        listens to the text; near it, that it only continues audio.
        """
        is_training = model.training
        model.eval()
        zeros = torch.zeros(len(GROUP_NAMES), device=self.batches[0].labels.device)
        totals = _Totals(GroupSums(zeros, zeros), zeros, [])
        for batch in self.batches:
            self._add(totals, model, batch)
        figures = {
            **group_means(totals.groups.losses, totals.groups.counts),
            **group_means(totals.hits, totals.groups.counts, "_accuracy"),
            **_stop_figures(totals),
        }
        if self.probe:
            own, swapped = (self._audio_loss(model, batch) for batch in self.probe)
            figures.update(audio_own_text=own, audio_swapped_text=swapped)
        model.train(is_training)
        return figures

    def _add(self, totals: _Totals, model: PreTrainedModel, batch: LMBatch) -> None:
        logits, labels, groups = _predict(model, batch)
        sums = group_sums(logits, labels, groups)
        totals.groups = GroupSums(
            *(old + new for old, new in zip(totals.groups, sums, strict=True))
        )
        totals.hits = totals.hits + group_hits(logits, labels, groups)
        best = logits.argmax(-1)
        is_end = groups == GROUP_END
        is_stop = (best == self.tokens.audio_end) & (groups >= GROUP_AUDIO)
        totals.num_stops += int(is_end.sum())
        totals.true_stops += int((is_stop & is_end).sum())
        totals.false_stops += int((is_stop & ~is_end).sum())
        # Labels are in reading order: the first audio label of a row follows a text label.
        is_first = (groups == GROUP_AUDIO) & (groups.roll(1) < GROUP_AUDIO)
        totals.first_audio += (best == labels)[is_first].tolist()

    def _audio_loss(self, model: PreTrainedModel, batch: LMBatch) -> float:
        sums = group_sums(*_predict(model, batch))
        return group_means(sums.losses, sums.counts)["audio"]


class _Predictions(NamedTuple):
    """At every labelled position."""

    logits: Tensor  # [N, V]
    labels: Tensor  # [N]
    groups: Tensor  # [N]


def _predict(model: PreTrainedModel, batch: LMBatch) -> _Predictions:
    every = torch.ones(len(GROUP_NAMES), device=batch.labels.device)
    labelled = supervised_positions(batch.labels, batch.groups, every)
    states = hidden_states(model, batch.input_ids, batch.position_ids)
    logits = head(model)(states.flatten(0, 1)[labelled.positions])
    return _Predictions(logits, labelled.labels, labelled.groups)


def _stop_figures(totals: _Totals) -> dict[str, float]:
    predicted = totals.true_stops + totals.false_stops
    return {
        "first_audio_accuracy": sum(totals.first_audio) / max(1, len(totals.first_audio)),
        "end_precision": totals.true_stops / max(1, predicted),
        "end_recall": totals.true_stops / max(1, totals.num_stops),
    }


def _probe_pair(
    samples: Sequence[Sample], tokens: TokenMap, spec: PromptSpec, device: torch.device
) -> tuple[LMBatch, LMBatch] | None:
    """The same audio with its own text, and with the text of the next sample."""
    if len({sample.text_ids for sample in samples}) < 2:
        return None
    texts = [sample.text_ids for sample in samples]
    batches = [
        collate_prompts(
            [
                build_prompt(text, sample.semantic_tokens, tokens, spec)
                for text, sample in zip(chosen, samples, strict=True)
            ],
            pad_id=tokens.pad,
        ).to(device)
        for chosen in (texts, texts[1:] + texts[:1])
    ]
    return batches[0], batches[1]
