"""The prepared corpus on disk: Parquet shards plus `corpus.json`.

    corpus/
      corpus.json               rates, text front-end, symbols, codec, splits, shard names
      train-00000.parquet       id, text, model_text, speaker, language, sample_rate, num_samples,
      validation-00000.parquet  audio {bytes (FLAC), path}, and semantic_tokens once tokenised

Any Parquet reader opens the shards; `datasets` reads the audio column as its `Audio` feature.
"""

import dataclasses
import io
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import soundfile
from numpy.typing import NDArray

from tts_stack.contract import AudioSpec, CodecIdentity, TextSpec
from tts_stack.errors import ConfigError, DataError
from tts_stack.records import TokenizedUtterance, Utterance
from tts_stack.runtime import write_text

CORPUS_FILE = "corpus.json"
FORMAT_VERSION = 1
SPLITS = ("train", "validation")
ROWS_PER_GROUP = 8  # a random read decodes one row and touches this many: about a megabyte
_CONFIG_KEY = b"tts_stack.config_hash"
_CODEC_KEY = b"tts_stack.codec_sha256"
_BASE_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("text", pa.string()),
        ("model_text", pa.string()),
        ("speaker", pa.string()),
        ("language", pa.string()),
        ("sample_rate", pa.int32()),
        ("num_samples", pa.int64()),
        ("audio", pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
    ]
)
_TOKENS_FIELD = pa.field("semantic_tokens", pa.list_(pa.int32()))


@dataclass(frozen=True)
class CorpusInfo:
    """What `corpus.json` says of a prepared corpus."""

    sample_rate: int  # Hz
    text: TextSpec
    symbols: tuple[str, ...]  # every character of model_text in the training split, sorted
    config_hash: str  # of the preparation's settings; each shard carries it too
    shards: dict[str, tuple[str, ...]]  # split -> file names in order
    num_utterances: dict[str, int]
    seconds: dict[str, float]
    codec: CodecIdentity | None = None  # set by tokenize
    codec_audio: AudioSpec | None = None
    format_version: int = FORMAT_VERSION


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus, opened and checked."""

    path: Path
    info: CorpusInfo

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read `corpus.json` and check that every shard it names is there and belongs to it.

        Raises:
            DataError: the folder is not a prepared corpus, a shard is missing, damaged, or was
                written with other settings.
        """
        if not path.is_dir():
            raise DataError(f"{path}: no such corpus folder; make one with tts-stack prepare")
        info = read_info(path)
        for name in (name for names in info.shards.values() for name in names):
            schema = _read_schema(path / name)
            found = (schema.metadata or {}).get(_CONFIG_KEY, b"").decode()
            if found != info.config_hash:
                raise DataError(
                    f"{path / name}: made with settings {found or '(none)'}, {CORPUS_FILE} says "
                    f"{info.config_hash}; re-run tts-stack prepare into an empty folder"
                )
        return cls(path, info)

    def require_codec(self) -> CodecIdentity:
        """The codec that tokenised this corpus.

        Raises:
            DataError: the corpus holds no semantic tokens yet.
        """
        if self.info.codec is None:
            raise DataError(
                f"{self.path}: no semantic tokens yet; run tts-stack tokenize corpus={self.path}"
            )
        return self.info.codec

    @property
    def audio_spec(self) -> AudioSpec:
        """Rates of audio and tokens.

        Raises:
            DataError: the corpus holds no semantic tokens yet.
        """
        self.require_codec()
        assert self.info.codec_audio is not None
        return self.info.codec_audio

    def shard_paths(self, split: str) -> list[Path]:
        """Files of one split, in order."""
        return [self.path / name for name in self.info.shards[split]]

    def tokenized(self, split: str) -> list[TokenizedUtterance]:
        """Text and semantic tokens of a split, audio left on disk.

        Raises:
            DataError: the corpus holds no tokens, or a shard was tokenised by another codec.
        """
        codec = self.require_codec()
        columns = ["id", "model_text", "speaker", "language", "semantic_tokens"]
        found = []
        for path in self.shard_paths(split):
            written_by = shard_codec(path)
            if written_by != codec.weights_sha256:
                raise DataError(
                    f"{path}: tokens from codec {written_by[:12] or '(none)'}, {CORPUS_FILE} says "
                    f"{codec.describe()}; run tts-stack tokenize corpus={self.path}"
                )
            for row in pq.read_table(path, columns=columns).to_pylist():
                tokens = np.asarray(row.pop("semantic_tokens"), dtype=np.int64)
                if codec.num_codebooks > 1:
                    tokens = tokens.reshape(-1, codec.num_codebooks)
                found.append(TokenizedUtterance(semantic_tokens=tokens, **row))
        return found

    def utterances(self, split: str) -> Iterator[Utterance]:
        """Rows of a split with their decoded audio, one at a time."""
        for path in self.shard_paths(split):
            yield from read_utterances(path)

    def audio(self, split: str) -> "SplitAudio":
        """Random access to the audio of a split, in the order of `tokenized`."""
        return SplitAudio(self.shard_paths(split))


