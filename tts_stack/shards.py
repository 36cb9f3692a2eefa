"""The prepared corpus on disk: Parquet shards plus `corpus.json`.

    corpus/
      corpus.json               rates, text front-end, symbols, codec, splits, shard names
      train-00000.parquet       id, text, model_text, speaker, language, sample_rate, num_samples,
      validation-00000.parquet  audio {bytes (FLAC), path}, and semantic_tokens once tokenised

A corpus imported as text and tokens has null for audio, and a column `instruction`.
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
from tts_stack.row_groups import TOKENS_COLUMN, RowGroups, SplitTokens, iter_tokens
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
_TOKENS_FIELD = pa.field(TOKENS_COLUMN, pa.list_(pa.int32()))
_INSTRUCTION_FIELD = pa.field("instruction", pa.string())
_TOKEN_ROWS_PER_GROUP = 256  # rows without audio: less than a megabyte
_NO_RECORDING = (
    "the corpus holds text and tokens only, which train stage 1; for the codec and the vocoder "
    "prepare recordings with tts-stack prepare"
)


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
    has_audio: bool = True  # False: imported as text and tokens


@dataclass(frozen=True)
class TokenRow:
    """A row without recording: text and tokens that come from elsewhere."""

    id: str
    text: str
    model_text: str
    speaker: str
    language: str
    semantic_tokens: NDArray[np.int64]  # [S]
    instruction: str  # JSON: what else the source held, so that export gives it back


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

    def require_audio(self) -> None:
        """Check that there are recordings, for everything that reads audio.

        Raises:
            DataError: the corpus was imported as text and tokens.
        """
        if not self.info.has_audio:
            raise DataError(f"{self.path}: no recordings; {_NO_RECORDING}")

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

    def token_shards(self, split: str) -> list[Path]:
        """Files of one split, in order, checked to hold tokens of the corpus's codec.

        Raises:
            DataError: the corpus holds no tokens, or a shard was tokenised by another codec.
        """
        codec = self.require_codec()
        paths = self.shard_paths(split)
        for path in paths:
            written_by = shard_codec(path)
            if written_by != codec.weights_sha256:
                raise DataError(
                    f"{path}: tokens from codec {written_by[:12] or '(none)'}, {CORPUS_FILE} says "
                    f"{codec.describe()}; run tts-stack tokenize corpus={self.path}"
                )
        return paths

    def tokenized(self, split: str) -> list[TokenizedUtterance]:
        """Text and semantic tokens of a split, audio left on disk.

        Raises:
            DataError: the corpus holds no tokens, or a shard was tokenised by another codec.
        """
        return list(self.iter_tokenized(split))

    def iter_tokenized(self, split: str) -> Iterator[TokenizedUtterance]:
        """Rows of `tokenized` one at a time, a few hundred in memory.

        Raises:
            DataError: the corpus holds no tokens, or a shard was tokenised by another codec.
        """
        num_codebooks = self.require_codec().num_codebooks
        for path in self.token_shards(split):
            yield from iter_tokens(path, num_codebooks)

    def token_rows(self, split: str) -> SplitTokens:
        """Random access to the rows of `tokenized`.

        Raises:
            DataError: the corpus holds no tokens, or a shard was tokenised by another codec.
        """
        return SplitTokens(self.token_shards(split), self.require_codec().num_codebooks)

    def tags(self, column: str) -> tuple[str, ...]:
        """The speakers or languages named in the training split, sorted."""
        tables = [pq.read_table(path, columns=[column]) for path in self.shard_paths("train")]
        found = {name for table in tables for name in table.column(0).unique().to_pylist()}
        return tuple(sorted(found - {"", None}))

    def utterances(self, split: str) -> Iterator[Utterance]:
        """Rows of a split with their decoded audio, one at a time.

        Raises:
            DataError: the corpus holds no recordings, or one does not decode.
        """
        self.require_audio()
        for path in self.shard_paths(split):
            yield from read_utterances(path)

    def audio(self, split: str) -> "SplitAudio":
        """Random access to the audio of a split, in the order of `tokenized`.

        Raises:
            DataError: the corpus holds no recordings.
        """
        self.require_audio()
        return SplitAudio(self.shard_paths(split))


class SplitAudio(Sequence[NDArray[np.float32]]):
    """Audio of one split by row number, decoded when asked for; may travel to other processes."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._rows = RowGroups(paths)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        """Samples [T] of row `index`, float32."""
        row = self._rows.read(index, ["audio"])
        audio = row.table.column("audio")[row.place].as_py()
        return decode_audio(_audio_bytes(audio), f"{row.path}: row {index}")


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


def write_token_shard(
    path: Path,
    rows: Sequence[TokenRow],
    *,
    codec: CodecIdentity,
    audio: AudioSpec,
    config_hash: str,
) -> None:
    """Write rows without recordings as one Parquet file; it appears whole or not at all."""
    values = [
        {
            **dataclasses.asdict(row),
            "semantic_tokens": row.semantic_tokens.astype(np.int32),
            "sample_rate": audio.sample_rate,
            "num_samples": len(row.semantic_tokens) * audio.samples_per_token,
            "audio": None,
        }
        for row in rows
    ]
    schema = pa.schema([*_BASE_SCHEMA, _INSTRUCTION_FIELD, _TOKENS_FIELD]).with_metadata(
        {_CONFIG_KEY: config_hash.encode(), _CODEC_KEY: codec.weights_sha256.encode()}
    )
    table = pa.Table.from_pylist(values, schema=schema)
    _write_table(path, table, rows_per_group=_TOKEN_ROWS_PER_GROUP)


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
            audio = decode_audio(_audio_bytes(row.pop("audio")), f"{path}: {row['id']}")
            yield Utterance(audio=audio, **row)


def encode_audio(audio: NDArray[np.float32], sample_rate: int) -> bytes:
    """Samples [T] in -1..1 as FLAC, 16 bits."""
    buffer = io.BytesIO()
    soundfile.write(buffer, audio, sample_rate, format="FLAC", subtype="PCM_16")
    return buffer.getvalue()


def decode_audio(data: bytes | None, place: str) -> NDArray[np.float32]:
    """FLAC bytes as float32 samples [T].

    Raises:
        DataError: there are no bytes or they are not audio; the message starts with `place`.
    """
    if data is None:
        raise DataError(f"{place}: no recording; {_NO_RECORDING}")
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


def _audio_bytes(audio: dict[str, Any] | None) -> bytes | None:
    return audio["bytes"] if audio else None


def _write_table(path: Path, table: pa.Table, *, rows_per_group: int = ROWS_PER_GROUP) -> None:
    partial = path.with_name(path.name + ".partial")
    # FLAC does not compress further; the text columns are small.
    pq.write_table(table, partial, row_group_size=rows_per_group, compression="none")
    os.replace(partial, path)
