"""What a validation lets one hear and see: recordings, generated audio, and their spectrograms."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stage2_vocoder.metrics import validate_vocoder
from stage2_vocoder.module import AdversarialTask, ReconstructionTask
from tts_stack.training import MediaLog

Pixels = NDArray[np.uint8]  # [H, W, 3]
LEVEL_RANGE = 10.0  # nat, from the loudest bin of the recording down
DIFFERENCE_RANGE = 2.0  # nat, either way
GAP = 4  # pixels between panels
# Colours of rising level: dark blue, purple, orange, pale yellow. Evenly rising in lightness.
LEVEL_COLORS = ((0, 0, 20), (90, 20, 110), (210, 70, 60), (250, 170, 40), (255, 255, 210))
# Too quiet, alike, too loud.
DIFFERENCE_COLORS = ((30, 80, 200), (245, 245, 245), (200, 40, 30))


class Pictures:
    """Shows the first validation utterances after each validation; the recordings once.

    Args:
        task: the training, whose validated weights are heard.
        num_shown: utterances.
    """

    def __init__(self, task: ReconstructionTask | AdversarialTask, num_shown: int) -> None:
        self.task = task
        self.batches = task.validator.batches[:num_shown]

    def __call__(self, step: int, media: MediaLog) -> None:
        """Called by the training loop."""
        if not media.is_shown or not self.batches:
            return
        with self.task.validated_vocoder() as vocoder:
            heard: list[tuple[Tensor, Tensor]] = []
            validate_vocoder(
                vocoder,
                self.batches,
                self.task.loss,
                self.task.fabric.device,
                lambda audio_hat, audio: heard.append((audio_hat, audio)),
            )
        rate = vocoder.audio.sample_rate
        for index, (audio_hat, audio) in enumerate(heard):
            name = f"validation/{index}"
            log_mels = self.task.loss.mel.log_mel(torch.stack([audio, audio_hat]))
            media.add_image(f"{name}/spectrogram", spectrogram_picture(*log_mels))
            media.add_audio(f"{name}/output", audio_hat.cpu().numpy(), rate)
            if step == 0:
                media.add_audio(f"{name}/target", audio.cpu().numpy(), rate)


def spectrogram_picture(target: Tensor, output: Tensor) -> Pixels:
    """Three panels, one above the other: the recording, what was generated, the difference.

    Args:
        target: log-mel [K, F] of the recording, in nat.
        output: log-mel [K, F] of the generated audio.

    Returns:
        Pixels [3 K + 2 gaps, F, 3], low frequencies at the bottom of each panel. In the last one
        red is too loud, blue too quiet.
    """
    bottom = float(target.max()) - LEVEL_RANGE
    levels = [(log_mel - bottom) / LEVEL_RANGE for log_mel in (target, output)]
    difference = (output - target) / (2 * DIFFERENCE_RANGE) + 0.5
    panels = [
        colored(levels[0], LEVEL_COLORS),
        colored(levels[1], LEVEL_COLORS),
        colored(difference, DIFFERENCE_COLORS),
    ]
    gap = np.full((GAP, target.shape[1], 3), 255, dtype=np.uint8)
    return np.concatenate([panels[0], gap, panels[1], gap, panels[2]])


def colored(values: Tensor, colors: Sequence[tuple[int, int, int]]) -> Pixels:
    """Values [K, F], of which 0 .. 1 is shown -> pixels [K, F, 3], the first row at the bottom."""
    shown = values.detach().float().cpu().clamp(0, 1).nan_to_num(0.0).flip(0).numpy()
    places = np.linspace(0, 1, len(colors))
    table = np.asarray(colors, dtype=np.float64)  # [colours, 3]
    channels = [np.interp(shown, places, table[:, channel]) for channel in range(3)]
    return np.stack(channels, axis=-1).round().astype(np.uint8)
