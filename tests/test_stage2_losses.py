import math

import pytest
import torch
from auraloss.freq import MultiResolutionSTFTLoss
from torch.testing import assert_close
from vocos.loss import (
    DiscriminatorLoss,
    FeatureMatchingLoss,
    GeneratorLoss,
    MelSpecReconstructionLoss,
)

from stage2_vocoder.config import LossConfig, MelScaleConfig
from stage2_vocoder.discriminators import DiscriminatorOutput
from stage2_vocoder.losses import (
    ADVERSARIAL_LOSSES,
    MelLoss,
    ReconstructionLoss,
    STFTLoss,
    feature_matching,
    is_silent,
)
from tts_stack.contract import AudioSpec
from tts_stack.errors import ConfigError

SPEC = AudioSpec(8000, 40, 4)
MEL = MelScaleConfig(160, 40, 12)


def loss_config(**changes):
    values = {
        "mel": MEL,
        "mel_weight": 2.0,
        "multi_mel": [MEL, MelScaleConfig(80, 20, 8)],
        "multi_mel_weight": 0.5,
        "stft_sizes": [64, 128],
        "stft_hops": [16, 32],
        "stft_windows": [64, 128],
        "stft_weight": 3.0,
        "adversarial_kind": "hinge",
        "adversarial_weight": 1.0,
        "feature_weight": 1.0,
    }
    return LossConfig(**{**values, **changes})


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_equal_audio_costs_nothing():
    audio, count = noise(2, 640), torch.tensor([640, 640])
    losses = ReconstructionLoss(loss_config(), SPEC)(audio, audio, count)
    assert losses.total == 0 and losses.mel == 0 and losses.stft == 0


def test_mel_of_audio_e_times_louder_is_one_nat():
    audio = noise(1, 640)
    count = torch.tensor([640])
    assert_close(MelLoss(MEL, SPEC)(audio * math.e, audio, count), torch.tensor(1.0))


def test_the_total_is_the_weighted_sum():
    audio, other, count = noise(1, 640), noise(1, 640, seed=1), torch.tensor([640])
    losses = ReconstructionLoss(loss_config(), SPEC)(other, audio, count)
    assert_close(losses.total, 2 * losses.mel + 3 * losses.stft + 0.5 * losses.multi_mel)


def test_a_loss_of_weight_zero_is_not_computed():
    config = loss_config(stft_weight=0.0, multi_mel_weight=0.0)
    losses = ReconstructionLoss(config, SPEC)(
        noise(1, 640), noise(1, 640, seed=1), torch.tensor([640])
    )
    assert losses.stft == 0 and losses.multi_mel == 0 and losses.mel > 0


def test_padding_is_excluded_and_items_count_by_length():
    audio, other = noise(2, 960), noise(2, 960, seed=1)
    audio[1, 320:] = 0
    other[1, 320:] = 0
    count = torch.tensor([960, 320])
    for loss in (MelLoss(MEL, SPEC), STFTLoss(loss_config())):
        alone = [
            loss(other[i : i + 1, :n], audio[i : i + 1, :n], count[i : i + 1])
            for i, n in ((0, 960), (1, 320))
        ]
        assert_close(loss(other, audio, count), (alone[0] * 960 + alone[1] * 320) / 1280)


def test_one_whole_item_has_the_loss_of_auraloss():
    audio, other = noise(1, 640), noise(1, 640, seed=1)
    reference = MultiResolutionSTFTLoss([64, 128], [16, 32], [64, 128])
    found = STFTLoss(loss_config())(other, audio, torch.tensor([640]))
    assert_close(found, reference(other[:, None], audio[:, None]))


def test_an_item_shorter_than_half_a_window_has_a_finite_loss():
    config = loss_config(stft_sizes=[64, 1024], stft_windows=[64, 1024])
    loss = STFTLoss(config)(noise(1, 160), noise(1, 160, seed=1), torch.tensor([160]))
    assert torch.isfinite(loss) and loss > 0


def test_silence_gives_finite_gradients():
    audio_hat = torch.zeros(1, 640, requires_grad=True)
    loss = ReconstructionLoss(loss_config(), SPEC)(
        audio_hat, torch.zeros(1, 640), torch.tensor([640])
    )
    loss.total.backward()
    assert torch.isfinite(audio_hat.grad).all()


def test_spectra_are_float32_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        losses = ReconstructionLoss(loss_config(), SPEC)(
            noise(1, 640).bfloat16(), noise(1, 640), torch.tensor([640])
        )
    assert losses.total.dtype == torch.float32


def test_hinge_by_hand():
    hinge = ADVERSARIAL_LOSSES["hinge"]
    real, fake = [torch.tensor([2.0, 0.5])], [torch.tensor([-3.0, 0.0])]
    # real: (0 + 0.5) / 2; fake: (0 + 1) / 2; generator: (4 + 1) / 2
    assert_close(hinge.discriminator(real, fake), torch.tensor(0.75))
    assert_close(hinge.generator(fake), torch.tensor(2.5))


def test_least_squares_by_hand():
    least_squares = ADVERSARIAL_LOSSES["least_squares"]
    real, fake = [torch.tensor([2.0, 1.0])], [torch.tensor([-1.0, 0.0])]
    # real: (1 + 0) / 2; fake: (1 + 0) / 2; generator: (4 + 1) / 2
    assert_close(least_squares.discriminator(real, fake), torch.tensor(1.0))
    assert_close(least_squares.generator(fake), torch.tensor(2.5))


