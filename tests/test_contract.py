import dataclasses
import json

import pytest

from tts_stack.contract import (
    AudioSpec,
    CodecIdentity,
    PromptSpec,
    TextSpec,
    TokenMap,
    VoiceContract,
    file_sha256,
)
from tts_stack.errors import CheckpointError, ConfigError


def contract() -> VoiceContract:
    return VoiceContract(
        name="test",
        audio=AudioSpec(24000, 240, 4),
        text=TextSpec("phonemes", "en-us"),
        codec=CodecIdentity("fsq", "ab" * 32, 1000),
        tokens=TokenMap(1088, 0, 1, 2, 3, 4, 1000, 1004, (" ", "a", "ˈ")),
    )


def test_rates_follow_from_hop_and_frames():
    spec = AudioSpec(24000, 240, 4)
    assert (spec.samples_per_token, spec.token_rate) == (960, 25.0)


@pytest.mark.parametrize(("samples", "tokens"), [(1, 1), (959, 1), (960, 1), (961, 2), (9600, 10)])
def test_the_last_token_covers_what_is_left(samples, tokens):
    assert AudioSpec(24000, 240, 4).num_tokens(samples) == tokens


def test_a_contract_survives_the_disk(tmp_path):
    contract().save(tmp_path / "voice.json")
    assert VoiceContract.load(tmp_path / "voice.json") == contract()


def test_a_missing_contract_says_what_a_voice_folder_holds(tmp_path):
    with pytest.raises(CheckpointError, match=r"voice\.json: no such file"):
        VoiceContract.load(tmp_path / "voice.json")


def test_a_damaged_contract_is_named(tmp_path):
    (tmp_path / "voice.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        VoiceContract.load(tmp_path / "voice.json")


@pytest.mark.parametrize("text", ["[]", "3", '{"format_version": 99}'])
def test_another_version_is_refused(tmp_path, text):
    (tmp_path / "voice.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match="format_version is .*, this release reads 1"):
        VoiceContract.load(tmp_path / "voice.json")


@pytest.mark.parametrize("change", [{"audio": 3}, {"surprise": 1}, {"audio": {"hop": 1}}])
def test_a_contract_with_foreign_fields_is_refused(tmp_path, change):
    values = {**dataclasses.asdict(contract()), **change}
    (tmp_path / "voice.json").write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(CheckpointError, match="not a voice contract"):
        VoiceContract.load(tmp_path / "voice.json")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TextSpec("ipa", "en"), "text.kind is 'ipa'"),
        (lambda: PromptSpec(position_scheme="odd"), "position_scheme is 'odd'"),
        (lambda: PromptSpec(state_position="odd"), "state_position is 'odd'"),
        (lambda: AudioSpec(24000, 0, 4), "hop_length is 0"),
    ],
)
def test_values_outside_the_contract_are_named(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_file_hash_is_the_published_one(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    assert file_sha256(tmp_path / "x").startswith("ba7816bf8f01cfea")  # FIPS 180-2, example B.1
    with pytest.raises(CheckpointError, match="cannot be read"):
        file_sha256(tmp_path / "y")


def test_less_than_one_mixed_layer_is_refused():
    with pytest.raises(ConfigError, match="num_mixed_layers is 0, expected at least 1"):
        PromptSpec(num_mixed_layers=0)
