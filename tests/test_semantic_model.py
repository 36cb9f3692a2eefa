import pytest
import torch
from torch.testing import assert_close

from tts_stack.semantic.config import CodecConfig
from tts_stack.semantic.model import build_codec, build_log_mel, token_mask


def small_config(**changes):
    values = {
        "id": "test",
        "sample_rate": 24000,
        "n_fft": 1024,
        "hop_length": 240,
        "n_mels": 20,
        "frames_per_token": 4,
        "levels": [8, 5, 5, 5],
        "hidden_size": 16,
        "ffn_size": 32,
        "kernel_size": 5,
        "num_encoder_blocks": 2,
        "num_decoder_blocks": 2,
    }
    return CodecConfig(**{**values, **changes})


def codec_and_mel(num_frames, num_clips=1, **changes):
    torch.manual_seed(0)
    codec = build_codec(small_config(**changes)).eval()
    return codec, torch.randn(num_clips, 20, num_frames) * 2 - 5


def test_token_mask_is_one_on_a_clips_own_tokens():
    expected = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    assert_close(token_mask(torch.tensor([2, 3]), 3), expected)


@pytest.mark.parametrize("frames_per_token", [1, 2, 3, 4, 8])
def test_each_token_stands_for_frames_per_token_frames(frames_per_token):
    for num_tokens in (1, 2, 5):
        codec, mel = codec_and_mel(num_tokens * frames_per_token, frames_per_token=frames_per_token)
        output = codec(mel, torch.tensor([num_tokens]))
        assert output.indices.shape == (1, num_tokens)
        assert output.mel_hat.shape == mel.shape


def test_padding_changes_neither_codes_nor_reconstruction():
    codec, mel = codec_and_mel(12)
    padded = torch.nn.functional.pad(mel, (0, 20), value=7.0)
    alone, together = codec(mel, torch.tensor([3])), codec(padded, torch.tensor([3]))
    assert_close(together.indices[:, :3], alone.indices)
    assert_close(together.mel_hat[..., :12], alone.mel_hat)


def test_decode_gives_the_reconstruction_of_forward():
    codec, mel = codec_and_mel(40, num_clips=2)
    num_tokens = torch.tensor([10, 4])
    output = codec(mel, num_tokens)
    decoded = codec.decode(output.indices, num_tokens)
    assert_close(decoded[0], output.mel_hat[0])
    assert_close(decoded[1, :, :16], output.mel_hat[1, :, :16])


def test_encode_gives_the_codes_of_forward():
    codec, mel = codec_and_mel(24)
    assert_close(codec.encode(mel, torch.tensor([6])), codec(mel, torch.tensor([6])).indices)


def test_statistics_scale_the_reconstruction_back_to_nats():
    codec, mel = codec_and_mel(16)
    before = codec(mel, torch.tensor([4])).mel_hat
    codec.set_statistics(torch.full((20,), 3.0), torch.full((20,), 2.0))
    after = codec(mel * 2 + 3, torch.tensor([4])).mel_hat
    assert_close(after, before * 2 + 3)


def test_shipped_shape_has_about_2_7_million_parameters():
    config = small_config(n_mels=100, hidden_size=256, ffn_size=768, kernel_size=7)
    config.num_encoder_blocks = config.num_decoder_blocks = 3
    count = sum(parameter.numel() for parameter in build_codec(config).parameters())
    assert 2_600_000 < count < 2_800_000


def test_log_mel_has_a_frame_a_hop():
    config = small_config()
    assert build_log_mel(config)(torch.zeros(1, 960)).shape == (1, 20, 4)
