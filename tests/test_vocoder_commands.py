"""`extract-states`, `floor` and the checks of stage 2 as commands."""

import json
import shutil

import pytest
import typer
from stage2_support import TINY_OVERRIDES
from typer.testing import CliRunner
from voice_support import make_places

from tts_stack.commands import check, vocoder
from tts_stack.commands.common import console


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    return make_places(tmp_path_factory.mktemp("commands"))


@pytest.fixture
def places(template, tmp_path):
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture
def command(places, monkeypatch):
    """Run a command on the places; what it printed, both streams."""
    app = typer.Typer(pretty_exceptions_enable=False)
    for group in (vocoder, check):
        group.register(app)
    monkeypatch.setattr(console, "width", 400)

    def run(*args, overrides=TINY_OVERRIDES):
        where = (f"corpus={places / 'corpus'}", f"run={places / 'run'}")
        with console.capture() as captured:
            result = CliRunner().invoke(app, [*args, *where, *overrides], catch_exceptions=False)
        return result.exit_code, result.output + captured.get()

    return run


def test_extract_states_says_where_the_store_is_and_continues(command, places):
    code, output = command("extract-states")
    assert code == 0
    assert f"{places}/run/states: hidden states of 8 utterances" in output
    assert "(8 utterances new)" in output
    assert "next: tts-stack train-vocoder" in output
    assert "(0 utterances new)" in command("extract-states")[1]


def test_extract_states_takes_the_type_of_the_configuration(command, places):
    command("extract-states", "data.states_dtype=bfloat16")
    values = json.loads((places / "run" / "states" / "states.json").read_text())
    assert values["identity"]["dtype"] == "bfloat16"


def test_floor_prints_a_table_and_a_verdict(command, places):
    code, output = command("floor", "trainer.max_steps=1", "data.num_shown=0")
    assert code == 0
    assert "one vocoder, 1 steps on each input" in output
    for name in ("mel", "codes", "states", "mel L1", "STFT"):
        assert name in output
    assert "is the limit" in output
    assert (places / "run" / "floor" / "floor.json").exists()


@pytest.mark.parametrize("name", ["states", "stream"])
def test_checks_of_stage_2_hold(command, name, monkeypatch):
    monkeypatch.setattr("stage1_llm.generate.UNKNOWN_LENGTH_TOKENS", 12)
    code, output = command("check", name)
    assert code == 0
    assert f"check {name}: all" in output
