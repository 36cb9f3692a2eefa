"""`inspect` and `merge-lora`: look at a language model, make one model of base and adapter."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tts_stack.commands.common import console, next_step

if TYPE_CHECKING:
    from stage1_llm.inspection import Inspection


class WeightType(StrEnum):
    """Number types of a model's file."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


class PromptFormat(StrEnum):
    """Prompt formats; see docs."""

    tagged = "tagged"
    chat = "chat"


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command()(inspect)
    app.command("merge-lora")(merge_lora)


def inspect(
    target: Annotated[
        str | None,
        typer.Argument(
            help="Run, voice, LLM or adapter folder; a base model's folder or hub name. "
            "Default: the shipped voice."
        ),
    ] = None,
    codebook_size: Annotated[
        int | None, typer.Option(min=1, help="Semantic tokens a base model would get.")
    ] = None,
    prompt_format: Annotated[
        PromptFormat, typer.Option("--format", help="Prompt a base model would get.")
    ] = PromptFormat.tagged,
    text: Annotated[str, typer.Option(help="Text of the example prompt.")] = "Hello there.",
) -> None:
    """Show the id map, an example prompt and the size of a language model.

    tts-stack inspect runs/mine

    tts-stack inspect Qwen/Qwen2.5-0.5B-Instruct --codebook-size 512 --format chat
    """
    from stage1_llm.inspection import inspect_target
    from tts_stack.voice import default_voice_dir

    found = inspect_target(
        target or str(default_voice_dir()),
        codebook_size=codebook_size,
        prompt_format=prompt_format.value,
        text=text,
    )
    _show(found)


def merge_lora(
    run: Annotated[Path, typer.Argument(help="Run folder with llm/adapter, or that folder.")],
    base: Annotated[
        str | None, typer.Option(help="Folder or hub name; default: the one the adapter names.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Default: RUN/llm/model.")] = None,
    dtype: Annotated[
        WeightType, typer.Option(help="Of the file; half the bytes round the weights.")
    ] = WeightType.float32,
) -> None:
    """Merge an adapter into its base model: a standard Hugging Face folder, proved equal.

    tts-stack merge-lora runs/mine
    """
    from stage1_llm.merge import merge_adapter

    report = merge_adapter(run, base=base, out=out, dtype=dtype.value)
    console.print(f"{report.folder}: {report.describe()}", markup=False, soft_wrap=True)
    if out is None and (run / "llm").is_dir():
        corpus = _corpus_of(run)
        next_step(f"tts-stack train-vocoder corpus={corpus} run={run} --phase reconstruction")


def _corpus_of(run: Path) -> str:
    """What stage 1 of a run was trained on; a placeholder where that is not known."""
    from omegaconf import OmegaConf

    path = run / "llm" / "config.yaml"
    return str(OmegaConf.select(OmegaConf.load(path), "corpus")) if path.is_file() else "CORPUS"


def _show(found: "Inspection") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    facts = Table("", "", title=found.title, title_justify="left", show_header=False)
    for name, value in found.facts:
        facts.add_row(name, Text(value))
    ids = Table("ids", "from", "to", "count", "names", title="Id map", title_justify="left")
    for part in found.ids:
        count = part.last - part.first + 1
        ids.add_row(part.kind, str(part.first), str(part.last), str(count), Text(part.names))
    example = Table("id", "token", "position", "loss", title="Example", title_justify="left")
    for step in found.example:
        # A token may be a bracket or a line end: neither markup nor a new line of the table.
        shown = Text(step.name if step.name.isprintable() else repr(step.name)[1:-1])
        example.add_row(str(step.token_id), shown, f"{step.position:g}", step.group)
    output = Console()  # the answer itself: standard output
    for table in (facts, ids, example):
        output.print(table)
