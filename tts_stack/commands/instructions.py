"""`import-instructions`, `export-instructions`, `import-tokens`: data without our codec."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tts_stack.commands.common import console, next_step, progress_bar

CodebookSize = Annotated[int, typer.Option(help="Different codes: 0 .. size - 1.")]
CodecId = Annotated[str, typer.Option(help="A name for the speech tokenizer.")]
CodecHash = Annotated[
    str, typer.Option(help="SHA-256 of its weights; without it the name stands for them.")
]
SampleRate = Annotated[int, typer.Option(help="Hz of the audio that it reads.")]
HopLength = Annotated[int, typer.Option(help="Samples a frame.")]
FramesPerToken = Annotated[
    int, typer.Option(help="Frames a token; sample rate / hop / frames = tokens per second.")
]


class Split(StrEnum):
    """Splits of a corpus."""

    train = "train"
    validation = "validation"


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("import-instructions")(import_instructions)
    app.command("export-instructions")(export_instructions)
    app.command("import-tokens")(import_tokens)


def import_instructions(
    source: Annotated[
        Path, typer.Argument(help="JSON array, JSONL file, or folder of a Hugging Face dataset.")
    ],
    corpus: Annotated[Path, typer.Argument(help="Folder to write the corpus to.")],
    codebook_size: CodebookSize = 512,
    codec_id: CodecId = "whisper-vq",
    codec_sha256: CodecHash = "",
    sample_rate: SampleRate = 16000,
    hop_length: HopLength = 160,
    frames_per_token: FramesPerToken = 4,
    split: Annotated[
        str | None, typer.Option(help="Of a dataset that has several: train, test, …")
    ] = None,
    validation_fraction: Annotated[float, typer.Option(help="Share of rows held out.")] = 0.02,
    language: Annotated[str, typer.Option(help="Of rows that name none.")] = "en-us",
    seed: Annotated[int, typer.Option(help="Of the train/validation split.")] = 0,
) -> None:
    """Turn instruction data into a corpus that stage 1 trains on.

    A row is a dialogue under messages or conversations: the user's turn is <|text_to_semantic|>
    and the text, the assistant's <|sound_start|><|sound_0209|>…<|sound_end|>, where
    <|duration_NN|> stretches the sound token behind it. Rows of another form are left out and
    listed by number. export-instructions gives the rows back as they were.

    The defaults are Ichigo's: 512 sound tokens, 25 a second.
    """
    from tts_stack.contract import AudioSpec
    from tts_stack.data.instructions import ImportSettings
    from tts_stack.data.instructions import import_instructions as run_import
    from tts_stack.data.outside_tokens import outside_codec

    settings = ImportSettings(
        codec=outside_codec(codec_id, codebook_size, weights_sha256=codec_sha256),
        audio=AudioSpec(sample_rate, hop_length, frames_per_token),
        validation_fraction=validation_fraction,
        seed=seed,
        language=language.lower(),
    )
    with progress_bar("rows") as advance:
        report = run_import(source, corpus, settings, split=split, on_progress=advance)
    for line in report.lines():
        console.print(line, markup=False, soft_wrap=True)
    next_step(f"tts-stack train-llm corpus={corpus} llm=qwen2_5_0_5b prompt.format=chat")


def export_instructions(
    corpus: Annotated[Path, typer.Argument(help="Tokenised or imported corpus.")],
    out: Annotated[Path, typer.Argument(help="File to write: .jsonl (a row a line) or .json.")],
    split: Annotated[Split | None, typer.Option(help="One split; default: both.")] = None,
    durations: Annotated[
        bool,
        typer.Option("--durations", help="Collapse runs; imported rows keep their own form."),
    ] = False,
) -> None:
    """Write a corpus as instruction data in chat form.

    Imported rows come back as they were, in their first order. Rows made by prepare and tokenize
    get the form that import-instructions reads.
    """
    from tts_stack.data.instruction_export import export_instructions as run_export
    from tts_stack.shards import SPLITS

    splits = SPLITS if split is None else (split.value,)
    with progress_bar("rows") as advance:
        num_rows = run_export(corpus, out, splits=splits, durations=durations, on_progress=advance)
    console.print(f"{out}: {num_rows} rows", markup=False, soft_wrap=True)


def import_tokens(
    corpus: Annotated[Path, typer.Argument(help="Corpus written by prepare.")],
    file: Annotated[Path, typer.Argument(help="JSONL or .parquet of id and semantic_tokens.")],
    codec_id: CodecId,
    codebook_size: CodebookSize,
    sample_rate: SampleRate,
    hop_length: HopLength,
    frames_per_token: FramesPerToken = 1,
    num_codebooks: Annotated[int, typer.Option(help="Codes a token, K.")] = 1,
    codec_sha256: CodecHash = "",
) -> None:
    """Bring the tokens of your own speech tokenizer (Mimi, X-codec2, SNAC, …) into a corpus.

    A row is {"id": "clip-1", "semantic_tokens": [5, 9, …]}, or [[5, 310], [9, 17], …] for several
    codebooks, one inner list a token. Ids are the corpus's; encode the audio as prepare left it.

    Mimi at 24 kHz: --codec-id mimi --codebook-size 2048 --num-codebooks 8 --sample-rate 24000
    --hop-length 1920
    """
    from tts_stack.contract import AudioSpec
    from tts_stack.data.outside_tokens import import_tokens as run_import
    from tts_stack.data.outside_tokens import outside_codec

    codec = outside_codec(codec_id, codebook_size, num_codebooks, codec_sha256)
    audio = AudioSpec(sample_rate, hop_length, frames_per_token)
    with progress_bar("utterances") as advance:
        report = run_import(corpus, file, codec, audio, on_progress=advance)
    for line in report.lines():
        console.print(line, markup=False, soft_wrap=True)
    next_step(f"tts-stack train-llm corpus={corpus}")
