"""`tts-stack check collate`: what has a label, what it weighs, and that padding does nothing."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from stage1_llm.build import Language
from stage1_llm.checks.layout import Ints, decode_audio, expected_groups
from stage1_llm.checks.report import Claim, Report, close
from stage1_llm.checks.setup import Example, Setup, training_form
from stage1_llm.checks.shown import show_prompt
from stage1_llm.collate import LMBatch, collate_prompts, pack_prompts
from stage1_llm.dataset import Sample, sample_prompt
from stage1_llm.loss import denominators
from stage1_llm.network import Predictions
from stage1_llm.prompt import GROUP_AUDIO, GROUP_NAMES, GROUP_NONE, Prompt
from stage1_llm.stream import IGNORE_INDEX


def check_collate(setup: Setup) -> Report:
    """Show one sample and prove its batch; see docs."""
    tokens, spec = setup.contract.tokens, setup.contract.prompt
    whole = [example.sample for example in setup.examples]
    prompts = [sample_prompt(sample, tokens, spec) for sample in whole]
    is_packing = setup.config.batching.kind == "packing"
    batch = pack_prompts(prompts) if is_packing else collate_prompts(prompts, pad_id=tokens.pad)
    groups = [expected_groups(sample, tokens, spec) for sample in whole]
    places = _places(batch, groups)
    shortest = min(range(len(whole)), key=lambda index: whole[index].length)
    return Report(
        setup.describe(),
        (
            _labels(batch, places, prompts),
            _no_labels(batch, places),
            _weights(batch, groups, setup),
            _audio(batch, places, whole, setup),
            _text(setup.examples, setup.language),
            _alone(setup),
        ),
        tuple(show_prompt(prompts[shortest], setup)),
    )


def _places(batch: LMBatch, groups: Sequence[Ints]) -> list[tuple[Ints, Ints]]:
    """Flat positions of each sample in the batch, with the group that each should have."""
    width = batch.input_ids.shape[1]
    starts = (
        np.arange(len(groups)) * width
        if batch.segment_lengths is None
        else np.cumsum([0, *(len(group) for group in groups[:-1])])
    )
    return [
        (start + np.arange(len(group)), group)
        for start, group in zip(starts.tolist(), groups, strict=True)
    ]


def _labels(
    batch: LMBatch, places: Sequence[tuple[Ints, Ints]], prompts: Sequence[Prompt]
) -> Claim:
    labels, groups = batch.labels.flatten().numpy(), batch.groups.flatten().numpy()
    counts = np.zeros(len(GROUP_NAMES), dtype=np.int64)
    num_wrong = 0
    for (place, group), prompt in zip(places, prompts, strict=True):
        is_predicted = group != GROUP_NONE
        own = (labels[place] == prompt.token_ids) & (groups[place] == group)
        num_wrong += int((is_predicted & ~own).sum())
        counts += np.bincount(group[is_predicted], minlength=len(GROUP_NAMES))
    found = ", ".join(f"{count} {name}" for count, name in zip(counts, GROUP_NAMES, strict=True))
    return Claim(
        "every audio token, every end and every text token is labelled once, with itself",
        num_wrong == 0 and int((labels != IGNORE_INDEX).sum()) == counts.sum(),
        f"{found} expected; {num_wrong} wrong; {int((labels != IGNORE_INDEX).sum())} labels in all",
    )


def _no_labels(batch: LMBatch, places: Sequence[tuple[Ints, Ints]]) -> Claim:
    is_free = np.ones(batch.labels.numel(), dtype=bool)
    for place, group in places:
        is_free[place] = group == GROUP_NONE
    num_padding = int((~batch.attention_mask).sum())
    has_label = batch.labels.flatten().numpy() != IGNORE_INDEX
    has_group = batch.groups.flatten().numpy() != GROUP_NONE
    num_wrong = int(((has_label | has_group) & is_free).sum())
    return Claim(
        "padding, template, tags and masked tokens are never labelled",
        num_wrong == 0,
        f"{num_padding} positions of padding, {int(is_free.sum()) - num_padding} of template, "
        f"tags and masks; {num_wrong} with a label",
    )


def _weights(batch: LMBatch, groups: Sequence[Ints], setup: Setup) -> Claim:
    weights = setup.config.loss.weights(0)
    found = denominators(batch.groups, batch.codes, torch.tensor(weights, dtype=torch.float64))
    counts = [sum(int((group == g).sum()) for group in groups) for g in range(len(GROUP_NAMES))]
    wanted = sum(count * weight for count, weight in zip(counts, weights, strict=True))
    difference = abs(float(found.weight) - wanted)
    terms = " + ".join(
        f"{count} {name} x {weight:g}"
        for count, name, weight in zip(counts, GROUP_NAMES, weights, strict=True)
    )
    return Claim(
        "the weights at step 0 add up",
        difference <= 1e-9 * max(1.0, wanted),
        f"{terms} = {wanted:g}; the loss divides by {float(found.weight):g}, difference "
        f"{difference:.2g}",
    )


def _audio(
    batch: LMBatch, places: Sequence[tuple[Ints, Ints]], samples: Sequence[Sample], setup: Setup
) -> Claim:
    tokens, spec = setup.contract.tokens, setup.contract.prompt
    ids = batch.input_ids.flatten().numpy()
    codes = batch.codes.flatten(0, 1).numpy()  # [B * L, C]
    num_equal = num_compared = 0
    for (place, group), sample in zip(places, samples, strict=True):
        if (sample.semantic_tokens == tokens.codebook_size).any():
            continue  # a mask stands for any token
        heard = place[group == GROUP_AUDIO]
        spoken = decode_audio(ids[heard], codes[heard], tokens, spec)
        num_compared += 1
        num_equal += np.array_equal(spoken, sample.semantic_tokens)
    return Claim(
        "the audio of a prompt decodes to the corpus's speech tokens",
        num_equal == num_compared,
        f"{num_equal} of {num_compared} utterances equal",
    )


def _text(examples: Sequence[Example], language: Language) -> Claim:
    num_dropped = sum(example.sample.num_dropped for example in examples)
    wrong = ""
    for example in examples:
        text, decoded = _known(example.text, language), _decode(example.sample, language)
        if decoded != text and not wrong:
            wrong = f"; {example.sample.id}: {decoded!r}, expected {text!r}"
    return Claim(
        "the text ids decode to the text of the corpus",
        not wrong,
        f"{len(examples)} texts, {num_dropped} symbols unknown to the voice and left out{wrong}",
    )


def _known(text: str, language: Language) -> str:
    """The text without what the voice cannot read."""
    symbols = set(language.tokens.symbols)
    return "".join(s for s in text if s in symbols) if symbols else text.strip()


def _decode(sample: Sample, language: Language) -> str:
    if language.base is None:
        tokens = language.tokens
        return "".join(tokens.symbols[i - tokens.text_offset] for i in sample.text_ids)
    text: str = language.base.tokenizer.decode(
        list(sample.text_ids), clean_up_tokenization_spaces=False
    )
    return text.strip()


@torch.no_grad()
def _alone(setup: Setup) -> Claim:
    prompts, pad = setup.prompts(), setup.contract.tokens.pad
    network = setup.network()
    training_form(network, setup.config, "dynamic")
    every = torch.ones(len(GROUP_NAMES))
    batch = collate_prompts(prompts, pad_id=pad)
    together = network(batch, every)
    alone = [network(collate_prompts([prompt], pad_id=pad), every) for prompt in prompts]
    claim = close(
        f"a padded batch of {len(prompts)} samples gives the logits of each sample alone",
        all_logits([together]),
        all_logits(alone),
    )
    num_padding = int((~batch.attention_mask).sum())
    return claim._replace(detail=f"{claim.detail}; {num_padding} positions of padding")


def all_logits(predictions: Sequence[Predictions]) -> list[Tensor]:
    """Logits of the token stream and of each other codebook, samples one after the other."""
    parts = zip(*([one.logits, *one.code_logits] for one in predictions), strict=True)
    return [torch.cat(part) for part in parts]
