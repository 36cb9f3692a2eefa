import json

import pytest
from instruction_support import END, SETTINGS, START, import_rows, odd_rows, read_back, row, sound

from tts_stack.data.instructions import import_instructions
from tts_stack.errors import DataError

MALFORMED = {
    "not_json": ([1], "found a list, expected an object with messages"),
    "no_turns": (
        {"text": "a", "id": "b"},
        r"no list messages or conversations, expected one \(keys found: id, text\)",
    ),
    "missing_role": (
        {"messages": row()["messages"][:1]},
        r"no assistant turn, expected one \(found: user\)",
    ),
    "wrong_turns": (
        {"messages": row()["messages"] * 2},
        "turns are user, assistant, user, assistant; expected user, assistant",
    ),
    "bad_content": (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}, row()["messages"][1]]},
        "content of turn 1 is list, expected a string",
    ),
    "no_task_token": (
        {"messages": [{"role": "user", "content": "Please say hello"}, row()["messages"][1]]},
        r"user turn begins with 'Please say hello', expected <\|text_to_semantic\|> before",
    ),
    "unusable_text": (row("..."), r'text "\.\.\.": nothing to speak in it'),
    "no_sound_start": (row(answer="<|sound_0001|>" + END), "expected <.sound_start.> first"),
    "no_sound_end": (row(answer=sound(1, 2)[:-13]), r"ends with '.*sound_0002\|>', expected"),
    "no_sound": (row(answer=START + END), "holds no sound token, expected at least one"),
    "unknown_token": (
        row(answer=START + "<|sound_0001|><|noise|>" + END),
        r"holds '<\|noise\|>' at character 14 after <\|sound_start\|>, expected sound and duration",
    ),
    "outside_codebook": (row(answer=sound(1, 512)), r"sound token 512, expected 0 \.\. 511"),
    "bad_duration": (
        row(answer=f"{START}<|sound_0001|><|duration_02|>{END}"),
        r"<\|duration_02\|> stands before <\|sound_end\|>, expected a sound token",
    ),
    "duplicate_id": (row(id="first"), "id 'first' is already used by row 1, expected unique ids"),
}
MORE_MALFORMED = [
    ("missing_role", {"messages": []}, r"no user turn, expected one \(found: none\)"),
    ("missing_role", {"messages": [{"role": "assistant", "content": "a"}]}, "no user turn"),
    ("wrong_turns", {"messages": row()["messages"][::-1]}, "turns are assistant, user; expected"),
    ("bad_content", {"messages": ["hello"]}, "turn 1 is a str, expected role and content"),
    ("bad_content", {"messages": [{"role": "user"}]}, "content of turn 1 is NoneType, expected"),
    (
        "no_task_token",
        {"messages": [{"role": "user", "content": "a<|text_to_semantic|>b"}, row()["messages"][1]]},
        "user turn begins with 'a<.text_to",
    ),
    ("unusable_text", row("a\ud83d"), "text holds half a surrogate pair"),
    ("unusable_text", row(""), "nothing to speak"),
    ("no_sound_start", row(answer=""), "assistant turn is '', expected"),
    ("no_sound_end", row(answer=START), r"ends with '<\|sound_start\|>', expected"),
    ("unknown_token", row(answer=START + sound(1)), r"holds '<\|sound_start\|>.*' at character 0"),
    ("unknown_token", row(answer=f"{START}<|sound_٣|>{END}"), "at character 0"),
    ("bad_duration", row(answer=f"{START}<|duration_00|><|sound_0001|>{END}"), "duration of 0"),
    ("bad_duration", row(answer=f"{START}<|duration_100|><|sound_0001|>{END}"), "duration of 100"),
    (
        "bad_duration",
        row(answer=f"{START}<|duration_02|><|duration_03|><|sound_0001|>{END}"),
        r"<\|duration_02\|> stands before another duration",
    ),
]


@pytest.mark.parametrize(
    ("reason", "bad", "message"),
    [(reason, *case) for reason, case in MALFORMED.items()] + MORE_MALFORMED,
)
def test_a_malformed_row_is_reported_by_number_and_left_out(tmp_path, reason, bad, message):
    good = [row(id="first"), row("third")]
    report = import_rows(tmp_path, [good[0], bad, good[1]])
    (found,) = report.malformed
    assert (found.row, found.reason) == (2, reason)
    with pytest.raises(DataError, match=message):
        raise DataError(found.message)
    listing = (tmp_path / "corpus" / "malformed.jsonl").read_text(encoding="utf-8")
    assert json.loads(listing) == {"row": 2, "reason": reason, "message": found.message}
    assert read_back(tmp_path) == good


def test_every_reason_is_tested():
    from tts_stack.data.malformed import REASONS

    assert set(MALFORMED) == set(REASONS)


def test_the_summary_counts_malformed_rows_by_reason(tmp_path):
    bad = [row("..."), row(answer=sound(999)), row("!")]
    lines = import_rows(tmp_path, [row(), *bad, row()]).lines()
    assert lines[0].startswith("kept 2 of 5 rows: 1 train (0.00 h), 1 validation")
    assert lines[1] == f"left out 3, listed in {tmp_path / 'corpus' / 'malformed.jsonl'}:"
    assert lines[2:4] == [
        "       2  nothing to speak in the text",
        "       1  sound token outside the codebook",
    ]
    assert lines[4] == '  row 2: text "...": nothing to speak in it; give at least one word'


def test_all_rows_malformed_is_an_error_that_leaves_nothing(tmp_path):
    message = (
        r"rows\.jsonl: none of 2 rows can be used \(1  nothing to speak in the text, 1  sound "
        r"token outside the codebook\); row 1: text"
    )
    with pytest.raises(DataError, match=message):
        import_rows(tmp_path, [row("..."), row(answer=sound(999))])
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_broken_line_of_jsonl_is_left_out_and_lines_are_counted(tmp_path):
    lines = [b"\xef\xbb\xbf" + json.dumps(row(n=1)).encode(), b"", b"{", b"\xff", b'{"a": NaN}']
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"\r\n".join([*lines, json.dumps(row(n=6)).encode()]))
    report = import_instructions(file, tmp_path / "corpus", SETTINGS)
    assert [(bad.row, bad.reason) for bad in report.malformed] == [
        (3, "not_json"),
        (4, "not_json"),
        (5, "not_json"),
    ]
    assert report.malformed[0].message.startswith("not JSON (Expecting property name")
    assert "NaN is not JSON" in report.malformed[2].message
    assert read_back(tmp_path) == [row(n=1), row(n=6)]


def test_a_json_array_is_read_whatever_its_name(tmp_path):
    rows = odd_rows()
    for name in ("rows.json", "rows.txt"):
        (tmp_path / name).write_text(json.dumps(rows, indent=1), encoding="utf-8")
        import_instructions(tmp_path / name, tmp_path / f"{name}-out" / "corpus", SETTINGS)
        assert read_back(tmp_path / f"{name}-out") == rows
