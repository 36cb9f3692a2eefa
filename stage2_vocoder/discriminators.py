"""Discriminators of the adversarial phase: each looks at the waveform in another way.

Period and scale discriminators follow HiFi-GAN (arXiv:2010.05646, section 2.3 and appendix A), the
spectrogram ones EnCodec's complex STFT discriminator (arXiv:2210.13438, section 3.4). Written from
the papers. At multiplier 1.0 the first two have HiFi-GAN's parameter counts. The banded spectrogram
discriminator is the one of the package vocos.
"""

import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from vocos.discriminators import DiscriminatorR

from stage2_vocoder.config import DiscriminatorConfig
from tts_stack.errors import ConfigError

LEAKY_SLOPE = 0.1
PERIOD_CHANNELS = (32, 128, 512, 1024, 1024)
PERIOD_KERNEL, PERIOD_STRIDE = 5, 3
SCALE_CHANNELS = (128, 128, 256, 512, 1024, 1024, 1024)
SCALE_KERNELS = (15, 41, 41, 41, 41, 41, 5)
SCALE_STRIDES = (1, 2, 2, 4, 4, 1, 1)
SCALE_GROUPS = (1, 4, 16, 16, 16, 16, 1)
SPECTROGRAM_STRIDES = (2, 2, 2, 1, 1)  # along frequency; the first halves the cost


class DiscriminatorOutput(NamedTuple):
    """What one discriminator says of a batch."""

    score: Tensor  # [B, ...]; high means real
    features: list[Tensor]  # after each layer, the score last


