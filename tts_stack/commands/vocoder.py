"""`extract-states` and `floor`: what stage 2 learns from, and which stage limits its sound."""

from pathlib import Path

import typer
from rich.console import Console

from tts_stack.commands.common import (
    Overrides,
    console,
    is_demo,
    next_step,
    progress_bar,
    with_defaults,
)

FLOOR_STEPS = 300  # of each input, when the user names no number


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("extract-states")(extract_states)
    app.command("floor")(floor)


def extract_states(overrides: Overrides = None) -> None:
    """Write the frozen LLM's hidden states to RUN/states, for train-vocoder.

    train-vocoder does this by itself; this command does it beforehand, or on another machine.
    Re-running continues an interrupted extraction; states of another LLM are replaced.

    Takes the settings of train-vocoder: corpus=work/corpus run=runs/mine
    data.states_dtype=bfloat16 trainer.device=cuda
    """
    from stage2_vocoder.config import VocoderTrainConfig
    from tts_stack.config import load_config
    from tts_stack.runtime import choose_device
    from tts_stack.states import extract_states as run_extraction

    config = load_config(
        VocoderTrainConfig, "train_vocoder", with_defaults(overrides, "demo_vocoder")
    )
    with progress_bar("hidden states") as advance:
        report = run_extraction(
            Path(config.run),
            Path(config.corpus),
            device=choose_device(config.trainer.device),
            dtype=config.data.states_dtype,
            on_progress=advance,
        )
    console.print(report.describe(), markup=False, soft_wrap=True)
    corpus = "" if is_demo(overrides) else f" corpus={config.corpus} run={config.run}"
    next_step(f"tts-stack train-vocoder{corpus} --phase reconstruction")


def floor(overrides: Overrides = None) -> None:
    """Tell which stage limits the sound: one vocoder, trained on three inputs.

    mel: the recordings' own mel frames, what the decoder alone costs. codes: the codec's codes,
    what the tokens lose. states: the LLM's hidden states, what stage 1 loses. Same size, data,
    steps and seed. Writes RUN/floor/; re-running continues.

    Takes the settings of train-vocoder: corpus=work/corpus run=runs/mine trainer.max_steps=300
    """
    from rich.table import Table

    from stage2_vocoder.config import VocoderTrainConfig
    from tts_stack.config import load_config
    from tts_stack.floor import FLOOR_FILE, FLOOR_FOLDER, run_floor

    given = with_defaults(overrides, "demo_vocoder")
    steps = [item for item in given if item.startswith("trainer.max_steps=")]
    steps = steps or [f"trainer.max_steps={FLOOR_STEPS}"]
    # A preset gives the phase its own number of steps; the user's comes before it.
    given += [*steps, steps[-1].replace("trainer.max_steps", "reconstruction.max_steps")]
    config = load_config(VocoderTrainConfig, "train_vocoder", given)
    with progress_bar("hidden states") as advance:
        report = run_floor(config, on_progress=advance)
    heading, *rows = report.rows()
    table = Table(*heading)
    for row in rows:
        table.add_row(*row)
    added = ", ".join(f"{name} {value:+.3f}" for name, value in report.added.items())
    output = Console(highlight=False)  # the answer itself: standard output
    output.print(f"one vocoder, {report.steps} steps on each input", markup=False)
    output.print(table)
    output.print(f"mel error by stage: {added}", markup=False, soft_wrap=True)
    output.print(report.verdict, markup=False, soft_wrap=True)
    console.print(f"{Path(config.run) / FLOOR_FOLDER / FLOOR_FILE}", markup=False, soft_wrap=True)
