"""`tts-stack tokenize`: semantic tokens into every shard of a prepared corpus."""

import dataclasses
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from tts_stack.errors import DataError
from tts_stack.records import Utterance
from tts_stack.semantic.checkpoint import load_codec
from tts_stack.semantic.dataset import pack_sorted
from tts_stack.semantic.losses import code_entropy_bits
from tts_stack.semantic.tokenizer import SpeechTokenizer
from tts_stack.shards import Corpus, add_tokens, read_utterances, shard_codec, write_info
from tts_stack.voice import CODEC_DIR, default_voice_dir

_WINDOW_CLIPS = 128  # clips in memory at once; they are sorted by length before batching
_BATCH_SECONDS = 45.0  # of speech, padding included


@dataclass(frozen=True)
class TokenizeReport:
    """What tokenisation did and how well the codec suits the corpus."""

    codec: str
    num_clips: int  # all clips of the corpus
    num_tokens: int  # of all clips
    num_new_tokens: int  # written by this call
    codes_used: int
    codebook_size: int
    entropy_bits: float
    mel_l1: float | None  # nats, round trip of the clips of this call; None when all were done
    skipped_shards: int  # already held tokens of this codec
    speech_seconds: float  # encoded by this call
    work_seconds: float

    @property
    def perplexity(self) -> float:
        """Size of a codebook whose codes were equally likely, with the same entropy."""
        return float(2.0**self.entropy_bits)

    @property
    def speed(self) -> float:
        """Seconds of speech per second of work, reading and writing included."""
        return self.speech_seconds / self.work_seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens written by this call per second of work."""
        return self.num_new_tokens / self.work_seconds

    def describe(self) -> str:
        """One line for the log and the terminal."""
        distance = "not measured" if self.mel_l1 is None else f"{self.mel_l1:.3f} nat"
        return (
            f"{self.num_clips} clips, {self.num_tokens} tokens of {self.codec}; "
            f"{self.codes_used} of {self.codebook_size} codes used, {self.entropy_bits:.2f} bits "
            f"(perplexity {self.perplexity:.0f}); round-trip mel error {distance}; "
            f"{self.tokens_per_second:.0f} tokens/s, {self.speed:.0f} times real time; "
            f"{self.skipped_shards} shards were done before"
        )


@dataclass
class _Tally:
    """Running sums of one call."""

    counts: Tensor  # [codebook_size]
    total_clips: int  # in the corpus
    num_clips: int = 0  # done
    num_new_tokens: int = 0
    skipped_shards: int = 0
    speech_seconds: float = 0.0
    mel_distances: list[float] = field(default_factory=list)  # one a clip
    mel_frames: list[int] = field(default_factory=list)

    def add(self, tokens: Sequence[NDArray[np.int64]]) -> None:
        """Count the codes of clips that are done."""
        self.num_clips += len(tokens)
        if tokens:
            found = torch.from_numpy(np.concatenate(tokens))
            self.counts += torch.bincount(found, minlength=len(self.counts))


def tokenize(
    corpus_path: Path,
    codec_path: Path | None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    device: str = "cpu",
) -> TokenizeReport:
    """Give every clip of a corpus its semantic tokens, and record the codec in `corpus.json`.

    Shards that hold tokens of this codec already are left alone, so an interrupted call
    continues where it stopped.

    Args:
        corpus_path: folder written by prepare.
        codec_path: codec folder; None takes the codec of the built-in voice.
        on_progress: called with (clips done, clips in the corpus) after every batch.
        device: where the codec runs.

    Returns:
        Codebook use, round-trip error and speed.

    Raises:
        DataError: the corpus cannot be read, or has another sample rate than the codec.
        CheckpointError: the codec cannot be read.
    """
    started = time.monotonic()
    corpus = Corpus.open(corpus_path)
    corpus.require_audio()
    codec_path = codec_path or default_voice_dir() / CODEC_DIR
    tokenizer = load_codec(codec_path, device=device)
    _check_sample_rate(corpus, tokenizer)
    tally = _Tally(
        torch.zeros(tokenizer.identity.codebook_size, dtype=torch.long),
        sum(corpus.info.num_utterances.values()),
    )
    for path in (path for split in corpus.info.shards for path in corpus.shard_paths(split)):
        if shard_codec(path) == tokenizer.identity.weights_sha256:
            _count_finished_shard(path, tally)
            on_progress(tally.num_clips, tally.total_clips)
            continue
        tokens = _encode_shard(path, tokenizer, tally, on_progress)
        add_tokens(path, tokens, tokenizer.identity)
    info = dataclasses.replace(
        corpus.info, codec=tokenizer.identity, codec_audio=tokenizer.audio_spec
    )
    _keep_codec(codec_path, corpus_path / CODEC_DIR)
    write_info(corpus_path, info)
    return _report(tokenizer, tally, time.monotonic() - started)


def _keep_codec(codec_path: Path, kept: Path) -> None:
    """Copy the codec beside its tokens: export packs it into the voice."""
    if codec_path.resolve() != kept.resolve():
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(codec_path, kept)


def _check_sample_rate(corpus: Corpus, tokenizer: SpeechTokenizer) -> None:
    expected = tokenizer.audio_spec.sample_rate
    if corpus.info.sample_rate != expected:
        raise DataError(
            f"{corpus.path}: sample_rate is {corpus.info.sample_rate} Hz, codec "
            f"{tokenizer.identity.describe()} reads {expected} Hz; re-run tts-stack prepare with "
            f"sample_rate={expected}, or choose another codec"
        )


def _encode_shard(
    path: Path,
    tokenizer: SpeechTokenizer,
    tally: _Tally,
    on_progress: Callable[[int, int], None],
) -> list[NDArray[np.int64]]:
    """Tokens [S] of each row of a shard, in its order."""
    tokens: list[NDArray[np.int64]] = []
    for window in _windows(read_utterances(path)):
        found: dict[int, NDArray[np.int64]] = {}
        for rows in _length_batches(window, tokenizer):
            clips = [window[row].audio for row in rows]
            encoded = tokenizer.encode(clips)
            found |= {row: codes.numpy() for row, codes in zip(rows, encoded, strict=True)}
            _measure_round_trip(clips, encoded, tokenizer, tally)
            num_samples = sum(len(clip) for clip in clips)
            tally.speech_seconds += num_samples / tokenizer.audio_spec.sample_rate
            tally.num_new_tokens += sum(len(codes) for codes in encoded)
            tally.add([found[row] for row in rows])
            on_progress(tally.num_clips, tally.total_clips)
        tokens += [found[row] for row in range(len(window))]
    return tokens


def _windows(utterances: Iterator[Utterance]) -> Iterator[list[Utterance]]:
    while window := list(islice(utterances, _WINDOW_CLIPS)):
        yield window


def _length_batches(
    window: Sequence[Utterance], tokenizer: SpeechTokenizer
) -> Sequence[Sequence[int]]:
    num_tokens = [tokenizer.audio_spec.num_tokens(len(utterance.audio)) for utterance in window]
    rows = sorted(range(len(window)), key=lambda row: num_tokens[row])
    max_tokens = round(_BATCH_SECONDS * tokenizer.audio_spec.token_rate)
    return pack_sorted(rows, num_tokens, max_tokens)


def _measure_round_trip(
    clips: Sequence[NDArray[np.float32]],
    tokens: Sequence[Tensor],
    tokenizer: SpeechTokenizer,
    tally: _Tally,
) -> None:
    pairs = zip(tokenizer.log_mel(clips), tokenizer.decode_mel(tokens), strict=True)
    for mel, mel_hat in pairs:  # [K, F] each
        tally.mel_distances.append(float((mel - mel_hat).abs().mean()))
        tally.mel_frames.append(mel.shape[1])


def _count_finished_shard(path: Path, tally: _Tally) -> None:
    rows = pq.read_table(path, columns=["semantic_tokens"]).column(0).to_pylist()
    tally.add([np.asarray(row, dtype=np.int64) for row in rows])
    tally.skipped_shards += 1


def _report(tokenizer: SpeechTokenizer, tally: _Tally, work_seconds: float) -> TokenizeReport:
    frames = sum(tally.mel_frames)
    pairs = zip(tally.mel_distances, tally.mel_frames, strict=True)
    distance = sum(value * count for value, count in pairs)
    return TokenizeReport(
        codec=tokenizer.identity.describe(),
        num_clips=tally.num_clips,
        num_tokens=int(tally.counts.sum()),
        num_new_tokens=tally.num_new_tokens,
        codes_used=int((tally.counts > 0).sum()),
        codebook_size=tokenizer.identity.codebook_size,
        entropy_bits=code_entropy_bits(tally.counts),
        mel_l1=distance / frames if frames else None,
        skipped_shards=tally.skipped_shards,
        speech_seconds=tally.speech_seconds,
        work_seconds=work_seconds,
    )
