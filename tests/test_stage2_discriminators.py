import pytest
import torch
from torch import nn
from torch.nn.functional import avg_pool1d, conv1d, leaky_relu
from torch.testing import assert_close
from vocos.discriminators import MultiPeriodDiscriminator, MultiResolutionDiscriminator

from stage2_vocoder.config import DiscriminatorConfig
from stage2_vocoder.discriminators import (
    Discriminators,
    PeriodDiscriminator,
    ScaleDiscriminator,
    SpectrogramDiscriminator,
    require_crop,
    split_outputs,
)
from stage2_vocoder.model import count_parameters
from tts_stack.errors import ConfigError

OLD_WEIGHT_NORM = pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
FULL = {
    "periods": [2, 3, 5, 7, 11],
    "period_multiplier": 1.0,
    "num_scales": 3,
    "scale_multiplier": 1.0,
    "spectrogram_sizes": [],
}
SEGMENT = 8192  # samples: HiFi-GAN's training segment


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
        full = discriminators(**FULL)
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


def test_full_width_has_the_output_shapes_of_hifi_gan():
    """Worked out from the paper's strides (3 3 3 3 1; 1 2 2 4 4 1 1) on its 8192 samples."""
    period_lengths = {
        2: (1366, 456, 152, 51, 51, 51),
        3: (911, 304, 102, 34, 34, 34),
        5: (547, 183, 61, 21, 21, 21),
        7: (391, 131, 44, 15, 15, 15),
        11: (249, 83, 28, 10, 10, 10),
    }
    scale_lengths = (
        (8192, 4096, 2048, 512, 128, 128, 128, 128),
        (4097, 2049, 1025, 257, 65, 65, 65, 65),
        (2049, 1025, 513, 129, 33, 33, 33, 33),
    )
    with torch.device("meta"):
        outputs = discriminators(**FULL)(torch.empty(1, SEGMENT))
    for output, (period, lengths) in zip(outputs, period_lengths.items(), strict=False):
        channels = (32, 128, 512, 1024, 1024, 1)
        wanted = [(period, *size) for size in zip(channels, lengths, strict=True)]
        assert [tuple(feature.shape) for feature in output.features] == wanted
        assert output.score.shape == (1, period * lengths[-1])
    for output, lengths in zip(outputs[5:], scale_lengths, strict=True):
        channels = (128, 128, 256, 512, 1024, 1024, 1024, 1)
        wanted = [(1, *size) for size in zip(channels, lengths, strict=True)]
        assert [tuple(feature.shape) for feature in output.features] == wanted
        assert output.score.shape == (1, lengths[-1])


@OLD_WEIGHT_NORM
@pytest.mark.parametrize("num_samples", [SEGMENT, SEGMENT + 5])
def test_the_period_discriminators_are_those_of_vocos(num_samples):
    """The package vocos carries HiFi-GAN's period discriminators: same weights, same output."""
    theirs = MultiPeriodDiscriminator()
    ours = discriminators(**{**FULL, "num_scales": 0}).period
    assert count_parameters(theirs) == count_parameters(ours)
    audio, other = torch.randn(2, num_samples), torch.randn(2, num_samples)
    for mine, reference in zip(ours, theirs.discriminators, strict=True):
        pairs = zip(
            [*mine.layers, mine.score], [*reference.convs, reference.conv_post], strict=True
        )
        for layer, convolution in pairs:
            norm = layer.parametrizations.weight
            convolution.weight_g.data = norm.original0.data[..., None]
            convolution.weight_v.data = norm.original1.data[..., None]
            convolution.bias.data = layer.bias.data
    with torch.no_grad():
        real, _, real_features, _ = theirs(y=audio, y_hat=other)
        outputs = [mine(audio) for mine in ours]
    for output, score, features in zip(outputs, real, real_features, strict=True):
        assert output.score.shape == score.shape
        # They leave out the first layer; HiFi-GAN's feature matching has it.
        for found, wanted in zip(output.features[1:], features, strict=True):
            rows = wanted.permute(0, 3, 1, 2).flatten(0, 1)  # [B, C, F, P] -> [B P, C, F]
            assert_close(found, rows, atol=1e-5, rtol=1e-4)


