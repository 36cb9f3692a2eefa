"""`tts-stack train-codec`: a prepared corpus in, `<run>/codec/codec/` out."""

import dataclasses
import hashlib
import json
import logging
import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from tts_stack import training
from tts_stack.errors import ConfigError, DataError
from tts_stack.processes import is_main_process
from tts_stack.runtime import open_run_dir, seed_everything
from tts_stack.semantic.checkpoint import save_codec
from tts_stack.semantic.config import CodecTrainConfig
from tts_stack.semantic.dataset import CodecBatch, CodecDataset, pack_sorted, plan_batches
from tts_stack.semantic.losses import CTCHead, code_entropy_bits, mel_l1, transcript_loss
from tts_stack.semantic.model import MelCodec, build_codec, build_log_mel, token_mask
from tts_stack.shards import Corpus
from tts_stack.training import BEST_WEIGHTS, TrainSummary

logger = logging.getLogger(__name__)
_LONG_SHARE = 0.05  # of clips whose transcript does not fit, before it is worth a warning
_STATISTICS_CLIPS = 256  # enough for the mean and spread of each mel bin


class CodecLosses(NamedTuple):
    """Losses of one batch, and its codes."""

    mel: Tensor  # nats per bin
    ctc: Tensor  # nats per symbol
    indices: Tensor  # [B, S] int64


class CodecTrainer(nn.Module):
    """The codec with the head that only training needs; forward gives the losses."""

    def __init__(self, codec: MelCodec, ctc_head: CTCHead) -> None:
        super().__init__()
        self.codec = codec
        self.ctc_head = ctc_head

    def forward(self, batch: CodecBatch) -> CodecLosses:
        """Reconstruct the mel and read the transcript back, padding excluded."""
        output = self.codec(batch.mel, batch.num_tokens)
        frame_mask = token_mask(batch.num_tokens * self.codec.frames_per_token, batch.mel.shape[-1])
        ctc = transcript_loss(
            self.ctc_head(output.features),
            batch.num_tokens * self.ctc_head.steps_per_token,
            batch.symbols,
            batch.num_symbols,
        )
        return CodecLosses(mel_l1(output.mel_hat, batch.mel, frame_mask), ctc, output.indices)


