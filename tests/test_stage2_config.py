import pytest

from stage2_vocoder.config import VocoderTrainConfig
from tts_stack.config import config_groups, load_config
from tts_stack.errors import ConfigError


def load(*overrides):
    return load_config(VocoderTrainConfig, "train_vocoder", ["corpus=c", "run=r", *overrides])


@pytest.mark.parametrize("group", ["vocoder", "discriminator", "losses"])
def test_every_choice_of_a_group_loads(group):
    for choice in config_groups()[group]:
        load(f"{group}={choice}")


@pytest.mark.parametrize("name", ["demo_vocoder", "joe_vocoder"])
def test_presets_load_with_small_discriminators(name):
    config = load(f"experiment={name}")
    assert config.discriminator.period_multiplier < 1
    assert config.reconstruction.max_steps is not None


def test_whole_utterances_are_the_default_of_reconstruction():
    assert load().reconstruction.crop_seconds is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["vocoder.input_kernel_size=4"], "input_kernel_size is 4, expected an odd number"),
        (["vocoder.dim=0"], "dim is 0, expected at least 1"),
        (
            ["losses.adversarial_kind=wasserstein"],
            "is 'wasserstein', expected hinge or least_squares",
        ),
        (["losses.stft_hops=[1]"], "3 stft_sizes, 1 stft_hops and 3 stft_windows"),
        (["adversarial.decode=some"], "decode is 'some', expected crop or full"),
        (["adversarial.ema_decay=1.0"], "ema_decay is 1.0, expected 0 to below 1"),
        (["discriminator.spectrogram_kind=some"], "is 'some', expected whole or banded"),
        (["data.states=none"], "data.states is 'none', expected cached or on_the_fly"),
        (["data.state_noise=-0.1"], "data.state_noise is -0.1, expected at least 0"),
        (["data.quality_every=-1"], "data.quality_every is -1, expected at least 0"),
        (["reconstruction.crop_seconds=0"], "crop_seconds is 0"),
        (["adversarial.margin_tokens=-1"], "margin_tokens is -1, expected at least 0"),
        (
            [
                "discriminator.periods=[]",
                "discriminator.num_scales=0",
                "discriminator.spectrogram_sizes=[]",
            ],
            "name no discriminator",
        ),
        (["vocoder.dmi=3"], "unknown key vocoder.dmi; the nearest valid key is vocoder.dim"),
    ],
)
def test_a_bad_value_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load(*overrides)
