"""`synth` and `export`: speak with a voice, gather a voice in a folder."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from tts_stack.commands.common import (
    Phase,
    console,
    next_step,
    progress_bar,
    quiet_libraries,
)
from tts_stack.errors import ConfigError, DataError


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command()(synth)
    app.command()(export)


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
    speaker: Annotated[
        str | None, typer.Option(help="Of a voice trained with speaker tags.")
    ] = None,
    language: Annotated[
        str | None, typer.Option(help="Of a voice trained with language tags.")
    ] = None,
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
    quiet_libraries()
    from tts_stack.synthesize import SynthesisSettings, Voice

    settings = SynthesisSettings(
        seed=seed,
        temperature=temperature,
        top_p=top_p,
        speed=speed,
        speaker=speaker,
        language=language,
    )
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
    next_step(f'tts-stack synth "hello" out.wav --voice {out}')


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
