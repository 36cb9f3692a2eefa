"""Rows of instruction data that cannot be used: why, how many of each kind, and the listing."""

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tts_stack.errors import DataError
from tts_stack.runtime import write_text

MALFORMED_FILE = "malformed.jsonl"

# Reason -> what a summary says of it.
REASONS = {
    "not_json": "not a JSON object",
    "no_turns": "no list of turns",
    "missing_role": "no user turn or no assistant turn",
    "wrong_turns": "other turns than system, user, assistant",
    "bad_content": "a turn without text content",
    "no_task_token": "user turn without the task token",
    "unusable_text": "nothing to speak in the text",
    "no_sound_start": "assistant turn does not begin with sound_start",
    "no_sound_end": "assistant turn does not end with sound_end",
    "no_sound": "no sound token in the assistant turn",
    "unknown_token": "something else than tokens in the assistant turn",
    "outside_codebook": "sound token outside the codebook",
    "bad_duration": "duration token that stretches nothing",
    "duplicate_id": "id used twice",
}


class MalformedError(DataError):
    """A row cannot be used; the reason is a key of REASONS."""

    def __init__(self, reason: str, message: str) -> None:
        assert reason in REASONS, reason
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class MalformedRow:
    """A row that was left out."""

    row: int  # line of the JSONL file, or place in the array or dataset, from 1
    reason: str  # a key of REASONS
    message: str  # value found, value expected


def describe_malformed(rows: Sequence[MalformedRow]) -> list[str]:
    """Counts by reason, most frequent first, a line each."""
    counts = Counter(row.reason for row in rows).most_common()
    return [f"  {count:6d}  {REASONS[reason]}" for reason, count in counts]


def write_malformed(folder: Path, rows: Sequence[MalformedRow]) -> None:
    """Write `malformed.jsonl`, one object a line."""
    lines = [json.dumps(dataclasses.asdict(row)) for row in rows]
    write_text(folder / MALFORMED_FILE, "".join(f"{line}\n" for line in lines))
