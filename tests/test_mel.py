import pytest
import torch
from torch.testing import assert_close

from tts_stack.mel import LOG_FLOOR, LogMel


def make() -> LogMel:
    return LogMel(sample_rate=24000, n_fft=1024, hop_length=240, n_mels=100)


@pytest.mark.parametrize("frames", [1, 4, 7, 100])
def test_there_is_exactly_one_frame_a_hop(frames):
    assert make()(torch.randn(2, 240 * frames)).shape == (2, 100, frames)


def test_silence_is_the_floor():
    assert_close(make()(torch.zeros(1, 2400)), torch.full((1, 100, 10), LOG_FLOOR).log())


def test_a_tone_peaks_in_the_band_that_holds_it():
    time = torch.arange(24000) / 24000
    mel = make()(torch.sin(2 * torch.pi * 1000 * time)[None])[0, :, 50]
    hz_to_mel = lambda hz: 2595 * torch.log10(torch.tensor(1 + hz / 700))  # noqa: E731 - HTK scale
    expected = float(hz_to_mel(1000) / hz_to_mel(12000) * 101 - 1)
    assert abs(int(mel.argmax()) - expected) <= 1


def test_a_length_between_frames_is_a_programming_error():
    with pytest.raises(ValueError, match="not a multiple of 240"):
        make()(torch.zeros(1, 241))


def test_no_table_enters_a_checkpoint():
    assert make().state_dict() == {}