class PeriodDiscriminator(nn.Module):
    """Sees every `period`-th sample as one row, so that periodic structure lines up."""

    def __init__(self, period: int, multiplier: float) -> None:
        super().__init__()
        self.period = period
        channels = [_scaled(width, multiplier) for width in PERIOD_CHANNELS]
        self.layers = nn.ModuleList()
        for index, (num_in, num_out) in enumerate(zip([1, *channels], channels, strict=False)):
            stride = PERIOD_STRIDE if index + 1 < len(channels) else 1
            layer = nn.Conv1d(num_in, num_out, PERIOD_KERNEL, stride, padding=PERIOD_KERNEL // 2)
            self.layers.append(weight_norm(layer))
        self.score = weight_norm(nn.Conv1d(channels[-1], 1, 3, padding=1))

    def forward(self, audio: Tensor) -> DiscriminatorOutput:
        """Judge [B, T].

        The paper's 2-D kernels are one phase wide: a 1-D convolution over B * period rows is the
        same and twice as fast on a CPU.
        """
        batch_size, num_samples = audio.shape
        padding = -num_samples % self.period
        x = nn.functional.pad(audio[:, None], (0, padding), mode="reflect")
        x = x.reshape(batch_size, -1, self.period).transpose(1, 2)  # [B, period, T / period]
        x = x.reshape(batch_size * self.period, 1, -1)
        output = _run(self.layers, self.score, x)
        rows = output.score.reshape(batch_size, -1)
        return DiscriminatorOutput(rows, output.features)


class ScaleDiscriminator(nn.Module):
    """Sees the waveform at one rate, with long strided kernels."""

    def __init__(self, multiplier: float, *, use_spectral_norm: bool) -> None:
        super().__init__()
        norm = spectral_norm if use_spectral_norm else weight_norm
        channels = [_scaled(width, multiplier) for width in SCALE_CHANNELS]
        self.uses_spectral_norm = use_spectral_norm
        self.layers = nn.ModuleList()
        for index, (num_in, num_out) in enumerate(zip([1, *channels], channels, strict=False)):
            kernel = SCALE_KERNELS[index]
            layer = nn.Conv1d(
                num_in,
                num_out,
                kernel,
                SCALE_STRIDES[index],
                padding=kernel // 2,
                groups=math.gcd(SCALE_GROUPS[index], math.gcd(num_in, num_out)),
            )
            self.layers.append(norm(layer))
        self.score = norm(nn.Conv1d(channels[-1], 1, 3, padding=1))
        self.train()

    def forward(self, audio: Tensor) -> DiscriminatorOutput:
        """Judge [B, T]."""
        return _run(self.layers, self.score, audio[:, None])

    def train(self, mode: bool = True) -> Self:
        """Nothing to do: the spectral norm moves in `refine_norm` alone."""
        return super().train(False)

    @torch.no_grad()
    def refine_norm(self) -> None:
        """One round of power iteration, as the paper does for each update (arXiv:1802.05957).

        Left to `forward` it would depend on how many micro-batches a step is divided into.
        """
        if not self.uses_spectral_norm:
            return
        for layer in (*self.layers, self.score):
            layer.train()
            _ = layer.weight  # computed anew, which moves the norm
            layer.eval()


class SpectrogramDiscriminator(nn.Module):
    """Sees real and imaginary parts of a complex spectrogram as two image channels."""

    def __init__(self, n_fft: int, channels: int) -> None:
        super().__init__()
        self.n_fft = n_fft
        self.register_buffer("window", torch.hann_window(n_fft), persistent=False)
        self.layers = nn.ModuleList()
        for index, stride in enumerate(SPECTROGRAM_STRIDES):
            num_in = channels if index else 2
            width = 9 if index + 1 < len(SPECTROGRAM_STRIDES) else 3  # along frequency
            layer = nn.Conv2d(num_in, channels, (3, width), (1, stride), padding=(1, width // 2))
            self.layers.append(weight_norm(layer))
        self.score = weight_norm(nn.Conv2d(channels, 1, 3, padding=1))

    def forward(self, audio: Tensor) -> DiscriminatorOutput:
        """Judge [B, T]."""
        return _run(self.layers, self.score, self._spectrogram(audio))

    def _spectrogram(self, audio: Tensor) -> Tensor:
        """[B, T] -> [B, 2, F, K]; an item at its own peak level, as in Vocos."""
        with torch.autocast(audio.device.type, enabled=False):
            audio = audio.float()
            audio = audio / audio.abs().amax(dim=-1, keepdim=True).clamp(min=1e-4)
            spectrum = torch.stft(
                audio,
                self.n_fft,
                self.n_fft // 4,
                window=cast(Tensor, self.window),
                return_complex=True,
                normalized=True,
                pad_mode="constant",
            )
            x = torch.view_as_real(spectrum).permute(0, 3, 2, 1)  # [B, K, F, 2] -> [B, 2, F, K]
        return x.contiguous(memory_format=torch.channels_last)  # 2-3 times faster on a CPU


class BandedSpectrogramDiscriminator(nn.Module):
    """Vocos' multi-resolution discriminator (arXiv:2306.00814): a stack of layers for each band."""

    def __init__(self, n_fft: int, channels: int) -> None:
        super().__init__()
        self.n_fft = n_fft
        with warnings.catch_warnings():
            # The package uses the older of torch's two weight norms; both work.
            warnings.filterwarnings("ignore", ".*weight_norm.* is deprecated", FutureWarning)
            self.bands = DiscriminatorR(n_fft, channels=channels)

    def forward(self, audio: Tensor) -> DiscriminatorOutput:
        """Judge [B, T]; T must be more than half an n_fft."""
        score, features = self.bands(audio.float())
        return DiscriminatorOutput(score.flatten(1), features)


SPECTROGRAM_DISCRIMINATORS = {
    "whole": SpectrogramDiscriminator,
    "banded": BandedSpectrogramDiscriminator,
}


class Discriminators(nn.Module):
    """All discriminators of a run: [B, T] -> one output each."""

    def __init__(self, config: DiscriminatorConfig) -> None:
        super().__init__()
        self.period = nn.ModuleList(
            PeriodDiscriminator(period, config.period_multiplier) for period in config.periods
        )
        self.num_halvings = config.first_scale
        self.scale = nn.ModuleList(
            ScaleDiscriminator(config.scale_multiplier, use_spectral_norm=index == 0)
            for index in range(config.num_scales)
        )
        self.spectrogram = nn.ModuleList(
            SPECTROGRAM_DISCRIMINATORS[config.spectrogram_kind](n_fft, config.spectrogram_channels)
            for n_fft in config.spectrogram_sizes
        )
        self.spectrogram.to(memory_format=torch.channels_last)
        self.halve_rate = nn.AvgPool1d(4, stride=2, padding=2)

    def forward(self, audio: Tensor) -> list[DiscriminatorOutput]:
        """Judge [B, T] with every discriminator."""
        outputs = [discriminator(audio) for discriminator in self.period]
        at_rate = audio[:, None]
        for _ in range(self.num_halvings):
            at_rate = self.halve_rate(at_rate)
        for discriminator in self.scale:
            outputs.append(discriminator(at_rate[:, 0]))
            at_rate = self.halve_rate(at_rate)
        return outputs + [discriminator(audio) for discriminator in self.spectrogram]

    def refine_norms(self) -> None:
        """Bring the spectral norms up to date: once a step."""
        for discriminator in self.scale:
            cast(ScaleDiscriminator, discriminator).refine_norm()


def require_crop(config: DiscriminatorConfig, num_samples: int) -> None:
    """Check that a crop is long enough to be judged.

    Raises:
        ConfigError: a banded spectrogram discriminator could not reflect the crop's ends.
    """
    longest = max(config.spectrogram_sizes, default=0)
    if config.spectrogram_kind == "banded" and num_samples <= longest // 2:
        raise ConfigError(
            f"adversarial.crop_seconds gives crops of {num_samples} samples, expected more than "
            f"half of discriminator.spectrogram_sizes' {longest}; take longer crops or "
            "discriminator.spectrogram_kind=whole"
        )


def scores(outputs: Sequence[DiscriminatorOutput]) -> list[Tensor]:
    """The score of each output."""
    return [output.score for output in outputs]


def split_outputs(
    outputs: Sequence[DiscriminatorOutput], parts: int = 2
) -> list[list[DiscriminatorOutput]]:
    """Undo a concatenation of `parts` equal batches along B."""
    split = []
    for output in outputs:
        split.append(
            [
                DiscriminatorOutput(score, list(features))
                for score, *features in zip(
                    output.score.chunk(parts),
                    *(feature.chunk(parts) for feature in output.features),
                    strict=True,
                )
            ]
        )
    return [list(part) for part in zip(*split, strict=True)]


def _run(layers: nn.ModuleList, score: nn.Module, x: Tensor) -> DiscriminatorOutput:
    features = []
    for layer in layers:
        x = nn.functional.leaky_relu(layer(x), LEAKY_SLOPE)
        features.append(x)
    x = score(x)
    return DiscriminatorOutput(x.flatten(1), [*features, x])


def _scaled(width: int, multiplier: float) -> int:
    return max(1, round(width * multiplier))
