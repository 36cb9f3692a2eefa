"""Whether stage 2 learns at all: a small vocoder and four utterances, by heart.

    python benchmarks/vocoder_overfit.py

The four are LJ Speech's shortest in ../shared/data/speech/ljspeech32 (or --source FOLDER, in
LJSpeech layout). In a temporary folder they go the whole road: prepare, tokenise with the shipped
codec, a tiny LLM, its hidden states. Then the reconstruction phase, until the mel-L1 of the four
is at most a third of its value after 50 steps; then the adversarial phase with spectrogram
discriminators. While these learn alone their scores of recordings and of generated audio must
part; once the generator learns too, the feature-matching loss must fall. The last line is one JSON
object; the exit code is 1 when a criterion is not met.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import soundfile
import torch

from stage1_llm.config import LLMTrainConfig
from stage1_llm.train import run_training as train_llm
from stage2_vocoder.config import VocoderTrainConfig
from stage2_vocoder.dataset import VocoderData
from stage2_vocoder.model import build_vocoder, count_parameters
from stage2_vocoder.module import AdversarialTask, ReconstructionTask
from stage2_vocoder.states import StateStore
from stage2_vocoder.train import states_folder
from tts_stack.config import load_config
from tts_stack.contract import AudioSpec
from tts_stack.data.config import PrepareConfig
from tts_stack.data.prepare import prepare
from tts_stack.runtime import seed_everything
from tts_stack.semantic.tokenize import tokenize
from tts_stack.shards import Corpus
from tts_stack.states import ensure_states
from tts_stack.training import make_fabric

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT.parent / "shared" / "data" / "speech" / "ljspeech32"
NUM_TRAINED = 4  # utterances; a fifth is the LLM's validation split
REFERENCE_STEP = 50
WANTED_RATIO = 1 / 3
WANTED_DISTANCE = 0.3  # of scores; the hinge loss pulls them 2 apart
WANTED_FALL = 0.75
MEASURE_EVERY = 50  # steps
WINDOW = 20  # steps that a figure of the adversarial phase is averaged over
VOCODER = [
    "vocoder.dim=128",
    "vocoder.intermediate_dim=384",
    "vocoder.num_token_blocks=2",
    "vocoder.num_layers=4",
    "reconstruction.optimizer.learning_rate=2e-3",
    "reconstruction.schedule.warmup_steps=50",
    "reconstruction.batch_seconds=60",
    "discriminator=small",
    "discriminator.periods=[]",
    "discriminator.num_scales=0",
    "discriminator.spectrogram_channels=16",
    "losses.feature_weight=2.0",
    "adversarial.batch_size=4",
    "adversarial.crop_seconds=0.5",
    "adversarial.warmup_steps=200",
    "adversarial.generator.learning_rate=3e-4",
    "adversarial.discriminator.learning_rate=3e-3",
    "trainer.device=cpu",
    "trainer.precision=32-true",
    "data.quality_every=0",
]


def main() -> None:
    """Run both phases, print their tables, and judge."""
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = make_data(args.source, folder)
        config = load_config(
            VocoderTrainConfig,
            "train_vocoder",
            [
                f"corpus={folder / 'corpus'}",
                f"run={folder / 'run'}",
                *VOCODER,
                f"reconstruction.max_steps={args.steps}",
                f"adversarial.max_steps={args.adversarial_steps}",
                f"trainer.num_threads={args.threads}",
                *args.overrides,
            ],
        )
        mel, reconstruction = reconstruct(config, data)
        parted, features = judge(config, data, reconstruction)
    report(mel, parted, features, time.monotonic() - started)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("overrides", nargs="*", help="settings of train-vocoder, as vocoder.dim=96")
    add("--source", type=Path, default=SOURCE, help="folder in LJSpeech layout")
    add("--steps", type=int, default=600, help="of the reconstruction phase, at most")
    add("--adversarial-steps", type=int, default=300, help="the first 200 without generator")
    add("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


def make_data(source: Path, folder: Path) -> VocoderData:
    """Four utterances and a tiny LLM's hidden states of them."""
    clips, corpus, run = folder / "clips", folder / "corpus", folder / "run"
    copy_shortest(source, clips, NUM_TRAINED + 1)
    prepare(
        load_config(
            PrepareConfig,
            "prepare",
            [
                f"source={clips}",
                f"corpus={corpus}",
                "validation_fraction=0.99",
                "max_validation=1",
                "num_workers=1",
            ],
        )
    )
    tokenize(corpus, None)
    train_llm(
        load_config(
            LLMTrainConfig,
            "train_llm",
            [
                f"corpus={corpus}",
                f"run={run}",
                "llm=tiny",
                "trainer.max_steps=100",
                "trainer.validate_every=100",
                "trainer.checkpoint_every=100",
                "trainer.device=cpu",
                "trainer.precision=32-true",
                "num_listened=0",
            ],
        ),
        resume=False,
    )
    ensure_states(run, corpus, device=torch.device("cpu"))
    opened = Corpus.open(corpus)
    data = VocoderData.open(opened, StateStore.open(states_folder(run), opened), "train", 10**9)
    assert len(data) == NUM_TRAINED
    return data


