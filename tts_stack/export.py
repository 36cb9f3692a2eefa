"""`tts-stack export`: a finished run becomes one voice folder, whole or not at all."""

import dataclasses
import json
import shutil
from datetime import date
from pathlib import Path

from omegaconf import OmegaConf

from stage1_llm.merge import require_fresh_merge
from tts_stack.contract import CONTRACT_FILE, VoiceContract, file_sha256, llm_sha256
from tts_stack.errors import CheckpointError
from tts_stack.runtime import versions, write_text
from tts_stack.voice import CODEC_DIR, LLM_DIR, VOCODER_DIR, WEIGHTS_FILE, VoiceFiles

PHASES = ("adversarial", "reconstruction")  # the better one first
CARD_FILE = "README.md"


def export_voice(run: Path, out_dir: Path, *, name: str, phase: str | None = None) -> VoiceFiles:
    """Copy the models of a run into a voice folder with its contract and card.

    Args:
        run: a run folder holding `llm/model` and `vocoder/<phase>/model`.
        out_dir: the voice folder; an older voice there is replaced.
        name: the voice's name in its contract and card.
        phase: vocoder phase; None takes the adversarial one if it is there.

    Returns:
        The written voice, verified.

    Raises:
        CheckpointError: the run lacks a stage, its LLM is older than its adapter, its vocoder was
            trained on another LLM, or `out_dir` holds something that is not a voice.
    """
    require_fresh_merge(run / "llm")
    contract = VoiceContract.load(_require_file(run / "llm" / "model" / CONTRACT_FILE, "train-llm"))
    vocoder = _find_vocoder(run, phase)
    _check_trained_on(vocoder, contract)
    if out_dir.exists() and any(out_dir.iterdir()) and not (out_dir / CONTRACT_FILE).exists():
        raise CheckpointError(f"{out_dir}: not empty and not a voice folder; choose another name")

    partial = out_dir.with_name(out_dir.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    ignore = shutil.ignore_patterns(CONTRACT_FILE, "*.partial")
    shutil.copytree(run / "llm" / "model", partial / LLM_DIR, ignore=ignore)
    shutil.copytree(vocoder / "model", partial / VOCODER_DIR, ignore=ignore)
    codec = _codec_dir(run)
    if codec is not None:
        shutil.copytree(codec, partial / CODEC_DIR, ignore=ignore)
    contract = dataclasses.replace(
        contract,
        name=name,
        llm_sha256=llm_sha256(partial / LLM_DIR),
        vocoder_sha256=file_sha256(partial / VOCODER_DIR / WEIGHTS_FILE),
    )
    contract.save(partial / CONTRACT_FILE)
    write_text(partial / CARD_FILE, _card(contract, run, vocoder.name, codec is not None))
    shutil.rmtree(out_dir, ignore_errors=True)
    partial.rename(out_dir)
    return VoiceFiles.open(out_dir)


def _find_vocoder(run: Path, phase: str | None) -> Path:
    for name in (phase,) if phase else PHASES:
        folder = run / "vocoder" / name
        if (folder / "model" / WEIGHTS_FILE).exists():
            return folder
    wanted = phase or "reconstruction"
    raise CheckpointError(
        f"{run}: no vocoder in it; run tts-stack train-vocoder run={run} --phase {wanted}"
    )


def _check_trained_on(vocoder: Path, contract: VoiceContract) -> None:
    config = vocoder / "model" / "config.json"
    values = json.loads(_require_file(config, "train-vocoder").read_text(encoding="utf-8"))
    trained_on = values.get("llm_sha256", "")
    if trained_on != contract.llm_sha256:
        raise CheckpointError(
            f"{config}: trained on the states of LLM {str(trained_on)[:12] or '(none)'}, the run "
            f"holds LLM {contract.llm_sha256[:12]}; train the vocoder again"
        )


def _codec_dir(run: Path) -> Path | None:
    config = OmegaConf.load(_require_file(run / "llm" / "config.yaml", "train-llm"))
    folder = Path(str(OmegaConf.select(config, "corpus"))) / CODEC_DIR
    return folder if folder.is_dir() else None


def _require_file(path: Path, command: str) -> Path:
    if not path.exists():
        raise CheckpointError(f"{path}: missing; run tts-stack {command} first")
    return path


def _card(contract: VoiceContract, run: Path, phase: str, has_codec: bool) -> str:
    size = contract.audio
    packages = ", ".join(f"{name} {version}" for name, version in versions().items())
    return f"""# Voice {contract.name}

Made with tts-stack on {date.today().isoformat()} from the run folder `{run.name}`.

| what | value |
|---|---|
| audio | {size.sample_rate} Hz mono, {size.token_rate:g} tokens per second |
| text | {contract.text.kind}, {contract.text.language} |
| speech tokenizer | {contract.codec.describe()}{"" if has_codec else " (not in this folder)"} |
| LLM | {contract.llm_sha256[:12]}, {contract.tokens.vocab_size} tokens |
| vocoder | {contract.vocoder_sha256[:12]}, phase {phase} |
| made with | {packages} |

Speak with it: `tts-stack synth "hello" out.wav --voice {contract.name}`
"""
