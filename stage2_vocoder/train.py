"""Train stage 2: one call runs one phase, from the states folder of a run to a vocoder folder.

<run>/states/                              hidden states, extracted before
<run>/vocoder/reconstruction/              checkpoints, metrics, model/
<run>/vocoder/adversarial/                 the same; starts from reconstruction/model/
"""

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path

from lightning.fabric import Fabric

from stage2_vocoder.checkpoint import VocoderIdentity, load_vocoder, read_identity, save_vocoder
from stage2_vocoder.config import PHASES, VocoderTrainConfig
from stage2_vocoder.dataset import VocoderData
from stage2_vocoder.model import Vocoder, build_vocoder, count_parameters
from stage2_vocoder.module import AdversarialTask, ReconstructionTask
from stage2_vocoder.pictures import Pictures
from stage2_vocoder.states import StatesReader, StateStore
from tts_stack.errors import CheckpointError, ConfigError
from tts_stack.processes import is_main_process
from tts_stack.runtime import open_run_dir, require_free, seed_everything
from tts_stack.shards import Corpus
from tts_stack.training import (
    BEST_WEIGHTS,
    FINAL_WEIGHTS,
    TrainerConfig,
    TrainSummary,
    load_weights,
    make_fabric,
    train,
    wait_for_all,
)

logger = logging.getLogger(__name__)
MODEL_FOLDER = "model"
STATES_FOLDER = "states"


@dataclass(frozen=True)
class _Inputs:
    corpus: Corpus
    store: StatesReader
    train_data: VocoderData
    validation_data: VocoderData


def run_training(
    config: VocoderTrainConfig,
    phase: str,
    *,
    resume: bool,
    llm_sha256: str | None = None,
    states: StatesReader | None = None,
) -> TrainSummary:
    """Train one phase and write its vocoder to `<run>/vocoder/<phase>/model`.

    Args:
        config: the composed configs/train_vocoder.yaml.
        phase: "reconstruction" or "adversarial".
        resume: continue the phase from its last checkpoint.
        llm_sha256: the LLM whose states `<run>/states` must hold; None accepts any.
        states: where the states come from; None reads `<run>/states`.

    Returns:
        Figures of the phase.

    Raises:
        ConfigError: unknown phase, sharded weights, or a run folder that already holds this phase,
            or that holds it with other settings.
        CheckpointError: states of another LLM, or no finished reconstruction to start from.
        DataError: states and corpus do not fit.
        TTSStackError: training stopped early.
    """
    if phase not in PHASES:
        raise ConfigError(f"phase is {phase!r}, expected {' or '.join(PHASES)}")
    if config.trainer.strategy == "fsdp":
        raise ConfigError(
            "trainer.strategy is 'fsdp', train-vocoder takes auto or ddp: every device holds the "
            "whole vocoder"
        )
    check_run(config, phase, resume=resume)
    inputs = _open_inputs(config, llm_sha256, states)
    identity = _identity(config, inputs, phase)
    seed_everything(config.trainer.seed)
    vocoder = _first_weights(config, identity)
    folder = open_run_dir(
        phase_folder(config.run, phase), config, resume=resume, unused=_unused_settings(phase)
    )

    trainer = phase_trainer(config, phase)
    getattr(config, phase).schedule.warn_when_never_warm(trainer.max_steps)
    task = _make_task(phase, make_fabric(trainer), vocoder, config, inputs)
    _report(config, task, inputs)
    summary = train(
        task,
        folder,
        trainer,
        resume=resume,
        fingerprint=_fingerprint(identity, inputs),
        title=f"vocoder {phase}",
        on_validation=Pictures(task, config.data.num_shown),
        warn_when_rising=phase == "reconstruction",
    )
    if is_main_process():
        # A GAN's spectral figures get worse while its sound gets better: the last average is kept.
        kept = BEST_WEIGHTS if phase == "reconstruction" else FINAL_WEIGHTS
        save_vocoder(folder / MODEL_FOLDER, identity, load_weights(folder / "checkpoints" / kept))
    wait_for_all()
    return summary


def check_run(config: VocoderTrainConfig, phase: str, *, resume: bool) -> None:
    """Find what stops a phase before hidden states are extracted, or older ones replaced.

    Raises:
        ConfigError: the run folder already holds this phase.
        CheckpointError: there is no finished reconstruction to start from.
    """
    require_free(phase_folder(config.run, phase), resume=resume)
    folder = phase_folder(config.run, "reconstruction") / MODEL_FOLDER
    if phase == "adversarial" and not (folder / "config.json").exists():
        raise CheckpointError(
            f"{folder}: no finished reconstruction to start from; run tts-stack "
            f"train-vocoder run={config.run} --phase reconstruction first"
        )


def phase_folder(run: str | Path, phase: str) -> Path:
    """Folder of one phase inside a run."""
    return Path(run) / "vocoder" / phase