class CodecTask:
    """Codec training as `training.train` runs it."""

    monitor = "loss"

    def __init__(self, corpus: Corpus, config: CodecTrainConfig, fabric: Fabric) -> None:
        seed_everything(config.trainer.seed)
        self.config, self.fabric = config, fabric
        self.train_set = self._open(corpus, "train")
        self.validation_set = self._open(corpus, "validation")
        _warn_of_long_transcripts(self.train_set, config.ctc_steps_per_token)
        self.max_tokens = round(config.batch_seconds * config.codec.audio_spec.token_rate)
        codec = build_codec(config.codec)
        codec.set_statistics(*self.train_set.statistics(_STATISTICS_CLIPS))
        head = CTCHead(
            config.codec.hidden_size, len(corpus.info.symbols), config.ctc_steps_per_token
        )
        self.module = CodecTrainer(codec, head)
        self.model = fabric.setup_module(self.module)  # first: it replaces weights it shards
        optimizer = torch.optim.AdamW(
            self.module.parameters(),
            lr=config.optimizer.lr,
            weight_decay=config.optimizer.weight_decay,
            fused=True,
        )
        self.optimizer = cast(torch.optim.Optimizer, fabric.setup_optimizers(optimizer))

    def batches(self, start_step: int, stop_step: int) -> Iterator[list[CodecBatch]]:
        """This process's micro-batches of steps start..stop-1."""
        share = training.Share.of(self.fabric, self.config.trainer.accumulate)
        plan = plan_batches(
            self.train_set.num_tokens,
            self.max_tokens,
            seed=self.config.trainer.seed,
            start_step=start_step * share.per_step,
        )
        for _, micro in zip(range(start_step, stop_step), share.steps(plan), strict=False):
            yield [self._to_device(self.train_set.batch(clips)) for clips in micro]

    def train_step(self, batch: list[CodecBatch], step: int) -> Mapping[str, float | Tensor]:
        """One update of codec and head."""
        factor = self.config.schedule.factor(step, self.config.trainer.max_steps)
        training.set_learning_rate(self.optimizer, factor)
        self.model.train()
        tokens = training.total_weight(int(micro.num_tokens.sum()) for micro in batch)
        clips = training.total_weight(len(micro.num_tokens) for micro in batch)
        parts: list[tuple[float, float]] = []

        def loss_of(micro: CodecBatch) -> Tensor:
            losses = self.model(micro)
            mel = losses.mel * (int(micro.num_tokens.sum()) / tokens)
            ctc = losses.ctc * (len(micro.num_tokens) / clips)
            parts.append((float(mel.detach()), float(ctc.detach())))
            return mel + self.config.ctc_weight * ctc

        norm = training.update(
            self.fabric,
            [partial(loss_of, micro) for micro in batch],
            self.model,
            self.optimizer,
            self.config.optimizer.max_grad_norm,
        )
        mel, ctc = training.sum_over_processes([sum(part) for part in zip(*parts, strict=True)])
        return {
            "loss": mel + self.config.ctc_weight * ctc,
            "mel": mel,
            "ctc": ctc,
            "grad_norm": norm,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            **_sizes(batch),
        }

    @torch.no_grad()
    def validate(self) -> Mapping[str, float]:
        """Losses, number of codes used and their entropy on the first validation clips."""
        self.model.eval()
        mel = ctc = total = 0.0
        counts = torch.zeros(self.config.codec.codebook_size, dtype=torch.long)
        for batch in self._validation_batches():
            losses = self.model(batch)
            weight = int(batch.num_tokens.sum())
            mel += weight * float(losses.mel)
            ctc += weight * float(losses.ctc)
            total += weight
            is_real = token_mask(batch.num_tokens, losses.indices.shape[1]).bool()
            counts += torch.bincount(losses.indices[is_real].cpu(), minlength=len(counts))
        mel, ctc = mel / total, ctc / total
        return {
            "loss": mel + self.config.ctc_weight * ctc,
            "mel": mel,
            "ctc": ctc,
            "codes_used": float((counts > 0).sum()),
            "entropy_bits": code_entropy_bits(counts),
        }

    def state_dict(self) -> dict[str, Any]:
        """Module and optimiser."""
        return {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.module.load_state_dict(state["module"])
        training.load_optimizer(self.optimizer, state["optimizer"])

    def weights(self) -> dict[str, Tensor]:
        """The codec without the CTC head."""
        return self.module.codec.state_dict()

    def _open(self, corpus: Corpus, split: str) -> CodecDataset:
        dataset = CodecDataset(
            corpus.shard_paths(split),
            corpus.info.symbols,
            build_log_mel(self.config.codec),
            self.config.codec.audio_spec,
            max_cache_bytes=round(self.config.max_cache_gb * 1e9),
        )
        if not len(dataset):
            raise DataError(
                f"{corpus.path}: the {split} split is empty, expected at least one clip; "
                "re-run tts-stack prepare with more recordings"
            )
        return dataset

    def _validation_batches(self) -> Iterator[CodecBatch]:
        num_tokens = self.validation_set.num_tokens
        count = min(len(num_tokens), self.config.num_validation_clips)
        clips = sorted(range(count), key=lambda clip: num_tokens[clip])
        for indices in pack_sorted(clips, num_tokens, self.max_tokens):
            yield self._to_device(self.validation_set.batch(indices))

    def _to_device(self, batch: CodecBatch) -> CodecBatch:
        return CodecBatch(*(tensor.to(self.fabric.device) for tensor in batch))


def run_training(config: CodecTrainConfig, *, resume: bool) -> TrainSummary:
    """Train the codec on a prepared corpus and write it to `<run>/codec/codec/`.

    Args:
        config: of `configs/train_codec.yaml`.
        resume: continue from the run's last checkpoint.

    Returns:
        Steps and validation figures.

    Raises:
        ConfigError: the corpus has another sample rate than the codec, or the run folder is taken.
        DataError: the corpus cannot be read or a split is empty.
    """
    corpus = Corpus.open(Path(config.corpus))
    corpus.require_audio()
    if corpus.info.sample_rate != config.codec.sample_rate:
        raise ConfigError(
            f"codec.sample_rate is {config.codec.sample_rate} Hz, {corpus.path} has "
            f"{corpus.info.sample_rate} Hz; choose another codec=… or re-run tts-stack prepare "
            f"with sample_rate={config.codec.sample_rate}"
        )
    config.schedule.warn_when_never_warm(config.trainer.max_steps)
    fabric = training.make_fabric(config.trainer)
    out_dir = open_run_dir(Path(config.run) / "codec", config, resume=resume)
    task = CodecTask(corpus, config, fabric)
    summary = training.train(
        task,
        out_dir,
        config.trainer,
        resume=resume,
        fingerprint=_fingerprint(corpus, config),
        title="codec",
    )
    if is_main_process():
        best = training.load_weights(out_dir / "checkpoints" / BEST_WEIGHTS)
        identity = save_codec(out_dir / "codec", config.codec, best)
        logger.info("codec %s written to %s", identity.describe(), out_dir / "codec")
    return summary


def _warn_of_long_transcripts(dataset: CodecDataset, steps_per_token: int) -> None:
    """Say when the transcript loss skips clips: the fewer tokens a second, the fewer its steps."""
    pairs = zip(dataset.transcripts, dataset.num_tokens, strict=True)
    needed = [len(transcript) / count for transcript, count in pairs]  # steps a token, at least
    num_long = sum(steps > steps_per_token for steps in needed)
    if num_long > _LONG_SHARE * len(needed):
        logger.warning(
            "%d of %d transcripts have more symbols than ctc_steps_per_token=%d has steps for and "
            "teach nothing; try ctc_steps_per_token=%d",
            num_long,
            len(needed),
            steps_per_token,
            math.ceil(2 * sum(needed) / len(needed)),
        )


def _sizes(batch: list[CodecBatch]) -> dict[str, float]:
    return {
        "num_tokens": float(sum(int(micro.num_tokens.sum()) for micro in batch)),
        "num_positions": float(
            sum(len(micro.num_tokens) * int(micro.num_tokens.max()) for micro in batch)
        ),
    }


def _fingerprint(corpus: Corpus, config: CodecTrainConfig) -> str:
    values = dataclasses.asdict(config.codec)
    values.pop("token_rate")  # it says again what the other rates say
    settings = json.dumps(values, sort_keys=True)
    settings_hash = hashlib.sha256(settings.encode()).hexdigest()[:12]
    return f"corpus {corpus.info.config_hash} with codec settings {settings_hash}"
