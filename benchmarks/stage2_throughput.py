"""How fast the adversarial phase trains: whole utterances or crops, states cached or computed.

    python benchmarks/stage2_throughput.py

One vocoder and one set of discriminators, the same utterances (noise, lengths like LJ Speech's)
and the same random 1-second crops, four ways in turn: the whole utterance decoded, heard by the
spectral losses, and the crop cut out of it for the discriminators; or the crop decoded with the
margin that makes it exact, and nothing else; each with hidden states read from a cache on disk, or
computed by the frozen LLM for each batch. A rate is the seconds of crops, which is what the
discriminators judge and the generator learns from them, in a second: reading, decoding, both
updates and all losses. The discriminators cost the same in all four, so the ratio grows with the
decoder. The generator's part, decoding and its backward pass, is shown on its own. Each figure is
the median of its turns.

The last line is one JSON object, of the last vocoder named: `crop_margin_cached_vs_full` is the
rate of crops with their margin from the cache over the rate of whole utterances from the cache,
`crop_margin_cached_vs_full_on_the_fly` over that of whole utterances with the LLM in the loop,
`generator_crop_vs_full` the first of the generator's part alone; `by_vocoder` has the first ratio
of each.
"""

import argparse
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stage1_llm.config import LLMTrainConfig
from stage1_llm.hidden_states import teacher_forced_states
from stage1_llm.model import build_llm
from stage1_llm.network import build_network
from stage1_llm.text import SymbolEncoder
from stage1_llm.vocab import build_token_map
from stage2_vocoder.config import VocoderTrainConfig
from stage2_vocoder.dataset import CachedAudio, VocoderData
from stage2_vocoder.live_states import LiveStates
from stage2_vocoder.model import build_vocoder, count_parameters
from stage2_vocoder.module import AdversarialTask
from stage2_vocoder.states import (
    SplitReader,
    SplitStates,
    StateIdentity,
    StatesInfo,
    StateWriter,
    shard_path,
)
from stage2_vocoder.step import decode
from tts_stack.config import load_config
from tts_stack.contract import AudioSpec, CodecIdentity, TextSpec, VoiceContract
from tts_stack.records import TokenizedUtterance
from tts_stack.training import make_fabric

CODEBOOK_SIZE = 1000
SYMBOLS = "abcdefghijklmnopqrstuvwxyz .,"
TOKENS = build_token_map(SYMBOLS, CODEBOOK_SIZE)
# LJ Speech: mean 6.57 s, standard deviation 2.19 s, 1.1 to 10.1 s, 15.2 characters a second.
MEAN_S, STD_S, SHORTEST_S, LONGEST_S, CHARACTERS_PER_S = 6.57, 2.19, 1.1, 10.1, 15.2
SOPRANO = "soprano_32k"
RATIO = "crop_margin_cached_vs_full"
WAYS = [(way, states) for way in ("full", "crop") for states in ("cached", "on_the_fly")]


class Setting(NamedTuple):
    """One shipped vocoder with the rates and the LLM that it is for."""

    audio: AudioSpec
    llm: str  # a choice of configs/llm from scratch
    override: str  # of train-vocoder


SETTINGS = {
    "base": Setting(AudioSpec(24000, 240, 4), "llama_5m", "vocoder=base"),
    "large": Setting(AudioSpec(24000, 240, 4), "llama_5m", "vocoder=large"),
    SOPRANO: Setting(AudioSpec(32000, 512, 4), "soprano_80m", "experiment=soprano_32k_vocoder"),
}


class Corpus(NamedTuple):
    """Utterances of one split."""

    utterances: list[TokenizedUtterance]
    audio: list[NDArray[np.float32]]

    @property
    def counts(self) -> NDArray[np.int64]:
        """Tokens of each."""
        return np.array([len(item.semantic_tokens) for item in self.utterances])


class Turn(NamedTuple):
    """Some steps of one way."""

    crop_seconds: float
    seconds: float

    @property
    def rate(self) -> float:
        """Seconds of audio a second."""
        return self.crop_seconds / self.seconds


def make_corpus(count: int, spec: AudioSpec) -> Corpus:
    """Random utterances; what they say does not matter for speed."""
    random = np.random.default_rng(0)
    corpus = Corpus([], [])
    for index in range(count):
        seconds = float(np.clip(random.normal(MEAN_S, STD_S), SHORTEST_S, LONGEST_S))
        text = "".join(random.choice(list(SYMBOLS), round(seconds * CHARACTERS_PER_S)))
        tokens = random.integers(0, CODEBOOK_SIZE, round(seconds * spec.token_rate))
        size = len(tokens) * spec.samples_per_token
        corpus.utterances.append(TokenizedUtterance(str(index), text, tokens))
        corpus.audio.append(random.uniform(-0.3, 0.3, size).astype(np.float32))
    return corpus


