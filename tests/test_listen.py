import dataclasses
import shutil

import numpy as np
import pytest
import torch
from stage1_support import CODEC, make_contract, sample_of, tiny_config, write_corpus

from stage1_llm.model import build_llm
from stage1_llm.network import build_network
from stage1_llm.vocab import build_token_map
from tts_stack.listen import make_listener, picture
from tts_stack.semantic.checkpoint import load_codec
from tts_stack.voice import CODEC_DIR, default_voice_dir


class Shown:
    """A MediaLog that remembers."""

    def __init__(self):
        self.texts, self.images, self.sounds = {}, {}, {}

    def add_text(self, name, text):
        self.texts[name] = text

    def add_image(self, name, array):
        self.images[name] = array

    def add_audio(self, name, samples, sample_rate):
        self.sounds[name] = (samples, sample_rate)


def listen(corpus, codec=CODEC, codebook_size=10):
    tokens = build_token_map("abc", codebook_size)
    contract = dataclasses.replace(make_contract(), tokens=tokens, codec=codec)
    network = build_network(build_llm(tiny_config(), tokens, seed=0), ())
    samples = [sample_of("abc", [1, 2, 3], id=f"s{i}", tokens=tokens) for i in range(3)]
    shown = Shown()
    make_listener(corpus, 2)(network, contract, samples, 7, shown)
    assert network.training
    return shown


def test_without_a_codec_the_tokens_are_shown_as_text(tmp_path):
    shown = listen(write_corpus(tmp_path / "corpus"))
    assert list(shown.texts) == ["validation/s0", "validation/s1"]
    assert "tokens (3 in the recording), " in shown.texts["validation/s0"]
    assert not shown.images and not shown.sounds


def test_with_the_codec_they_are_seen_and_heard(tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    shutil.copytree(default_voice_dir() / CODEC_DIR, corpus / CODEC_DIR)
    codec = load_codec(corpus / CODEC_DIR)
    shown = listen(corpus, codec.identity, codec.identity.codebook_size)
    image = shown.images["validation/s0"]
    assert image.dtype == np.uint8 and image.shape[2] == 3
    samples, sample_rate = shown.sounds["validation/s0"]
    assert sample_rate == 24000
    assert len(samples) == pytest.approx(image.shape[1] * 240, abs=240)
    assert np.isfinite(samples).all() and np.abs(samples).max() > 0


def test_a_codec_of_other_tokens_stays_silent(tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    shutil.copytree(default_voice_dir() / CODEC_DIR, corpus / CODEC_DIR)
    assert not listen(corpus).sounds


def test_nothing_is_spoken_when_nobody_asked(tmp_path):
    assert make_listener(tmp_path, 0) is None


def test_a_picture_has_low_bins_below_and_eight_nat_of_range():
    log_mel = torch.tensor([[0.0, -8.0], [-4.0, -20.0]])  # [K, F]
    assert picture(log_mel)[..., 0].tolist() == [[127, 0], [255, 0]]