@pytest.mark.parametrize("kind", ["hinge", "least_squares"])
def test_twice_the_discriminators_is_the_same_loss(kind):
    loss = ADVERSARIAL_LOSSES[kind]
    real, fake = [noise(3)], [noise(3, seed=1)]
    assert_close(loss.discriminator(real * 2, fake * 2), loss.discriminator(real, fake))
    assert_close(loss.generator(fake * 2), loss.generator(fake))


def test_feature_matching_sums_layers_and_averages_discriminators():
    def output(*features):
        return DiscriminatorOutput(torch.zeros(1), [torch.tensor(feature) for feature in features])

    real = [output([0.0, 0.0], [1.0]), output([0.0])]
    fake = [output([1.0, 3.0], [0.0]), output([5.0])]
    assert_close(feature_matching(real, fake), torch.tensor(((2 + 1) + 5) / 2))


def test_a_hop_that_does_not_divide_a_token_is_refused():
    with pytest.raises(
        ConfigError, match="hop_length is 50, expected a divisor of samples_per_token 160"
    ):
        MelLoss(MelScaleConfig(160, 50, 12), SPEC)


def judged(seed, *shapes):
    """An output with random features, the last of which is the score."""
    features = [noise(*shape, seed=seed + index) for index, shape in enumerate(shapes)]
    return DiscriminatorOutput(features[-1], features)


SHAPES = (((2, 3, 8), (2, 9)), ((2, 5, 4), (2, 2, 2), (2, 4)), ((2, 7),))


def test_hinge_and_feature_matching_are_those_of_vocos_over_the_number_of_discriminators():
    """Vocos' training divides each sum by the number of sub-discriminators (its section 3.3)."""
    real = [judged(10 * index, *shapes) for index, shapes in enumerate(SHAPES)]
    fake = [judged(10 * index + 100, *shapes) for index, shapes in enumerate(SHAPES)]
    real_scores, fake_scores = ([output.score for output in side] for side in (real, fake))
    hinge = ADVERSARIAL_LOSSES["hinge"]
    wanted = DiscriminatorLoss()(real_scores, fake_scores)[0] / 3
    assert_close(hinge.discriminator(real_scores, fake_scores), wanted[0])
    assert_close(hinge.generator(fake_scores), GeneratorLoss()(fake_scores)[0][0] / 3)
    features = [[output.features for output in side] for side in (real, fake)]
    assert_close(feature_matching(real, fake), FeatureMatchingLoss()(*features)[0] / 3)


def test_the_mel_loss_is_that_of_vocos_on_frames_half_a_hop_later():
    """Their frames stand on the hop's first sample, ours on its middle; at the ends is silence."""
    n_fft, hop, n_mels, silent = 160, 40, 12, 400
    audio = torch.nn.functional.pad(noise(1, 4000), (silent, silent))
    other = torch.nn.functional.pad(noise(1, 4000, seed=1), (silent, silent))
    theirs = MelSpecReconstructionLoss(8000, n_fft, hop, n_mels)
    ours = MelLoss(MelScaleConfig(n_fft, hop, n_mels), SPEC)
    wanted = theirs(other[:, hop // 2 :], audio[:, hop // 2 :])
    # The silent frames at the ends cost nothing, so the means differ by the number of frames alone.
    num_frames = (audio.shape[1] // hop, (audio.shape[1] - hop // 2) // hop + 1)
    found = ours(other, audio, torch.tensor([audio.shape[1]]))
    assert_close(found * num_frames[0], wanted * num_frames[1], rtol=1e-3, atol=1e-3)


def test_a_mel_loss_by_hand():
    """One frame twice as loud, one four times as loud, two alike: (ln 2 + ln 4) / 4."""
    audio = noise(1, 160)
    factor = torch.tensor([2.0, 4.0, 1.0, 1.0]).repeat_interleave(40)
    loss = MelLoss(MelScaleConfig(40, 40, 4), SPEC)
    wanted = torch.tensor(math.log(2) + math.log(4)) / 4
    # Without overlap a frame sees its own samples alone.
    assert_close(loss(audio * factor, audio, torch.tensor([160])), wanted)


def test_an_item_counts_as_silent_below_60_db():
    audio = torch.zeros(3, 100)
    audio[1, 50], audio[2, 50] = 0.9e-3, -1.1e-3
    assert is_silent(audio).tolist() == [True, True, False]


def test_a_silent_item_adds_nothing_to_the_stft_loss_and_keeps_its_weight():
    audio, other = noise(2, 640), noise(2, 640, seed=1)
    audio[1] = 0
    loss, count = STFTLoss(loss_config()), torch.tensor([640, 640])
    alone = loss(other[:1], audio[:1], count[:1])
    assert_close(loss(other, audio, count), alone / 2)


def test_a_batch_of_silence_has_no_stft_loss_and_a_gradient_of_zero():
    audio_hat = noise(2, 640).requires_grad_()
    loss = STFTLoss(loss_config())(audio_hat, torch.zeros(2, 640), torch.tensor([640, 320]))
    loss.backward()
    assert loss == 0 and torch.all(audio_hat.grad == 0)
