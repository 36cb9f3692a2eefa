import numpy as np
import pytest
import soundfile
from numpy.testing import assert_allclose

from tts_stack.audio import (
    audio_seconds,
    check_writable,
    normalize_loudness,
    read_audio,
    resample,
    speech_level_db,
    trim_silence,
    write_audio,
)
from tts_stack.errors import DataError

RATE = 24000


def tone(seconds: float, *, amplitude: float = 0.3, rate: int = RATE) -> np.ndarray:
    time = np.arange(round(seconds * rate)) / rate
    return (amplitude * np.sin(2 * np.pi * 220 * time)).astype(np.float32)


@pytest.mark.parametrize(
    ("name", "container", "subtype", "tolerance"),
    [
        ("a.wav", "WAV", "PCM_U8", 1e-2),
        ("a.wav", "WAV", "PCM_16", 1e-4),
        ("a.wav", "WAV", "PCM_24", 1e-6),
        ("a.wav", "WAV", "PCM_32", 1e-6),
        ("a.wav", "WAV", "FLOAT", 1e-7),
        ("a.wav", "WAV", "ULAW", 2e-2),
        ("a.flac", "FLAC", "PCM_16", 1e-4),
        ("a.aiff", "AIFF", "PCM_16", 1e-4),
        ("a.ogg", "OGG", "VORBIS", 5e-2),
        ("a.opus", "OGG", "OPUS", 5e-2),
        ("a.mp3", "MP3", "MPEG_LAYER_III", 5e-2),
    ],
)
def test_every_format_reads_as_mono_float32(tmp_path, name, container, subtype, tolerance):
    left, right = tone(0.5), tone(0.5, amplitude=0.1)
    stereo = np.stack([left, right], axis=1)
    soundfile.write(tmp_path / name, stereo, RATE, subtype=subtype, format=container)
    recording = read_audio(tmp_path / name)
    assert recording.sample_rate == RATE
    assert recording.audio.dtype == np.float32
    assert len(recording.audio) == len(left)
    middle = slice(RATE // 10, RATE * 4 // 10)  # lossy codecs need a moment to settle
    assert_allclose(recording.audio[middle], (left + right)[middle] / 2, atol=tolerance)


def test_a_wav_stream_without_a_length_reads_to_its_end(tmp_path):
    soundfile.write(tmp_path / "a.wav", tone(1), RATE)
    data = bytearray((tmp_path / "a.wav").read_bytes())
    size = data.find(b"data") + 4
    data[size : size + 4] = b"\xff" * 4
    (tmp_path / "a.wav").write_bytes(data)
    assert len(read_audio(tmp_path / "a.wav").audio) == RATE


def test_reading_stops_soon_after_max_seconds(tmp_path):
    soundfile.write(tmp_path / "a.flac", tone(30), RATE)
    recording = read_audio(tmp_path / "a.flac", max_seconds=5)
    assert 5 <= recording.seconds < 9
    assert audio_seconds(tmp_path / "a.flac") == 30


def test_a_missing_file_is_an_error_that_names_it(tmp_path):
    with pytest.raises(DataError, match=r"no\.wav: no such file"):
        read_audio(tmp_path / "no.wav")


@pytest.mark.parametrize("data", [b"", b"RIFF", b"no audio at all" * 100])
def test_a_corrupt_file_is_an_error_with_a_remedy(tmp_path, data):
    (tmp_path / "bad.wav").write_bytes(data)
    with pytest.raises(DataError, match=r"bad\.wav: cannot be read as audio .*; convert it to WAV"):
        read_audio(tmp_path / "bad.wav")
    assert audio_seconds(tmp_path / "bad.wav") == 0


def test_a_flac_cut_in_the_middle_is_an_error(tmp_path):
    soundfile.write(tmp_path / "a.flac", tone(3), RATE)
    data = (tmp_path / "a.flac").read_bytes()
    (tmp_path / "a.flac").write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=r"a\.flac: (cannot be read as audio|ends after)"):
        read_audio(tmp_path / "a.flac")


def test_an_empty_recording_is_an_error(tmp_path):
    soundfile.write(tmp_path / "a.wav", tone(0), RATE)
    with pytest.raises(DataError, match=r"a\.wav: holds no samples"):
        read_audio(tmp_path / "a.wav")


def test_samples_that_are_not_finite_are_an_error(tmp_path):
    audio = tone(0.1)
    audio[7] = np.nan
    soundfile.write(tmp_path / "a.wav", audio, RATE, subtype="FLOAT")
    with pytest.raises(DataError, match=r"a\.wav: 1 of 2400 samples are not finite"):
        read_audio(tmp_path / "a.wav")


@pytest.mark.parametrize("from_rate", [8000, 16000, 22050, 44100, 48000])
def test_resampling_keeps_length_level_and_phase(from_rate):
    audio = resample(tone(1, rate=from_rate), from_rate, RATE)
    assert audio.dtype == np.float32
    assert len(audio) == RATE
    assert_allclose(audio[2000:-2000], tone(1)[2000:-2000], atol=1e-3)


def test_resampling_to_the_same_rate_changes_nothing():
    audio = tone(0.1)
    assert resample(audio, RATE, RATE) is audio


def test_resampling_removes_what_the_new_rate_cannot_hold():
    time = np.arange(48000) / 48000
    audio = np.sin(2 * np.pi * 15000 * time).astype(np.float32)  # above 24 kHz's limit of 12 kHz
    assert np.abs(resample(audio, 48000, RATE)[2000:-2000]).max() < 1e-3


