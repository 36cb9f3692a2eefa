"""Losses of stage 2, pure: spectral ones that never see padding, and adversarial ones.

Spectra are computed in float32 whatever the training precision.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from auraloss.freq import MultiResolutionSTFTLoss
from torch import Tensor, nn

from stage2_vocoder.config import LossConfig, MelScaleConfig
from stage2_vocoder.discriminators import DiscriminatorOutput
from tts_stack.contract import AudioSpec
from tts_stack.errors import ConfigError
from tts_stack.mel import LogMel

SILENCE = 1e-3  # peak of an item, below which it counts as silent: -60 dB


class ReconstructionLosses(NamedTuple):
    """Spectral losses and their weighted sum."""

    total: Tensor
    mel: Tensor  # mean absolute difference of natural-log mel magnitudes
    stft: Tensor
    multi_mel: Tensor


class MelLoss(nn.Module):
    """Mean absolute difference of log-mel spectrograms over the frames that are audio."""

    def __init__(self, config: MelScaleConfig, audio: AudioSpec) -> None:
        """Prepare one resolution.

        Raises:
            ConfigError: the hop does not divide samples_per_token, so padding would leak.
        """
        super().__init__()
        if audio.samples_per_token % config.hop_length:
            raise ConfigError(
                f"losses: mel hop_length is {config.hop_length}, expected a divisor of "
                f"samples_per_token {audio.samples_per_token}"
            )
        self.hop_length = config.hop_length
        self.log_mel = LogMel(
            sample_rate=audio.sample_rate,
            n_fft=config.n_fft,
            hop_length=config.hop_length,
            n_mels=config.n_mels,
        )

    def forward(self, audio_hat: Tensor, audio: Tensor, num_samples: Tensor) -> Tensor:
        """Compare [B, T] with [B, T]; item i counts up to sample num_samples[i]."""
        difference = (self.log_mel(audio_hat) - self.log_mel(audio)).abs().mean(1)  # [B, F]
        frame = torch.arange(difference.shape[1], device=difference.device)
        is_audio = frame < (num_samples.to(difference.device) // self.hop_length)[:, None]
        return (difference * is_audio).sum() / is_audio.sum()


class STFTLoss(nn.Module):
    """auraloss' multi-resolution STFT loss (arXiv:1910.11480), item by item without padding.

    The mean is weighted by length. One item a call keeps the spectral-convergence ratio of a
    quiet item from drowning in a loud one's, and lets lengths differ. A silent item has no
    spectrum to converge to (the ratio divides by its norm): it counts 0, and the mel loss alone
    teaches it.
    """

    def __init__(self, config: LossConfig) -> None:
        super().__init__()
        self.loss = MultiResolutionSTFTLoss(
            fft_sizes=list(config.stft_sizes),
            hop_sizes=list(config.stft_hops),
            win_lengths=list(config.stft_windows),
        )
        # The STFT reflects half a window at the ends, which a shorter item does not have.
        self.min_samples = max(config.stft_sizes) // 2 + 1

    def forward(self, audio_hat: Tensor, audio: Tensor, num_samples: Tensor) -> Tensor:
        """Compare [B, T] with [B, T]; item i counts up to sample num_samples[i]."""
        counts, silent = num_samples.tolist(), is_silent(audio).tolist()
        losses = [
            self.loss(self._item(audio_hat[i], count), self._item(audio[i], count)) * count
            for i, count in enumerate(counts)
            if not silent[i]
        ]
        nothing = audio_hat[:0].sum()  # 0, with a gradient of 0
        return (torch.stack(losses).sum() if losses else nothing) / sum(counts)

    def _item(self, audio: Tensor, count: int) -> Tensor:
        item = audio[:count].float()
        return nn.functional.pad(item, (0, max(0, self.min_samples - count)))[None, None]


def is_silent(audio: Tensor) -> Tensor:
    """Which items are silent: [B, T] -> [B] bool."""
    return audio.abs().amax(dim=-1) < SILENCE


class ReconstructionLoss(nn.Module):
    """The weighted spectral losses of a batch; a loss of weight 0 is not computed."""

    def __init__(self, config: LossConfig, audio: AudioSpec) -> None:
        super().__init__()
        self.config = config
        self.mel = MelLoss(config.mel, audio)
        self.stft = STFTLoss(config)
        self.multi_mel = nn.ModuleList(MelLoss(scale, audio) for scale in config.multi_mel)

    def forward(
        self, audio_hat: Tensor, audio: Tensor, num_samples: Tensor
    ) -> ReconstructionLosses:
        """Compare [B, T] with [B, T]; item i counts up to sample num_samples[i]."""
        config = self.config
        with torch.autocast(audio.device.type, enabled=False):
            arguments = (audio_hat.float(), audio.float(), num_samples)
            zero = arguments[0].new_zeros(())
            mel = self.mel(*arguments) if config.mel_weight else zero
            stft = self.stft(*arguments) if config.stft_weight else zero
            multi_mel = zero
            if config.multi_mel_weight and len(self.multi_mel):
                multi_mel = torch.stack([loss(*arguments) for loss in self.multi_mel]).mean()
        total = (
            config.mel_weight * mel
            + config.stft_weight * stft
            + config.multi_mel_weight * multi_mel
        )
        return ReconstructionLosses(total, mel, stft, multi_mel)


class AdversarialLoss(NamedTuple):
    """The two sides of one GAN loss; each is a mean over discriminators."""

    discriminator: Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]  # (real, fake) scores
    generator: Callable[[Sequence[Tensor]], Tensor]  # fake scores


def hinge_discriminator(real: Sequence[Tensor], fake: Sequence[Tensor]) -> Tensor:
    """max(0, 1 - D(real)) + max(0, 1 + D(fake)) (arXiv:1705.02894)."""
    return _mean(
        (1 - r.float()).relu().mean() + (1 + f.float()).relu().mean()
        for r, f in zip(real, fake, strict=True)
    )


def hinge_generator(fake: Sequence[Tensor]) -> Tensor:
    """max(0, 1 - D(fake)), the form of Vocos (arXiv:2306.00814, equation 2)."""
    return _mean((1 - f.float()).relu().mean() for f in fake)


def least_squares_discriminator(real: Sequence[Tensor], fake: Sequence[Tensor]) -> Tensor:
    """(1 - D(real))^2 + D(fake)^2 (arXiv:1611.04076)."""
    return _mean(
        (1 - r.float()).square().mean() + f.float().square().mean()
        for r, f in zip(real, fake, strict=True)
    )


def least_squares_generator(fake: Sequence[Tensor]) -> Tensor:
    """(1 - D(fake))^2."""
    return _mean((1 - f.float()).square().mean() for f in fake)


ADVERSARIAL_LOSSES = {
    "hinge": AdversarialLoss(hinge_discriminator, hinge_generator),
    "least_squares": AdversarialLoss(least_squares_discriminator, least_squares_generator),
}


def feature_matching(
    real: Sequence[DiscriminatorOutput], fake: Sequence[DiscriminatorOutput]
) -> Tensor:
    """L1 between the features of real and generated audio, summed over a discriminator's layers.

    As in HiFi-GAN (arXiv:2010.05646, equation 4), but a mean over discriminators.
    """
    return _mean(
        torch.stack(
            [
                (f.float() - r.float().detach()).abs().mean()
                for r, f in zip(real_output.features, fake_output.features, strict=True)
            ]
        ).sum()
        for real_output, fake_output in zip(real, fake, strict=True)
    )


def _mean(losses: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(losses)).mean()
