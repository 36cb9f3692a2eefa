"""The law of rates, and that codec, tokenizer and vocoder keep it at every rate."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stage2_vocoder.config import VocoderConfig, VocoderTrainConfig
from stage2_vocoder.model import build_vocoder
from stage2_vocoder.stream import StreamDecoder
from tts_stack.config import load_config
from tts_stack.contract import AudioSpec, CodecIdentity, TextSpec
from tts_stack.errors import ConfigError
from tts_stack.rates import Split, check_token_rate, nearest_with_any_hop, nearest_with_hop
from tts_stack.records import Utterance
from tts_stack.semantic.config import CodecConfig, CodecOptimizerConfig, CodecTrainConfig
from tts_stack.semantic.model import build_codec, build_log_mel
from tts_stack.semantic.tokenize import tokenize
from tts_stack.semantic.tokenizer import MelCodecTokenizer
from tts_stack.semantic.train import _warn_of_long_transcripts, run_training
from tts_stack.shards import SPLITS, Corpus, CorpusInfo, write_info, write_shard
from tts_stack.training import ScheduleConfig, TrainerConfig

# Sample rate, hop and frames a token, with the token rate they give: 5 to 50 Hz.
RATES = [
    (16000, 160, 2, 50.0),
    (16000, 200, 4, 20.0),
    (16000, 160, 20, 5.0),
    (22050, 441, 1, 50.0),
    (22050, 294, 3, 25.0),
    (22050, 256, 4, 21.533203125),
    (22050, 315, 14, 5.0),
    (24000, 240, 2, 50.0),
    (24000, 240, 4, 25.0),
    (24000, 240, 8, 12.5),
    (24000, 300, 16, 5.0),
    (32000, 320, 2, 50.0),
    (32000, 512, 4, 15.625),
    (32000, 320, 20, 5.0),
    (44100, 441, 2, 50.0),
    (44100, 512, 4, 21.533203125),
    (44100, 441, 20, 5.0),
    (48000, 480, 2, 50.0),
    (48000, 480, 8, 12.5),
    (48000, 600, 16, 5.0),
]


def small_codec(sample_rate, hop_length, frames_per_token, **changes) -> CodecConfig:
    values = {
        "id": "small",
        "sample_rate": sample_rate,
        "n_fft": 4 * hop_length,
        "hop_length": hop_length,
        "n_mels": 12,
        "frames_per_token": frames_per_token,
        "levels": [3, 3],
        "hidden_size": 8,
        "ffn_size": 8,
        "kernel_size": 3,
        "num_encoder_blocks": 1,
        "num_decoder_blocks": 1,
    }
    return CodecConfig(**{**values, **changes})


def make_tokenizer(config: CodecConfig) -> MelCodecTokenizer:
    torch.manual_seed(0)
    identity = CodecIdentity("small", "ab" * 32, config.codebook_size)
    return MelCodecTokenizer(
        build_codec(config), build_log_mel(config), identity, config.audio_spec
    )


def test_the_issue_s_example_names_the_nearest_rates():
    message = (
        "codec.token_rate is 30 Hz, but 24000 Hz / (hop_length 240 x frames_per_token 4) is 25 Hz; "
        "nearest: 25 Hz (hop 240 x 4), 33.3 Hz (240 x 3); or hop_length 200 x 4 = 30 Hz"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(CodecTrainConfig, "train_codec", ["corpus=c", "run=r", "codec.token_rate=30"])


def test_a_rate_that_the_hop_divides_asks_for_other_frames():
    with pytest.raises(ConfigError, match="is 25 Hz; set frames_per_token to 2$"):
        small_codec(24000, 240, 4, token_rate=50)


def test_a_rate_that_no_whole_number_of_samples_gives_names_the_nearest_that_one_does():
    with pytest.raises(ConfigError) as error:
        small_codec(22050, 441, 2, token_rate=16)
    assert "nearest: 12.5 Hz (hop 441 x 4), 16.7 Hz (441 x 3)" in str(error.value)
    other = nearest_with_any_hop(16, 22050, 441)
    assert other.samples == round(22050 / 16) and other.rate(22050) == pytest.approx(16, abs=0.01)


@pytest.mark.parametrize("token_rate", [0, -5])
def test_a_rate_of_nothing_is_refused(token_rate):
    with pytest.raises(ConfigError, match=f"codec.token_rate is {token_rate}, expected more"):
        check_token_rate(
            token_rate, sample_rate=24000, hop_length=240, frames_per_token=4, place="codec"
        )


@pytest.mark.parametrize(("sample_rate", "hop", "frames", "token_rate"), RATES)
def test_the_right_token_rate_is_accepted_and_another_is_not(sample_rate, hop, frames, token_rate):
    arguments = {"sample_rate": sample_rate, "hop_length": hop, "frames_per_token": frames}
    check_token_rate(token_rate, **arguments, place="codec")
    check_token_rate(float(f"{token_rate:.3g}"), **arguments, place="codec")
    with pytest.raises(ConfigError, match="codec.token_rate"):
        check_token_rate(1.01 * token_rate, **arguments, place="codec")
    assert nearest_with_hop(token_rate, sample_rate, hop) == [Split(hop, frames)]
    assert nearest_with_any_hop(token_rate, sample_rate, hop) == Split(hop, frames)


@torch.no_grad()
@pytest.mark.parametrize(("sample_rate", "hop", "frames", "token_rate"), RATES)
def test_codec_tokenizer_and_vocoder_keep_the_law(sample_rate, hop, frames, token_rate):
    spec = AudioSpec(sample_rate, hop, frames)
    assert spec.token_rate == token_rate
    size = spec.samples_per_token
    tokenizer = make_tokenizer(small_codec(sample_rate, hop, frames, token_rate=token_rate))
    lengths = (1, size, size + 1, 3 * size - 1)
    clips = [np.full(length, 0.1, np.float32) for length in lengths]
    tokens = tokenizer.encode(clips)
    assert [len(row) for row in tokens] == [1, 1, 2, 3]
    for mel in (tokenizer.decode_mel(tokens), tokenizer.log_mel(clips)):
        assert [row.shape for row in mel] == [(12, frames * len(row)) for row in tokens]
    vocoder = build_vocoder(VocoderConfig(4, 8, 1, 1, 3, 4 * hop), hidden_size=6, audio=spec).eval()
    states = torch.randn(6, 6)
    whole = vocoder(states.T[None])[0]
    assert whole.shape == (6 * size,)  # T = S * frames_per_token * hop_length
    decoder = StreamDecoder(vocoder)
    assert len(torch.cat([decoder.push(states[:4]), decoder.push(states[4:])])) <= len(whole)
    padded = vocoder(states.T[None].repeat(2, 1, 1), torch.tensor([6, 2]))
    assert padded.shape == (2, 6 * size) and not padded[1, 2 * size :].any()


def test_the_named_32_khz_configs_fit_together():
    codec = load_config(
        CodecTrainConfig, "train_codec", ["corpus=c", "run=r", "codec=fsq_15hz_32k"]
    ).codec
    assert codec.audio_spec == AudioSpec(32000, 512, 4)
    assert (codec.audio_spec.token_rate, codec.audio_spec.samples_per_token) == (15.625, 2048)
    assert codec.codebook_size == 8000
    config = load_config(
        VocoderTrainConfig, "train_vocoder", ["corpus=c", "run=r", "experiment=soprano_32k_vocoder"]
    )
    assert (config.vocoder.dim, config.vocoder.num_layers, config.vocoder.n_fft) == (768, 8, 2048)
    assert codec.audio_spec.samples_per_token % config.losses.mel.hop_length == 0


ONE_OF_EACH = [rates for rates in RATES if rates[3] in (15.625, 21.533203125)] + [
    (16000, 160, 20, 5.0),
    (24000, 240, 2, 50.0),
    (48000, 480, 8, 12.5),
]


@pytest.mark.parametrize(("sample_rate", "hop", "frames", "token_rate"), ONE_OF_EACH)
def test_a_codec_trains_and_tokenizes_a_corpus_at_this_rate(
    tmp_path, sample_rate, hop, frames, token_rate
):
    corpus = write_corpus(tmp_path / "corpus", sample_rate)
    config = CodecTrainConfig(
        corpus=str(corpus),
        run=str(tmp_path / "run"),
        codec=small_codec(sample_rate, hop, frames, token_rate=token_rate),
        trainer=TrainerConfig(1, 1, 1, device="cpu"),
        optimizer=CodecOptimizerConfig(1e-3, 0.0, 1.0),
        schedule=ScheduleConfig("constant", 0),
        batch_seconds=3.0,
        ctc_weight=0.1,
        ctc_steps_per_token=8,
        num_validation_clips=1,
    )
    run_training(config, resume=False)
    tokenize(corpus, tmp_path / "run" / "codec" / "codec")
    opened = Corpus.open(corpus)
    assert opened.audio_spec == AudioSpec(sample_rate, hop, frames)
    for utterance, audio in zip(opened.tokenized("train"), opened.audio("train"), strict=True):
        wanted = -(-len(audio) // (hop * frames))
        assert len(utterance.semantic_tokens) == wanted


def test_transcripts_too_long_for_a_low_token_rate_are_told(caplog):
    dataset = SimpleNamespace(transcripts=[[1] * 9, [1] * 8], num_tokens=[3, 4])
    _warn_of_long_transcripts(dataset, 3)
    assert not caplog.records
    _warn_of_long_transcripts(dataset, 2)
    assert "1 of 2 transcripts have more symbols than ctc_steps_per_token=2" in caplog.text
    assert "try ctc_steps_per_token=5" in caplog.text  # twice the mean of 3 and 2 symbols a token


def write_corpus(path, sample_rate):
    path.mkdir()
    noise = np.random.default_rng(0)
    shards = {}
    for split in SPLITS:
        rows = [
            Utterance(f"{split}-{i}", "ab", "ab", "", "", noise.uniform(-0.3, 0.3, size))
            for i, size in enumerate((sample_rate // 3, sample_rate // 2 + 7))
        ]
        write_shard(path / f"{split}.parquet", rows, sample_rate=sample_rate, config_hash="h")
        shards[split] = (f"{split}.parquet",)
    info = CorpusInfo(
        sample_rate=sample_rate,
        text=TextSpec("raw", "en-us"),
        symbols=("a", "b"),
        config_hash="h",
        shards=shards,
        num_utterances=dict.fromkeys(SPLITS, 2),
        seconds=dict.fromkeys(SPLITS, 0.83),
    )
    write_info(path, info)
    return path
