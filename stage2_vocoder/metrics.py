"""Validation of a vocoder on fixed utterances: the figures that choose a checkpoint."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from stage2_vocoder.config import DataConfig
from stage2_vocoder.dataset import VocoderBatch, VocoderData
from stage2_vocoder.losses import ReconstructionLoss
from stage2_vocoder.model import Vocoder
from stage2_vocoder.quality import Pair, QualityMeter
from tts_stack.contract import AudioSpec
from tts_stack.errors import DataError
from tts_stack.processes import is_main_process

Listener = Callable[[Tensor, Tensor], None]  # (generated [T], recorded [T]) of one utterance


class Validator:
    """Fixed utterances and a vocoder's figures on them.

    Args:
        data: the validation split.
        config: which utterances.
        loss: the spectral losses.
        device: where the vocoder is.
    """

    def __init__(
        self, data: VocoderData, config: DataConfig, loss: ReconstructionLoss, device: torch.device
    ) -> None:
        rows = validation_rows(data, config.num_validation, config.validation_seconds)
        self.batches = [data.whole([row]) for row in rows]
        self.loss, self.device = loss, device
        self._quality = QualityMeter(data.spec.sample_rate)

    def figures(self, vocoder: Vocoder, *, with_quality: bool) -> dict[str, float]:
        """Spectral figures, and those of `QualityMeter` in the main process when asked for."""
        pairs: list[Pair] = []
        listener = None
        if with_quality and is_main_process():

            def listener(audio_hat: Tensor, audio: Tensor) -> None:
                pairs.append(Pair(audio_hat.cpu().numpy(), audio.cpu().numpy()))

        figures = validate_vocoder(vocoder, self.batches, self.loss, self.device, listener)
        return figures | (self._quality.measure(pairs) if pairs else {})


def validation_rows(data: VocoderData, num_rows: int, max_seconds: float) -> list[int]:
    """The first rows that are short enough and have hidden states.

    Raises:
        DataError: there is none.
    """
    max_tokens = int(max_seconds * data.spec.token_rate)
    counts = data.num_tokens()
    short = np.flatnonzero((counts > 0) & (counts <= max_tokens))[:num_rows]
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
    listener: Listener | None = None,
) -> dict[str, float]:
    """Spectral figures over whole utterances, weighted by length; always in float32.

    Args:
        vocoder: what is measured.
        batches: whole utterances.
        loss: the spectral losses.
        device: where the vocoder is.
        listener: called with the audio of each utterance.

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
        if listener is not None:
            for item, size in enumerate(counts.tolist()):
                listener(audio_hat[item, :size], batch.audio[item, :size])
    vocoder.train(was_training)
    level = 10 * np.log10(max(sums["energy_hat"], 1e-12) / max(sums["energy"], 1e-12))
    return {"mel": sums["mel"] / total, "stft": sums["stft"] / total, "level_db": float(level)}


def num_samples(batch: VocoderBatch, spec: AudioSpec) -> Tensor:
    """Samples of each item's audio that are real: [B]."""
    return batch.num_tokens * spec.samples_per_token
