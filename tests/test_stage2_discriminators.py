import pytest
import torch
from torch import nn
from torch.testing import assert_close

from stage2_vocoder.config import DiscriminatorConfig
from stage2_vocoder.discriminators import (
    Discriminators,
    PeriodDiscriminator,
    SpectrogramDiscriminator,
    split_outputs,
)
from stage2_vocoder.model import count_parameters


def discriminators(**changes):
    torch.manual_seed(0)
    values = {
        "periods": [2, 3],
        "period_multiplier": 0.05,
        "num_scales": 2,
        "first_scale": 0,
        "scale_multiplier": 0.05,
        "spectrogram_sizes": [64],
        "spectrogram_channels": 2,
    }
    return Discriminators(DiscriminatorConfig(**{**values, **changes}))


def test_full_width_has_the_parameter_counts_of_hifi_gan():
    with torch.device("meta"):  # counts need no memory
        full = discriminators(
            periods=[2, 3, 5, 7, 11],
            period_multiplier=1.0,
            num_scales=3,
            scale_multiplier=1.0,
            spectrogram_sizes=[],
        )
    assert round(count_parameters(full.period) / 1e6, 1) == 41.1
    assert round(count_parameters(full.scale) / 1e6, 1) == 29.6


def test_only_the_first_scale_is_spectrally_normalised():
    scales = discriminators(num_scales=3).scale
    uses_spectral = [any("_u" in name for name, _ in scale.named_buffers()) for scale in scales]
    assert uses_spectral == [True, False, False]


@pytest.mark.parametrize("num_samples", [1000, 1001, 1499])
def test_there_is_one_output_a_discriminator_at_any_length(num_samples):
    outputs = discriminators()(torch.randn(2, num_samples))
    assert len(outputs) == 5
    assert all(output.score.shape[0] == 2 for output in outputs)


def test_a_period_discriminator_is_the_papers_2d_convolution():
    torch.manual_seed(0)
    discriminator = PeriodDiscriminator(3, 0.05)
    audio = torch.randn(2, 31)
    x = nn.functional.pad(audio[:, None], (0, 2), mode="reflect").reshape(2, 1, 11, 3)
    for index, layer in enumerate(discriminator.layers):
        stride = (3, 1) if index < 4 else 1
        weight = layer.weight[..., None]
        x = nn.functional.conv2d(x, weight, layer.bias, stride, padding=(2, 0))
        x = nn.functional.leaky_relu(x, 0.1)
    score = discriminator.score
    x = nn.functional.conv2d(x, score.weight[..., None], score.bias, padding=(1, 0))
    found = discriminator(audio).score.reshape(2, 3, -1)  # rows by phase
    assert_close(found, x[:, 0].transpose(1, 2))


def test_the_spectrogram_discriminator_does_not_hear_the_level():
    torch.manual_seed(0)
    discriminator = SpectrogramDiscriminator(64, 2)
    audio = torch.randn(1, 500)
    assert_close(discriminator(audio).score, discriminator(audio * 0.1).score)


def test_splitting_a_joint_batch_gives_what_separate_batches_give():
    judge = discriminators(num_scales=0)
    real, fake = torch.randn(2, 700), torch.randn(2, 700)
    joint = split_outputs(judge(torch.cat([real, fake])))
    for part, audio in zip(joint, (real, fake), strict=True):
        for found, wanted in zip(part, judge(audio), strict=True):
            assert_close(found.score, wanted.score)
            for one, other in zip(found.features, wanted.features, strict=True):
                assert_close(one, other)
