"""Semantic tokens of a user's own speech tokenizer -> the shards of a prepared corpus.

Everything is checked before the first shard is written, so a refused file leaves the corpus as
it was.
"""

import dataclasses
import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tts_stack.contract import AudioSpec, CodecIdentity
from tts_stack.data.token_file import read_token_file
from tts_stack.errors import ConfigError, DataError
from tts_stack.shards import Corpus, add_tokens, write_info
from tts_stack.voice import CODEC_DIR

MAX_DIFFERENCE = 1  # tokens, of frames at the end that tokenizers round differently
_SHOWN_IDS = 5

Tokens = Mapping[str, NDArray[np.int64]]  # id -> [S] or [S, K]


@dataclass(frozen=True)
class TokenImport:
    """What the file held."""

    codec: CodecIdentity
    num_utterances: int
    num_tokens: int  # positions; each holds codec.num_codebooks codes
    codes_used: int  # of all codebooks together
    num_extended: int  # one token short: the last one was repeated
    num_shortened: int  # one token long: the last one was dropped
    unknown_ids: tuple[str, ...]  # in the file, not in the corpus

    def lines(self) -> list[str]:
        """Summary for a terminal."""
        found = [
            f"{self.num_utterances} utterances, {self.num_tokens} tokens of "
            f"{self.codec.describe()} in {self.codec.num_codebooks} codebook(s); "
            f"{self.codes_used} of {self.codec.codebook_size} codes used"
        ]
        if self.num_extended or self.num_shortened:
            found.append(
                f"{self.num_extended} utterances were a token short (the last one is repeated), "
                f"{self.num_shortened} a token long (the last one is dropped)"
            )
        if self.unknown_ids:
            found.append(
                f"{len(self.unknown_ids)} ids of the file are not in the corpus and were ignored: "
                f"{_show(self.unknown_ids)}"
            )
        return found


def outside_codec(
    id: str, codebook_size: int, num_codebooks: int = 1, weights_sha256: str = ""
) -> CodecIdentity:
    """Name a speech tokenizer whose weights are not here; without its hash the name stands for it.

    Raises:
        ConfigError: the name is empty, or a size is below 1.
    """
    if not id.strip():
        raise ConfigError("codec id is empty, expected a name such as mimi-24khz")
    for name, size in (("codebook_size", codebook_size), ("num_codebooks", num_codebooks)):
        if size < 1:
            raise ConfigError(f"{name} is {size}, expected at least 1")
    facts = f"{id}:{codebook_size}:{num_codebooks}"
    sha256 = weights_sha256 or hashlib.sha256(facts.encode()).hexdigest()
    return CodecIdentity(id, sha256, codebook_size, num_codebooks)


def import_tokens(
    corpus_path: Path,
    tokens_file: Path,
    codec: CodecIdentity,
    audio: AudioSpec,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> TokenImport:
    """Write tokens from a file into a prepared corpus, as `tokenize` does with its own codec.

    Args:
        corpus_path: folder written by prepare.
        tokens_file: JSONL or Parquet of `id` and `semantic_tokens`: [S], or [S, K] for K > 1.
        codec: name and sizes of the speech tokenizer.
        audio: its rates; T samples have ceil(T / samples_per_token) tokens, and one more or less
            is mended at the end.
        on_progress: called with (utterances written, utterances in the corpus).

    Returns:
        Counts of what was written, mended and ignored.

    Raises:
        DataError: the corpus cannot be read, has another sample rate or no recordings; the file
            is damaged, an utterance is missing in it, or its tokens do not fit.
    """
    corpus = Corpus.open(corpus_path)
    corpus.require_audio()
    _check_sample_rate(corpus, codec, audio)
    given = read_token_file(tokens_file, codec)
    lengths = _expected_lengths(corpus, audio)
    _check_complete(given, lengths, corpus_path, tokens_file)
    place = f"{tokens_file}, {audio.sample_rate} Hz at {audio.token_rate:g} tokens/s"
    tokens = {id: _fit(given[id], length, id, place) for id, length in lengths.items()}
    _write(corpus, tokens, codec, on_progress)
    # The codec kept by an earlier `tokenize` is not the one of these tokens.
    shutil.rmtree(corpus_path / CODEC_DIR, ignore_errors=True)
    write_info(corpus_path, dataclasses.replace(corpus.info, codec=codec, codec_audio=audio))
    return _report(given, tokens, codec)


def _check_sample_rate(corpus: Corpus, codec: CodecIdentity, audio: AudioSpec) -> None:
    if corpus.info.sample_rate != audio.sample_rate:
        raise DataError(
            f"{corpus.path}: sample_rate is {corpus.info.sample_rate} Hz, codec {codec.id} has "
            f"{audio.sample_rate} Hz; re-run tts-stack prepare with "
            f"sample_rate={audio.sample_rate}, or correct --sample-rate"
        )


def _rows(corpus: Corpus) -> Iterator[tuple[Path, list[str], list[int]]]:
    """File, ids and sample counts of each shard."""
    for path in (path for split in corpus.info.shards for path in corpus.shard_paths(split)):
        table = pq.read_table(path, columns=["id", "num_samples"])
        yield path, table.column("id").to_pylist(), table.column("num_samples").to_pylist()


def _expected_lengths(corpus: Corpus, audio: AudioSpec) -> dict[str, int]:
    return {
        id: audio.num_tokens(samples)
        for _, ids, num_samples in _rows(corpus)
        for id, samples in zip(ids, num_samples, strict=True)
    }


def _check_complete(given: Tokens, wanted: Mapping[str, int], corpus: Path, file: Path) -> None:
    missing = [id for id in wanted if id not in given]
    if missing:
        raise DataError(
            f"{file}: no tokens for {len(missing)} of {len(wanted)} utterances of {corpus}: "
            f"{_show(missing)}; add them, or prepare the corpus without these recordings"
        )


def _fit(tokens: NDArray[np.int64], expected: int, id: str, place: str) -> NDArray[np.int64]:
    """Tokens of exactly the length that the recording has."""
    difference = len(tokens) - expected
    if abs(difference) > MAX_DIFFERENCE or not len(tokens):
        raise DataError(
            f"{place}: {len(tokens)} tokens for {id}, expected {expected}; check --sample-rate, "
            "--hop-length and --frames-per-token, and that the codec read the prepared audio "
            "(silence is trimmed there)"
        )
    return np.concatenate([tokens, tokens[-1:]])[:expected]


def _write(
    corpus: Corpus, tokens: Tokens, codec: CodecIdentity, on_progress: Callable[[int, int], None]
) -> None:
    done = 0
    for path, ids, _ in _rows(corpus):
        add_tokens(path, [tokens[id] for id in ids], codec)
        done += len(ids)
        on_progress(done, len(tokens))


def _report(given: Tokens, tokens: Tokens, codec: CodecIdentity) -> TokenImport:
    differences = np.array([len(given[id]) - len(tokens[id]) for id in tokens])
    used = np.zeros(codec.codebook_size, dtype=np.bool_)
    for codes in tokens.values():
        used[codes] = True
    return TokenImport(
        codec=codec,
        num_utterances=len(tokens),
        num_tokens=sum(map(len, tokens.values())),
        codes_used=int(used.sum()),
        num_extended=int((differences < 0).sum()),
        num_shortened=int((differences > 0).sum()),
        unknown_ids=tuple(id for id in given if id not in tokens),
    )


def _show(ids: list[str] | tuple[str, ...]) -> str:
    return ", ".join(ids[:_SHOWN_IDS]) + (", …" if len(ids) > _SHOWN_IDS else "")
