"""Every form of stage 1 from the command line: base models, codebooks, prompt forms, durations."""

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import soundfile
from base_models import write_tiny_base
from command_line import call_main
from pipeline_sizes import SMALL_VOCODER

from tts_stack.shards import Corpus
from tts_stack.voice import CODEC_DIR, default_voice_dir

NUM_CLIPS = 12
STEPS = ["trainer.max_steps=2", "trainer.validate_every=2", "trainer.checkpoint_every=2"]
BASES = {
    "qwen2-tied": {"kind": "qwen2", "tie": True, "template": "chatml"},
    "llama-tied": {"kind": "llama", "tie": True, "template": "llama3"},
    "llama-untied": {"kind": "llama", "tie": False, "template": "llama3"},
}
CELLS = list(itertools.product(BASES, (1, 4), ("tagged", "chat"), ("none", "tokens", "codebook")))
# Each value of each column at least once; the others are slow.
QUICK = {
    ("qwen2-tied", 1, "tagged", "none"),
    ("llama-tied", 4, "chat", "tokens"),
    ("llama-untied", 4, "tagged", "codebook"),
}


@pytest.fixture(scope="session")
def spoken_corpora(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The same recordings with one codebook, and with four brought in from outside."""
    speech = shared_data / "speech" / "ljspeech32"
    top = tmp_path_factory.mktemp("matrix")
    recordings = top / "recordings"
    (recordings / "wavs").mkdir(parents=True)
    lines = (speech / "metadata.csv").read_text(encoding="utf-8").splitlines()[:NUM_CLIPS]
    for line in lines:
        name = f"{line.split('|')[0]}.flac"
        shutil.copy(speech / "wavs" / name, recordings / "wavs" / name)
    (recordings / "metadata.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    one, four = top / "one", top / "four"
    settings = ["num_workers=1", "validation_fraction=0.2", "text.kind=normalized"]
    with pytest.MonkeyPatch.context() as monkeypatch:
        run(["prepare", recordings, one, *settings], monkeypatch)
        codec = default_voice_dir() / CODEC_DIR
        run(["tokenize", f"corpus={one}", f"tokenizer={codec}"], monkeypatch)
        shutil.copytree(one, four)
        write_codes(Corpus.open(one), top / "codes.jsonl")
        identity = ["--codec-id", "outside", "--codebook-size", "1000", "--num-codebooks", "4"]
        rates = ["--sample-rate", "24000", "--hop-length", "240", "--frames-per-token", "4"]
        run(["import-tokens", four, top / "codes.jsonl", *identity, *rates], monkeypatch)
    return {1: one, 4: four}


def write_codes(corpus: Corpus, path: Path) -> None:
    """Three invented codebooks beside the true one."""
    random = np.random.default_rng(0)
    with path.open("w", encoding="utf-8") as file:
        for split in ("train", "validation"):
            for utterance in corpus.tokenized(split):
                tokens = utterance.semantic_tokens[:, None]
                others = random.integers(0, 1000, (len(tokens), 3))
                codes = np.concatenate([tokens, others], axis=1).tolist()
                file.write(json.dumps({"id": utterance.id, "semantic_tokens": codes}) + "\n")


def run(command, monkeypatch) -> None:
    assert call_main([str(part) for part in command], monkeypatch) == 0, command


@pytest.mark.parametrize(
    ("base", "num_codebooks", "prompt_format", "durations"),
    [
        pytest.param(
            *cell,
            marks=() if cell in QUICK else pytest.mark.slow,
            id="-".join(map(str, cell)),
        )
        for cell in CELLS
    ],
)
def test_a_base_model_with_lora_becomes_a_voice(
    spoken_corpora, tmp_path, monkeypatch, base, num_codebooks, prompt_format, durations
):
    folder = write_tiny_base(tmp_path / "base", **BASES[base])
    where = [f"corpus={spoken_corpora[num_codebooks]}", f"run={tmp_path / 'run'}"]
    form = [f"prompt.format={prompt_format}", f"prompt.durations={durations}"]
    llm = [f"llm={folder}", "+lora=r_8_alpha_16", "batching.max_tokens=2048", "num_listened=1"]
    run(["train-llm", *where, *llm, *form, *STEPS], monkeypatch)
    assert not (tmp_path / "run" / "llm" / "model").exists()
    run(["merge-lora", tmp_path / "run"], monkeypatch)
    run(["train-vocoder", *where, *SMALL_VOCODER, *STEPS], monkeypatch)
    run(["synth", "Hello there.", tmp_path / "out.wav", "--voice", tmp_path / "run"], monkeypatch)
    info = soundfile.info(tmp_path / "out.wav")
    assert info.samplerate == 24000 and info.frames > 0
