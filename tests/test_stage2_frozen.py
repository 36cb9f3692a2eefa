"""Frozen means frozen: stage 2 trains on an LLM's states and never touches, or holds, the LLM."""

import numpy as np
import pytest
import torch
from stage1_support import (
    CODEC,
    SYMBOLS,
    make_contract,
    make_samples,
    text_of,
    tiny_network,
)
from stage2_support import TINY_OVERRIDES, flat_tensors

from stage1_llm.checkpoint import save_llm
from stage2_vocoder.config import VocoderTrainConfig
from stage2_vocoder.train import phase_folder, run_training
from tts_stack.config import load_config
from tts_stack.contract import AudioSpec, TextSpec, file_sha256
from tts_stack.records import Utterance
from tts_stack.shards import SPLITS, CorpusInfo, add_tokens, write_info, write_shard
from tts_stack.states import ensure_states, live_states
from tts_stack.training import load_weights

SPEC = AudioSpec(24000, 240, 4)
SIZES = (
    "vocoder.n_fft=960",
    "losses.mel={n_fft: 960, hop_length: 240, n_mels: 12}",
    "reconstruction.batch_seconds=1",
    "adversarial.batch_size=2",
    "adversarial.crop_seconds=0.1",
    "trainer.max_steps=3",
)


def write_corpus(folder):
    """Noise of the length that the made-up tokens say."""
    folder.mkdir()
    samples = make_samples(6)
    parts = {"train": samples[:4], "validation": samples[4:]}
    random = np.random.default_rng(0)
    for split, part in parts.items():
        file = folder / f"{split}-00000.parquet"
        rows = []
        for sample in part:
            noise = random.normal(0, 0.1, len(sample.semantic_tokens) * SPEC.samples_per_token)
            text = text_of(sample)
            rows.append(Utterance(sample.id, text, text, "", "en-us", noise.astype(np.float32)))
        write_shard(file, rows, sample_rate=SPEC.sample_rate, config_hash="h")
        add_tokens(file, [sample.semantic_tokens for sample in part], CODEC)
    info = CorpusInfo(
        sample_rate=SPEC.sample_rate,
        text=TextSpec("raw", "en-us"),
        symbols=SYMBOLS,
        config_hash="h",
        shards={split: (f"{split}-00000.parquet",) for split in SPLITS},
        num_utterances={split: len(part) for split, part in parts.items()},
        seconds=dict.fromkeys(SPLITS, 1.0),
        codec=CODEC,
        codec_audio=SPEC,
    )
    write_info(folder, info)
    return folder


@pytest.fixture(scope="module", params=["cached", "on_the_fly"])
def trained(request, tmp_path_factory):
    """(run folder, the LLM's files before): both phases on the states of a tiny LLM."""
    folder = tmp_path_factory.mktemp("frozen")
    corpus, run = write_corpus(folder / "corpus"), folder / "run"
    save_llm(tiny_network(), make_contract(), run / "llm" / "model")
    before = hashes(run)
    config = load_config(
        VocoderTrainConfig,
        "train_vocoder",
        [f"corpus={corpus}", f"run={run}", *TINY_OVERRIDES, *SIZES],
    )
    states = None
    if request.param == "cached":
        ensure_states(run, corpus, device=torch.device("cpu"))
    else:
        states = live_states(run, corpus, device=torch.device("cpu"))
    for phase in ("reconstruction", "adversarial"):
        run_training(config, phase, resume=False, states=states)
    return run, before


def hashes(run):
    return {path.name: file_sha256(path) for path in (run / "llm" / "model").iterdir()}


def checkpoints(run):
    """Every tensor that stage 2 wrote, by file and place."""
    found = {}
    for phase in ("reconstruction", "adversarial"):
        for path in sorted(phase_folder(run, phase).rglob("*")):
            if path.suffix == ".ckpt":
                tensors = flat_tensors(torch.load(path, weights_only=True))
            elif path.suffix == ".safetensors":
                tensors = load_weights(path)
            else:
                continue
            found |= {f"{path.relative_to(run)}:{name}": one for name, one in tensors.items()}
    return found


def test_the_llm_is_bit_identical_after_training(trained):
    run, before = trained
    assert len(before) >= 3 and hashes(run) == before


def test_no_stage_2_checkpoint_holds_a_parameter_of_the_llm(trained):
    run, _ = trained
    llm = load_weights(run / "llm" / "model" / "model.safetensors")
    written = checkpoints(run)
    assert sum(name.endswith(".norm.weight") for name in written) >= 4  # files were really read
    for name, tensor in written.items():
        for own, weight in llm.items():
            is_same = tensor.shape == weight.shape and torch.equal(tensor, weight.to(tensor.dtype))
            # A norm's weights are all one in any network that has not learnt yet.
            assert not is_same or bool((weight == 1).all()), f"{name} is the LLM's {own}"
            assert own not in name


def test_every_weight_of_an_optimiser_is_the_vocoders_or_a_discriminators(trained):
    run, _ = trained
    for phase, parts in (
        ("reconstruction", {"optimizer": "vocoder"}),
        (
            "adversarial",
            {"generator_optimizer": "vocoder", "discriminator_optimizer": "discriminators"},
        ),
    ):
        path = phase_folder(run, phase) / "checkpoints" / "last.ckpt"
        state = torch.load(path, weights_only=True)["task"]
        for optimizer, network in parts.items():
            moments = [one["exp_avg"].shape for one in state[optimizer]["state"].values()]
            shapes = [tensor.shape for tensor in state[network].values()]
            assert moments and all(shape in shapes for shape in moments)
            (group,) = state[optimizer]["param_groups"]
            assert len(group["params"]) == len(moments)
