"""`prepare`, `train-codec`, `tokenize`, `demo-corpus`: recordings to a tokenised corpus."""

from pathlib import Path
from typing import Annotated

import typer

from tts_stack.commands.common import (
    Overrides,
    Resume,
    console,
    default_run,
    next_step,
    print_summary,
    progress_bar,
    with_defaults,
)

UNSUITABLE_MEL_L1 = 0.7  # nat; a codec trained on its own voice has 0.4 to 0.5


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command()(prepare)
    app.command("train-codec")(train_codec)
    app.command()(tokenize)
    app.command("demo-corpus")(demo_corpus)


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
    next_step(f"tts-stack train-codec corpus={corpus}   (for another voice than the shipped one)")
    console.print(f"  or: tts-stack tokenize corpus={corpus}", markup=False, soft_wrap=True)


def train_codec(overrides: Overrides = None, resume: Resume = False) -> None:
    """Train the speech tokenizer (optional: one ships in the package).

    Common settings: corpus=work/corpus run=runs/mine trainer.max_steps=2500
    experiment=demo_codec; without corpus= it trains on the demonstration corpus.
    """
    from tts_stack.config import load_config
    from tts_stack.semantic.config import CodecTrainConfig
    from tts_stack.semantic.train import run_training

    given = with_defaults(overrides, "demo_codec")
    config = load_config(CodecTrainConfig, "train_codec", given)
    summary = run_training(config, resume=resume)
    print_summary(summary, Path(config.run) / "codec")
    next_step(f"tts-stack tokenize corpus={config.corpus} tokenizer={config.run}/codec/codec")


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
    trained = default_run(config.corpus) / "codec" / "codec"
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
    next_step(f"tts-stack train-llm corpus={config.corpus}")


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
    next_step(f"tts-stack prepare {out} work/corpus")
