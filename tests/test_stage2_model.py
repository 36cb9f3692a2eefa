import pytest
import torch
from stage2_support import HIDDEN_SIZE, SPEC, TINY
from torch.testing import assert_close
from vocos.heads import ISTFTHead

from stage2_vocoder.config import VocoderConfig, VocoderTrainConfig
from stage2_vocoder.model import (
    LayerMix,
    MaskedISTFTHead,
    build_vocoder,
    count_parameters,
    run_backbone,
)
from tts_stack.config import load_config
from tts_stack.contract import AudioSpec
from tts_stack.errors import ConfigError, DataError


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


def test_sopranos_shape_counts_as_sopranos_decoder_but_for_what_differs():
    """Soprano's decoder has 30,352,642 parameters (30.35 M), its 8 blocks 28,379,136 of them."""
    given = ["corpus=none", "run=none", "vocoder=soprano_32k"]
    config = load_config(VocoderTrainConfig, "train_vocoder", given).vocoder
    vocoder = build_vocoder(config, hidden_size=512, audio=AudioSpec(32000, 512, 4))
    backbone, dim = vocoder.backbone, 768
    same = [vocoder.embed, vocoder.head, backbone.final_layer_norm, backbone.norm]
    blocks = sum(count_parameters(block) for block in backbone.convnext)
    wider_kernels = 8 * dim * (7 - 3)  # Vocos' blocks read 7 frames, Soprano's 3
    assert blocks - wider_kernels == 28_379_136
    assert sum(map(count_parameters, same)) + blocks - wider_kernels == 30_352_642
    # Only here: the states are normalised, tokens are upsampled by a learned layer (Soprano
    # interpolates), and Vocos' first convolution follows.
    only_here = [vocoder.norm, vocoder.upsample, backbone.embed]
    counts = [count_parameters(module) for module in only_here]
    assert counts == [2 * 512, 4 * dim * dim + dim, 7 * dim * dim + dim]
    assert count_parameters(vocoder) == 30_352_642 + wider_kernels + sum(counts) == 36_867_842
    assert vocoder(torch.randn(1, 512, 2)).shape == (1, 2 * 2048)


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


@torch.no_grad()
@pytest.mark.parametrize("hop_length", [40, 41])
def test_an_odd_hop_is_as_exact_as_an_even_one(hop_length):
    """441 samples, a hundredth of a second at 44.1 kHz: n_fft - hop is odd then."""
    torch.manual_seed(0)
    head = MaskedISTFTHead(8, 164, hop_length)
    spectrum = torch.zeros(1, 83, 9, dtype=torch.complex64)
    head.spectrum = lambda x: spectrum
    frame = (torch.arange(hop_length * 9 + 164) * 0.3).sin()
    for index in range(9):  # the STFT of a tone, frames centred on their hop
        start = index * hop_length
        spectrum[0, :, index] = torch.fft.rfft(frame[start : start + 164] * head.istft.window)
    wanted = frame[head.padding : head.padding + 9 * hop_length]
    x = torch.zeros(1, 9, 8)
    assert_close(head(x)[0], wanted, atol=1e-5, rtol=0)
    mask = torch.arange(9)[None] < 5
    masked = head(x, mask)[0]
    assert masked.shape == wanted.shape and not masked[5 * hop_length :].any()
    spectrum = spectrum[..., :5]
    assert_close(masked[: 5 * hop_length], head(x[:, :5])[0], atol=1e-5, rtol=0)


def test_receptive_field_is_the_sum_of_the_layers():
    # Tokens: kernel 3 -> 1, kernel 7 -> 3. Frames: 3 + 3, and a window of 4 hops reaches 2.
    assert tiny_vocoder().receptive_field_tokens() == 1 + 3 + 2  # 8 frames are 2 tokens


@torch.no_grad()
@pytest.mark.parametrize("audio", [SPEC, AudioSpec(8000, 40, 1), AudioSpec(8000, 41, 1)])
def test_a_token_changes_no_sample_outside_the_receptive_field_and_some_at_its_edge(audio):
    torch.manual_seed(0)
    vocoder = build_vocoder(TINY, hidden_size=HIDDEN_SIZE, audio=audio).eval()
    for parameter in vocoder.parameters():  # Vocos starts so small that far effects round to 0
        parameter.normal_(0, 0.3)
    reach, size = vocoder.receptive_field_tokens(), audio.samples_per_token
    middle, count = reach + 3, 2 * reach + 7
    hidden_states = torch.randn(1, HIDDEN_SIZE, count)
    changed = hidden_states.clone()
    changed[:, :, middle] = 5 * torch.randn(HIDDEN_SIZE)  # a constant would vanish in the norm
    difference = (vocoder(hidden_states) - vocoder(changed))[0].abs().reshape(-1, size).amax(1)
    outside = [token for token in range(count) if abs(token - middle) > reach]
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


