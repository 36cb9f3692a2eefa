"""A tiny language of made-up tokens, and a tiny LLM, for the tests of stage 1."""

from pathlib import Path

import numpy as np

from stage1_llm.config import (
    BatchingConfig,
    CurriculumConfig,
    LLMConfig,
    LLMTrainConfig,
    LossConfig,
    OptimizerConfig,
    PromptConfig,
    SamplingConfig,
    WeightConfig,
)
from stage1_llm.dataset import Sample, make_sample
from stage1_llm.model import build_llm
from stage1_llm.network import TextToSemantic, build_network
from stage1_llm.text import SymbolEncoder
from stage1_llm.vocab import build_token_map
from tts_stack.contract import (
    AudioSpec,
    CodecIdentity,
    PromptSpec,
    TextSpec,
    TokenMap,
    VoiceContract,
)
from tts_stack.records import TokenizedUtterance, Utterance
from tts_stack.shards import SPLITS, CorpusInfo, add_tokens, write_info, write_shard
from tts_stack.training import ScheduleConfig, TrainerConfig

SYMBOLS = ("a", "b", "c")
CODEBOOK_SIZE = 10
TOKENS: TokenMap = build_token_map(SYMBOLS, CODEBOOK_SIZE)
ENCODE = SymbolEncoder(TOKENS)
PLAIN = PromptSpec()
CODEC = CodecIdentity("fake", "ab" * 32, CODEBOOK_SIZE)


def tiny_config(**changes) -> LLMConfig:
    values = {
        "architecture": "llama",
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 2,
        "intermediate_size": 48,
        "tie_embeddings": True,
        "rope_theta": 10000.0,
        "max_positions": 128,
        "dropout": 0.0,
    }
    return LLMConfig(**{**values, **changes})


def tiny_llm(seed=0, **changes):
    return build_llm(tiny_config(**changes), TOKENS, seed=seed).eval()


def tiny_network(seed=0, codebook_sizes=(), **changes) -> TextToSemantic:
    return build_network(tiny_llm(seed, **changes), codebook_sizes, seed=seed).eval()


def make_contract(**prompt) -> VoiceContract:
    return VoiceContract(
        name="test",
        audio=AudioSpec(24000, 240, 4),
        text=TextSpec("raw", "en-us"),
        codec=CODEC,
        tokens=TOKENS,
        prompt=PromptSpec(**prompt),
    )


def make_samples(count=6, seed=0) -> list[Sample]:
    """Each symbol sounds as two tokens, so that the text decides the audio."""
    random = np.random.default_rng(seed)
    samples = []
    for index in range(count):
        symbols = random.integers(0, len(SYMBOLS), random.integers(2, 7))
        audio = np.stack([symbols * 3, symbols * 3 + 1], axis=1).reshape(-1)
        text = "".join(SYMBOLS[symbol] for symbol in symbols)
        samples.append(sample_of(text, audio, id=f"s{index}"))
    return samples


def sample_of(text, audio, *, id="x", tokens=TOKENS, spec=PLAIN) -> Sample:
    utterance = TokenizedUtterance(id, text, np.asarray(audio, dtype=np.int64))
    return make_sample(utterance, SymbolEncoder(tokens), tokens, spec)


def prompt_config(**changes) -> PromptConfig:
    values = {
        "position_scheme": "aligned",
        "hidden_layer": -1,
        "state_position": "reads",
        "format": "tagged",
        "durations": "none",
        "max_run": 9,
        "speaker_tags": False,
        "language_tags": False,
    }
    return PromptConfig(**{**values, **changes})


def batching_config(**changes) -> BatchingConfig:
    values = {
        "kind": "dynamic",
        "max_tokens": 64,
        "max_length": 40,
        "cache_tokens": 10_000,
        "curriculum": CurriculumConfig(8, 0),
    }
    return BatchingConfig(**{**values, **changes})


def loss_config(text=0.1, audio=1.0, end=1.0, codebooks=1.0) -> LossConfig:
    return LossConfig(WeightConfig(text), WeightConfig(audio), WeightConfig(end), codebooks)


def train_config(corpus="", run="", max_steps=20, **changes) -> LLMTrainConfig:
    values = {
        "llm": tiny_config(),
        "prompt": prompt_config(),
        "batching": batching_config(),
        "loss": loss_config(),
        "optimizer": OptimizerConfig("muon_adamw", 0.01, 0.01, 0.0, 0.9, 0.95, 1.0, 0.0),
        "schedule": ScheduleConfig("cosine", 2),
        "sampling": SamplingConfig(0.7, 0.9),
        "trainer": TrainerConfig(max_steps, 5, 5, device="cpu"),
        "token_noise": 0.1,
        "max_validation_samples": 4,
        "num_listened": 0,
        "save_dtype": "float32",
    }
    return LLMTrainConfig(corpus=str(corpus), run=str(run), **{**values, **changes})


def write_corpus(path: Path, *, num_train=12, num_validation=4) -> Path:
    """A tokenised corpus of `make_samples`, with silence for audio."""
    path.mkdir(parents=True)
    samples = make_samples(num_train + num_validation)
    parts = {"train": samples[:num_train], "validation": samples[num_train:]}
    for split, part in parts.items():
        file = path / f"{split}-00000.parquet"
        write_shard(
            file, [_utterance(sample) for sample in part], sample_rate=24000, config_hash="h"
        )
        add_tokens(file, [sample.semantic_tokens for sample in part], CODEC)
    info = CorpusInfo(
        sample_rate=24000,
        text=TextSpec("raw", "en-us"),
        symbols=SYMBOLS,
        config_hash="h",
        shards={split: (f"{split}-00000.parquet",) for split in SPLITS},
        num_utterances={split: len(part) for split, part in parts.items()},
        seconds=dict.fromkeys(SPLITS, 1.0),
        codec=CODEC,
        codec_audio=AudioSpec(24000, 240, 4),
    )
    write_info(path, info)
    return path


def text_of(sample: Sample) -> str:
    return "".join(SYMBOLS[id - TOKENS.text_offset] for id in sample.text_ids)


def _utterance(sample: Sample) -> Utterance:
    text = text_of(sample)
    return Utterance(sample.id, text, text, "", "en-us", np.zeros(960, np.float32))
