"""What every check stands on: the user's settings and samples, with a tiny random model."""

import copy
import dataclasses
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from stage1_llm.build import Language, build_contract, build_language, build_trained_network
from stage1_llm.checks.shrink import shrink_base, shrink_llm, shrink_settings
from stage1_llm.config import LLMTrainConfig
from stage1_llm.dataset import Sample, make_sample, num_markers, sample_prompt
from stage1_llm.module import prepare_network
from stage1_llm.network import TextToSemantic
from stage1_llm.prompt import Prompt
from tts_stack.contract import VoiceContract
from tts_stack.errors import DataError
from tts_stack.shards import Corpus

NUM_SAMPLES = 24
NUM_COMPARED = 4  # samples of a batch that is compared with each sample alone
MAX_LOGITS = 4_000_000  # of one sample; with a large vocabulary samples are cut to fewer tokens
MIN_TOKENS = 24  # text and audio that is left of a cut sample
_NOISE = 0.02


@dataclass(frozen=True)
class Example:
    """One utterance of the corpus, whole."""

    text: str
    sample: Sample


@dataclass(frozen=True)
class Setup:
    """A user's settings, made small; `folder` is gone when the check ends."""

    config: LLMTrainConfig  # of a tiny training
    user: LLMTrainConfig  # as given
    language: Language  # its base model is never changed: see `network`
    contract: VoiceContract
    examples: tuple[Example, ...]
    samples: tuple[Sample, ...]  # the same utterances, cut where the vocabulary is large
    shape: Any  # transformers configuration of the user's base model; None from scratch
    folder: Path

    def network(self, *, with_lora: bool = True) -> TextToSemantic:
        """A new network as training starts, in evaluation mode."""
        config, language = self.config, self.language
        if not with_lora:
            config = dataclasses.replace(config, lora=None)
        if language.base is not None:
            base = language.base._replace(model=copy.deepcopy(language.base.model))
            language = language._replace(base=base)
        network = build_trained_network(config, language, self.contract.codebook_sizes)
        return network.eval()

    def prompts(self) -> list[Prompt]:
        """Some samples of different lengths."""
        tokens, spec = self.contract.tokens, self.contract.prompt
        return [sample_prompt(s, tokens, spec) for s in self.samples[:NUM_COMPARED]]

    def describe(self) -> tuple[str, ...]:
        """What the claims are tried on."""
        llm, user = self.language.base, self.user
        model = f"{user.llm.base_model} (tokenizer and architecture)" if llm else "from scratch"
        num_tokens = [sample.length for sample in self.samples]
        cut = sum(
            s.length < e.sample.length for s, e in zip(self.samples, self.examples, strict=True)
        )
        lora = f", LoRA r {user.lora.r} alpha {user.lora.alpha}" if user.lora else ""
        return (
            f"corpus {user.corpus}: {len(self.samples)} utterances, {min(num_tokens)} to "
            f"{max(num_tokens)} tokens" + (f", {cut} of them cut for speed" if cut else ""),
            f"model {model}, tiny and random{lora}; prompt {self.contract.prompt.format}, "
            f"durations {self.contract.prompt.durations}, "
            f"codebooks {self.contract.codec.num_codebooks}, {self.config.batching.kind} batches",
        )


@contextmanager
def open_setup(user: LLMTrainConfig) -> Iterator[Setup]:
    """Read the first samples of the corpus and make a tiny model; all files are temporary.

    Raises:
        ConfigError: settings do not fit together.
        DataError: the corpus is not tokenised, or holds nothing to train on.
        CheckpointError: the base model is not found, or has no tokenizer that fits.
    """
    corpus = Corpus.open(Path(user.corpus))
    with tempfile.TemporaryDirectory(prefix="tts-stack-check-") as name:
        folder = Path(name)
        shape = None
        if user.llm.base_model is None:
            llm = shrink_llm(user.llm)
        else:
            shape = shrink_base(user.llm.base_model, folder / "base", seed=user.trainer.seed)
            llm = dataclasses.replace(user.llm, base_model=str(folder / "base"))
        language = build_language(dataclasses.replace(user, llm=llm), corpus)
        examples = _read_examples(corpus, language, user.batching.max_length)
        samples = [_cut(example.sample, language, index) for index, example in enumerate(examples)]
        lengths = [sample.length for sample in samples]
        yield Setup(
            shrink_settings(user, lengths, llm, folder / "run"),
            user,
            language,
            build_contract(
                "check",
                corpus,
                language,
                np.array([len(sample.text_ids) for sample in samples]),
                np.array(lengths),
            ),
            tuple(examples),
            tuple(samples),
            shape,
            folder,
        )


def training_form(network: TextToSemantic, config: LLMTrainConfig, kind: str) -> None:
    """The attention that training uses with a kind of batches; dropout stays off.

    Raises:
        ConfigError: the model cannot keep packed samples apart.
    """
    batching = dataclasses.replace(config.batching, kind=kind)
    trainer = dataclasses.replace(config.trainer, gradient_checkpointing=False)
    config = dataclasses.replace(config, batching=batching, trainer=trainer)
    prepare_network(network, config, torch.device("cpu"))
    network.eval()


@torch.no_grad()
def disturb(network: nn.Module) -> None:
    """Move every trained weight a little, so that none is zero as adapters are at first."""
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter.add_(_NOISE * torch.randn(parameter.shape, generator=generator))


def _read_examples(corpus: Corpus, language: Language, max_length: int) -> list[Example]:
    found: list[Example] = []
    for utterance in corpus.iter_tokenized("train"):
        sample = make_sample(utterance, language.encode, language.tokens, language.spec)
        if 0 < sample.length <= max_length:
            found.append(Example(utterance.model_text, sample))
        if len(found) == NUM_SAMPLES:
            break
    if not found:
        raise DataError(
            f"{corpus.path}: train: no utterance with text and audio of at most "
            f"batching.max_length={max_length} tokens; raise it"
        )
    return found


def _cut(sample: Sample, language: Language, index: int) -> Sample:
    """At most so many tokens that the logits stay small; not all samples get the same length."""
    given = num_markers(language.spec) + len(sample.tag_ids)
    limit = max(MAX_LOGITS // language.tokens.vocab_size, given + MIN_TOKENS) - index % NUM_COMPARED
    if sample.length <= limit:
        return sample
    num_text = min(len(sample.text_ids), (limit - given) // 2)
    short = dataclasses.replace(
        sample,
        text_ids=sample.text_ids[:num_text],
        semantic_tokens=sample.semantic_tokens[: limit - given - num_text],
    )
    return dataclasses.replace(
        short, length=len(sample_prompt(short, language.tokens, language.spec))
    )
