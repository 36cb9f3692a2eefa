"""A tiny corpus with hidden states, and a tiny training configuration."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from stage2_vocoder.config import VocoderConfig, VocoderTrainConfig
from stage2_vocoder.states import StateIdentity, StateWriter, corpus_hash
from tts_stack.config import load_config
from tts_stack.contract import AudioSpec, CodecIdentity, TextSpec
from tts_stack.records import Utterance
from tts_stack.shards import Corpus, CorpusInfo, add_tokens, write_info, write_shard

SPEC = AudioSpec(sample_rate=8000, hop_length=40, frames_per_token=4)  # 160 samples a token
HIDDEN_SIZE = 12
LLM = "a1" * 32
SECONDS = {"train": (0.9, 0.31, 0.62, 1.2, 0.5, 0.8), "validation": (0.4, 0.7)}
TINY = VocoderConfig(
    dim=8, intermediate_dim=16, num_token_blocks=1, num_layers=1, input_kernel_size=3, n_fft=160
)
TINY_OVERRIDES = (
    "vocoder=tiny",
    "vocoder.dim=8",
    "vocoder.intermediate_dim=16",
    "vocoder.n_fft=160",
    "discriminator=small",
    "discriminator.periods=[2,3]",
    "discriminator.period_multiplier=0.03",
    "discriminator.scale_multiplier=0.03",
    "discriminator.spectrogram_sizes=[128]",
    "discriminator.spectrogram_channels=2",
    "losses.mel={n_fft: 160, hop_length: 40, n_mels: 12}",
    "losses.stft_sizes=[64,128]",
    "losses.stft_hops=[16,32]",
    "losses.stft_windows=[64,128]",
    "data.num_validation=2",
    "data.quality_every=0",
    "reconstruction.batch_seconds=2",
    "reconstruction.schedule.warmup_steps=2",
    "adversarial.batch_size=3",
    "adversarial.crop_seconds=0.5",
    "trainer.validate_every=100",
    "trainer.checkpoint_every=100",
    "trainer.log_every=1",
    "trainer.device=cpu",
    "trainer.precision=32-true",
)


def make_corpus(folder: Path) -> Corpus:
    """Tones of different pitch, tokenised with zeros."""
    codec = CodecIdentity("fake", "cd" * 32, 1000)
    shards = {split: (f"{split}-00000.parquet",) for split in SECONDS}
    folder.mkdir(parents=True)
    for split, durations in SECONDS.items():
        rows = [
            _tone(f"{split}-{index}", duration, index) for index, duration in enumerate(durations)
        ]
        path = folder / shards[split][0]
        write_shard(path, rows, sample_rate=SPEC.sample_rate, config_hash="settings")
        tokens = [np.zeros(SPEC.num_tokens(len(row.audio)), dtype=np.int64) for row in rows]
        add_tokens(path, tokens, codec)
    info = CorpusInfo(
        sample_rate=SPEC.sample_rate,
        text=TextSpec("raw", "en-us"),
        symbols=("a",),
        config_hash="settings",
        shards=shards,
        num_utterances={split: len(durations) for split, durations in SECONDS.items()},
        seconds={split: sum(durations) for split, durations in SECONDS.items()},
        codec=codec,
        codec_audio=SPEC,
    )
    write_info(folder, info)
    return Corpus.open(folder)


def make_states(folder: Path, corpus: Corpus, llm_sha256: str = LLM) -> None:
    """Random states of the right lengths."""
    identity = StateIdentity(llm_sha256, corpus_hash(corpus))
    writer = StateWriter(
        folder,
        identity,
        hidden_size=HIDDEN_SIZE,
        num_rows=corpus.info.num_utterances,
        rows_per_shard=4,
    )
    for split in SECONDS:
        for rows in writer.missing(split):
            writer.write(split, rows, [row_states(split, row) for row in rows])
    writer.finish()


def row_states(split: str, row: int) -> np.ndarray:
    """States [S, D] of one row."""
    num_tokens = SPEC.num_tokens(round(SECONDS[split][row] * SPEC.sample_rate))
    generator = np.random.default_rng([row, len(split)])
    return generator.standard_normal((num_tokens, HIDDEN_SIZE)).astype(np.float32)


def tiny_config(corpus: Path, run: Path, *overrides: str) -> VocoderTrainConfig:
    """configs/train_vocoder.yaml shrunk to a second or two."""
    places = (f"corpus={corpus}", f"run={run}")
    return load_config(VocoderTrainConfig, "train_vocoder", [*places, *TINY_OVERRIDES, *overrides])


def flat_tensors(state: Any, place: str = "") -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint by its place in it."""
    if isinstance(state, torch.Tensor):
        return {place: state}
    if isinstance(state, list | tuple):
        state = dict(enumerate(state))
    if not isinstance(state, dict):
        return {}
    parts = [flat_tensors(value, f"{place}/{key}") for key, value in state.items()]
    return {key: tensor for part in parts for key, tensor in part.items()}


def _tone(name: str, duration: float, index: int) -> Utterance:
    time = np.arange(round(duration * SPEC.sample_rate)) / SPEC.sample_rate
    audio = 0.3 * np.sin(2 * np.pi * (200 + 60 * index) * time)
    return Utterance(name, "a", "a", "speaker", "en-us", audio.astype(np.float32))