def copy_shortest(source: Path, folder: Path, count: int) -> None:
    """The shortest clips of a folder in LJSpeech layout, as such a folder."""
    if not (source / "metadata.csv").exists():
        sys.exit(f"{source}: no metadata.csv in it; name a folder in LJSpeech layout: --source")
    lines = (source / "metadata.csv").read_text(encoding="utf-8").splitlines()
    by_id = {line.partition("|")[0]: line for line in lines if line}
    files = {path.stem: path for path in sorted((source / "wavs").iterdir())}
    known = [id for id in by_id if id in files]
    shortest = sorted(known, key=lambda id: soundfile.info(files[id]).duration)[:count]
    (folder / "wavs").mkdir(parents=True)
    for id in shortest:
        shutil.copy(files[id], folder / "wavs")
    chosen = "\n".join(by_id[id] for id in shortest)
    (folder / "metadata.csv").write_text(chosen + "\n", encoding="utf-8")


def reconstruct(
    config: VocoderTrainConfig, data: VocoderData
) -> tuple[dict[int, float], ReconstructionTask]:
    """Run the first phase until it has learnt enough; returns mel-L1 by step, and the task."""
    seed_everything(config.trainer.seed)
    audio: AudioSpec = data.spec
    vocoder = build_vocoder(config.vocoder, hidden_size=data.width, audio=audio)
    task = ReconstructionTask(make_fabric(config.trainer), vocoder, config, data, data)
    seconds = int(data.num_tokens().sum()) / audio.token_rate
    print(
        f"{len(data)} utterances, {seconds:.1f} s; vocoder of "
        f"{count_parameters(vocoder) / 1e6:.2f} M parameters; {torch.get_num_threads()} thread(s)"
    )
    print(
        "\nreconstruction\n| step | mel-L1 (nat) | of step 50's | STFT | seconds |\n"
        "|---|---|---|---|---|"
    )
    mel: dict[int, float] = {}
    started = time.monotonic()
    for step, batch in enumerate(task.batches(0, task.max_steps), 1):
        task.train_step(batch, step - 1)
        if step % MEASURE_EVERY and step != task.max_steps:
            continue
        figures = task.validate()
        mel[step] = figures["mel"]
        ratio = mel[step] / mel.get(REFERENCE_STEP, mel[step])
        print(
            f"| {step} | {mel[step]:.3f} | {ratio:.3f} | {figures['stft']:.3f} | "
            f"{time.monotonic() - started:.0f} |",
            flush=True,
        )
        if ratio <= WANTED_RATIO:
            break
    return mel, task


def judge(
    config: VocoderTrainConfig, data: VocoderData, first: ReconstructionTask
) -> tuple[dict[str, float], dict[str, float]]:
    """Run the second phase.

    Returns:
        How far apart the scores are, first and last before the generator learns, and the
        feature-matching loss, first and last after that.
    """
    task = AdversarialTask(first.fabric, first.vocoder, config, data, data)
    sizes = ", ".join(map(str, config.discriminator.spectrogram_sizes))
    print(f"\nadversarial, spectrogram discriminators of {sizes} points")
    print(
        "| steps | score of recordings | of generated | apart | D loss | feature matching | mel |"
    )
    print("|---|---|---|---|---|---|---|")
    rows: list[dict[str, float]] = []
    for step, batch in enumerate(task.batches(0, task.max_steps), 1):
        rows.append(task.train_step(batch, step - 1))
        if step % WINDOW == 0:
            print_window(step, rows[-WINDOW:])
    alone = rows[: task.phase.warmup_steps]
    apart = [row["discriminator/real"] - row["discriminator/fake"] for row in alone]
    features = [row["generator/features"] for row in rows if "generator/features" in row]
    return ends(apart), ends(features)


def ends(values: Sequence[float]) -> dict[str, float]:
    """Means over the first and the last steps."""
    return {"first": statistics.fmean(values[:WINDOW]), "last": statistics.fmean(values[-WINDOW:])}


def print_window(step: int, rows: Sequence[Mapping[str, float]]) -> None:
    """One line of the second table."""
    real, fake = mean(rows, "discriminator/real"), mean(rows, "discriminator/fake")
    names = ("discriminator/loss", "generator/features", "generator/mel")
    others = [f"{mean(rows, name):.3f}" if name in rows[0] else "-" for name in names]
    print(
        f"| {step - len(rows) + 1}-{step} | {real:.3f} | {fake:.3f} | {real - fake:.3f} | "
        + " | ".join(others)
        + " |",
        flush=True,
    )


def mean(rows: Sequence[Mapping[str, float]], name: str) -> float:
    """Mean of a figure over steps."""
    return statistics.fmean(row[name] for row in rows)


def report(
    mel: Mapping[int, float],
    apart: Mapping[str, float],
    features: Mapping[str, float],
    seconds: float,
) -> None:
    """Print the JSON line; leave with code 1 when a criterion is not met."""
    last = max(mel)
    ratio = mel[last] / mel[REFERENCE_STEP]
    criteria = {
        "mel_at_most_a_third": ratio <= WANTED_RATIO,
        "scores_part": apart["last"] > apart["first"] + WANTED_DISTANCE,
        "feature_matching_falls": features["last"] < WANTED_FALL * features["first"],
    }
    figures = {
        "mel_at_step_50": round(mel[REFERENCE_STEP], 4),
        "mel_at_end": round(mel[last], 4),
        "mel_ratio": round(ratio, 4),
        "steps": last,
        "scores_apart": {name: round(value, 4) for name, value in apart.items()},
        "feature_matching": {name: round(value, 4) for name, value in features.items()},
        "seconds": round(seconds, 1),
        "passed": criteria,
    }
    print()
    print(json.dumps(figures))
    if not all(criteria.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
