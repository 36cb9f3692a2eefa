"""`tts-stack floor`: one vocoder on three inputs tells which stage limits the sound.

    mel     the recordings' own log-mel frames, those of a token side by side: what the decoder
            leaves when its input holds everything
    codes   the codec's codes, digit by digit: what the tokens lose
    states  the LLM's hidden states of the same tokens: what stage 1 loses

Size, data, steps, seed and batches are the same. Every input passes the vocoder's first layer
normalisation unharmed: codes are one-hot, so that each token has the same mean and variance, and
mel frames carry two constants by which their level is still known behind it.
"""

import dataclasses
import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stage2_vocoder.config import VocoderTrainConfig
from stage2_vocoder.live_states import LiveStates
from stage2_vocoder.states import StateIdentity, StatesInfo, StatesReader
from stage2_vocoder.train import run_training
from tts_stack.errors import CheckpointError
from tts_stack.runtime import choose_device, write_text
from tts_stack.semantic.checkpoint import load_codec, read_codec_config
from tts_stack.semantic.tokenizer import SpeechTokenizer
from tts_stack.shards import Corpus
from tts_stack.states import Progress, no_progress, open_recordings, open_states
from tts_stack.training import TrainSummary
from tts_stack.voice import CODEC_DIR

logger = logging.getLogger(__name__)
INPUTS = ("mel", "codes", "states")
FIGURES = ("mel", "stft", "pesq")  # of those that validation gives
FLOOR_FOLDER, FLOOR_FILE = "floor", "floor.json"
STATISTICS_ROWS = 32  # for the mean and spread of each mel bin
CACHE_BYTES = 200_000_000  # of inputs kept in memory, for each split
WORTH_NAMING = 0.1  # a stage that adds less than this share of the decoder's error is no limit


@dataclass(frozen=True)
class FloorReport:
    """What one vocoder reached on each input."""

    steps: int
    figures: Mapping[str, Mapping[str, float]]  # input -> name -> value on validation utterances

    @property
    def added(self) -> dict[str, float]:
        """Log-mel error, nats, that each stage adds: decoder, codec, LLM; their sum is the last."""
        mel = [self.figures[name]["mel"] for name in INPUTS]
        return {"decoder": mel[0], "codec": mel[1] - mel[0], "llm": mel[2] - mel[1]}

    @property
    def verdict(self) -> str:
        """Which stage is to blame, in one sentence."""
        added = self.added
        worst = max(("codec", "llm"), key=lambda name: added[name])
        if added[worst] < WORTH_NAMING * added["decoder"]:
            return (
                "the decoder is the limit: codes and states cost it little; train it for longer, "
                "or take a larger one"
            )
        if worst == "codec":
            return (
                "the codec is the limit: its codes say less than the mel does; train it for "
                "longer, or take more codes or a higher token rate"
            )
        return (
            "the LLM is the limit: its states say less than the codes do; try a lower "
            "prompt.hidden_layer or prompt.num_mixed_layers, or train it for longer"
        )

    def rows(self) -> list[tuple[str, ...]]:
        """A table with its heading."""
        names = [name for name in FIGURES if all(name in self.figures[row] for row in INPUTS)]
        titles = {"mel": "mel L1", "stft": "STFT", "pesq": "PESQ"}
        lines = [("input", *(titles[name] for name in names))]
        return lines + [
            (row, *(f"{self.figures[row][name]:.3f}" for name in names)) for row in INPUTS
        ]

    def save(self, path: Path) -> None:
        """Write as JSON."""
        values = {
            "steps": self.steps,
            "figures": self.figures,
            "added_mel": self.added,
            "verdict": self.verdict,
        }
        write_text(path, json.dumps(values, indent=1) + "\n")


def run_floor(config: VocoderTrainConfig, *, on_progress: Progress = no_progress) -> FloorReport:
    """Train the reconstruction phase on each input, as far as that is not done yet.

    Args:
        config: of `tts-stack train-vocoder`; its reconstruction phase is what is trained, each
            under `<run>/floor/<input>`.
        on_progress: called while hidden states are extracted.

    Raises:
        ConfigError: several processes, or an earlier call had other settings.
        CheckpointError: the run holds no LLM, or the corpus no codec.
        DataError: the corpus is missing, not tokenised, or holds no recordings.
    """
    config.trainer.require_one_process("floor")
    corpus = open_recordings(Path(config.corpus))
    device = choose_device(config.trainer.device)
    states = open_states(config, device=device, on_progress=on_progress)
    codec = _load_codec(corpus)
    readers = {"mel": mel_inputs(corpus, codec, states), "codes": code_inputs(corpus, states)}
    figures: dict[str, dict[str, float]] = {}
    steps = 0
    for name in INPUTS:
        folder = Path(config.run) / FLOOR_FOLDER / name
        logger.info("floor: training on %s in %s", name, folder)
        own = dataclasses.replace(config, run=str(folder))
        summary = _train(own, readers.get(name, states))
        steps = summary.steps
        figures[name] = {
            key: value for key, value in summary.last_validation.items() if math.isfinite(value)
        }
    report = FloorReport(steps, figures)
    report.save(Path(config.run) / FLOOR_FOLDER / FLOOR_FILE)
    return report


