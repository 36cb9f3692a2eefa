import numpy as np
import pytest
import soundfile
from data_support import RATE, fail_to_speak, prepare_config, speak_upper, tone, write_tone

from tts_stack.audio import speech_level_db
from tts_stack.data.config import TextConfig
from tts_stack.data.report import RejectedItem
from tts_stack.data.utterance import prepare_item
from tts_stack.records import SourceItem, Utterance


def item(path, text="hello there", **changes):
    values = {"id": "a", "audio_path": str(path), "text": text, "place": "metadata.csv:1"}
    return SourceItem(**{**values, **changes})


def prepared(source_item, tmp_path, **changes):
    config = prepare_config(tmp_path, tmp_path / "corpus", **changes)
    return prepare_item(source_item, config, speak_upper)


def rejection(source_item, tmp_path, **changes):
    result = prepared(source_item, tmp_path, **changes)
    assert isinstance(result, RejectedItem), result
    assert (result.place, result.id) == ("metadata.csv:1", "a")
    return result.reason, result.message


def test_an_utterance_is_resampled_trimmed_levelled_and_converted(tmp_path):
    audio = np.concatenate([np.zeros(44100), tone(1, 44100), np.zeros(44100)])
    soundfile.write(tmp_path / "a.wav", np.stack([audio, audio], axis=1), 44100)
    result = prepared(item(tmp_path / "a.wav", speaker="s"), tmp_path)
    assert isinstance(result, Utterance)
    assert (result.id, result.text, result.model_text) == ("a", "hello there", "HELLO THERE")
    assert (result.speaker, result.language) == ("s", "en-us")
    assert result.audio.dtype == np.float32
    assert len(result.audio) / RATE == pytest.approx(1.16, abs=0.05)
    assert speech_level_db(result.audio, RATE) == pytest.approx(-23, abs=0.1)


def test_audio_is_left_alone_when_trimming_and_levelling_are_off(tmp_path):
    audio = np.concatenate([np.zeros(RATE, np.float32), tone(1)])
    soundfile.write(tmp_path / "a.wav", audio, RATE, subtype="FLOAT")
    result = prepared(item(tmp_path / "a.wav"), tmp_path, trim_silence=False, loudness_db=None)
    np.testing.assert_allclose(result.audio, audio, atol=1e-6)


def test_a_constant_offset_does_not_hide_silence_from_trimming(tmp_path):
    audio = np.concatenate([np.zeros(RATE, np.float32), tone(1), np.zeros(RATE, np.float32)])
    soundfile.write(tmp_path / "a.wav", audio + 0.1, RATE)
    assert len(prepared(item(tmp_path / "a.wav"), tmp_path).audio) / RATE < 1.2


@pytest.mark.parametrize(
    ("seconds", "text", "reason", "message"),
    [
        (0.1, "hello", "too_short", "0.10 s of sound, expected at least min_seconds=0.3"),
        (6, "hello there", "too_long", "6.0 s, expected at most max_seconds=5; cut it"),
        (300, "hello there", "too_long", "300.0 s, expected at most max_seconds=5"),
        (4, "Hi.", "too_slow", "3 characters in 4.00 s are 0.8 a second, expected at least"),
        (1, "word " * 20, "too_fast", "100 characters in 1.00 s are 100.0 a second, expected at"),
        (1, "", "unusable_text", "text is empty"),
        (1, " \n", "unusable_text", "text is empty"),
        (1, "\U0001f600", "unusable_text", "nothing to speak in it"),
    ],
)
def test_what_breaks_a_bound_is_left_out_with_value_and_bound(
    tmp_path, seconds, text, reason, message
):
    write_tone(tmp_path / "a.flac", seconds)
    found_reason, found_message = rejection(item(tmp_path / "a.flac", text), tmp_path)
    assert found_reason == reason
    assert message in found_message


def test_a_missing_recording_is_left_out(tmp_path):
    reason, message = rejection(item(tmp_path / "no.wav"), tmp_path)
    assert reason == "missing_audio"
    assert f"no audio file {tmp_path / 'no.wav'}" in message


def test_a_damaged_or_empty_recording_is_left_out(tmp_path):
    (tmp_path / "bad.wav").write_bytes(b"RIFF garbage")
    write_tone(tmp_path / "empty.wav", 0)
    assert rejection(item(tmp_path / "bad.wav"), tmp_path)[0] == "unreadable_audio"
    reason, message = rejection(item(tmp_path / "empty.wav"), tmp_path)
    assert reason == "unreadable_audio"
    assert "holds no samples" in message


@pytest.mark.parametrize("settings", [{}, {"trim_silence": False, "loudness_db": None}])
def test_a_silent_recording_is_left_out_whatever_the_settings(tmp_path, settings):
    soundfile.write(tmp_path / "a.wav", np.zeros(RATE), RATE)
    assert rejection(item(tmp_path / "a.wav"), tmp_path, **settings)[0] == "silent_audio"


def test_special_token_names_in_a_text_are_just_text(tmp_path):
    write_tone(tmp_path / "a.wav", 3)
    result = prepared(item(tmp_path / "a.wav", "say <|audio_start|> now"), tmp_path)
    assert result.model_text == "SAY <|AUDIO_START|> NOW"


def test_another_language_is_left_out_unless_the_text_stays_raw(tmp_path):
    write_tone(tmp_path / "a.wav")
    german = item(tmp_path / "a.wav", language="de-de")
    phonemes = TextConfig(kind="phonemes", language="en-us", engine="gruut")
    reason, message = rejection(german, tmp_path, text=phonemes)
    assert reason == "other_language"
    assert "language is de-de, expected en-us; prepare it with text.language=de-de" in message
    assert prepared(german, tmp_path).language == "de-de"
    british = item(tmp_path / "a.wav", language="en_GB")
    assert isinstance(prepared(british, tmp_path, text=phonemes), Utterance)


def test_a_crash_of_the_front_end_names_the_line(tmp_path):
    write_tone(tmp_path / "a.wav")
    config = prepare_config(tmp_path, tmp_path / "corpus")
    with pytest.raises(ZeroDivisionError) as caught:
        prepare_item(item(tmp_path / "a.wav"), config, fail_to_speak)
    assert "metadata.csv:1: 'hello there'" in caught.value.__notes__[0]