def computed_states(corpus: Corpus, setting: Setting, device: str) -> LiveStates:
    """The LLM in the loop; each utterance comes once an epoch, so memory holds none of use."""
    config = load_config(
        LLMTrainConfig, "train_llm", ["corpus=none", "run=none", f"llm={setting.llm}"]
    )
    llm = build_llm(config.llm, TOKENS, seed=0)
    network = build_network(llm, ()).eval().requires_grad_(False).to(device)
    contract = VoiceContract(
        name="benchmark",
        audio=setting.audio,
        text=TextSpec("raw", "en-us"),
        codec=CodecIdentity("none", "", CODEBOOK_SIZE),
        tokens=TOKENS,
    )

    def compute(split: str, row: int) -> Tensor:
        chosen = [corpus.utterances[row]]
        return teacher_forced_states(network, contract, SymbolEncoder(TOKENS), chosen)[0]

    info = StatesInfo(
        StateIdentity("llm", "corpus"), config.llm.hidden_size, {"train": len(corpus.utterances)}
    )
    return LiveStates(Path("llm"), info, {"train": corpus.counts}, compute, max_bytes=0)


def cached_states(live: LiveStates, folder: Path) -> SplitStates:
    """The same states from disk."""
    info = live.info
    writer = StateWriter(
        folder, info.identity, hidden_size=info.hidden_size, num_rows=info.num_rows
    )
    for rows in writer.missing("train"):
        writer.write("train", rows, [live.compute("train", row) for row in rows])
    return SplitStates([shard_path(folder, "train", 0)])


def make_task(
    args: argparse.Namespace, setting: Setting, way: str, data: VocoderData, hidden_size: int
) -> AdversarialTask:
    """The adversarial phase as train-vocoder sets it up, on crops of one second."""
    config = load_config(
        VocoderTrainConfig,
        "train_vocoder",
        [
            "corpus=none",
            "run=none",
            setting.override,
            f"discriminator={args.discriminator}",
            f"adversarial.decode={way}",
            f"adversarial.batch_size={args.batch_size}",
            "data.num_validation=1",
            "data.quality_every=0",
            f"trainer.device={args.device}",
            f"trainer.precision={'bf16-mixed' if args.bf16 else '32-true'}",
        ],
    )
    torch.manual_seed(0)
    vocoder = build_vocoder(config.vocoder, hidden_size=hidden_size, audio=setting.audio)
    return AdversarialTask(make_fabric(config.trainer), vocoder, config, data, data)


def step_turns(task: AdversarialTask, args: argparse.Namespace) -> Callable[[], Turn]:
    """Whole steps, reading included; each call takes the next ones."""
    state = {"step": 0}

    def turn() -> Turn:
        start = state["step"]
        synchronize(args.device)
        started = time.perf_counter()
        seconds = 0.0
        for step, batch in enumerate(task.batches(start, start + args.steps), start=start):
            task.train_step(batch, step)
            seconds += sum(int(micro.crop_tokens.sum()) for micro in batch) / data_rate(task)
        synchronize(args.device)
        state["step"] += args.steps
        return Turn(seconds, time.perf_counter() - started)

    return turn


def generator_turns(task: AdversarialTask, args: argparse.Namespace) -> Callable[[], Turn]:
    """Decoding and its backward pass alone, the batches already read."""
    batches = list(task.batches(0, args.steps))

    def turn() -> Turn:
        synchronize(args.device)
        started = time.perf_counter()
        seconds = 0.0
        for micro in (micro.to(task.fabric.device) for batch in batches for micro in batch):
            with task.fabric.autocast():
                audio_hat = decode(task.vocoder, micro)
            audio_hat.backward(torch.ones_like(audio_hat))
            seconds += int(micro.crop_tokens.sum()) / data_rate(task)
        task.vocoder.zero_grad()
        synchronize(args.device)
        return Turn(seconds, time.perf_counter() - started)

    return turn


def data_rate(task: AdversarialTask) -> float:
    """Tokens a second."""
    return task.train_data.spec.token_rate


