"""The commands from recordings to speech, and what each says about bad input."""

import json
import shutil

import pytest
import soundfile

from tts_stack.contract import VoiceContract, file_sha256
from tts_stack.training import read_metrics


def test_the_commands_lead_from_recordings_to_speech(small_run, cli, tmp_path):
    result = cli("synth", "Hello there.", tmp_path / "out.wav", "--voice", small_run.voice)
    assert result.code == 0
    info = soundfile.info(tmp_path / "out.wav")
    assert (info.samplerate, info.channels) == (24000, 1)
    assert info.frames > 0 and info.frames % 960 == 0


@pytest.mark.parametrize("extension", ["wav", "flac", "ogg", "mp3"])
def test_the_extension_chooses_the_container(small_run, cli, tmp_path, extension):
    path = tmp_path / f"out.{extension}"
    assert cli("synth", "Hello.", path, "--voice", small_run.voice).code == 0
    assert soundfile.info(path).format.lower() == {"mp3": "mp3"}.get(extension, extension)


def test_the_run_folder_speaks_like_the_exported_voice(small_run, cli, tmp_path):
    for name, voice in (("a.wav", small_run.voice), ("b.wav", small_run.run)):
        assert cli("synth", "Hello.", tmp_path / name, "--voice", voice).code == 0
    assert file_sha256(tmp_path / "a.wav") == file_sha256(tmp_path / "b.wav")


def test_the_same_seed_gives_the_same_samples_and_another_seed_others(small_run, cli, tmp_path):
    for name, seed in (("a.wav", 1), ("b.wav", 1), ("c.wav", 2)):
        command = ("synth", "Hello.", tmp_path / name, "--voice", small_run.voice, "--seed", seed)
        assert cli(*command).code == 0
    assert file_sha256(tmp_path / "a.wav") == file_sha256(tmp_path / "b.wav")
    assert file_sha256(tmp_path / "a.wav") != file_sha256(tmp_path / "c.wav")


def test_text_comes_from_a_file_or_from_standard_input(small_run, cli, tmp_path, monkeypatch):
    import io
    import sys

    (tmp_path / "text.txt").write_text("Hello.", encoding="utf-8")
    voice = ("--voice", small_run.voice)
    assert cli("synth", "Hello.", tmp_path / "a.wav", *voice).code == 0
    assert cli("synth", "--file", tmp_path / "text.txt", tmp_path / "b.wav", *voice).code == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello."))
    assert cli("synth", "-", tmp_path / "c.wav", *voice).code == 0
    assert len({file_sha256(tmp_path / f"{name}.wav") for name in "abc"}) == 1


def test_training_the_vocoder_leaves_the_llm_bit_identical(small_run):
    contract = VoiceContract.load(small_run.run / "llm" / "model" / "voice.json")
    assert file_sha256(small_run.run / "llm" / "model" / "model.safetensors") == contract.llm_sha256
    exported = file_sha256(small_run.voice / "llm" / "model.safetensors")
    assert exported == contract.llm_sha256


def test_a_run_folder_records_config_versions_and_figures(small_run):
    for stage in ("codec", "llm", "vocoder/reconstruction", "vocoder/adversarial"):
        folder = small_run.run / stage
        assert f"run: {small_run.run}" in (folder / "config.yaml").read_text(encoding="utf-8")
        assert "torch" in json.loads((folder / "versions.json").read_text(encoding="utf-8"))
        assert read_metrics(folder)[-1]["step"] == 4


@pytest.mark.parametrize("command", ["train-codec", "train-llm", "train-vocoder"])
def test_a_finished_run_is_not_overwritten_without_being_asked(small_run, cli, command):
    where = (f"corpus={small_run.corpus}", f"run={small_run.run}")
    preset = {"train-codec": "codec=fsq_25hz_small", "train-llm": "llm=tiny"}
    given = [preset[command]] if command in preset else ["vocoder=tiny"]
    result = cli(command, *where, *given)
    assert result.code == 1
    assert "already holds a training run; add --resume" in result.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "nothing to speak"),
        ("   ", "nothing to speak"),
        ("😀😀", "nothing to speak"),
        ("...", "nothing to speak"),
    ],
)
def test_text_without_words_is_one_clear_line(small_run, cli, tmp_path, text, message):
    result = cli("synth", text, tmp_path / "out.wav", "--voice", small_run.voice)
    assert result.code == 1
    assert message in result.output and "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_control_token_in_the_text_is_text(small_run, cli, tmp_path):
    text = "before <|audio_start|> after <|audio_end|>"
    result = cli("synth", text, tmp_path / "out.wav", "--voice", small_run.voice)
    assert result.code == 0 and soundfile.info(tmp_path / "out.wav").frames > 0


def test_five_thousand_characters_without_punctuation_are_spoken_in_pieces(small_run):
    from tts_stack import Voice

    sentences = Voice.load(small_run.voice, device="cpu")._front_end("word " * 1000)[0]
    assert sum(sentence.count("word") for sentence, _ in sentences) == 1000
    assert max(len(sentence) for sentence, _ in sentences) <= 200


