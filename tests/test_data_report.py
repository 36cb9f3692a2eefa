import json

import pytest

from tts_stack.data.report import (
    REASONS,
    PrepareReport,
    RejectedItem,
    count_reasons,
    write_rejected,
)
from tts_stack.errors import DataError

REPORT = PrepareReport(
    corpus="work/corpus",
    layout="ljspeech",
    kept={"train": 9, "validation": 1},
    seconds={"train": 3540.0, "validation": 60.0},
    rejected={"too_long": 2, "bad_line": 1},
)


def test_the_summary_counts_what_was_kept_and_why_the_rest_was_not():
    assert (REPORT.num_kept, REPORT.num_rejected, REPORT.hours) == (10, 3, 1.0)
    assert REPORT.lines() == [
        "kept 10 of 13: 9 train (59.0 min), 1 validation (1.0 min)",
        "left out 3, listed in work/corpus/rejected.jsonl:",
        "       2  longer than max_seconds",
        "       1  line not understood",
    ]


def test_the_summary_warns_of_a_missing_validation_split():
    report = PrepareReport("c", "pairs", {"train": 1, "validation": 0}, REPORT.seconds, {})
    assert report.lines()[-1].startswith("no validation split")


def test_a_report_survives_saving(tmp_path):
    REPORT.save(tmp_path)
    assert PrepareReport.load(tmp_path) == REPORT


def test_a_damaged_report_is_an_error(tmp_path):
    (tmp_path / "report.json").write_text("{")
    with pytest.raises(
        DataError, match=r"report\.json: cannot be read .*; re-run tts-stack prepare"
    ):
        PrepareReport.load(tmp_path)


def test_rejections_are_counted_most_frequent_first_and_written_one_a_line(tmp_path):
    short, long = (RejectedItem("m:1", "é", reason, "x") for reason in ("too_short", "too_long"))
    assert list(count_reasons([short, long, long]).items()) == [("too_long", 2), ("too_short", 1)]
    write_rejected(tmp_path, [short, long])
    lines = (tmp_path / "rejected.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[0]) == {
        "place": "m:1",
        "id": "é",
        "reason": "too_short",
        "message": "x",
    }
    assert len(lines) == 2


def test_every_reason_has_words_for_the_summary():
    assert all(words for words in REASONS.values())