def synchronize(device: str) -> None:
    """Wait for a GPU to finish what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def in_turns(ways: dict[str, Callable[[], Turn]], num_turns: int) -> dict[str, float]:
    """Median rate of each way, all of them once to warm up and then in turn."""
    turns: dict[str, list[Turn]] = {name: [] for name in ways}
    for number in range(num_turns + 1):
        for name, way in ways.items():
            turn = way()
            if number:
                turns[name].append(turn)
    return {name: statistics.median(turn.rate for turn in done) for name, done in turns.items()}


def mean_tokens(task: AdversarialTask, args: argparse.Namespace) -> Iterator[float]:
    """Tokens decoded for a crop, padding included, batch by batch."""
    for batch in task.batches(0, args.steps):
        yield from (float(micro.hidden_states.shape[-1]) for micro in batch)


def main() -> None:
    """Measure each vocoder; the JSON line is of the last."""
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    print(
        f"{args.device}, {args.threads} threads, {'bf16' if args.bf16 else 'fp32'}; "
        f"{args.batch_size} crops of 1 s a step, discriminators {args.discriminator}"
    )
    results = {name: measure(args, name) for name in args.vocoder}
    ratios = {name: round(result[RATIO], 3) for name, result in results.items()}
    last = {key: round(value, 3) for key, value in results[args.vocoder[-1]].items()}
    print(json.dumps({**last, "vocoder": args.vocoder[-1], "by_vocoder": ratios}))


def measure(args: argparse.Namespace, name: str) -> dict[str, float]:
    """The four ways in turn, then the generator's part of two of them."""
    setting = SETTINGS[name]
    corpus = make_corpus(args.utterances, setting.audio)
    live = computed_states(corpus, setting, args.device)
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        readers: dict[str, SplitReader] = {
            "cached": cached_states(live, Path(folder)),
            "on_the_fly": live.split("train"),
        }
        tasks = {}
        for way, kind in WAYS:
            audio = CachedAudio(corpus.audio, 10**9)
            data = VocoderData(readers[kind], audio, setting.audio, live.info.width)
            tasks[f"{way}_{kind}"] = make_task(args, setting, way, data, live.info.hidden_size)
        describe(name, tasks["crop_cached"], setting)
        return compare(args, tasks)


def describe(name: str, task: AdversarialTask, setting: Setting) -> None:
    """Sizes of what is measured."""
    print(
        f"vocoder {name} {count_parameters(task.vocoder) / 1e6:.2f} M, discriminators "
        f"{count_parameters(task.discriminators) / 1e6:.2f} M, LLM {setting.llm}; "
        f"{setting.audio.sample_rate} Hz, {setting.audio.token_rate:g} tokens/s, margin "
        f"{task.vocoder.receptive_field_tokens()} tokens"
    )


def compare(args: argparse.Namespace, tasks: dict[str, AdversarialTask]) -> dict[str, float]:
    """Rates of all ways, and of the generator alone, printed and returned."""
    rates = in_turns({name: step_turns(task, args) for name, task in tasks.items()}, args.turns)
    cached = {way: tasks[f"{way}_cached"] for way in ("full", "crop")}
    generator = in_turns(
        {way: generator_turns(task, args) for way, task in cached.items()}, args.turns
    )
    for name, rate in rates.items():
        print(f"  {name:16s} {rate:8.2f} s of audio trained a second")
    for way, rate in generator.items():
        width = statistics.mean(mean_tokens(cached[way], args))
        print(f"  generator {way:6s} {rate:8.2f} s a second; {width:.0f} tokens decoded a crop")
    result = {
        RATIO: rates["crop_cached"] / rates["full_cached"],
        f"{RATIO}_on_the_fly": rates["crop_cached"] / rates["full_on_the_fly"],
        "generator_crop_vs_full": generator["crop"] / generator["full"],
        **{f"{name}_s_per_s": rate for name, rate in rates.items()},
    }
    if args.device == "cuda":
        result["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return result


def parse_arguments() -> argparse.Namespace:
    """Sizes of the measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--utterances", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3, help="after one to warm up")
    parser.add_argument("--steps", type=int, default=1, help="of each turn")
    parser.add_argument("--batch-size", type=int, default=16, help="crops a step")
    parser.add_argument(
        "--vocoder", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="the last one counts"
    )
    parser.add_argument("--discriminator", default="small", help="of configs/discriminator")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--fp32", dest="bf16", action="store_false")
    return parser.parse_args()


if __name__ == "__main__":
    main()