def trim(audio: np.ndarray) -> np.ndarray:
    return trim_silence(audio, RATE, threshold_db=40, keep_before_s=0.06, keep_after_s=0.1)


def test_trimming_cuts_silence_and_keeps_the_margins():
    silence = np.zeros(RATE, np.float32)
    trimmed = trim(np.concatenate([silence, tone(0.5), silence]))
    assert len(trimmed) == round((0.06 + 0.5 + 0.1) * RATE)
    assert_allclose(trimmed[1440 : 1440 + 12000], tone(0.5))


def test_trimming_keeps_pauses_inside_and_adds_nothing():
    audio = np.concatenate([tone(0.2), np.zeros(RATE, np.float32), tone(0.2)])
    assert_allclose(trim(audio), audio)


def test_trimming_measures_silence_relative_to_the_loudest_frame():
    noise = tone(1, amplitude=0.3 * 10 ** (-45 / 20))  # 45 dB below
    assert len(trim(np.concatenate([noise, tone(0.5), noise]))) == round(0.66 * RATE)


def test_silence_has_no_level_and_nothing_to_trim():
    silence = np.zeros(RATE, np.float32)
    for function in (trim, lambda audio: speech_level_db(audio, RATE)):
        with pytest.raises(DataError, match="silent: its loudest frame is at -200 dBFS"):
            function(silence)


def test_speech_level_of_a_sine_is_its_rms_and_pauses_do_not_count():
    level = speech_level_db(tone(1, amplitude=0.5), RATE)
    assert level == pytest.approx(20 * np.log10(0.5 / np.sqrt(2)), abs=0.05)
    with_pause = np.concatenate([tone(1, amplitude=0.5), np.zeros(RATE, np.float32)])
    assert speech_level_db(with_pause, RATE) == pytest.approx(level, abs=1e-6)


@pytest.mark.parametrize("amplitude", [0.01, 0.3, 0.9])
def test_normalisation_reaches_the_target_level(amplitude):
    audio = normalize_loudness(tone(1, amplitude=amplitude), RATE, -23)
    assert audio.dtype == np.float32
    assert speech_level_db(audio, RATE) == pytest.approx(-23, abs=0.01)


def test_normalisation_never_lifts_a_peak_above_minus_1_dbfs():
    audio = tone(1, amplitude=0.01)
    audio[100] = 0.5
    peak = np.abs(normalize_loudness(audio, RATE, -23)).max()
    assert peak == pytest.approx(10 ** (-1 / 20), abs=1e-4)


@pytest.mark.parametrize("extension", ["wav", "flac", "ogg", "mp3", "WAV"])
def test_what_is_written_reads_back_and_leaves_no_partial_file(tmp_path, extension):
    path = tmp_path / f"out.{extension}"
    write_audio(path, tone(1), RATE)
    recording = read_audio(path)
    assert recording.sample_rate == RATE
    assert len(recording.audio) == RATE
    assert speech_level_db(recording.audio, RATE) == pytest.approx(
        speech_level_db(tone(1), RATE), abs=0.3
    )
    assert list(tmp_path.iterdir()) == [path]


def test_a_long_vorbis_file_is_written_whole(tmp_path):
    write_audio(tmp_path / "long.ogg", np.tile(tone(1), 90), RATE)
    assert audio_seconds(tmp_path / "long.ogg") == 90


def test_samples_outside_full_scale_are_clipped_not_wrapped(tmp_path):
    write_audio(tmp_path / "a.wav", np.array([2.0, -2.0], np.float32), RATE)
    assert_allclose(read_audio(tmp_path / "a.wav").audio, [1, -1], atol=1e-4)


@pytest.mark.parametrize("write", [lambda path: write_audio(path, tone(0.1), RATE), check_writable])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("out.m4a", r"extension is \.m4a, expected one of \.wav \.flac \.ogg \.mp3"),
        ("out", r"extension is \(none\), expected"),
        ("no/out.wav", r"there is no folder .*/no; create it first"),
        (".", "is a folder, expected a file name"),
    ],
)
def test_a_wrong_output_path_is_an_error_that_says_what_to_do(tmp_path, write, name, message):
    with pytest.raises(DataError, match=message):
        write(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_rate_the_format_does_not_know_is_an_error_and_keeps_the_old_file(tmp_path):
    path = tmp_path / "out.mp3"
    path.write_bytes(b"old")
    with pytest.raises(DataError, match=r"out\.mp3: cannot be written as MP3 at 96000 Hz"):
        write_audio(path, tone(0.1), 96000)
    assert [file.name for file in tmp_path.iterdir()] == ["out.mp3"]
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize(
    ("audio", "message"),
    [(np.zeros(0, np.float32), "holds no samples"), (np.full(9, np.inf, np.float32), "9 of 9")],
)
def test_audio_that_cannot_be_heard_is_not_written(tmp_path, audio, message):
    with pytest.raises(DataError, match=message):
        write_audio(tmp_path / "out.wav", audio, RATE)


def test_clips_of_every_rate_and_channel_count_read(shared_data):
    for path in sorted((shared_data / "speech" / "multilingual").glob("*.mp3"))[::6]:
        assert 0.5 < read_audio(path).seconds < 30
