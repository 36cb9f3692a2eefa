"""The command line: each command loads a config and calls one function.

Heavy imports stand inside the commands, so that `--help` answers at once.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tts_stack.errors import ConfigError, DataError, TTSStackError

if TYPE_CHECKING:
    from tts_stack.training import TrainSummary

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Recordings into a voice, and text into speech with it.",
)
console = Console(stderr=True)
UNSUITABLE_MEL_L1 = 0.7  # nat; a codec trained on its own voice has 0.4 to 0.5
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Settings as key=value: corpus=work/corpus trainer.max_steps=200"),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint.")]


class Phase(StrEnum):
    """Phases of the vocoder's training."""

    reconstruction = "reconstruction"
    adversarial = "adversarial"


def main() -> NoReturn:
    """Run a command; an error meant for the user is one line and exit code 1."""
    logging.basicConfig(
        level=logging.INFO,
        format="%(message)s",
        handlers=[RichHandler(console=console, show_path=False)],
    )
    for name in ("httpx", "lightning", "lightning.fabric", "matplotlib", "numba"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        app(standalone_mode=False)
    except TTSStackError as error:
        fail(str(error))
    except typer.Exit as error:
        sys.exit(error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        fail("interrupted")
    except Exception as error:
        show = getattr(error, "show", None)  # click's usage errors print themselves
        if show is None:
            raise
        show()
        sys.exit(2)
    sys.exit(0)


def fail(message: str) -> NoReturn:
    """Print one error line and leave with code 1."""
    console.print(
        f"error: {message}", style="bold red", markup=False, highlight=False, soft_wrap=True
    )
    sys.exit(1)


@app.command()
def synth(
    text: Annotated[
        str | None, typer.Argument(help='What to say, "-" for standard input, or use --file.')
    ] = None,
    out: Annotated[Path | None, typer.Argument(help="Audio file: .wav .flac .ogg .mp3")] = None,
    voice: Annotated[
        Path | None, typer.Option(help="Voice or run folder; default: the shipped voice.")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Read the text from this file (UTF-8).")] = None,
    seed: Annotated[int, typer.Option(help="Another seed is another take.")] = 0,
    temperature: Annotated[float | None, typer.Option(help="0 is the likeliest reading.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the likeliest share.")] = None,
    speed: Annotated[float, typer.Option(help="0.5 to 2; 1.2 speaks 20 % faster.")] = 1.0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
) -> None:
    """Speak text into an audio file.

    tts-stack synth "hello" out.wav

    tts-stack synth --file chapter.txt chapter.mp3 --voice my_voice/
    """
    if file is not None and out is None and text is not None:
        out, text = Path(text), None
    if out is None:
        raise ConfigError('no output file given; use: tts-stack synth "hello" out.wav')
    spoken = _read_text(text, file)
    from tts_stack.audio import check_writable

    check_writable(out)
    _quiet_libraries()
    from tts_stack.synthesize import SynthesisSettings, Voice

    settings = SynthesisSettings(seed=seed, temperature=temperature, top_p=top_p, speed=speed)
    loaded = Voice.load(voice, device=device)
    with progress_bar("sentences") as advance:
        speech = loaded.synthesize(spoken, settings, on_sentence=advance)
    speech.save(out)
    for warning in speech.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)
    console.print(
        f"{out}: {speech.seconds:.2f} s at {speech.sample_rate} Hz, "
        f"{len(speech.sentences)} sentence(s), voice {loaded.contract.name}",
        markup=False,
        soft_wrap=True,
    )


@app.command()
def prepare(
    source: Annotated[Path, typer.Argument(help="Folder with recordings, or a JSONL manifest.")],
    corpus: Annotated[Path, typer.Argument(help="Folder to write the corpus to.")],
    overrides: Overrides = None,
) -> None:
    """Check recordings and transcripts and write them as Parquet shards.

    Reads LJSpeech layout (metadata.csv + wavs/), a JSONL manifest (audio, text, optional speaker
    and language), or a folder of x.wav + x.txt. Re-running continues an interrupted run.

    Common settings: sample_rate=24000 text.language=en-us text.kind=phonemes min_seconds=0.4
    max_seconds=20 trim_silence=true loudness_db=-23 num_workers=2
    """
    from tts_stack.config import load_config
    from tts_stack.data.config import PrepareConfig
    from tts_stack.data.prepare import prepare as run_prepare

    given = [f"source={source}", f"corpus={corpus}", *(overrides or [])]
    config = load_config(PrepareConfig, "prepare", given)
    with progress_bar("recordings") as advance:
        report = run_prepare(config, on_progress=advance)
    for line in report.lines():
        console.print(line, markup=False, soft_wrap=True)
    _next_step(f"tts-stack train-codec corpus={corpus}   (for another voice than the shipped one)")
    console.print(f"  or: tts-stack tokenize corpus={corpus}", markup=False, soft_wrap=True)


@app.command("train-codec")
def train_codec(overrides: Overrides = None, resume: Resume = False) -> None:
    """Train the speech tokenizer (optional: one ships in the package).

    Common settings: corpus=work/corpus run=runs/mine trainer.max_steps=2500
    experiment=demo_codec; without corpus= it trains on the demonstration corpus.
    """
    from tts_stack.config import load_config
    from tts_stack.semantic.config import CodecTrainConfig
    from tts_stack.semantic.train import run_training

    given = _with_defaults(overrides, "demo_codec")
    config = load_config(CodecTrainConfig, "train_codec", given)
    summary = run_training(config, resume=resume)
    _print_summary(summary, Path(config.run) / "codec")
    _next_step(f"tts-stack tokenize corpus={config.corpus} tokenizer={config.run}/codec/codec")


@app.command()
def tokenize(overrides: Overrides = None) -> None:
    """Write semantic tokens into a corpus's shards.

    corpus=work/corpus is needed; tokenizer=FOLDER names another codec than the one trained in the
    corpus's run folder, or, when there is none, the one that ships.
    """
    from tts_stack.config import load_config
    from tts_stack.semantic.config import TokenizeConfig
    from tts_stack.semantic.tokenize import tokenize as run_tokenize
    from tts_stack.voice import CODEC_DIR, default_voice_dir

    config = load_config(TokenizeConfig, "tokenize", overrides or [])
    trained = _default_run(config.corpus) / "codec" / "codec"
    shipped = default_voice_dir() / CODEC_DIR
    codec = Path(config.tokenizer) if config.tokenizer else trained if trained.is_dir() else shipped
    console.print(f"codec: {codec}", markup=False)
    with progress_bar("recordings") as advance:
        report = run_tokenize(Path(config.corpus), codec, on_progress=advance)
    console.print(report.describe(), markup=False, soft_wrap=True)
    if report.mel_l1 is not None and report.mel_l1 > UNSUITABLE_MEL_L1:
        console.print(
            f"warning: a round-trip error of {report.mel_l1:.2f} nat says this codec was made for "
            f"other recordings; train your own: tts-stack train-codec corpus={config.corpus}",
            style="yellow",
            markup=False,
            soft_wrap=True,
        )
    _next_step(f"tts-stack train-llm corpus={config.corpus}")


@app.command("train-llm")
def train_llm(overrides: Overrides = None, resume: Resume = False) -> None:
    """Stage 1: train the LLM that reads text and writes semantic tokens.

    Without corpus= it trains on the demonstration corpus in runs/demo, in minutes.

    Common settings: corpus=work/corpus run=runs/mine trainer.max_steps=3000 llm=llama_5m
    text_weight=0.1 trainer.precision=bf16-mixed trainer.num_threads=1
    """
    from stage1_llm.config import LLMTrainConfig
    from stage1_llm.train import run_training
    from tts_stack.config import load_config

    config = load_config(LLMTrainConfig, "train_llm", _with_defaults(overrides, "demo_llm"))
    summary = run_training(config, resume=resume)
    _print_summary(summary, Path(config.run) / "llm")
    corpus = "" if _is_demo(overrides) else f" corpus={config.corpus}"
    _next_step(f"tts-stack train-vocoder{corpus} --phase reconstruction")


@app.command("train-vocoder")
def train_vocoder(
    overrides: Overrides = None,
    phase: Annotated[Phase, typer.Option(help="reconstruction first.")] = Phase.reconstruction,
    resume: Resume = False,
) -> None:
    """Stage 2: train the decoder on the frozen LLM's hidden states.

    Phase reconstruction: mel-L1 and multi-resolution STFT on whole utterances. Phase adversarial:
    discriminators and feature matching on random 1-second crops, starting from the first phase.

    Common settings: corpus=work/corpus run=runs/mine trainer.max_steps=3000 vocoder=base
    """
    from stage2_vocoder.config import VocoderTrainConfig
    from stage2_vocoder.train import run_training
    from tts_stack.config import load_config
    from tts_stack.export import export_voice
    from tts_stack.runtime import choose_device
    from tts_stack.states import ensure_states
    from tts_stack.voice import RUN_VOICE_DIR

    given = _with_defaults(overrides, "demo_vocoder")
    # A preset gives each phase its own number of steps; the user's number comes before it.
    given += [
        item.replace("trainer.max_steps", f"{phase.value}.max_steps")
        for item in given
        if item.startswith("trainer.max_steps=")
    ]
    config = load_config(VocoderTrainConfig, "train_vocoder", given)
    run = Path(config.run)
    with progress_bar("hidden states") as advance:
        device = choose_device(config.trainer.device)
        llm_sha256 = ensure_states(run, Path(config.corpus), device=device, on_progress=advance)
    summary = run_training(config, phase.value, resume=resume, llm_sha256=llm_sha256)
    _print_summary(summary, run / "vocoder" / phase.value)
    export_voice(run, run / RUN_VOICE_DIR, name=run.name, phase=phase.value)
    corpus = "" if _is_demo(overrides) else f" corpus={config.corpus}"
    if phase is Phase.reconstruction:
        _next_step(f"tts-stack train-vocoder{corpus} --phase adversarial")
    console.print(f'listen: tts-stack synth "hello" out.wav --voice {run}', markup=False)
    console.print(f"keep it: tts-stack export {run} my_voice/", markup=False)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Run folder of a trained voice.")],
    out: Annotated[Path, typer.Argument(help="Voice folder to write.")],
    name: Annotated[
        str | None, typer.Option(help="Name of the voice; default: the folder's.")
    ] = None,
    phase: Annotated[Phase | None, typer.Option(help="Default: adversarial if trained.")] = None,
) -> None:
    """Gather a trained voice in one folder: contract, LLM, vocoder, codec, card."""
    from tts_stack.export import export_voice

    files = export_voice(run, out, name=name or out.name, phase=phase.value if phase else None)
    console.print(f"{files.path}: voice {files.contract.name!r} written", markup=False)
    _next_step(f'tts-stack synth "hello" out.wav --voice {out}')


@app.command("demo-corpus")
def demo_corpus(
    out: Annotated[Path, typer.Argument(help="Folder to write: LJSpeech layout.")],
    text: Annotated[Path, typer.Option(help="Text, a passage a line; id|text files work too.")],
    hours: Annotated[float, typer.Option(help="Hours of speech to make.")] = 1.0,
    skip: Annotated[int, typer.Option(help="Leave out the first lines (held-out text).")] = 0,
    whole_lines: Annotated[bool, typer.Option(help="Speak each line as it is.")] = False,
    short_fraction: Annotated[float, typer.Option(help="Share of 1 to 3 word utterances.")] = 0.12,
    seed: Annotated[int, typer.Option(help="Fixes cuts and order.")] = 1,
    audio_format: Annotated[str, typer.Option("--format", help="flac or opus.")] = "flac",
    workers: Annotated[int, typer.Option(help="Processes, one thread each.")] = 2,
) -> None:
    """Make training speech from text with the CC0 Piper voice "joe" (extra: demo).

    Re-running continues: clips that exist are kept.
    """
    from tts_stack.data.demo_corpus import synthesize_corpus
    from tts_stack.data.demo_text import demo_sentences, read_lines

    sentences = demo_sentences(
        read_lines(text, skip=skip),
        seed=seed,
        short_fraction=0.0 if whole_lines else short_fraction,
        cut=not whole_lines,
    )
    with progress_bar("seconds") as advance:
        spoken = 0.0

        def on_clip(seconds: float) -> None:
            nonlocal spoken
            spoken += seconds
            advance(int(spoken), int(hours * 3600))

        made = synthesize_corpus(
            sentences,
            out,
            hours=hours,
            num_workers=workers,
            audio_format=audio_format,
            on_progress=on_clip,
        )
    console.print(f"{out}: {made:.3f} h of speech", markup=False)
    if made < hours * 0.99:
        console.print(f"the text ran out before {hours} h; give a longer file", markup=False)
    _next_step(f"tts-stack prepare {out} work/corpus")


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar that a function moves by calling it with (done, total)."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(title, total=None)

        def advance(done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total)

        yield advance


def _read_text(text: str | None, file: Path | None) -> str:
    if file is not None:
        if text is not None:
            raise ConfigError("text was given both as an argument and with --file; give one")
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{file}: cannot be read as UTF-8 text ({error})") from error
    if text is None:
        raise ConfigError('no text given; use: tts-stack synth "hello" out.wav')
    return sys.stdin.read() if text == "-" else text


def _is_demo(overrides: list[str] | None) -> bool:
    return not any(override.startswith("corpus=") for override in overrides or [])


def _default_run(corpus: str) -> Path:
    return Path("runs") / Path(corpus).resolve().name


def _with_defaults(overrides: list[str] | None, demo_experiment: str) -> list[str]:
    """Fill in what the user left out: the demonstration corpus and preset, and the run folder."""
    given = list(overrides or [])
    if _is_demo(given):
        from tts_stack.demo import DEMO_RUN, ensure_demo_corpus

        has_experiment = any(override.startswith("experiment=") for override in given)
        preset = [] if has_experiment else [f"experiment={demo_experiment}"]
        return [*preset, f"corpus={ensure_demo_corpus()}", f"run={DEMO_RUN}", *given]
    corpus = next(item for item in given if item.startswith("corpus=")).removeprefix("corpus=")
    return [f"run={_default_run(corpus)}", *given]


def _print_summary(summary: "TrainSummary", folder: Path) -> None:
    from tts_stack.training import format_figures

    console.print(
        f"{folder}: {summary.steps} steps in {summary.seconds:.0f} s "
        f"({summary.skipped_steps} skipped)",
        markup=False,
    )
    console.print(f"  first validation: {format_figures(summary.first_validation)}", markup=False)
    console.print(f"  last validation:  {format_figures(summary.last_validation)}", markup=False)
    console.print(f"  best {summary.best:.4g} at step {summary.best_step}", markup=False)


def _next_step(command: str) -> None:
    console.print(f"next: {command}", markup=False, soft_wrap=True)


def _quiet_libraries() -> None:
    """Keep the transformers progress bar for loading weights off a one-second command."""
    import os

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