def test_a_scale_discriminator_is_the_papers_grouped_convolutions():
    """Kernels, strides and groups of HiFi-GAN's appendix A, at a width that its groups divide."""
    torch.manual_seed(0)
    judge = discriminators(periods=[], num_scales=3, scale_multiplier=0.25, spectrogram_sizes=[])
    shapes = zip(
        (15, 41, 41, 41, 41, 41, 5), (1, 2, 2, 4, 4, 1, 1), (1, 4, 16, 16, 16, 16, 1), strict=True
    )
    shapes = list(shapes)
    audio = torch.randn(2, 3001)
    with torch.no_grad():
        outputs = judge(audio)
        x = audio[:, None]
        for index, (output, scale) in enumerate(zip(outputs, judge.scale, strict=True)):
            if index:
                x = avg_pool1d(x, 4, 2, padding=2)
            y = x
            for layer, feature, (kernel, stride, groups) in zip(
                scale.layers, output.features, shapes, strict=False
            ):
                y = conv1d(y, layer.weight, layer.bias, stride, kernel // 2, groups=groups)
                y = leaky_relu(y, 0.1)
                assert_close(feature, y)
            score = conv1d(y, scale.score.weight, scale.score.bias, padding=1)
            assert_close(output.score, score.flatten(1))


def largest_singular_values(scale):
    return [
        float(torch.linalg.matrix_norm(layer.weight.detach().flatten(1), 2))
        for layer in (*scale.layers, scale.score)
    ]


def test_a_spectral_norm_gives_every_weight_matrix_a_norm_of_one():
    judge = discriminators(num_scales=2)
    for _ in range(200):
        judge.refine_norms()
    assert largest_singular_values(judge.scale[0]) == pytest.approx([1] * 8, rel=1e-3)
    assert largest_singular_values(judge.scale[1]) != pytest.approx([1] * 8, rel=1e-3)


def test_spectral_norms_move_once_a_step_however_often_audio_is_judged():
    judge = discriminators().train()
    audio = torch.randn(2, 700)

    def vectors():
        return {name: value.clone() for name, value in judge.named_buffers() if "_u" in name}

    before = vectors()
    first = judge(audio)[2].score
    assert torch.equal(judge(audio)[2].score, first)
    assert before and all(torch.equal(before[name], value) for name, value in vectors().items())
    judge.refine_norms()
    assert any(not torch.equal(before[name], value) for name, value in vectors().items())


@pytest.mark.parametrize("use_spectral_norm", [True, False])
def test_gradient_reaches_every_weight_of_a_scale_discriminator(use_spectral_norm):
    scale = ScaleDiscriminator(0.05, use_spectral_norm=use_spectral_norm)
    scale(torch.randn(2, 700)).score.square().sum().backward()
    assert all(float(weight.grad.abs().sum()) > 0 for weight in scale.parameters())


@OLD_WEIGHT_NORM
def test_banded_spectrogram_discriminators_are_those_of_vocos():
    sizes = {"spectrogram_sizes": [512, 256, 128], "spectrogram_channels": 32}
    ours = discriminators(periods=[], num_scales=0, spectrogram_kind="banded", **sizes)
    theirs = MultiResolutionDiscriminator((512, 256, 128))
    theirs.load_state_dict(
        {name.replace(".bands.", "."): one for name, one in rename(ours).items()}
    )
    real, fake = torch.randn(2, 2000), torch.randn(2, 2000)
    with torch.no_grad():
        wanted = theirs(real, fake)
        outputs = [ours(real), ours(fake)]
    for side, found in enumerate(outputs):
        for output, score, features in zip(found, wanted[side], wanted[side + 2], strict=True):
            assert_close(output.score, score.flatten(1), rtol=0, atol=0)
            assert_close(output.features, features, rtol=0, atol=0)


def rename(judge):
    states = judge.spectrogram.state_dict()
    return {f"discriminators.{name}": tensor for name, tensor in states.items()}


@OLD_WEIGHT_NORM
def test_the_full_discriminators_have_vocos_third_kind_at_its_size():
    from stage2_vocoder.config import VocoderTrainConfig
    from tts_stack.config import load_config

    config = load_config(VocoderTrainConfig, "train_vocoder", ["corpus=c", "run=r"])
    with torch.device("meta"):
        found, wanted = Discriminators(config.discriminator), MultiResolutionDiscriminator()
    assert count_parameters(found.spectrogram) == count_parameters(wanted)
    assert len(found.spectrogram) == 3


def test_building_a_banded_discriminator_warns_of_nothing(recwarn):
    discriminators(spectrogram_kind="banded")
    assert not recwarn.list


@pytest.mark.parametrize("kind", ["whole", "banded"])
def test_gradient_reaches_every_weight_of_a_spectrogram_discriminator(kind):
    judge = discriminators(periods=[], num_scales=0, spectrogram_kind=kind)
    (output,) = judge(torch.randn(2, 700))
    output.score.square().sum().backward()
    assert all(float(weight.grad.abs().sum()) > 0 for weight in judge.parameters())


def test_a_crop_that_a_banded_discriminator_cannot_reflect_is_refused():
    discriminators(spectrogram_kind="banded")(torch.randn(1, 33))
    config = DiscriminatorConfig([], 1.0, 0, 0, 1.0, [64], 2, "banded")
    require_crop(config, 33)
    with pytest.raises(ConfigError, match="crops of 32 samples, expected more than half of .* 64;"):
        require_crop(config, 32)
