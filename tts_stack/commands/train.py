"""`train-llm` and `train-vocoder`: the two stages."""

from pathlib import Path
from typing import Annotated

import typer

from tts_stack.commands.common import (
    Overrides,
    Phase,
    Resume,
    console,
    is_demo,
    next_step,
    print_summary,
    progress_bar,
    with_defaults,
)


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("train-llm")(train_llm)
    app.command("train-vocoder")(train_vocoder)


def train_llm(overrides: Overrides = None, resume: Resume = False) -> None:
    """Stage 1: train the LLM that reads text and writes semantic tokens.

    Without corpus= it trains on the demonstration corpus in runs/demo, in minutes.

    From scratch: llm=llama_5m. From a base model: llm=FOLDER, llm=Qwen/Qwen2.5-0.5B, or a named
    one with its learning rate, llm=qwen2_5_0_5b. With adapters: +lora=r_8_alpha_16 (r_16_alpha_32,
    r_64_alpha_128, attention_r_8_alpha_16). tts-stack inspect shows what a base model will get.

    Common settings: corpus=work/corpus run=runs/mine trainer.max_steps=3000 batching.kind=packing
    prompt.format=chat loss.text_weight.value=0.1 trainer.devices=2 trainer.precision=bf16-mixed
    """
    from stage1_llm.config import LLMTrainConfig
    from stage1_llm.llm_override import resolve_llm_override
    from stage1_llm.train import run_training
    from tts_stack.config import config_groups, load_config
    from tts_stack.listen import make_listener
    from tts_stack.shards import Corpus

    given = with_defaults(overrides, "demo_llm")
    given = resolve_llm_override(given, config_groups()["llm"])
    config = load_config(LLMTrainConfig, "train_llm", given)
    listen = make_listener(Path(config.corpus), config.num_listened)
    summary = run_training(config, resume=resume, listen=listen)
    print_summary(summary, Path(config.run) / "llm")
    corpus = "" if is_demo(overrides) else f" corpus={config.corpus} run={config.run}"
    if config.lora is not None:
        next_step(f"tts-stack merge-lora {config.run}")
    elif not Corpus.open(Path(config.corpus)).info.has_audio:
        next_step("tts-stack prepare: stage 2 needs recordings, this corpus holds tokens alone")
    else:
        next_step(f"tts-stack train-vocoder{corpus} --phase reconstruction")


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
    from stage2_vocoder.train import check_run, run_training
    from tts_stack.config import load_config
    from tts_stack.export import export_voice
    from tts_stack.processes import is_main_process
    from tts_stack.runtime import choose_device
    from tts_stack.states import open_states
    from tts_stack.voice import RUN_VOICE_DIR

    given = with_defaults(overrides, "demo_vocoder")
    # A preset gives each phase its own number of steps; the user's number comes before it.
    given += [
        item.replace("trainer.max_steps", f"{phase.value}.max_steps")
        for item in given
        if item.startswith("trainer.max_steps=")
    ]
    config = load_config(VocoderTrainConfig, "train_vocoder", given)
    run = Path(config.run)
    check_run(config, phase.value, resume=resume)
    with progress_bar("hidden states") as advance:
        device = choose_device(config.trainer.device)
        states = open_states(config, device=device, on_progress=advance)
    summary = run_training(config, phase.value, resume=resume, states=states)
    if not is_main_process():
        return
    print_summary(summary, run / "vocoder" / phase.value)
    export_voice(run, run / RUN_VOICE_DIR, name=run.name, phase=phase.value)
    corpus = "" if is_demo(overrides) else f" corpus={config.corpus} run={config.run}"
    if phase is Phase.reconstruction:
        next_step(f"tts-stack train-vocoder{corpus} --phase adversarial")
    console.print(f'listen: tts-stack synth "hello" out.wav --voice {run}', markup=False)
    console.print(f"keep it: tts-stack export {run} my_voice/", markup=False)
