"""Validation of a vocoder on fixed utterances: the figures that choose a checkpoint."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from stage2_vocoder.dataset import VocoderBatch, VocoderData
from stage2_vocoder.losses import ReconstructionLoss
from stage2_vocoder.model import Vocoder
from tts_stack.contract import AudioSpec
from tts_stack.errors import DataError


def validation_rows(data: VocoderData, num_rows: int, max_seconds: float) -> list[int]:
    """The first rows that are short enough.

    Raises:
        DataError: there is none.
    """
    max_tokens = int(max_seconds * data.spec.token_rate)
    short = np.flatnonzero(data.num_tokens() <= max_tokens)[:num_rows]
    if not len(short):
        raise DataError(
            f"validation: no utterance of at most {max_seconds} s; raise data.validation_seconds"
        )
    return [int(row) for row in short]


@torch.no_grad()
def validate_vocoder(
    vocoder: Vocoder,
    batches: Sequence[VocoderBatch],
    loss: ReconstructionLoss,
    device: torch.device,
) -> dict[str, float]:
    """Spectral figures over whole utterances, weighted by length; always in float32.

    Returns:
        `mel` (mean absolute log-mel difference), `stft`, and `level_db`: how much louder the
        generated audio is than the recordings.
    """
    was_training = vocoder.training
    vocoder.eval()
    sums = dict.fromkeys(("mel", "stft", "energy_hat", "energy"), 0.0)
    total = 0
    for batch in (batch.to(device) for batch in batches):
        counts = num_samples(batch, vocoder.audio)
        audio_hat = vocoder(batch.hidden_states, batch.lengths)
        count = int(counts.sum())
        sums["mel"] += float(loss.mel(audio_hat, batch.audio, counts)) * count
        sums["stft"] += float(loss.stft(audio_hat, batch.audio, counts)) * count
        sums["energy_hat"] += float(audio_hat.square().sum())
        sums["energy"] += float(batch.audio.square().sum())
        total += count
    vocoder.train(was_training)
    level = 10 * np.log10(max(sums["energy_hat"], 1e-12) / max(sums["energy"], 1e-12))
    return {"mel": sums["mel"] / total, "stft": sums["stft"] / total, "level_db": float(level)}


def num_samples(batch: VocoderBatch, spec: AudioSpec) -> Tensor:
    """Samples of each item's audio that are real: [B]."""
    return batch.num_tokens * spec.samples_per_token