def mixing_vocoder(num_layers):
    torch.manual_seed(0)
    return build_vocoder(
        TINY, hidden_size=HIDDEN_SIZE, audio=SPEC, num_mixed_layers=num_layers
    ).eval()


def test_a_mix_is_the_softmax_weighted_sum_times_the_scale():
    mix = LayerMix(3)
    mix.weights.data = torch.tensor([0.0, 1.0, 2.0]).log1p()  # softmax: 1/6, 2/6, 3/6
    mix.scale.data = torch.tensor(2.0)
    layers = torch.tensor([[6.0, 0], [3, 3], [0, 12]])[None, None]  # [1, 1, k, D]
    assert_close(mix(layers), torch.tensor([[[4.0, 14.0]]]))


def test_one_layer_has_no_mix_and_its_weights_are_those_of_older_releases():
    vocoder = tiny_vocoder()
    assert not [name for name in vocoder.state_dict() if "mix" in name]
    assert vocoder.mix is None


@torch.no_grad()
def test_layers_that_are_alike_decode_as_one_of_them():
    vocoder, single = mixing_vocoder(3), tiny_vocoder()
    vocoder.load_state_dict(single.state_dict(), strict=False)
    states = torch.randn(1, HIDDEN_SIZE, 5)
    assert_close(vocoder(states.repeat(1, 3, 1)), single(states), atol=1e-6, rtol=0)


@torch.no_grad()
def test_the_layers_come_lowest_first_and_their_sizes_do_not_matter():
    vocoder, single = mixing_vocoder(2), tiny_vocoder()
    vocoder.load_state_dict(single.state_dict(), strict=False)
    low, top = torch.randn(2, 1, HIDDEN_SIZE, 5)
    both = vocoder(torch.cat([low, top], dim=1))
    assert_close(vocoder(torch.cat([1000 * low, top], dim=1)), both, atol=1e-5, rtol=0)
    vocoder.mix.weights.data = torch.tensor([-100.0, 0.0])  # the upper layer alone
    assert_close(vocoder(torch.cat([low, top], dim=1)), single(top), atol=1e-6, rtol=0)


def test_weights_and_scale_of_a_mix_are_learned():
    vocoder = mixing_vocoder(2)
    vocoder(torch.randn(1, 2 * HIDDEN_SIZE, 5)).square().sum().backward()
    assert vocoder.mix.weights.grad.abs().sum() > 0
    assert vocoder.mix.scale.grad.abs() > 0


@torch.no_grad()
def test_padding_leaves_a_mix_alone():
    vocoder = mixing_vocoder(2)
    states = torch.randn(2, 2 * HIDDEN_SIZE, 6)
    alone = vocoder(states[1:, :, :4])[0]
    batched = vocoder(states, torch.tensor([6, 4]))[1]
    assert_close(batched[: len(alone)], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("num_layers", "wanted"), [(1, 12), (2, 24)])
def test_states_of_the_wrong_width_are_refused(num_layers, wanted):
    with pytest.raises(DataError, match=f"hidden states 13 wide, expected {wanted}"):
        mixing_vocoder(num_layers)(torch.zeros(1, 13, 4))


@pytest.mark.parametrize("n_fft", [40, 41, 161])
def test_n_fft_that_does_not_suit_the_hop_is_refused(n_fft):
    config = VocoderConfig(8, 16, 1, 1, 3, n_fft)
    with pytest.raises(ConfigError, match=f"n_fft is {n_fft}, expected more than hop_length 40"):
        build_vocoder(config, hidden_size=4, audio=SPEC)


def test_windows_that_hardly_overlap_are_refused_before_vocos_asserts():
    config, audio = VocoderConfig(8, 16, 1, 1, 3, 2050), AudioSpec(24000, 2048, 1)
    with pytest.raises(ConfigError, match="n_fft is 2050, expected more than hop_length 2048"):
        build_vocoder(config, hidden_size=4, audio=audio)
