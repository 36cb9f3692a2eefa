"""How fast stage 1 trains: dynamic batches and packing against the plain Hugging Face Trainer.

    python benchmarks/stage1_throughput.py

One small model, the same utterances (random tokens, lengths like LJ Speech's), three ways, in one
run: transformers.Trainer with padded batches of so many utterances; our loop with token-budget
batches of similar length; our loop with packed rows. All with AdamW, in the same precision. The
three take turns, and each figure is the median of its turns. The last line is one JSON object.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments

from stage1_llm.batching import plan_epoch
from stage1_llm.collate import collate_prompts
from stage1_llm.config import LLMTrainConfig
from stage1_llm.dataset import Sample, make_sample, sample_prompt
from stage1_llm.model import build_llm
from stage1_llm.module import LLMTask
from stage1_llm.network import build_network
from stage1_llm.prompt import GROUP_AUDIO
from stage1_llm.text import SymbolEncoder
from stage1_llm.vocab import build_token_map
from tts_stack.config import load_config
from tts_stack.contract import PromptSpec
from tts_stack.records import TokenizedUtterance
from tts_stack.training import make_fabric

CODEBOOK_SIZE, TOKEN_RATE = 1000, 25.0
SYMBOLS = "abcdefghijklmnopqrstuvwxyz .,"
TOKENS = build_token_map(SYMBOLS, CODEBOOK_SIZE)
SPEC = PromptSpec()
# LJ Speech: mean 6.57 s, standard deviation 2.19 s, 1.1 to 10.1 s, 15.2 characters a second.
MEAN_S, STD_S, SHORTEST_S, LONGEST_S, CHARACTERS_PER_S = 6.57, 2.19, 1.1, 10.1, 15.2


@dataclass
class Turn:
    """One way's training on the utterances, once through."""

    audio_tokens: int
    positions: int  # padding included
    tokens: int  # without
    seconds: float


def make_samples(count: int) -> list[Sample]:
    """Random utterances; what they say does not matter for speed."""
    random = np.random.default_rng(0)
    encode = SymbolEncoder(TOKENS)
    samples = []
    for index in range(count):
        seconds = float(np.clip(random.normal(MEAN_S, STD_S), SHORTEST_S, LONGEST_S))
        text = "".join(random.choice(list(SYMBOLS), round(seconds * CHARACTERS_PER_S)))
        audio = random.integers(0, CODEBOOK_SIZE, round(seconds * TOKEN_RATE))
        utterance = TokenizedUtterance(str(index), text, audio)
        samples.append(make_sample(utterance, encode, TOKENS, SPEC))
    return samples


def settings(args: argparse.Namespace, kind: str) -> LLMTrainConfig:
    """The configuration of our loop."""
    return load_config(
        LLMTrainConfig,
        "train_llm",
        [
            "corpus=none",
            "run=none",
            f"llm={args.llm}",
            f"batching.kind={kind}",
            f"batching.max_tokens={args.max_tokens}",
            "batching.max_length=1024",
            "optimizer.kind=adamw",
            "token_noise=0",
            "prompt.position_scheme=plain",
            f"trainer.device={args.device}",
            f"trainer.precision={'bf16-mixed' if args.bf16 else '32-true'}",
            f"trainer.num_threads={args.threads}",
        ],
    )


def our_way(args: argparse.Namespace, kind: str, samples: list[Sample]) -> Callable[[], Turn]:
    """Our loop, once through the utterances a call."""
    config = settings(args, kind)
    fabric = make_fabric(config.trainer)
    network = build_network(build_llm(config.llm, TOKENS, seed=0), ())
    lengths = np.array([sample.length for sample in samples], dtype=np.int32)
    task = LLMTask(network, samples, lengths, samples[:2], TOKENS, SPEC, config, fabric)
    plan = plan_epoch(lengths, max_tokens=args.max_tokens, seed=0, epoch=0, kind=kind)

    def turn() -> Turn:
        synchronize(args.device)
        started = time.perf_counter()
        audio = positions = tokens = 0
        for step, micro in enumerate(task.batches(0, len(plan.batches))):
            task.train_step(micro, step)
            audio += sum(int((batch.groups == GROUP_AUDIO).sum()) for batch in micro)
            positions += sum(batch.input_ids.numel() for batch in micro)
            tokens += sum(batch.num_tokens for batch in micro)
        synchronize(args.device)
        return Turn(audio, positions, tokens, time.perf_counter() - started)

    return turn


