"""Rows of instruction data, and what the tests of their import and export share."""

import json

import numpy as np

from tts_stack.contract import AudioSpec
from tts_stack.data.instruction_export import export_instructions
from tts_stack.data.instructions import ImportSettings, import_instructions
from tts_stack.data.outside_tokens import outside_codec
from tts_stack.data.sound_tokens import render_sound
from tts_stack.shards import SPLITS, Corpus

SETTINGS = ImportSettings(
    outside_codec("whisper-vq", 512), AudioSpec(16000, 320, 2), validation_fraction=0.3
)
START, END = "<|sound_start|>", "<|sound_end|>"


def sound(*codes: int) -> str:
    return START + "".join(f"<|sound_{code:04d}|>" for code in codes) + END


def row(text="hello", answer=None, **others) -> dict:
    turns = [
        {"role": "user", "content": "<|text_to_semantic|>" + text},
        {"role": "assistant", "content": sound(1, 2, 3) if answer is None else answer},
    ]
    return {"messages": turns} | others


def odd_rows() -> list[dict]:
    """Rows that differ in everything but what stage 1 reads of them."""
    turns = row()["messages"]
    system = {"role": "system", "content": "You speak."}
    sharegpt = [
        {"from": "human", "value": "<|text_to_semantic|> How now? "},
        {"from": "gpt", "value": sound(5)},
    ]
    return [
        row("plain"),
        {"messages": [system, *turns]},
        {"conversations": sharegpt, "id": "own-id", "messages": None},
        {"source": "mls", "n": 1, "ratio": 1.0, "messages": turns, "tags": ["a", {"b": None}]},
        {"messages": [turns[0] | {"name": "joe"}, {"content": sound(9), "role": "assistant"}]},
        row("tabs\tand\nlines  "),
        row("say <|sound_end|><|text_to_semantic|> now"),
        {"messages": [{"role": "user", "content": "\n <|text_to_semantic|>hi"}, turns[1]]},
        row("Grüße, 世界"),
        row(answer=f"\n{START} <|sound_0001|>\n<|sound_2|>{END} "),
        row(answer=f"{START}<|duration_03|><|sound_0007|><|sound_0008|>{END}"),
        row(answer=f"{START}<|duration_01|><|sound_0007|><|sound_0007|>{END}"),
        row(answer=render_sound(np.repeat([4, 5, 5], [250, 1, 3]), 512, durations=True)),
        row(answer=f"{START}<|sound_mask|><|sound_0001|>{END}"),
        row(speaker="Joe", language="DE-de", id=7, note="half \ud83d pair"),
    ]


def write_jsonl(path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def import_rows(tmp_path, rows, settings=SETTINGS):
    write_jsonl(tmp_path / "rows.jsonl", rows)
    return import_instructions(tmp_path / "rows.jsonl", tmp_path / "corpus", settings)


def utterances(corpus) -> dict:
    opened = Corpus.open(corpus)
    return {row.id: row for split in SPLITS for row in opened.tokenized(split)}


def read_back(tmp_path, name="back.jsonl", **options) -> list:
    export_instructions(tmp_path / "corpus", tmp_path / name, **options)
    text = (tmp_path / name).read_text(encoding="utf-8")
    if name.endswith(".json"):
        return json.loads(text)
    return [json.loads(line) for line in text.split("\n")[:-1]]