def states_folder(run: str | Path) -> Path:
    """Folder of a run's hidden states."""
    return Path(run) / STATES_FOLDER


def finished_vocoder(run: str | Path) -> Path:
    """The vocoder folder of a run's last finished phase.

    Raises:
        CheckpointError: no phase is finished.
    """
    for phase in reversed(PHASES):
        folder = phase_folder(run, phase) / MODEL_FOLDER
        if (folder / "config.json").exists():
            return folder
    raise CheckpointError(
        f"{Path(run) / 'vocoder'}: no finished vocoder; run tts-stack train-vocoder run={run}"
    )


def phase_trainer(config: VocoderTrainConfig, phase: str) -> TrainerConfig:
    """The trainer of a phase: its own number of steps when it names one."""
    own = config.reconstruction if phase == "reconstruction" else config.adversarial
    return dataclasses.replace(config.trainer, max_steps=own.max_steps or config.trainer.max_steps)


def _open_inputs(
    config: VocoderTrainConfig, llm_sha256: str | None, states: StatesReader | None
) -> _Inputs:
    corpus = Corpus.open(Path(config.corpus))
    store = states or StateStore.open(states_folder(config.run), corpus, llm_sha256=llm_sha256)
    cache_bytes = config.data.cache_mb * 1_000_000
    train_data = VocoderData.open(corpus, store, "train", cache_bytes)
    validation_data = VocoderData.open(corpus, store, "validation", 0)
    return _Inputs(corpus, store, train_data, validation_data)


def _identity(config: VocoderTrainConfig, inputs: _Inputs, phase: str) -> VocoderIdentity:
    return VocoderIdentity(
        vocoder=config.vocoder,
        audio=inputs.corpus.audio_spec,
        hidden_size=inputs.store.info.hidden_size,
        llm_sha256=inputs.store.info.identity.llm_sha256,
        phase=phase,
        num_mixed_layers=inputs.store.info.num_mixed_layers,
    )


def _first_weights(config: VocoderTrainConfig, identity: VocoderIdentity) -> Vocoder:
    if identity.phase == "reconstruction":
        return build_vocoder(
            identity.vocoder,
            hidden_size=identity.hidden_size,
            audio=identity.audio,
            num_mixed_layers=identity.num_mixed_layers,
        )
    folder = phase_folder(config.run, "reconstruction") / MODEL_FOLDER
    found = read_identity(folder)
    if found != dataclasses.replace(identity, phase=found.phase):
        raise CheckpointError(
            f"{folder}: made for {_describe(found)}, this run is {_describe(identity)}; "
            "train the reconstruction phase again"
        )
    return load_vocoder(folder).train()


def _make_task(
    phase: str, fabric: Fabric, vocoder: Vocoder, config: VocoderTrainConfig, inputs: _Inputs
) -> ReconstructionTask | AdversarialTask:
    arguments = (fabric, vocoder, config, inputs.train_data, inputs.validation_data)
    if phase == "reconstruction":
        return ReconstructionTask(*arguments)
    return AdversarialTask(*arguments)


def _report(
    config: VocoderTrainConfig, task: ReconstructionTask | AdversarialTask, inputs: _Inputs
) -> None:
    if not is_main_process():
        return
    num_rows = int((inputs.train_data.num_tokens() > 0).sum())
    logger.info(
        "vocoder %s: %.2f M parameters, receptive field %d tokens, %d utterances",
        task.name,
        count_parameters(task.vocoder) / 1e6,
        task.vocoder.receptive_field_tokens(),
        num_rows,
    )
    if isinstance(task, AdversarialTask):
        num_crops = config.adversarial.batch_size * task.reader.share.per_step
        if num_crops > num_rows:
            logger.warning(
                "a step takes %d crops (adversarial.batch_size x processes x accumulate), the "
                "corpus has %d utterances: some come more than once in a step",
                num_crops,
                num_rows,
            )


def _unused_settings(phase: str) -> tuple[str, ...]:
    return ("adversarial", "discriminator") if phase == "reconstruction" else ("reconstruction",)


def _describe(identity: VocoderIdentity) -> str:
    vocoder = identity.vocoder
    layers = f" x {identity.num_mixed_layers} layers" if identity.num_mixed_layers > 1 else ""
    return (
        f"LLM {identity.llm_sha256[:12]}, hidden size {identity.hidden_size}{layers}, vocoder "
        f"{vocoder.dim}/{vocoder.intermediate_dim} x "
        f"{vocoder.num_token_blocks}+{vocoder.num_layers}, {identity.audio.sample_rate} Hz"
    )


def _fingerprint(identity: VocoderIdentity, inputs: _Inputs) -> str:
    return f"{_describe(identity)}, corpus {inputs.store.info.identity.corpus_hash}"
