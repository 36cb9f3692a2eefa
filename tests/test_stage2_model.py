import pytest
import torch
from stage2_support import HIDDEN_SIZE, SPEC, TINY
from torch.testing import assert_close
from vocos.heads import ISTFTHead

from stage2_vocoder.config import VocoderConfig
from stage2_vocoder.model import MaskedISTFTHead, build_vocoder, count_parameters, run_backbone
from tts_stack.contract import AudioSpec
from tts_stack.errors import ConfigError


def tiny_vocoder():
    torch.manual_seed(0)
    return build_vocoder(TINY, hidden_size=HIDDEN_SIZE, audio=SPEC).eval()


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7, 40])
def test_s_tokens_give_exactly_s_times_samples_per_token(num_tokens):
    audio = tiny_vocoder()(torch.randn(2, HIDDEN_SIZE, num_tokens))
    assert audio.shape == (2, num_tokens * SPEC.samples_per_token)
    assert audio.dtype == torch.float32


@pytest.mark.parametrize(
    ("dim", "inner", "layers", "wanted"),
    [
        (256, 768, 6, 4_740_546),
        (384, 1152, 8, 12_085_954),
    ],
)
def test_shipped_sizes_have_their_parameter_counts(dim, inner, layers, wanted):
    config = VocoderConfig(dim, inner, 3, layers, 3, 960)
    vocoder = build_vocoder(config, hidden_size=256, audio=AudioSpec(24000, 240, 4))
    assert count_parameters(vocoder) == wanted


@torch.no_grad()
def test_padding_in_a_batch_leaves_every_items_audio_alone():
    vocoder = tiny_vocoder()
    lengths = torch.tensor([9, 1, 4, 8])
    hidden_states = torch.randn(4, HIDDEN_SIZE, 9) * 3
    batched = vocoder(hidden_states, lengths)
    for index, length in enumerate(lengths.tolist()):
        alone = vocoder(hidden_states[index : index + 1, :, :length])[0]
        end = length * SPEC.samples_per_token
        assert_close(batched[index, :end], alone, atol=1e-5, rtol=1e-5)
        assert torch.all(batched[index, end:] == 0)


@torch.no_grad()
def test_without_padding_the_head_and_backbone_are_those_of_vocos():
    vocoder = tiny_vocoder()
    x = torch.randn(2, TINY.dim, 12)
    assert_close(run_backbone(vocoder.backbone, x, None), vocoder.backbone(x))
    head = ISTFTHead(TINY.dim, 160, 40, padding="same")
    masked = MaskedISTFTHead(TINY.dim, 160, 40)
    masked.load_state_dict(head.state_dict(), strict=False)
    features = torch.randn(2, 12, TINY.dim)
    assert_close(masked(features), head(features))


def test_receptive_field_is_the_sum_of_the_layers():
    # Tokens: kernel 3 -> 1, kernel 7 -> 3. Frames: 3 + 3, and a window of 4 hops reaches 2.
    assert tiny_vocoder().receptive_field_tokens() == 1 + 3 + 2  # 8 frames are 2 tokens


@torch.no_grad()
def test_a_token_changes_no_sample_outside_the_receptive_field_and_some_at_its_edge():
    vocoder = tiny_vocoder()
    for parameter in vocoder.parameters():  # Vocos starts so small that far effects round to 0
        parameter.normal_(0, 0.3)
    reach, middle, size = vocoder.receptive_field_tokens(), 10, SPEC.samples_per_token
    hidden_states = torch.randn(1, HIDDEN_SIZE, 21)
    changed = hidden_states.clone()
    changed[:, :, middle] = 5 * torch.randn(HIDDEN_SIZE)  # a constant would vanish in the norm
    difference = (vocoder(hidden_states) - vocoder(changed))[0].abs().reshape(-1, size).amax(1)
    outside = [token for token in range(21) if abs(token - middle) > reach]
    assert torch.all(difference[outside] == 0)
    assert difference[middle - reach] > 0 and difference[middle + reach] > 0


@torch.no_grad()
def test_bf16_autocast_decodes_because_the_head_stays_in_float32():
    with torch.autocast("cpu", torch.bfloat16):
        audio = tiny_vocoder()(torch.randn(1, HIDDEN_SIZE, 4))
    assert audio.dtype == torch.float32
    assert torch.isfinite(audio).all()


def test_weights_hold_no_tables():
    assert not [name for name in tiny_vocoder().state_dict() if "window" in name]


def test_a_vocoder_overfits_one_batch():
    torch.manual_seed(0)
    vocoder = build_vocoder(TINY, hidden_size=HIDDEN_SIZE, audio=SPEC)
    hidden_states = torch.randn(1, HIDDEN_SIZE, 4)
    time = torch.arange(640) / 8000
    audio = 0.3 * torch.sin(2 * torch.pi * 200 * time)[None]
    optimizer = torch.optim.Adam(vocoder.parameters(), 1e-2)
    losses = []
    for _ in range(150):
        loss = (vocoder(hidden_states) - audio).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.05 * losses[0]


@pytest.mark.parametrize("n_fft", [40, 41, 161])
def test_n_fft_that_does_not_suit_the_hop_is_refused(n_fft):
    config = VocoderConfig(8, 16, 1, 1, 3, n_fft)
    with pytest.raises(ConfigError, match=f"n_fft is {n_fft}, expected more than hop_length 40"):
        build_vocoder(config, hidden_size=4, audio=SPEC)
