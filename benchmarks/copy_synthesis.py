"""What each phase of stage 2 adds: copy-synthesis of held-out clips before and after it.

    python benchmarks/copy_synthesis.py --corpus work/demo --run runs/demo

The states of the clips' true tokens (teacher forcing) are decoded by an untrained vocoder, by the
reconstruction phase's and by the adversarial phase's, and compared with the recordings: mel-L1,
PESQ, STOI, word error rate of Whisper base and predicted opinion (distillmos). The recordings
themselves are judged too. Needs `pip install ".[measure]"`. The last line is one JSON object.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from measure_voice import default_cache, hardware
from numpy.typing import NDArray
from referee import Referee, wer_interval, word_error_rate

from stage2_vocoder.checkpoint import load_vocoder, read_identity
from stage2_vocoder.config import LossConfig, VocoderTrainConfig
from stage2_vocoder.dataset import VocoderData
from stage2_vocoder.losses import ReconstructionLoss
from stage2_vocoder.metrics import validate_vocoder, validation_rows
from stage2_vocoder.model import Vocoder, build_vocoder
from stage2_vocoder.quality import Pair, QualityMeter
from stage2_vocoder.states import StateStore
from stage2_vocoder.train import MODEL_FOLDER, phase_folder, states_folder
from tts_stack.config import load_config
from tts_stack.shards import Corpus

CPU = torch.device("cpu")


def main() -> None:
    """Measure every vocoder of the run on the same clips."""
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    corpus = Corpus.open(args.corpus)
    store = StateStore.open(states_folder(args.run), corpus)
    data = VocoderData.open(corpus, store, "validation", 10**9)
    rows = validation_rows(data, args.clips, args.max_seconds)
    spoken = [utterance.text for utterance in corpus.utterances("validation")]
    texts = [spoken[row] for row in rows]
    referee = Referee(args.cache, num_threads=args.threads)
    losses = load_config(VocoderTrainConfig, "train_vocoder", ["corpus=c", "run=r"]).losses
    report: dict[str, dict[str, float]] = {}
    for name, vocoder in vocoders(args.run).items():
        report[name] = measure(vocoder, data, rows, texts, losses, referee)
        print(name, {key: round(value, 3) for key, value in report[name].items()}, flush=True)
    recordings = [data.whole([row]).audio[0].numpy() for row in rows]
    report["recordings"] = judge(recordings, data.spec.sample_rate, texts, referee)
    print(json.dumps({"clips": len(rows), "figures": report, "hardware": hardware()}))


def vocoders(run: Path) -> dict[str, Vocoder]:
    """The untrained one and those of finished phases."""
    first = phase_folder(run, "reconstruction") / MODEL_FOLDER
    identity = read_identity(first)
    torch.manual_seed(0)
    found = {
        "untrained": build_vocoder(
            identity.vocoder,
            hidden_size=identity.hidden_size,
            audio=identity.audio,
            num_mixed_layers=identity.num_mixed_layers,
        ).eval(),
        "reconstruction": load_vocoder(first),
    }
    second = phase_folder(run, "adversarial") / MODEL_FOLDER
    if second.is_dir():
        found["adversarial"] = load_vocoder(second)
    return found


def measure(
    vocoder: Vocoder,
    data: VocoderData,
    rows: Sequence[int],
    texts: Sequence[str],
    losses: LossConfig,
    referee: Referee,
) -> dict[str, float]:
    """Figures of one vocoder."""
    pairs: list[Pair] = []
    figures = validate_vocoder(
        vocoder,
        [data.whole([row]) for row in rows],
        ReconstructionLoss(losses, data.spec),
        CPU,
        lambda audio_hat, audio: pairs.append(Pair(audio_hat.numpy(), audio.numpy())),
    )
    figures |= QualityMeter(data.spec.sample_rate).measure(pairs)
    heard = [pair.audio_hat for pair in pairs]
    return figures | judge(heard, data.spec.sample_rate, texts, referee)


def judge(
    clips: Sequence[NDArray[np.float32]], sample_rate: int, texts: Sequence[str], referee: Referee
) -> dict[str, float]:
    """What Whisper understands of the clips, and their predicted opinion score."""
    found = [
        referee.judge(clip, sample_rate, text) for clip, text in zip(clips, texts, strict=True)
    ]
    low, high = wer_interval(found)
    return {
        "wer": word_error_rate(found),
        "wer_low": low,
        "wer_high": high,
        "mos": float(np.mean([item.mos for item in found])),
    }


def parse_arguments() -> argparse.Namespace:
    """Which run, and how much of its validation split."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--clips", type=int, default=30)
    parser.add_argument("--max-seconds", type=float, default=12.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=default_cache())
    return parser.parse_args()


if __name__ == "__main__":
    main()
