"""A tiny language of made-up tokens, and a tiny LLM, for the tests of stage 1."""

from pathlib import Path

import numpy as np

from stage1_llm.config import (
    BatchingConfig,
    LLMConfig,
    LLMTrainConfig,
    LossConfig,
    OptimizerConfig,
    PromptConfig,
    SamplingConfig,
)
from stage1_llm.dataset import Sample
from stage1_llm.model import build_llm
from stage1_llm.vocab import build_token_map
from tts_stack.contract import (
    AudioSpec,
    CodecIdentity,
    PromptSpec,
    TextSpec,
    TokenMap,
    VoiceContract,
)
from tts_stack.records import Utterance
from tts_stack.shards import SPLITS, CorpusInfo, add_tokens, write_info, write_shard
from tts_stack.training import ScheduleConfig, TrainerConfig

SYMBOLS = ("a", "b", "c")
CODEBOOK_SIZE = 10
TOKENS: TokenMap = build_token_map(SYMBOLS, CODEBOOK_SIZE)
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
        samples.append(Sample(f"s{index}", tuple(TOKENS.text_offset + symbols), audio))
    return samples


def train_config(corpus="", run="", max_steps=20, **changes) -> LLMTrainConfig:
    values = {
        "llm": tiny_config(),
        "prompt": PromptConfig("aligned", -1, "reads"),
        "batching": BatchingConfig(max_tokens=64, max_length=40),
        "loss": LossConfig(0.1, 1.0, 1.0),
        "optimizer": OptimizerConfig("muon_adamw", 0.01, 0.01, 0.0, 0.9, 0.95, 1.0),
        "schedule": ScheduleConfig("cosine", 2),
        "sampling": SamplingConfig(0.7, 0.9),
        "trainer": TrainerConfig(max_steps, 5, 5, device="cpu"),
        "token_noise": 0.1,
        "max_validation_samples": 4,
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