class SplitAudio(Sequence[NDArray[np.float32]]):
    """Audio of one split by row number, decoded when asked for; may travel to other processes."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)
        self._files: dict[int, pq.ParquetFile] = {}
        self._place: list[tuple[int, int, int]] = []  # row -> (shard, row group, row in group)
        for shard, path in enumerate(self._paths):
            metadata = pq.read_metadata(path)
            for group in range(metadata.num_row_groups):
                rows = metadata.row_group(group).num_rows
                self._place += [(shard, group, row) for row in range(rows)]

    def __len__(self) -> int:
        return len(self._place)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}  # open files do not travel

    def __getitem__(self, index: Any) -> Any:
        """Samples [T] of row `index`, float32."""
        shard, group, row = self._place[index]
        if shard not in self._files:
            self._files[shard] = pq.ParquetFile(self._paths[shard])
        column = self._files[shard].read_row_group(group, columns=["audio"]).column("audio")
        return decode_audio(column[row]["bytes"].as_py(), f"{self._paths[shard]}: row {index}")


def read_info(path: Path) -> CorpusInfo:
    """Read `corpus.json` of a corpus folder.

    Raises:
        DataError: it is missing, damaged, or of another version.
    """
    file = path / CORPUS_FILE
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        if values["format_version"] != FORMAT_VERSION:
            raise DataError(
                f"{file}: format_version is {values['format_version']}, this release reads "
                f"{FORMAT_VERSION}; re-run tts-stack prepare"
            )
        codec, codec_audio = values.pop("codec"), values.pop("codec_audio")
        return CorpusInfo(
            text=TextSpec(**values.pop("text")),
            symbols=tuple(values.pop("symbols")),
            shards={split: tuple(names) for split, names in values.pop("shards").items()},
            codec=CodecIdentity(**codec) if codec else None,
            codec_audio=AudioSpec(**codec_audio) if codec_audio else None,
            **values,
        )
    except FileNotFoundError as error:
        raise DataError(
            f"{path}: no {CORPUS_FILE} in it, so it is not a finished corpus; run tts-stack prepare"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
        raise DataError(f"{file}: cannot be read ({error}); re-run tts-stack prepare") from error


def write_info(path: Path, info: CorpusInfo) -> None:
    """Write `corpus.json`: the last step of preparation and of tokenisation."""
    write_text(path / CORPUS_FILE, json.dumps(dataclasses.asdict(info), indent=1) + "\n")


def write_shard(
    path: Path, utterances: Sequence[Utterance], *, sample_rate: int, config_hash: str
) -> None:
    """Write prepared utterances as one Parquet file; it appears whole or not at all."""
    rows = [
        {
            "id": utterance.id,
            "text": utterance.text,
            "model_text": utterance.model_text,
            "speaker": utterance.speaker,
            "language": utterance.language,
            "sample_rate": sample_rate,
            "num_samples": len(utterance.audio),
            "audio": {
                "bytes": encode_audio(utterance.audio, sample_rate),
                "path": f"{utterance.id}.flac",
            },
        }
        for utterance in utterances
    ]
    schema = _BASE_SCHEMA.with_metadata({_CONFIG_KEY: config_hash.encode()})
    _write_table(path, pa.Table.from_pylist(rows, schema=schema))


def add_tokens(path: Path, tokens: Sequence[NDArray[np.int64]], codec: CodecIdentity) -> None:
    """Put semantic tokens ([S] or [S, num_codebooks] a row) into a shard, replacing older ones."""
    table = pq.read_table(path)
    if _TOKENS_FIELD.name in table.column_names:
        table = table.drop_columns([_TOKENS_FIELD.name])
    column = pa.array([row.reshape(-1).astype(np.int32) for row in tokens], type=_TOKENS_FIELD.type)
    table = table.append_column(_TOKENS_FIELD, column)
    metadata = {**(table.schema.metadata or {}), _CODEC_KEY: codec.weights_sha256.encode()}
    _write_table(path, table.replace_schema_metadata(metadata))


def shard_codec(path: Path) -> str:
    """SHA-256 of the codec whose tokens a shard holds; empty when it holds none."""
    metadata = _read_schema(path).metadata or {}
    return bytes(metadata.get(_CODEC_KEY, b"")).decode()


def read_utterances(path: Path) -> Iterator[Utterance]:
    """Rows of one shard with their audio.

    Raises:
        DataError: a row's audio does not decode.
    """
    columns = ["id", "text", "model_text", "speaker", "language", "audio"]
    for batch in pq.ParquetFile(path).iter_batches(ROWS_PER_GROUP, columns=columns):
        for row in batch.to_pylist():
            audio = decode_audio(row.pop("audio")["bytes"], f"{path}: {row['id']}")
            yield Utterance(audio=audio, **row)


def encode_audio(audio: NDArray[np.float32], sample_rate: int) -> bytes:
    """Samples [T] in -1..1 as FLAC, 16 bits."""
    buffer = io.BytesIO()
    soundfile.write(buffer, audio, sample_rate, format="FLAC", subtype="PCM_16")
    return buffer.getvalue()


def decode_audio(data: bytes, place: str) -> NDArray[np.float32]:
    """FLAC bytes as float32 samples [T].

    Raises:
        DataError: the bytes are not audio; the message starts with `place`.
    """
    try:
        audio, _ = soundfile.read(io.BytesIO(data), dtype="float32")
    except soundfile.SoundFileError as error:
        raise DataError(f"{place}: audio does not decode ({error}); re-run prepare") from error
    return np.asarray(audio, dtype=np.float32)


def _read_schema(path: Path) -> pa.Schema:
    try:
        return pq.read_schema(path)
    except FileNotFoundError as error:
        raise DataError(f"{path}: shard is missing; re-run tts-stack prepare") from error
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path}: not a Parquet shard ({error}); re-run prepare") from error


def _write_table(path: Path, table: pa.Table) -> None:
    partial = path.with_name(path.name + ".partial")
    # FLAC does not compress further; the text columns are small.
    pq.write_table(table, partial, row_group_size=ROWS_PER_GROUP, compression="none")
    os.replace(partial, path)
