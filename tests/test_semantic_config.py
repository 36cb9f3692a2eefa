import dataclasses

import pytest

from tts_stack.config import load_config
from tts_stack.errors import ConfigError
from tts_stack.semantic.config import CodecTrainConfig


def load(*overrides):
    return load_config(CodecTrainConfig, "train_codec", ["corpus=c", "run=r", *overrides])


def changed(**changes):
    return dataclasses.replace(load().codec, **changes)


def test_shipped_codec_has_25_tokens_a_second_and_1000_codes():
    config = load().codec
    assert config.audio_spec.token_rate == 25.0
    assert config.audio_spec.samples_per_token == 960
    assert config.codebook_size == 1000


@pytest.mark.parametrize("experiment", ["demo_codec", "joe_codec"])
def test_experiments_load(experiment):
    assert load(f"experiment={experiment}").codec.codebook_size == 1000


def test_demo_uses_the_small_codec():
    assert load("experiment=demo_codec").codec.hidden_size == 128


def test_even_kernel_is_refused():
    with pytest.raises(ConfigError, match=r"codec.kernel_size is 6, expected an odd number"):
        changed(kernel_size=6)


def test_single_level_is_refused():
    with pytest.raises(
        ConfigError, match=r"codec.levels is \[8, 1\], expected numbers of at least"
    ):
        changed(levels=[8, 1])


def test_window_shorter_than_the_hop_is_refused():
    with pytest.raises(
        ConfigError, match=r"codec.n_fft is 100, expected at least codec.hop_length"
    ):
        changed(n_fft=100)


def test_zero_width_is_refused():
    with pytest.raises(ConfigError, match=r"codec.hidden_size is 0, expected at least 1"):
        changed(hidden_size=0)


def test_negative_ctc_weight_is_refused():
    with pytest.raises(ConfigError, match=r"ctc_weight is -1.0, expected 0 or more"):
        load("ctc_weight=-1.0")


def test_empty_batch_is_refused():
    with pytest.raises(ConfigError, match=r"batch_seconds is 0.0, expected more than 0"):
        load("batch_seconds=0.0")
