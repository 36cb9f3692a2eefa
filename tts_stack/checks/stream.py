"""`check stream`: decoding in pieces gives the samples of decoding at once."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from stage1_llm.checks.report import Claim, Report, close
from stage2_vocoder.checkpoint import load_vocoder
from stage2_vocoder.config import VocoderTrainConfig
from stage2_vocoder.model import Vocoder, build_vocoder, count_parameters
from stage2_vocoder.segment import slice_audio, with_margin
from stage2_vocoder.stream import StreamDecoder
from stage2_vocoder.train import finished_vocoder
from tts_stack.contract import AudioSpec
from tts_stack.errors import CheckpointError
from tts_stack.shards import Corpus

LENGTHS = range(1, 41)  # tokens
CHUNKS = range(1, 13)  # tokens
SOME_CHUNK = 3
IRREGULAR = (5, 1, 0, 12, 2, 7, 1, 1)
CROP_TOKENS = 5
HIDDEN_SIZE = 256  # of a vocoder that is not trained yet
_GAIN = 0.5  # untrained: Vocos starts so small that a missing neighbour would round to nothing


def check_stream(config: VocoderTrainConfig) -> Report:
    """Compare streaming with offline decoding, for every length from one token.

    Args:
        config: of `tts-stack train-vocoder`. The vocoder is the run's, or an untrained one of the
            configured shape.

    Raises:
        ConfigError: the shape does not suit the corpus's rates.
        DataError: the corpus is missing or not tokenised.
        CheckpointError: the run's vocoder is damaged.
    """
    vocoder, name = _vocoder(config)
    width = vocoder.hidden_size * vocoder.num_mixed_layers
    states = torch.randn(LENGTHS[-1], width, generator=torch.Generator().manual_seed(0))
    reach, spec = vocoder.receptive_field_tokens(), vocoder.audio
    settings = (
        f"{name}: {count_parameters(vocoder) / 1e6:.2f} M parameters, {spec.sample_rate} Hz, "
        f"{spec.token_rate:g} tokens/s; random states",
        f"receptive field: {reach} tokens on either side, {reach / spec.token_rate:.2f} s are held "
        "back at most",
    )
    claims = (
        _every_length(vocoder, states),
        _every_chunk(vocoder, states),
        _held_back(vocoder, states),
        _cropped(vocoder, states),
    )
    return Report(settings, claims)


def _vocoder(config: VocoderTrainConfig) -> tuple[Vocoder, str]:
    try:
        folder = finished_vocoder(config.run)
    except CheckpointError:
        return _untrained(config, Corpus.open(Path(config.corpus)).audio_spec)
    return load_vocoder(folder), str(folder)


@torch.no_grad()
def _untrained(config: VocoderTrainConfig, audio: AudioSpec) -> tuple[Vocoder, str]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vocoder = build_vocoder(config.vocoder, hidden_size=HIDDEN_SIZE, audio=audio).eval()
        for weight_name, weight in vocoder.named_parameters():
            if "dwconv" in weight_name or "gamma" in weight_name:
                weight.normal_(0, _GAIN)
    return vocoder, "no vocoder in this run yet: an untrained one of the configured shape"


@torch.no_grad()
def _every_length(vocoder: Vocoder, states: Tensor) -> Claim:
    decoder = StreamDecoder(vocoder)
    found, wanted = [], []
    for length in LENGTHS:
        whole = vocoder(states[:length].T[None])[0]
        for sizes in (itertools.repeat(SOME_CHUNK), iter(IRREGULAR)):
            found.append(_stream(decoder, states[:length], sizes))
            wanted.append(whole)
    return close(
        f"utterances of {LENGTHS[0]} to {LENGTHS[-1]} tokens, each length in pieces of "
        f"{SOME_CHUNK} and of irregular sizes, have the samples of the whole",
        found,
        wanted,
    )


@torch.no_grad()
def _every_chunk(vocoder: Vocoder, states: Tensor) -> Claim:
    decoder = StreamDecoder(vocoder)
    found = [_stream(decoder, states, itertools.repeat(chunk)) for chunk in CHUNKS]
    return close(
        f"pieces of {CHUNKS[0]} to {CHUNKS[-1]} tokens, each size, give the samples of the whole",
        found,
        [vocoder(states.T[None])[0]] * len(found),
    )


def _held_back(vocoder: Vocoder, states: Tensor) -> Claim:
    decoder, size = StreamDecoder(vocoder), vocoder.audio.samples_per_token
    most = num_samples = 0
    for count, state in enumerate(states, start=1):
        num_samples += len(decoder.push(state[None]))
        most = max(most, count * size - num_samples)
    return Claim(
        "no sample is held back for longer than the receptive field",
        most <= decoder.latency_tokens * size,
        f"{most / size:.2f} tokens at most ({most / vocoder.audio.sample_rate:.3f} s), "
        f"receptive field {decoder.latency_tokens}",
    )


@torch.no_grad()
def _cropped(vocoder: Vocoder, states: Tensor) -> Claim:
    size, reach = vocoder.audio.samples_per_token, vocoder.receptive_field_tokens()
    whole = vocoder(states.T[None])
    found, wanted = [], []
    for start in range(len(states) - CROP_TOKENS + 1):
        part = with_margin(start, start + CROP_TOKENS, reach, len(states))
        window = vocoder(states[part.window_start : part.window_stop].T[None])
        first, count = torch.tensor([part.offset * size]), torch.tensor([CROP_TOKENS * size])
        found.append(slice_audio(window, first, int(count), count))
        wanted.append(whole[:, start * size : (start + CROP_TOKENS) * size])
    return close(
        f"crops of {CROP_TOKENS} tokens decoded with their margin, as training does, are those of "
        "the whole",
        found,
        wanted,
    )


def _stream(decoder: StreamDecoder, states: Tensor, sizes: Iterator[int]) -> Tensor:
    parts = [decoder.push(part) for part in _pieces(states, sizes)]
    return torch.cat([*parts, decoder.flush()])


def _pieces(states: Tensor, sizes: Iterator[int]) -> Iterator[Tensor]:
    start = 0
    for size in sizes:
        if start >= len(states):
            return
        yield states[start : start + size]
        start += size
    yield states[start:]
