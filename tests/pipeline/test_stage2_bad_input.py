"""What stage 2's commands say about bad input: one line, the place, and what to do."""

import io
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
from stage2_support import TINY_OVERRIDES
from voice_support import make_places, write_llm

STEPS = ("reconstruction.max_steps=2", "adversarial.max_steps=2")


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    return make_places(tmp_path_factory.mktemp("bad_input"))


@pytest.fixture
def places(template, tmp_path, monkeypatch):
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    # The LLM was not trained by a command, so no voice can be made of the run.
    monkeypatch.setattr("tts_stack.export.export_voice", lambda *args, **settings: None)
    return tmp_path


@pytest.fixture
def train(places, cli):
    def run(*words, phase="reconstruction"):
        where = (f"corpus={places / 'corpus'}", f"run={places / 'run'}")
        settings = (*where, *TINY_OVERRIDES, *STEPS, "trainer.max_steps=2", *words)
        return cli("train-vocoder", *settings, "--phase", phase)

    return run


def assert_refused(result, *parts):
    assert result.code == 1
    assert "Traceback" not in result.output
    errors = [line for line in result.output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    for part in parts:
        assert part in errors[0], errors[0]


def change_audio(places, change):
    """Change the samples of the first training clip in the corpus's shard."""
    path = places / "corpus" / "train-00000.parquet"
    table = pq.read_table(path)
    column = table.schema.get_field_index("audio")
    clips = table.column(column).to_pylist()
    audio, rate = soundfile.read(io.BytesIO(clips[0]["bytes"]))
    file = io.BytesIO()
    soundfile.write(file, change(audio), rate, format="WAV", subtype="FLOAT")
    clips[0]["bytes"] = file.getvalue()
    field = table.schema.field(column)
    pq.write_table(table.set_column(column, field, pa.array(clips, field.type)), path)


def states_file(places, name):
    return next((places / "run" / "states").glob(name))


def test_adversarial_before_reconstruction_computes_nothing(train, places):
    result = train(phase="adversarial")
    assert_refused(result, "no finished reconstruction to start from", "--phase reconstruction")
    assert not (places / "run" / "states").exists()


def test_a_finished_phase_is_refused_and_its_states_stay(train, places):
    assert train().code == 0
    kept = {path: path.read_bytes() for path in (places / "run" / "states").iterdir()}
    write_llm(places, seed=1)  # whose states would replace them
    assert_refused(train(), "already holds a training run; add --resume")
    assert {path: path.read_bytes() for path in (places / "run" / "states").iterdir()} == kept


def test_states_of_another_llm_are_replaced_and_its_vocoder_is_refused(train, places):
    assert train().code == 0
    before = states_file(places, "train-*").read_bytes()
    write_llm(places, seed=1)
    result = train(phase="adversarial")
    assert_refused(result, "vocoder/reconstruction/model: made for LLM", "train the reconstruction")
    assert states_file(places, "train-*").read_bytes() != before


def test_a_vocoder_of_another_size_is_refused(train):
    assert train().code == 0
    result = train("vocoder.dim=16", phase="adversarial")
    assert_refused(result, "vocoder 8/16 x", "this run is", "vocoder 16/16 x")


def test_audio_shorter_than_its_tokens_claim(train, places):
    path = places / "corpus" / "train-00000.parquet"
    table = pq.read_table(path)
    column = table.schema.get_field_index("semantic_tokens")
    tokens = [row + [0, 0, 0] for row in table.column(column).to_pylist()]
    field = table.schema.field(column)
    pq.write_table(table.set_column(column, field, pa.array(tokens, field.type)), path)
    assert_refused(train(), "train", "tokens")


def test_a_sample_rate_that_the_token_rate_does_not_divide(places, cli):
    rate = "codec.token_rate=30"
    result = cli("train-codec", f"corpus={places / 'corpus'}", f"run={places / 'run'}", rate)
    assert_refused(result, "24000 Hz / (hop_length 240 x frames_per_token 4) is 25 Hz", "nearest: ")


def test_a_batch_larger_than_the_data_works_and_is_said(train, caplog):
    assert train().code == 0
    assert train("adversarial.batch_size=9", phase="adversarial").code == 0
    assert "9 crops" in caplog.text and "the corpus has 6 utterances" in caplog.text


def test_a_silent_clip_is_trained_on_and_counted(train, places):
    change_audio(places, lambda audio: 0 * audio)
    assert train("reconstruction.batch_seconds=20").code == 0
    figures = (places / "run/vocoder/reconstruction/metrics.jsonl").read_text(encoding="utf-8")
    assert '"train/silent_items": 1.0' in figures


def test_a_clip_with_a_sample_that_is_no_number(train, places):
    change_audio(places, lambda audio: np.where(audio == audio.max(), np.nan, audio))
    result = train("reconstruction.batch_seconds=20")
    assert_refused(result, "row 0: ", "samples are NaN or infinite", "re-run tts-stack prepare")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("adversarial.decode=half", "adversarial.decode is 'half', expected crop or full"),
        ("adversarial.crop_seconds=0", "crop_seconds is 0"),
        ("data.states=stored", "data.states is 'stored', expected"),
        ("vocoder.n_fft=41", "vocoder.n_fft is 41"),
        ("losses.mel.hop_length=37", "mel hop_length is 37, expected a divisor"),
        ("data.state_noise=-1", "data.state_noise is -1"),
    ],
)
def test_a_setting_out_of_range(train, setting, message):
    assert_refused(train(setting), message)
