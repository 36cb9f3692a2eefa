"""A tokenised corpus with its codec, and a run whose tiny LLM fits it."""

import dataclasses
from pathlib import Path

import torch
from stage1_support import make_contract, tiny_config
from stage2_support import SPEC, make_corpus

from stage1_llm.build import build_network
from stage1_llm.checkpoint import save_llm
from stage1_llm.model import build_llm
from stage1_llm.vocab import Extras, build_token_map
from tts_stack.semantic.checkpoint import save_codec
from tts_stack.semantic.config import CodecConfig
from tts_stack.semantic.model import build_codec
from tts_stack.semantic.tokenize import tokenize
from tts_stack.shards import Corpus

LEVELS = [4, 3]
CODEC = CodecConfig("small", 8000, 160, 40, 10, 4, LEVELS, 8, 8, 3, 1, 1)


def make_places(folder: Path, **prompt) -> Path:
    """`corpus` and `run` under a folder."""
    make_corpus(folder / "corpus")
    write_codec(folder / "new_codec")
    tokenize(folder / "corpus", folder / "new_codec")
    write_llm(folder, **prompt)
    return folder


def write_codec(folder: Path, seed: int = 0) -> None:
    """A codec with random weights."""
    torch.manual_seed(seed)
    save_codec(folder, CODEC, build_codec(CODEC).state_dict())


def write_llm(folder: Path, seed: int = 0, **prompt) -> None:
    """An LLM with random weights for the folder's corpus."""
    spec = make_contract(**prompt).prompt
    extras = Extras(max_run=spec.max_run if spec.durations == "tokens" else 1)
    tokens = build_token_map(("a",), CODEC.codebook_size, extras)
    contract = dataclasses.replace(
        make_contract(**prompt),
        audio=SPEC,
        codec=Corpus.open(folder / "corpus").require_codec(),
        tokens=tokens,
    )
    network = build_network(
        build_llm(tiny_config(max_positions=2048), tokens, seed=seed),
        contract.codebook_sizes,
        seed=seed,
    )
    save_llm(network, contract, folder / "run" / "llm" / "model")
