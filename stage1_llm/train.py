"""`tts-stack train-llm`: a tokenised corpus -> <run>/llm/model, a Hugging Face folder."""

import logging
from pathlib import Path

import torch

from stage1_llm.batching import plan_epoch
from stage1_llm.checkpoint import save_llm
from stage1_llm.config import LLMTrainConfig
from stage1_llm.dataset import Sample, encode_samples, measure_lengths, measure_stride
from stage1_llm.model import build_llm, layer_index, load_saved_weights
from stage1_llm.module import LLMTask
from stage1_llm.vocab import build_token_map
from tts_stack.contract import PromptSpec, SamplingSpec, TokenMap, VoiceContract
from tts_stack.runtime import open_run_dir
from tts_stack.shards import Corpus
from tts_stack.training import BEST_WEIGHTS, TrainSummary, load_weights, make_fabric, train

logger = logging.getLogger(__name__)
LLM_FOLDER, MODEL_FOLDER = "llm", "model"


def run_training(config: LLMTrainConfig, *, resume: bool) -> TrainSummary:
    """Train stage 1 and export the weights that did best on the validation split.

    Args:
        config: checked settings.
        resume: continue the run in `<config.run>/llm`.

    Raises:
        ConfigError: settings do not fit together, or the run folder cannot be used.
        DataError: the corpus is not tokenised, or holds nothing to train on.
        CheckpointError: the run's checkpoint or the base model does not fit.
    """
    corpus = Corpus.open(Path(config.corpus))
    codec = corpus.require_codec()
    tokens = build_token_map(corpus.info.symbols, codec.codebook_size)
    samples = _load_split(corpus, "train", tokens, config)
    validation = _load_split(corpus, "validation", tokens, config)[: config.max_validation_samples]
    contract = build_contract(config, corpus, tokens, samples)
    _report_plan(samples, config)

    out_dir = open_run_dir(Path(config.run) / LLM_FOLDER, config, resume=resume)
    fabric = make_fabric(config.trainer)
    model = build_llm(config.llm, tokens, seed=config.trainer.seed)
    layer_index(model, config.prompt.hidden_layer)  # refuse a wrong one before training
    logger.info("LLM: %.2f M parameters", sum(p.numel() for p in model.parameters()) / 1e6)
    task = LLMTask(model, samples, validation, tokens, contract.prompt, config, fabric)
    summary = train(
        task,
        out_dir,
        config.trainer,
        resume=resume,
        fingerprint=f"codec {codec.weights_sha256[:16]}, corpus {corpus.info.config_hash}",
        title="LLM",
    )

    load_saved_weights(model, load_weights(out_dir / "checkpoints" / BEST_WEIGHTS))
    dtype = getattr(torch, config.save_dtype)
    save_llm(model, contract, out_dir / MODEL_FOLDER, dtype=dtype)
    logger.info("wrote %s (step %d)", out_dir / MODEL_FOLDER, summary.best_step)
    return summary


def build_contract(
    config: LLMTrainConfig, corpus: Corpus, tokens: TokenMap, samples: list[Sample]
) -> VoiceContract:
    """The voice contract as far as stage 1 knows it."""
    return VoiceContract(
        name=config.name or Path(config.run).name,
        audio=corpus.audio_spec,
        text=corpus.info.text,
        codec=corpus.require_codec(),
        tokens=tokens,
        prompt=PromptSpec(
            position_scheme=config.prompt.position_scheme,
            text_stride=round(measure_stride(samples), 4),
            hidden_layer=config.prompt.hidden_layer,
            state_position=config.prompt.state_position,
        ),
        length=measure_lengths(samples),
        sampling=SamplingSpec(config.sampling.temperature, config.sampling.top_p),
    )


def _load_split(
    corpus: Corpus, split: str, tokens: TokenMap, config: LLMTrainConfig
) -> list[Sample]:
    max_length = config.batching.max_length
    return encode_samples(corpus.tokenized(split), tokens, max_length=max_length, split=split)


def _report_plan(samples: list[Sample], config: LLMTrainConfig) -> None:
    plan = plan_epoch(
        [sample.length for sample in samples],
        max_tokens=config.batching.max_tokens,
        seed=config.trainer.seed,
        epoch=0,
    )
    logger.info(
        "%d samples, %d tokens (%d of audio), %d steps an epoch, %.1f %% padding, "
        "largest batch %d x %d",
        len(samples),
        sum(sample.length for sample in samples),
        sum(len(sample.semantic_tokens) for sample in samples),
        len(plan.batches),
        100 * plan.padding_share,
        *plan.largest,
    )
