"""Instruction data in chat form -> a corpus of text and semantic tokens, and back, lossless.

Source rows -> checked rows -> shards -> corpus.json and malformed.jsonl.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tts_stack.contract import AudioSpec, CodecIdentity, TextSpec
from tts_stack.data.instruction_row import parse_record
from tts_stack.data.instruction_source import InstructionSource, SourceRow, open_source
from tts_stack.data.malformed import (
    MALFORMED_FILE,
    MalformedError,
    MalformedRow,
    describe_malformed,
    write_malformed,
)
from tts_stack.data.part import shard_name
from tts_stack.data.plan import draw
from tts_stack.errors import ConfigError, DataError
from tts_stack.shards import SPLITS, CorpusInfo, TokenRow, write_info, write_token_shard
from tts_stack.text.frontend import build_frontend

OnProgress = Callable[[int, int], None]  # (rows read, rows in all)
_ROWS_PER_SHARD = 4096
_PROGRESS_ROWS = 100
_SHOWN_MALFORMED = 5
_HASH_LENGTH = 16


@dataclass(frozen=True)
class ImportSettings:
    """What instruction data does not say of itself."""

    codec: CodecIdentity  # that made the sound tokens
    audio: AudioSpec  # its rates
    validation_fraction: float = 0.02
    max_validation: int = 2000  # rows
    seed: int = 0  # of the train/validation split
    language: str = "en-us"  # of rows that name none

    def __post_init__(self) -> None:
        if self.codec.num_codebooks != 1:
            raise ConfigError(
                f"codec.num_codebooks is {self.codec.num_codebooks}, expected 1: the chat form "
                "holds one codebook; bring several with tts-stack import-tokens"
            )
        if not 0 < self.validation_fraction < 1:
            raise ConfigError(
                f"validation_fraction is {self.validation_fraction}, expected between 0 and 1"
            )


@dataclass(frozen=True)
class ImportReport:
    """What became of the rows."""

    corpus: Path
    kept: dict[str, int]  # split -> rows
    seconds: dict[str, float]  # split -> seconds of speech
    num_masked: int  # rows with a masked token
    malformed: tuple[MalformedRow, ...]

    def lines(self) -> list[str]:
        """Summary for a terminal."""
        num_kept = sum(self.kept.values())
        splits = ", ".join(
            f"{self.kept[split]} {split} ({self.seconds[split] / 3600:.2f} h)" for split in SPLITS
        )
        found = [f"kept {num_kept} of {num_kept + len(self.malformed)} rows: {splits}"]
        if self.malformed:
            listing = self.corpus / MALFORMED_FILE
            found.append(f"left out {len(self.malformed)}, listed in {listing}:")
            found += describe_malformed(self.malformed)
            found += [
                f"  row {row.row}: {row.message}" for row in self.malformed[:_SHOWN_MALFORMED]
            ]
        if self.num_masked:
            found.append(
                f"{self.num_masked} rows hold masked tokens: train with prompt.format=chat"
            )
        if not self.kept["validation"]:
            found.append("no validation split: one row is too few; add rows")
        return found


def import_instructions(
    source: Path,
    corpus: Path,
    settings: ImportSettings,
    *,
    split: str | None = None,
    on_progress: OnProgress = lambda done, total: None,
) -> ImportReport:
    """Write instruction data as a tokenised corpus that stage 1 trains on.

    A killed import leaves nothing at `corpus`; run it again.

    Args:
        source: JSON array, JSONL file, or folder of a Hugging Face dataset.
        corpus: folder to write; must not exist or be empty.
        settings: codec and split.
        split: of a dataset that has several.
        on_progress: called now and then.

    Returns:
        What was kept and left out.

    Raises:
        DataError: the source is not understood, every row is malformed, or `corpus` holds
            something.
        MissingDependencyError: the package `datasets` is needed.
    """
    if corpus.exists() and (not corpus.is_dir() or any(corpus.iterdir())):
        raise DataError(f"{corpus}: is not empty; choose another folder or delete this one")
    opened = open_source(source, split)
    partial = corpus.with_name(corpus.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise DataError(
            f"{corpus}: cannot be written ({error.strerror}); choose another folder"
        ) from error
    writer = _CorpusWriter(partial, settings, _config_hash(opened, settings))
    malformed: list[MalformedRow] = []
    for entry in _parse_rows(opened, settings, on_progress):
        if isinstance(entry, MalformedRow):
            malformed.append(entry)
        else:
            writer.add(entry)
    if not writer.num_rows:
        shutil.rmtree(partial)
        raise _all_malformed(opened, malformed)
    info = writer.finish()
    write_malformed(partial, malformed)
    write_info(partial, info)
    if corpus.exists():
        corpus.rmdir()
    partial.rename(corpus)
    return ImportReport(
        corpus, info.num_utterances, info.seconds, writer.num_masked, tuple(malformed)
    )


class _CorpusWriter:
    """Sorts rows into splits and writes a shard whenever one is full.

    Each id draws its split from a hash of (seed, id). The last shard of each split is held back,
    so that of two rows or more each split gets one.
    """

    def __init__(self, folder: Path, settings: ImportSettings, config_hash: str) -> None:
        self.num_masked = 0
        self._folder, self._settings, self._config_hash = folder, settings, config_hash
        self._waiting: dict[str, list[TokenRow]] = {split: [] for split in SPLITS}
        self._shards: dict[str, list[str]] = {split: [] for split in SPLITS}
        self._num_rows = dict.fromkeys(SPLITS, 0)
        self._num_tokens = dict.fromkeys(SPLITS, 0)
        self._symbols: set[str] = set()

    @property
    def num_rows(self) -> int:
        return sum(map(len, self._waiting.values())) + sum(self._num_rows.values())

    def add(self, row: TokenRow) -> None:
        """Put a row into its split."""
        self.num_masked += bool((row.semantic_tokens == self._settings.codec.codebook_size).any())
        split = self._choose_split(row.id)
        if len(self._waiting[split]) == _ROWS_PER_SHARD:
            self._flush(split)
        self._waiting[split].append(row)

    def finish(self) -> CorpusInfo:
        """Write what waits, and describe the corpus."""
        self._fill_empty_split()
        for split in SPLITS:
            self._flush(split)
        settings = self._settings
        return CorpusInfo(
            sample_rate=settings.audio.sample_rate,
            text=TextSpec("raw", settings.language),
            symbols=tuple(sorted(self._symbols)),
            config_hash=self._config_hash,
            shards={split: tuple(names) for split, names in self._shards.items()},
            num_utterances=dict(self._num_rows),
            seconds={s: self._num_tokens[s] / settings.audio.token_rate for s in SPLITS},
            codec=settings.codec,
            codec_audio=settings.audio,
            has_audio=False,
        )

    def _choose_split(self, id: str) -> str:
        settings = self._settings
        num_validation = self._num_rows["validation"] + len(self._waiting["validation"])
        is_validation = draw(settings.seed, id) < settings.validation_fraction
        return (
            "validation" if is_validation and num_validation < settings.max_validation else "train"
        )

    def _fill_empty_split(self) -> None:
        """Move the row that came nearest to drawing the empty split."""
        for empty, other, nearest in (("validation", "train", min), ("train", "validation", max)):
            rows = self._waiting[other]
            if not self._waiting[empty] and len(rows) > 1:
                draws = [draw(self._settings.seed, row.id) for row in rows]
                self._waiting[empty].append(rows.pop(draws.index(nearest(draws))))

    def _flush(self, split: str) -> None:
        rows = self._waiting[split]
        if not rows:
            return
        name = shard_name(split, len(self._shards[split]))
        settings = self._settings
        write_token_shard(
            self._folder / name,
            rows,
            codec=settings.codec,
            audio=settings.audio,
            config_hash=self._config_hash,
        )
        self._shards[split].append(name)
        self._num_rows[split] += len(rows)
        self._num_tokens[split] += sum(len(row.semantic_tokens) for row in rows)
        if split == "train":
            self._symbols.update(*(row.model_text for row in rows))
        self._waiting[split] = []


def _parse_rows(
    source: InstructionSource, settings: ImportSettings, on_progress: OnProgress
) -> Iterator[TokenRow | MalformedRow]:
    frontend = build_frontend(TextSpec("raw", settings.language))
    first_rows: dict[str, int] = {}
    for row in source.rows():
        try:
            parsed = _parse_row(row, settings, frontend)
            if parsed.id in first_rows:
                raise MalformedError(
                    "duplicate_id",
                    f"id {parsed.id!r} is already used by row {first_rows[parsed.id]}, "
                    "expected unique ids",
                )
        except MalformedError as error:
            yield MalformedRow(row.number, error.reason, str(error))
        else:
            first_rows[parsed.id] = row.number
            yield parsed
        if row.number % _PROGRESS_ROWS == 0:
            on_progress(row.number, source.num_rows)
    on_progress(source.num_rows, source.num_rows)


def _parse_row(
    row: SourceRow, settings: ImportSettings, frontend: Callable[[str], str]
) -> TokenRow:
    if row.error is not None:
        raise row.error
    parsed = parse_record(row.value, row.number, settings.codec.codebook_size, frontend)
    return replace(parsed, language=parsed.language or settings.language)


def _config_hash(source: InstructionSource, settings: ImportSettings) -> str:
    facts = json.dumps([source.sha256, asdict(settings)], sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()[:_HASH_LENGTH]


def _all_malformed(source: InstructionSource, rows: Sequence[MalformedRow]) -> DataError:
    counts = ", ".join(line.strip() for line in describe_malformed(rows))
    return DataError(
        f"{source.path}: none of {len(rows)} rows can be used ({counts}); "
        f"row {rows[0].row}: {rows[0].message}"
    )
