import importlib
import logging
import sys

import numpy as np
import pytest
from stage2_support import make_corpus, make_states, tiny_config

from stage2_vocoder.quality import PACKAGES, Pair, Pitch, QualityMeter, pitch_difference
from stage2_vocoder.states import StateStore
from stage2_vocoder.step import is_quality_due
from stage2_vocoder.train import phase_folder, run_training
from tts_stack.training import read_metrics

RATE = 16000


def needs(*packages):
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


def voice(f0, seconds=1.0, rate=RATE):
    """A buzz with a syllable-like envelope."""
    time = np.arange(round(seconds * rate)) / rate
    harmonics = sum(np.sin(2 * np.pi * f0 * k * time) / k for k in range(1, 20))
    return (0.1 * harmonics * (1 + np.sin(2 * np.pi * 4 * time))).astype(np.float32)


def noise(audio, level):
    return (audio + level * np.random.default_rng(0).standard_normal(len(audio))).astype(np.float32)


def measure(audio_hat, audio, rate=RATE):
    return QualityMeter(rate).measure([Pair(audio_hat, audio)])


@needs("pesq")
def test_pesq_is_that_of_the_package_at_16_khz():
    from pesq import pesq

    audio = voice(150)
    found = measure(noise(audio, 0.001), audio)["pesq"]
    assert found == pytest.approx(pesq(RATE, audio, noise(audio, 0.001), "wb"))
    assert measure(audio, audio)["pesq"] > 4.5 > found > measure(noise(audio, 0.1), audio)["pesq"]


@needs("pystoi")
def test_stoi_is_that_of_the_package():
    from pystoi import stoi

    audio = voice(150)
    found = measure(noise(audio, 0.05), audio)["stoi"]
    assert found == pytest.approx(stoi(audio, noise(audio, 0.05), RATE))
    assert measure(audio, audio)["stoi"] == pytest.approx(1.0)


@needs("librosa")
def test_a_voice_three_semitones_higher_has_300_cents_of_error():
    found = measure(voice(150 * 2 ** (3 / 12)), voice(150))
    assert found["f0_cents"] == pytest.approx(300, abs=20)
    assert found["voicing_error"] == 0


@needs("librosa")
def test_frames_voiced_in_one_alone_are_the_voicing_error():
    half = voice(150)
    half[RATE // 2 :] = noise(np.zeros(RATE // 2), 0.05)
    found = measure(half, voice(150))
    assert found["voicing_error"] == pytest.approx(0.5, abs=0.1)
    assert found["f0_cents"] < 30


def test_pitch_counts_only_where_both_are_voiced():
    one = Pitch(np.array([100.0, np.nan, 200.0, 100.0]), np.array([True, False, True, True]))
    other = Pitch(np.array([100.0, 100.0, 100.0, np.nan]), np.array([True, True, True, False]))
    assert pitch_difference(one, other).tolist() == [0.0, 1200.0]


@needs(*PACKAGES)
@pytest.mark.parametrize("rate", [8000, 22050, 24000, 48000])
def test_any_sample_rate_is_measured_at_16_khz(rate):
    audio = voice(150, rate=rate)
    found = measure(audio, audio, rate)
    assert found["pesq"] > 4.5 and found["stoi"] > 0.99
    assert (found["f0_cents"], found["voicing_error"]) == (0, 0)


@needs(*PACKAGES)
@pytest.mark.parametrize(
    ("audio_hat", "audio"),
    [
        (voice(150), np.zeros(RATE, np.float32)),
        (voice(150)[:200], voice(150)[:200]),
        (np.zeros(0, np.float32), np.zeros(0, np.float32)),
        (np.full(RATE, np.nan, np.float32), voice(150)),
    ],
    ids=["silent recording", "12 ms", "nothing", "NaN"],
)
def test_what_cannot_be_judged_has_no_figures_and_does_not_count(audio_hat, audio):
    assert measure(audio_hat, audio) == {}
    good = Pair(noise(voice(150), 0.02), voice(150))
    both = QualityMeter(RATE).measure([Pair(audio_hat, audio), good])
    assert both == QualityMeter(RATE).measure([good])


@needs(*PACKAGES)
def test_a_silent_output_has_the_worst_figures():
    found = measure(np.zeros(RATE, np.float32), voice(150))
    assert (found["pesq"], found["stoi"]) == (1.0, 0.0)
    assert found["voicing_error"] > 0.9 and "f0_cents" not in found


def test_a_missing_package_is_said_once_and_its_figure_left_out(monkeypatch, caplog):
    for name in PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)  # how Python marks a module as missing
    caplog.set_level(logging.INFO)
    meter = QualityMeter(RATE)
    for _ in range(3):
        assert meter.measure([Pair(voice(150), voice(150))]) == {}
    assert [record.message for record in caplog.records] == [
        "validation without PESQ, STOI, pitch and voicing errors: pip install pesq pystoi librosa, "
        "or all of tts-stack[measure]"
    ]


@needs("pystoi")
def test_the_figures_of_the_other_packages_stay(monkeypatch, caplog):
    for name in ("pesq", "librosa"):
        monkeypatch.setitem(sys.modules, name, None)
    caplog.set_level(logging.INFO)
    assert measure(voice(150), voice(150)).keys() == {"stoi"}
    assert "validation without PESQ, pitch and voicing errors: pip install pesq librosa," in (
        caplog.text
    )


@needs("librosa")
def test_a_recordings_pitch_is_found_once(monkeypatch):
    from stage2_vocoder import quality

    calls = []
    real = quality.pitch
    monkeypatch.setattr(quality, "pitch", lambda *args: calls.append(args) or real(*args))
    meter = QualityMeter(RATE)
    for _ in range(2):
        meter.measure([Pair(voice(160), voice(150))])
    assert len(calls) == 3  # the recording once, each output


def test_quality_is_due_at_the_first_every_fifth_and_the_last_validation(tmp_path):
    config = tiny_config(tmp_path, tmp_path, "data.quality_every=5", "trainer.validate_every=10")
    due = [step for step in range(0, 128, 10) if is_quality_due(config, step, 127)]
    assert due == [0, 50, 100]
    assert is_quality_due(config, 127, 127)
    config.data.quality_every = 0
    assert not is_quality_due(config, 0, 127)


@needs("pystoi")
@pytest.mark.parametrize("phase", ["reconstruction", "adversarial"])
def test_quality_is_logged_beside_the_validation_figures(tmp_path, monkeypatch, phase):
    for name in ("pesq", "librosa"):  # slow to load
        monkeypatch.setitem(sys.modules, name, None)
    corpus = make_corpus(tmp_path / "corpus")
    make_states(tmp_path / "states", corpus)
    store = StateStore.open(tmp_path / "states", corpus)

    def train(name, *overrides):
        config = tiny_config(
            corpus.path, tmp_path, "trainer.max_steps=6", "trainer.validate_every=1", *overrides
        )
        return run_training(config, name, resume=False, states=store)

    if phase == "adversarial":
        train("reconstruction", "reconstruction.max_steps=1")
    summary = train(phase, "data.quality_every=4")
    rows = read_metrics(phase_folder(tmp_path, phase))
    assert [row["step"] for row in rows if "validation/mel" in row] == list(range(7))
    assert [row["step"] for row in rows if "validation/stoi" in row] == [0, 4, 6]
    assert 0 <= summary.last_validation["stoi"] <= 1