@pytest.mark.parametrize(
    ("path", "message"),
    [("missing/out.wav", "missing"), ("out.xyz", "xyz"), ("out", "extension")],
)
def test_an_output_path_that_cannot_be_written_is_named_first(cli, tmp_path, path, message):
    result = cli("synth", "Hello.", tmp_path / path)
    assert result.code == 1 and message in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--speed", "9"], "speed is 9.0, expected 0.5 to 2.0"),
        (["--top-p", "0"], "top_p is 0.0"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--seed", "-1"], "seed is -1"),
        (["--device", "abacus"], "device 'abacus' cannot be used"),
        (["--voice", "no/such/voice"], "no/such/voice: no such voice folder"),
        (["--file", "no/such/text"], "given both as an argument and with --file"),
    ],
)
def test_a_wrong_option_is_one_clear_line(cli, tmp_path, options, message):
    result = cli("synth", "Hello.", tmp_path / "out.wav", *options)
    assert result.code == 1
    assert message in result.output and "Traceback" not in result.output


def test_a_command_line_that_cannot_be_parsed_has_exit_code_2(cli):
    assert cli("synth", "--speeed", "1").code == 2


def copy_voice(small_run, tmp_path):
    return shutil.copytree(small_run.voice, tmp_path / "voice")


@pytest.mark.parametrize("name", ["llm/model.safetensors", "llm/config.json", "voice.json",
                                  "vocoder/model.safetensors", "vocoder/config.json"])  # fmt: skip
def test_a_voice_without_one_of_its_files_is_refused(small_run, cli, tmp_path, name):
    voice = copy_voice(small_run, tmp_path)
    (voice / name).unlink()
    result = cli("synth", "Hello.", tmp_path / "out.wav", "--voice", voice)
    assert result.code == 1
    assert name.split("/")[-1] in result.output and "Traceback" not in result.output
    assert not (tmp_path / "out.wav").exists()


@pytest.mark.parametrize("stage", ["llm", "vocoder"])
def test_a_voice_with_another_voice_s_weights_is_refused(small_run, cli, tmp_path, stage):
    voice = copy_voice(small_run, tmp_path)
    other = "vocoder" if stage == "llm" else "llm"
    shutil.copy(voice / other / "model.safetensors", voice / stage / "model.safetensors")
    result = cli("synth", "Hello.", tmp_path / "out.wav", "--voice", voice)
    assert result.code == 1 and "the file belongs to another voice" in result.output


def test_a_voice_without_a_codec_speaks_but_does_not_copy(small_run, tmp_path):
    import numpy as np

    from tts_stack import Voice
    from tts_stack.errors import CheckpointError

    voice = copy_voice(small_run, tmp_path)
    shutil.rmtree(voice / "codec")
    loaded = Voice.load(voice, device="cpu")
    assert loaded.synthesize("Hello.").seconds > 0
    with pytest.raises(CheckpointError, match="no codec/ in this voice"):
        loaded.copy_synthesis(np.zeros(2400, np.float32), "Hello.")


def test_copy_synthesis_covers_the_recording(small_run):
    import numpy as np

    from tts_stack import Voice

    audio = np.random.default_rng(0).normal(0, 0.1, 5000).astype(np.float32)
    copied = Voice.load(small_run.voice, device="cpu").copy_synthesis(audio, "Hello.")
    assert len(copied) == 6 * 960


def test_speed_changes_the_number_of_tokens_decoded(small_run):
    from tts_stack import Voice
    from tts_stack.synthesize import SynthesisSettings

    voice = Voice.load(small_run.voice, device="cpu")
    slow, normal = (voice.synthesize("Hello.", SynthesisSettings(speed=s)) for s in (0.5, 1.0))
    assert len(slow.audio) == 2 * len(normal.audio)


def test_a_missing_stage_names_the_command_that_makes_it(small_run, cli, tmp_path):
    where = (f"corpus={small_run.corpus}", f"run={tmp_path / 'new'}")
    result = cli("train-vocoder", *where, "vocoder=tiny")
    assert result.code == 1 and "run tts-stack train-llm" in result.output
    result = cli("export", tmp_path / "new", tmp_path / "voice")
    assert result.code == 1 and "run tts-stack train-llm" in result.output


def test_export_does_not_replace_a_folder_that_is_not_a_voice(small_run, cli, tmp_path):
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    result = cli("export", small_run.run, tmp_path)
    assert result.code == 1 and "not empty and not a voice folder" in result.output
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "mine"


def test_a_retrained_llm_and_an_old_vocoder_are_not_exported_together(small_run, cli, tmp_path):
    run = shutil.copytree(small_run.run, tmp_path / "run")
    config = run / "vocoder" / "adversarial" / "model" / "config.json"
    values = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps({**values, "llm_sha256": "0" * 64}), encoding="utf-8")
    result = cli("export", run, tmp_path / "voice")
    assert result.code == 1 and "train the vocoder again" in result.output
    assert not (tmp_path / "voice").exists()


@pytest.mark.parametrize("command", ["tokenize", "train-codec", "train-llm", "train-vocoder"])
def test_a_corpus_that_is_not_there_is_one_clear_line(cli, tmp_path, command):
    result = cli(command, f"corpus={tmp_path / 'none'}", *([] if command == "tokenize" else
                 [f"run={tmp_path / 'run'}"]))  # fmt: skip
    assert result.code == 1 and "Traceback" not in result.output


def test_an_unknown_key_names_the_nearest_one(small_run, cli):
    result = cli("train-llm", f"corpus={small_run.corpus}", "trainer.max_step=3")
    assert result.code == 1
    assert (
        "unknown key trainer.max_step; the nearest valid key is trainer.max_steps" in result.output
    )


@pytest.mark.parametrize(
    "command",
    ["synth", "prepare", "train-codec", "tokenize", "train-llm", "train-vocoder", "export",
     "demo-corpus"],
)  # fmt: skip
def test_every_command_explains_itself(cli, command):
    result = cli(command, "--help")
    assert result.code == 0 and len(result.output) > 200
