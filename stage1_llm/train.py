"""`tts-stack train-llm`: a tokenised corpus -> <run>/llm/model, a Hugging Face folder.

With LoRA it writes <run>/llm/adapter instead, which `tts-stack merge-lora` turns into the model.
"""

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import torch

from stage1_llm.batching import describe_plan
from stage1_llm.build import (
    Language,
    build_contract,
    build_language,
    build_trained_network,
    save_tokenizer,
)
from stage1_llm.checkpoint import ADAPTER_FOLDER, MODEL_FOLDER, save_llm
from stage1_llm.config import LLMTrainConfig
from stage1_llm.dataset import make_sample, measure_lengths, num_markers
from stage1_llm.lora import save_adapter
from stage1_llm.module import LLMTask
from stage1_llm.network import TextToSemantic
from stage1_llm.runs import length_saved
from stage1_llm.store import SampleStore, open_store
from stage1_llm.weights import load_network_weights
from tts_stack.contract import CODEBOOKS_FILE, SamplingSpec, VoiceContract
from tts_stack.processes import is_main_process
from tts_stack.runtime import open_run_dir
from tts_stack.shards import Corpus
from tts_stack.training import (
    BEST_WEIGHTS,
    MediaLog,
    OnValidation,
    TrainSummary,
    load_weights,
    make_fabric,
    save_weights,
    train,
    wait_for_all,
)

logger = logging.getLogger(__name__)
LLM_FOLDER = "llm"
Listen = Callable[[TextToSemantic, VoiceContract, SampleStore, int, MediaLog], None]


def run_training(
    config: LLMTrainConfig, *, resume: bool, listen: Listen | None = None
) -> TrainSummary:
    """Train stage 1 and export the weights that did best on the validation split.

    Args:
        config: checked settings.
        resume: continue the run in `<config.run>/llm`.
        listen: called after each validation, to put speech and token streams into the log.

    Raises:
        ConfigError: settings do not fit together, or the run folder cannot be used.
        DataError: the corpus is not tokenised, or holds nothing to train on.
        CheckpointError: the run's checkpoint or the base model does not fit.
    """
    fabric = make_fabric(config.trainer)
    corpus = Corpus.open(Path(config.corpus))
    language = build_language(config, corpus)
    samples = _open_split(corpus, "train", language, config)
    validation = _open_split(corpus, "validation", language, config)
    contract = voice_contract(config, corpus, language, samples)
    _report_durations(contract, samples)
    logger.info("plan: %s", describe_plan(samples.lengths, config.batching, config.trainer))

    out_dir = open_run_dir(Path(config.run) / LLM_FOLDER, config, resume=resume)
    config.schedule.warn_when_never_warm(config.trainer.max_steps)
    network = build_trained_network(config, language, contract.codebook_sizes)
    _report_size(network)
    task = LLMTask(
        network,
        samples,
        samples.lengths,
        validation[: config.max_validation_samples],
        contract.tokens,
        contract.prompt,
        config,
        fabric,
    )
    codec = contract.codec.weights_sha256[:16]
    summary = train(
        task,
        out_dir,
        config.trainer,
        resume=resume,
        fingerprint=f"codec {codec}, corpus {corpus.info.config_hash}",
        title="LLM",
        on_validation=_on_validation(listen, config, network, contract, validation),
    )
    if is_main_process():
        if config.trainer.strategy == "fsdp":  # the network holds a share of the weights alone
            language = build_language(config, corpus)
            network = build_trained_network(config, language, contract.codebook_sizes)
        load_network_weights(network, load_weights(out_dir / "checkpoints" / BEST_WEIGHTS))
        _export(network, contract, language, config, out_dir)
    wait_for_all()
    return summary


def voice_contract(
    config: LLMTrainConfig, corpus: Corpus, language: Language, samples: SampleStore
) -> VoiceContract:
    """The voice contract as far as stage 1 knows it."""
    name = config.name or Path(config.run).name
    return dataclasses.replace(
        build_contract(name, corpus, language, samples.num_text, samples.lengths),
        length=measure_lengths(samples.num_text, samples.num_audio),
        sampling=SamplingSpec(config.sampling.temperature, config.sampling.top_p),
    )


def _on_validation(
    listen: Listen | None,
    config: LLMTrainConfig,
    network: TextToSemantic,
    contract: VoiceContract,
    samples: SampleStore,
) -> OnValidation | None:
    """Let the main process speak after validations; sharded weights cannot speak alone."""
    if listen is None or config.trainer.strategy == "fsdp" or not is_main_process():
        return None
    return lambda step, media: listen(network, contract, samples, step, media)


def _open_split(
    corpus: Corpus, split: str, language: Language, config: LLMTrainConfig
) -> SampleStore:
    return open_store(
        corpus,
        split,
        lambda utterance: make_sample(utterance, language.encode, language.tokens, language.spec),
        max_length=config.batching.max_length,
        cache_tokens=config.batching.cache_tokens,
    )


def _report_durations(contract: VoiceContract, samples: SampleStore) -> None:
    if contract.prompt.durations != "none":
        others = int(samples.num_text.sum()) + num_markers(contract.prompt) * len(samples)
        num_positions = int(samples.lengths.sum()) - others  # a tag counts too: one in hundreds
        num_tokens = int(samples.num_audio.sum())
        logger.info(
            "durations: %d semantic tokens in %d positions, %.1f %% saved",
            num_tokens,
            num_positions,
            100 * length_saved(num_tokens, num_positions),
        )


def _report_size(network: TextToSemantic) -> None:
    total = sum(parameter.numel() for parameter in network.parameters())
    trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
    logger.info("LLM: %.2f M parameters, %.2f M of them trained", total / 1e6, trained / 1e6)


def _export(
    network: TextToSemantic,
    contract: VoiceContract,
    language: Language,
    config: LLMTrainConfig,
    out_dir: Path,
) -> None:
    """Write what was trained: the whole model, or the adapter and the new rows."""
    if config.lora is None:
        folder = out_dir / MODEL_FOLDER
        save_llm(network, contract, folder, dtype=getattr(torch, config.save_dtype))
    else:
        folder = out_dir / ADAPTER_FOLDER
        assert language.base is not None  # build_trained_network refused it otherwise
        save_adapter(network.llm, folder, contract, language.base, config.lora)
        if network.codebooks is not None:
            save_weights(network.codebooks.state_dict(), folder / CODEBOOKS_FILE)
    save_tokenizer(language, folder)
    logger.info("wrote %s", folder)
