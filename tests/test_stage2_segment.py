import pytest
import torch
from stage2_support import HIDDEN_SIZE, SPEC, TINY
from torch.testing import assert_close

from stage2_vocoder.model import build_vocoder
from stage2_vocoder.segment import Segment, crop_tokens, random_segment, slice_audio, with_margin
from tts_stack.contract import AudioSpec


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_one_second_is_25_tokens_at_25_hz_and_never_none():
    spec = AudioSpec(24000, 240, 4)
    assert crop_tokens(1.0, spec) == 25
    assert crop_tokens(0.001, spec) == 1


def test_margin_is_cut_at_the_ends_of_the_utterance():
    assert with_margin(2, 5, 3, 6) == Segment(2, 5, 0, 6)
    assert with_margin(2, 5, 1, 6) == Segment(2, 5, 1, 6)
    assert with_margin(2, 5, 1, 6).offset == 1


@pytest.mark.parametrize(("num_tokens", "wanted"), [(1, 1), (9, 9), (10, 10), (11, 10), (50, 10)])
def test_clips_around_the_crop_length_give_what_they_have(num_tokens, wanted):
    for seed in range(20):
        segment = random_segment(num_tokens, 10, 4, generator(seed))
        assert segment.num_tokens == wanted
        assert 0 <= segment.window_start <= segment.crop_start
        assert segment.crop_stop <= segment.window_stop <= num_tokens


def test_every_place_is_reached_the_last_one_included():
    starts = {random_segment(13, 10, 0, generator(seed)).crop_start for seed in range(60)}
    assert starts == {0, 1, 2, 3}


def test_slices_differ_by_row_and_end_in_silence():
    audio = torch.arange(12.0).reshape(2, 6)
    found = slice_audio(audio, torch.tensor([1, 4]), 3, torch.tensor([3, 2]))
    assert_close(found, torch.tensor([[1.0, 2, 3], [10, 11, 0]]))


@torch.no_grad()
@pytest.mark.parametrize("start", [0, 1, 7, 15, 19])
def test_a_crop_decoded_with_its_margin_is_the_slice_of_the_whole(start):
    torch.manual_seed(0)
    vocoder = build_vocoder(TINY, hidden_size=HIDDEN_SIZE, audio=SPEC).eval()
    hidden_states, size = torch.randn(1, HIDDEN_SIZE, 24), SPEC.samples_per_token
    segment = with_margin(start, start + 5, vocoder.receptive_field_tokens(), 24)
    window = vocoder(hidden_states[:, :, segment.window_start : segment.window_stop])
    counts = torch.tensor([5 * size])
    crop = slice_audio(window, torch.tensor([segment.offset * size]), 5 * size, counts)
    whole = vocoder(hidden_states)[:, start * size : (start + 5) * size]
    assert_close(crop, whole, atol=1e-5, rtol=1e-5)
