import itertools

import pytest
import torch
from stage2_support import HIDDEN_SIZE, SPEC, TINY
from torch.testing import assert_close

from stage2_vocoder.config import VocoderConfig, VocoderTrainConfig
from stage2_vocoder.model import build_vocoder
from stage2_vocoder.stream import StreamDecoder
from tts_stack.config import load_config
from tts_stack.contract import AudioSpec
from tts_stack.errors import DataError

LENGTHS = range(1, 41)
CHUNKS = range(1, 13)
IRREGULAR = (5, 1, 0, 12, 2, 7, 1, 1, 20)
# name, rates, width of the states, tokens: every shape that ships.
SHIPPED = [
    ("tiny", AudioSpec(24000, 240, 4), 32),
    ("base", AudioSpec(24000, 240, 4), 256),
    ("large", AudioSpec(24000, 240, 4), 256),
    ("soprano_32k", AudioSpec(32000, 512, 4), 512),
]


def loud_vocoder(config=TINY, hidden_size=HIDDEN_SIZE, audio=SPEC, **settings):
    """Vocos starts with weights so small that a missing neighbour would round to nothing."""
    torch.manual_seed(0)
    vocoder = build_vocoder(config, hidden_size=hidden_size, audio=audio, **settings).eval()
    with torch.no_grad():
        for name, parameter in vocoder.named_parameters():
            if "dwconv" in name or "gamma" in name:
                parameter.normal_(0, 0.5)
    return vocoder


def shipped(name):
    given = ["corpus=none", "run=none", f"vocoder={name}"]
    return load_config(VocoderTrainConfig, "train_vocoder", given).vocoder


def pieces(states, sizes):
    """Cut [S, W] into pieces of the given sizes, the last one as long as what is left."""
    start = 0
    for size in sizes:
        if start >= len(states):
            return
        yield states[start : start + size]
        start += size
    yield states[start:]


def stream(decoder, states, sizes):
    return torch.cat([*(decoder.push(part) for part in pieces(states, sizes)), decoder.flush()])


@torch.no_grad()
def offline(vocoder, states):
    return vocoder(states.T[None])[0]


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_every_chunk_size_gives_the_samples_of_the_whole(num_tokens):
    vocoder = loud_vocoder()
    decoder = StreamDecoder(vocoder)
    states = torch.randn(num_tokens, HIDDEN_SIZE)
    whole = offline(vocoder, states)
    for chunk in CHUNKS:
        found = stream(decoder, states, itertools.repeat(chunk))
        assert_close(found, whole, atol=1e-5, rtol=0)
    assert_close(stream(decoder, states, IRREGULAR), whole, atol=1e-5, rtol=0)


def test_the_comparison_would_see_a_token_less_of_context():
    vocoder = loud_vocoder()
    states = torch.randn(40, HIDDEN_SIZE)
    reach, size = vocoder.receptive_field_tokens(), SPEC.samples_per_token
    part = offline(vocoder, states[20 - reach + 1 :])[(reach - 1) * size : reach * size]
    assert (part - offline(vocoder, states)[20 * size : 21 * size]).abs().max() > 1e-5


@pytest.mark.parametrize(("name", "audio", "hidden_size"), SHIPPED)
@pytest.mark.parametrize("num_tokens", [1, 2, 9, 37])
def test_every_shipped_shape_streams(name, audio, hidden_size, num_tokens):
    vocoder = loud_vocoder(shipped(name), hidden_size, audio)
    states = torch.randn(num_tokens, hidden_size)
    whole = offline(vocoder, states)
    for sizes in (itertools.repeat(1), itertools.repeat(8), IRREGULAR):
        found = stream(StreamDecoder(vocoder), states, sizes)
        assert found.shape == (num_tokens * audio.samples_per_token,)
        assert_close(found, whole, atol=1e-5 * float(whole.abs().max().clamp(min=1)), rtol=0)


@pytest.mark.parametrize("frames_per_token", [1, 3, 20])
@pytest.mark.parametrize("n_fft", [60, 80, 160, 400])
@pytest.mark.parametrize("hop_length", [40, 41])
def test_other_rates_and_windows_stream(frames_per_token, n_fft, hop_length):
    config = VocoderConfig(8, 16, 1, 2, 5, n_fft)
    vocoder = loud_vocoder(config, 4, AudioSpec(8000, hop_length, frames_per_token))
    states = torch.randn(11, 4)
    found = stream(StreamDecoder(vocoder), states, itertools.repeat(2))
    assert_close(found, offline(vocoder, states), atol=1e-5, rtol=0)


def test_mixed_layers_stream():
    vocoder = loud_vocoder(num_mixed_layers=3)
    states = torch.randn(9, 3 * HIDDEN_SIZE)
    found = stream(StreamDecoder(vocoder), states, itertools.repeat(2))
    assert_close(found, offline(vocoder, states), atol=1e-5, rtol=0)


def test_nothing_is_held_back_beyond_the_receptive_field():
    vocoder = loud_vocoder()
    decoder = StreamDecoder(vocoder)
    num_samples = 0
    for count in range(1, 31):
        num_samples += len(decoder.push(torch.randn(1, HIDDEN_SIZE)))
        least = max(0, count - decoder.latency_tokens) * SPEC.samples_per_token
        assert least <= num_samples <= count * SPEC.samples_per_token
    assert decoder.latency_tokens == vocoder.receptive_field_tokens()


def test_what_was_emitted_does_not_change_with_what_follows():
    decoder = StreamDecoder(loud_vocoder())
    start = torch.randn(12, HIDDEN_SIZE)
    found = []
    for _ in range(2):
        found.append(decoder.push(start))
        decoder.push(torch.randn(5, HIDDEN_SIZE))
        decoder.flush()
    assert torch.equal(*found) and len(found[0]) > 0


def test_every_layer_reads_every_position_once():
    vocoder = loud_vocoder()
    positions = {"tokens": 0, "frames": 0, "head": 0}

    def count(name):
        def hook(module, inputs):
            positions[name] += inputs[0].shape[1]

        return hook

    vocoder.token_blocks[0].pwconv1.register_forward_pre_hook(count("tokens"))
    vocoder.backbone.convnext[-1].pwconv1.register_forward_pre_hook(count("frames"))
    vocoder.head.out.register_forward_pre_hook(count("head"))
    stream(StreamDecoder(vocoder), torch.randn(30, HIDDEN_SIZE), itertools.repeat(1))
    assert positions == {"tokens": 30, "frames": 120, "head": 120}


def test_a_decoder_starts_anew_after_a_flush():
    vocoder = loud_vocoder()
    decoder = StreamDecoder(vocoder)
    states = torch.randn(7, HIDDEN_SIZE)
    first = stream(decoder, states, [3])
    assert torch.equal(stream(decoder, states, [3]), first)


def test_an_utterance_without_tokens_has_no_samples():
    decoder = StreamDecoder(loud_vocoder())
    assert len(decoder.flush()) == 0
    assert len(decoder.push(torch.zeros(0, HIDDEN_SIZE))) == 0
    assert len(decoder.flush()) == 0


def test_half_precision_states_are_taken():
    vocoder = loud_vocoder()
    states = torch.randn(5, HIDDEN_SIZE).half()
    found = stream(StreamDecoder(vocoder), states, [2])
    assert found.dtype == torch.float32
    assert_close(found, offline(vocoder, states.float()), atol=1e-5, rtol=0)


def test_states_of_the_wrong_width_are_refused():
    with pytest.raises(DataError, match="hidden states 5 wide, expected 12"):
        StreamDecoder(loud_vocoder()).push(torch.zeros(3, 5))
