"""A whole small run, made once through the command line: what the end-to-end tests look at."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from command_line import call_main
from pipeline_sizes import SMALL_CODEC, SMALL_LLM, SMALL_VOCODER

from tts_stack.voice import demo_corpus_dir

NUM_CLIPS = 30


class Result(NamedTuple):
    """What a command left behind."""

    code: int
    output: str  # standard output and error


@pytest.fixture(scope="session")
def small_recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first clips of the demonstration corpus, in LJSpeech layout."""
    folder = tmp_path_factory.mktemp("recordings")
    (folder / "wavs").mkdir()
    lines = (demo_corpus_dir() / "metadata.csv").read_text(encoding="utf-8").splitlines()
    for line in lines[:NUM_CLIPS]:
        name = f"{line.split('|')[0]}.opus"
        shutil.copy(demo_corpus_dir() / "wavs" / name, folder / "wavs" / name)
    (folder / "metadata.csv").write_text("\n".join(lines[:NUM_CLIPS]) + "\n", encoding="utf-8")
    return folder


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> Callable[..., Result]:
    """Run one command in this process."""

    def run(*args: object) -> Result:
        capfd.readouterr()
        code = call_main([str(arg) for arg in args], monkeypatch)
        captured = capfd.readouterr()
        return Result(code, captured.out + captured.err)

    return run


class SmallRun(NamedTuple):
    """Folders of the session's run."""

    corpus: Path
    run: Path
    voice: Path


@pytest.fixture(scope="session")
def small_run(small_recordings: Path, tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    """prepare, train-codec, tokenize, train-llm, train-vocoder twice, export."""
    top = tmp_path_factory.mktemp("small")
    made = SmallRun(top / "corpus", top / "run", top / "voice")
    where = [f"corpus={made.corpus}", f"run={made.run}"]
    steps = ["trainer.max_steps=4", "trainer.validate_every=2", "trainer.checkpoint_every=2"]
    commands = [
        ["prepare", small_recordings, made.corpus, "num_workers=1", "validation_fraction=0.1"],
        ["train-codec", *where, *SMALL_CODEC, *steps],
        ["tokenize", f"corpus={made.corpus}", f"tokenizer={made.run}/codec/codec"],
        ["train-llm", *where, *SMALL_LLM, *steps],
        ["train-vocoder", *where, *SMALL_VOCODER, *steps],
        ["train-vocoder", *where, *SMALL_VOCODER, *steps, "--phase", "adversarial"],
        ["export", made.run, made.voice],
    ]
    with pytest.MonkeyPatch.context() as monkeypatch:
        for command in commands:
            assert call_main([str(part) for part in command], monkeypatch) == 0, command
    return made
