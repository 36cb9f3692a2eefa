import pytest
import torch
from torch.testing import assert_close

from tts_stack.contract import CodecIdentity
from tts_stack.errors import DataError
from tts_stack.semantic.config import CodecConfig
from tts_stack.semantic.model import build_codec, build_log_mel
from tts_stack.semantic.tokenizer import MelCodecTokenizer


@pytest.fixture(scope="module")
def tokenizer():
    config = CodecConfig(
        id="test",
        sample_rate=24000,
        n_fft=1024,
        hop_length=240,
        n_mels=100,
        frames_per_token=4,
        levels=[8, 5, 5, 5],
        hidden_size=32,
        ffn_size=64,
        kernel_size=7,
        num_encoder_blocks=2,
        num_decoder_blocks=2,
    )
    torch.manual_seed(0)
    codec = build_codec(config)
    codec.set_statistics(torch.full((100,), -5.0), torch.full((100,), 2.0))
    identity = CodecIdentity("test", "0" * 64, config.codebook_size)
    return MelCodecTokenizer(codec, build_log_mel(config), identity, config.audio_spec)


def noise(num_samples):
    generator = torch.Generator().manual_seed(num_samples)
    return torch.randn(num_samples, generator=generator) * 0.1


@pytest.mark.parametrize(
    "num_samples", [1, 2, 239, 240, 241, 959, 960, 961, 1919, 1920, 1921, 2881, 4800]
)
def test_a_clip_has_a_token_for_each_960_samples_begun(tokenizer, num_samples):
    (tokens,) = tokenizer.encode([noise(num_samples)])
    assert tokens.shape == (-(-num_samples // 960),)
    assert tokens.dtype == torch.int64


def test_clips_of_a_batch_have_the_tokens_they_have_alone(tokenizer):
    clips = [noise(length) for length in (1, 700, 960, 5000, 24000, 30001)]
    together = tokenizer.encode(clips)
    for clip, tokens in zip(clips, together, strict=True):
        assert_close(tokens, tokenizer.encode([clip])[0])


def test_zeros_up_to_the_token_boundary_change_nothing(tokenizer):
    clip = noise(3000)
    padded = torch.nn.functional.pad(clip, (0, 3840 - 3000))
    assert_close(tokenizer.encode([clip]), tokenizer.encode([padded]))


def test_a_tensor_of_clips_and_numpy_clips_are_read_alike(tokenizer):
    clips = torch.stack([noise(2000), noise(2000) * 2])
    assert_close(tokenizer.encode(clips), tokenizer.encode([clip.numpy() for clip in clips]))


def test_decoded_clips_have_four_frames_a_token_and_do_not_depend_on_the_batch(tokenizer):
    tokens = [torch.tensor([5, 999, 0]), torch.tensor([17])]
    mels = tokenizer.decode_mel(tokens)
    assert [mel.shape for mel in mels] == [(100, 12), (100, 4)]
    assert_close(mels[1], tokenizer.decode_mel(tokens[1:])[0])


def test_log_mel_has_the_frames_of_decode_mel(tokenizer):
    clips = [noise(1000), noise(5000)]
    decoded = tokenizer.decode_mel(tokenizer.encode(clips))
    assert [mel.shape for mel in tokenizer.log_mel(clips)] == [mel.shape for mel in decoded]


def test_an_empty_clip_is_refused(tokenizer):
    with pytest.raises(
        DataError, match=r"clip 1: has shape \[0\], expected \[T\] with at least one"
    ):
        tokenizer.encode([noise(10), torch.zeros(0)])


def test_stereo_is_refused(tokenizer):
    with pytest.raises(DataError, match=r"clip 0: has shape \[2, 50\], expected \[T\]"):
        tokenizer.encode([torch.zeros(2, 50)])


def test_a_token_outside_the_codebook_is_refused(tokenizer):
    with pytest.raises(DataError, match=r"clip 0: holds tokens 3 to 1000, expected 0 to 999"):
        tokenizer.decode_mel([torch.tensor([3, 1000])])
