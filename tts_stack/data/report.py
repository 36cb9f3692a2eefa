"""What preparation kept and left out, and why: `rejected.jsonl` and `report.json`."""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tts_stack.errors import DataError
from tts_stack.runtime import write_text

REPORT_FILE = "report.json"
REJECTED_FILE = "rejected.jsonl"

# Reason of a rejection -> what a summary says of it.
REASONS = {
    "bad_line": "line not understood",
    "duplicate_id": "id used twice",
    "missing_audio": "no audio file",
    "missing_text": "no transcript",
    "unreadable_audio": "audio damaged, empty or of an unknown format",
    "silent_audio": "recording is silent",
    "unusable_text": "text is empty or cannot be spoken",
    "other_language": "in another language",
    "too_short": "shorter than min_seconds",
    "too_long": "longer than max_seconds",
    "too_slow": "too little text for its length",
    "too_fast": "too much text for its length",
}


@dataclass(frozen=True)
class RejectedItem:
    """A source line that did not make it into the corpus."""

    place: str  # "metadata.csv:17"
    id: str
    reason: str  # a key of REASONS
    message: str  # value found, value expected, what to do

    def __post_init__(self) -> None:
        assert self.reason in REASONS, self.reason


@dataclass(frozen=True)
class PrepareReport:
    """Outcome of a preparation, for people and for `report.json`."""

    corpus: str  # folder
    layout: str  # how the source was read: ljspeech, jsonl or pairs
    kept: dict[str, int]  # split -> utterances
    seconds: dict[str, float]  # split -> seconds of audio
    rejected: dict[str, int]  # reason -> source lines, most frequent first

    @property
    def num_kept(self) -> int:
        return sum(self.kept.values())

    @property
    def num_rejected(self) -> int:
        return sum(self.rejected.values())

    @property
    def hours(self) -> float:
        return sum(self.seconds.values()) / 3600

    def lines(self) -> list[str]:
        """Summary for a terminal."""
        splits = ", ".join(
            f"{self.kept[split]} {split} ({self.seconds[split] / 60:.1f} min)"
            for split in self.kept
        )
        found = [f"kept {self.num_kept} of {self.num_kept + self.num_rejected}: {splits}"]
        if self.rejected:
            details = Path(self.corpus) / REJECTED_FILE
            found.append(f"left out {self.num_rejected}, listed in {details}:")
            found += [f"  {count:6d}  {REASONS[reason]}" for reason, count in self.rejected.items()]
        if not self.kept.get("validation"):
            found.append("no validation split: one utterance is too few; add recordings")
        return found

    def save(self, folder: Path) -> None:
        """Write `report.json`."""
        write_text(folder / REPORT_FILE, json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read `report.json` of a corpus folder.

        Raises:
            DataError: it is missing or damaged.
        """
        file = folder / REPORT_FILE
        try:
            return cls(**json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise DataError(
                f"{file}: cannot be read ({error}); re-run tts-stack prepare"
            ) from error


def count_reasons(rejected: Iterable[RejectedItem]) -> dict[str, int]:
    """Rejections by reason, most frequent first."""
    return dict(Counter(item.reason for item in rejected).most_common())


def write_rejected(folder: Path, rejected: Iterable[RejectedItem]) -> None:
    """Write `rejected.jsonl`, one object a line."""
    rows = [json.dumps(dataclasses.asdict(item), ensure_ascii=False) for item in rejected]
    write_text(folder / REJECTED_FILE, "".join(f"{row}\n" for row in rows))
