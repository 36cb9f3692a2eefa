"""`check`: the claims of both stages, proved on the user's own settings."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tts_stack.commands.common import Overrides, with_defaults
from tts_stack.errors import TTSStackError

if TYPE_CHECKING:
    from rich.table import Table

    from stage1_llm.checks.report import Report, ShownToken

DEFAULT_LORA = "+lora=r_8_alpha_16"
COLOURS = {"text": "cyan", "audio": "green", "end": "bold magenta", "": "dim"}
_LOUD = (
    "stage1_llm",
    "tts_stack.training",
    "lightning.fabric",
    "lightning.pytorch",
)  # what the tiny training says


class Check(StrEnum):
    """What can be checked."""

    collate = "collate"
    pack = "pack"
    lora = "lora"
    merge = "merge"
    resume = "resume"
    states = "states"
    stream = "stream"


OF_STAGE_2 = (Check.states, Check.stream)


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command()(check)


def check(
    name: Annotated[Check, typer.Argument(help="What to prove.")], overrides: Overrides = None
) -> None:
    """Prove what training relies on, on your own settings, with a tiny random model in seconds.

    collate: which tokens are labelled, and their weights; shows a sample token by token

    pack: a batch or packed row gives the logits and gradients of each sample alone

    lora: adapters start as nothing, learn alone, and are all that a checkpoint holds

    merge: the merged model, read by plain transformers, is base + adapter

    resume: 10 + 10 steps equal 20, bit for bit

    states: the run's LLM gives the vocoder the same states in training and in synthesis; prints
    the gap between states of recorded tokens and of its own

    stream: the run's vocoder, or an untrained one, decodes in pieces what it decodes at once

    Takes the settings of train-llm, the last two those of train-vocoder: corpus=work/corpus
    llm=FOLDER +lora=r_8_alpha_16 batching.kind=packing run=runs/mine. Exit code 1 when a claim
    does not hold.
    """
    with _quiet():
        report = (
            _check_vocoder(name, overrides) if name in OF_STAGE_2 else _check_llm(name, overrides)
        )
    _show(name.value, report)
    if report.failed:
        # Not typer.Exit: without standalone mode click swallows its code.
        raise TTSStackError(
            f"check {name.value}: {len(report.failed)} of {len(report.claims)} claims do not hold, "
            f"first: {report.failed[0].name}; do not train with these settings, and report "
            "the lines above"
        )


def _check_llm(name: Check, overrides: Sequence[str] | None) -> "Report":
    """A claim of stage 1, on a tiny random model."""
    from stage1_llm.checks.run import NEED_ADAPTER, run_check
    from stage1_llm.config import LLMTrainConfig
    from stage1_llm.llm_override import resolve_llm_override
    from tts_stack.config import config_groups, load_config

    given = with_defaults(list(overrides or []), "demo_llm")
    given = resolve_llm_override(given, config_groups()["llm"])
    if name.value in NEED_ADAPTER and not _has_lora(given):
        given.append(DEFAULT_LORA)
    return run_check(name.value, load_config(LLMTrainConfig, "train_llm", given))


def _check_vocoder(name: Check, overrides: Sequence[str] | None) -> "Report":
    """A claim of stage 2, on the models of the run."""
    from stage2_vocoder.config import VocoderTrainConfig
    from tts_stack.config import load_config

    given = with_defaults(list(overrides or []), "demo_vocoder")
    config = load_config(VocoderTrainConfig, "train_vocoder", given)
    if name is Check.stream:
        from tts_stack.checks.stream import check_stream

        return check_stream(config)
    from tts_stack.checks.states import check_states
    from tts_stack.runtime import choose_device

    device = choose_device(config.trainer.device)
    return check_states(Path(config.run), Path(config.corpus), device)


def _has_lora(overrides: Sequence[str]) -> bool:
    return any(override.lstrip("+").startswith("lora=") for override in overrides)


@contextmanager
def _quiet() -> Iterator[None]:
    """Warnings only: the plan and the losses of the tiny model are of no use."""
    loggers = [logging.getLogger(name) for name in _LOUD]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _show(name: str, report: "Report") -> None:
    from rich.console import Console
    from rich.text import Text

    output = Console()  # the answer itself: standard output
    if report.sample:
        output.print(_table(report.sample))
    for line in report.settings:
        output.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
    for claim in report.claims:
        mark = ("ok      ", "green") if claim.is_met else ("FAILED  ", "bold red")
        output.print(Text.assemble(mark, claim.name), soft_wrap=True)
        output.print(
            f"        {claim.detail}", style="dim", markup=False, highlight=False, soft_wrap=True
        )
    if not report.failed:
        end = f"check {name}: all {len(report.claims)} claims hold"
        output.print(end, style="bold green", markup=False, highlight=False)


def _table(sample: "Sequence[ShownToken]") -> "Table":
    from rich.table import Table
    from rich.text import Text

    has_codes = any(token.codes for token in sample)
    columns = ("id", "token", "group", "label", "weight", "position")
    table = Table(*columns, *(("codes",) if has_codes else ()), title_justify="left")
    for token in sample:
        # A token may be a bracket or a line end: neither markup nor a new line of the table.
        shown = token.name if token.name.isprintable() else repr(token.name)[1:-1]
        has_label = token.label is not None
        table.add_row(
            str(token.token_id),
            Text(shown),
            token.group or "-",
            str(token.label) if has_label else "-",
            f"{token.weight:g}" if has_label else "-",
            f"{token.position:g}",
            *((" ".join(map(str, token.codes)),) if has_codes else ()),
            style=COLOURS[token.group],
        )
    return table