def _train(config: VocoderTrainConfig, states: StatesReader) -> TrainSummary:
    try:
        return run_training(config, "reconstruction", resume=True, states=states)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; or delete {config.run} to train anew") from error


def mel_inputs(corpus: Corpus, codec: SpeechTokenizer, states: StatesReader) -> LiveStates:
    """Log-mel frames of each token side by side, standardised: frames_per_token * bins + 2."""
    audio = {split: corpus.audio(split) for split in states.info.num_rows}

    def frames(split: str, row: int) -> Tensor:
        log_mel = codec.log_mel([audio[split][row]])[0]  # [K, F]
        return log_mel.T

    num_rows = min(STATISTICS_ROWS, len(audio["train"]))
    seen = torch.cat([frames("train", row) for row in range(num_rows)])  # [F, K]
    mean, std = seen.mean(0), seen.std(0).clamp(min=1e-3)
    per_token = corpus.audio_spec.frames_per_token

    def compute(split: str, row: int) -> Tensor:
        scaled = (frames(split, row) - mean) / std
        return with_constants(scaled.reshape(-1, per_token * len(mean)))  # [F, K] -> [S, W]

    return _reader("mel", compute, per_token * len(mean) + 2, states)


def code_inputs(corpus: Corpus, states: StatesReader) -> LiveStates:
    """The digits of each token's code, each one-hot: as many values as the levels' sum."""
    levels = read_codec_config(corpus.path / CODEC_DIR).levels
    tokens = {split: corpus.token_rows(split) for split in states.info.num_rows}

    def compute(split: str, row: int) -> Tensor:
        return one_hot_digits(tokens[split][row].semantic_tokens, levels)

    return _reader("codes", compute, sum(levels), states)


def with_constants(features: Tensor) -> Tensor:
    """Two constants behind the features [S, W]: a layer normalisation no longer hides the level.

    As large as all the features together, they show the mean and the spread that it divides by.
    """
    size = math.sqrt(features.shape[1])
    constants = features.new_tensor([size, -size]).expand(len(features), 2)
    return torch.cat([features, constants], dim=1)


def one_hot_digits(tokens: NDArray[np.int64], levels: list[int]) -> Tensor:
    """Codes [S] -> [S, sum of levels], first digit fastest as in tts_stack.semantic.fsq."""
    rest, parts = torch.from_numpy(tokens), []
    for size in levels:
        parts.append(torch.nn.functional.one_hot(rest % size, size))
        rest = rest // size
    return torch.cat(parts, dim=1).float()


def _reader(
    name: str, compute: Callable[[str, int], Tensor], width: int, states: StatesReader
) -> LiveStates:
    """Inputs for the very rows that have hidden states."""
    info = states.info
    counts: dict[str, NDArray[np.int64]] = {}
    for split in info.num_rows:
        rows = states.split(split)
        counts[split] = np.array([rows.num_tokens(row) for row in range(len(rows))])
    identity = StateIdentity(f"none: {name}", info.identity.corpus_hash, name)
    return LiveStates(
        Path(name), StatesInfo(identity, width, dict(info.num_rows)), counts, compute, CACHE_BYTES
    )


def _load_codec(corpus: Corpus) -> SpeechTokenizer:
    folder = corpus.path / CODEC_DIR
    if not folder.is_dir():
        raise CheckpointError(
            f"{corpus.path}: no {CODEC_DIR}/ beside its tokens, so floor cannot tell what the "
            f"codes lose; run tts-stack tokenize corpus={corpus.path} again"
        )
    codec = load_codec(folder)
    if codec.identity != corpus.require_codec():
        raise CheckpointError(
            f"{folder}: codec {codec.identity.describe()}, the tokens are of "
            f"{corpus.require_codec().describe()}; run tts-stack tokenize corpus={corpus.path} "
            "again"
        )
    return codec