class _Clock(TrainerCallback):
    """Counts the time of training steps alone, without the Trainer's start and end."""

    started = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.started = time.perf_counter()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds = time.perf_counter() - self.started


def plain_way(args: argparse.Namespace, samples: list[Sample]) -> Callable[[], Turn]:
    """transformers.Trainer, padded batches in random order, once through a call."""
    model = build_llm(settings(args, "dynamic").llm, TOKENS, seed=0)
    mean_length = sum(sample.length for sample in samples) / len(samples)
    batch_size = max(1, round(args.max_tokens / mean_length))
    counted = Turn(0, 0, 0, 0.0)

    def collate(chosen: list[Sample]) -> dict[str, Tensor]:
        prompts = [sample_prompt(sample, TOKENS, SPEC) for sample in chosen]
        batch = collate_prompts(prompts, pad_id=TOKENS.pad)
        counted.audio_tokens += int((batch.groups == GROUP_AUDIO).sum())
        counted.positions += batch.input_ids.numel()
        counted.tokens += batch.num_tokens
        return {
            "input_ids": batch.input_ids,
            "attention_mask": batch.attention_mask.long(),
            "labels": batch.labels,
        }

    def turn() -> Turn:
        counted.audio_tokens = counted.positions = counted.tokens = 0
        clock = _Clock()
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=batch_size,
                num_train_epochs=1,
                bf16=args.bf16,
                use_cpu=args.device == "cpu",
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                remove_unused_columns=False,
            )
            trainer = Trainer(
                model=model,
                args=arguments,
                train_dataset=samples,
                data_collator=collate,
                callbacks=[clock],
            )
            trainer.train()
            synchronize(args.device)
        return Turn(counted.audio_tokens, counted.positions, counted.tokens, clock.seconds)

    return turn


def synchronize(device: str) -> None:
    """Wait for a GPU to finish what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Run the three ways in turn and print rates, waste and ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--utterances", type=int, default=240)
    parser.add_argument("--turns", type=int, default=3, help="after one to warm up")
    parser.add_argument("--llm", default="llama_5m", help="a choice of configs/llm from scratch")
    parser.add_argument("--max-tokens", type=int, default=4096, help="budget of a batch")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--fp32", dest="bf16", action="store_false")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    samples = make_samples(args.utterances)
    ways = {
        "trainer": plain_way(args, samples),
        "dynamic": our_way(args, "dynamic", samples),
        "packing": our_way(args, "packing", samples),
    }
    turns: dict[str, list[Turn]] = {name: [] for name in ways}
    for number in range(args.turns + 1):
        for name, way in ways.items():
            turn = way()
            if number:
                turns[name].append(turn)
    rates, wastes = {}, {}
    print(f"{args.device}, {args.threads} threads, {'bf16' if args.bf16 else 'fp32'}, {args.llm}")
    for name, done in turns.items():
        rates[name] = statistics.median(turn.audio_tokens / turn.seconds for turn in done)
        wastes[name] = 1 - sum(t.tokens for t in done) / sum(t.positions for t in done)
        print(f"{name:8s} {rates[name]:9.0f} audio tokens/s, padding {100 * wastes[name]:5.2f} %")
    print(
        json.dumps(
            {
                "dynamic_vs_trainer": round(rates["dynamic"] / rates["trainer"], 3),
                "packing_vs_trainer": round(rates["packing"] / rates["trainer"], 3),
                "dynamic_padding_waste": round(wastes["dynamic"], 4),
                "packing_padding_waste": round(wastes["packing"], 4),
            }
        )
    )


if __name__ == "__main__":
    main()
