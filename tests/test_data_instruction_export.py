import dataclasses
import json

import numpy as np
import pytest
from instruction_support import (
    END,
    SETTINGS,
    START,
    import_rows,
    odd_rows,
    read_back,
    row,
    sound,
    utterances,
    write_jsonl,
)
from numpy.testing import assert_array_equal
from stage1_support import write_corpus

from tts_stack.data.instruction_export import export_instructions
from tts_stack.data.outside_tokens import outside_codec
from tts_stack.data.sound_tokens import parse_sound, render_sound
from tts_stack.errors import ConfigError, DataError
from tts_stack.shards import SPLITS, Corpus, add_tokens, write_info


def test_a_corpus_of_recordings_exports_to_rows_that_import_again(tmp_path):
    first = write_corpus(tmp_path / "corpus")
    rows = read_back(tmp_path)
    wanted = [row for split in SPLITS for row in Corpus.open(first).tokenized(split)]
    assert rows[0] == {
        "messages": [
            {"role": "user", "content": "<|text_to_semantic|>" + wanted[0].model_text},
            {"role": "assistant", "content": sound(*wanted[0].semantic_tokens)},
        ],
        "id": "s0",
        "language": "en-us",
    }
    assert [found["id"] for found in rows] == [found.id for found in wanted]
    (tmp_path / "again").mkdir()
    settings = dataclasses.replace(SETTINGS, codec=outside_codec("fake", 10))
    import_rows(tmp_path / "again", rows, settings)
    found = utterances(tmp_path / "again" / "corpus")
    for each in wanted:
        assert found[each.id].model_text == each.model_text
        assert_array_equal(found[each.id].semantic_tokens, each.semantic_tokens)


def test_a_corpus_of_recordings_exports_with_durations(tmp_path):
    corpus = Corpus.open(write_corpus(tmp_path / "corpus"))
    for split in SPLITS:
        rows = [np.array([1, 1, 1, 2]) for _ in corpus.tokenized(split)]
        add_tokens(corpus.shard_paths(split)[0], rows, corpus.require_codec())
    content = read_back(tmp_path, durations=True)[0]["messages"][1]["content"]
    assert content == f"{START}<|duration_03|><|sound_0001|><|sound_0002|>{END}"


def test_what_cannot_be_exported_is_an_error(tmp_path):
    import_rows(tmp_path, [row(), row()])
    with pytest.raises(ConfigError, match=r"extension is '\.csv', expected \.jsonl or \.json"):
        export_instructions(tmp_path / "corpus", tmp_path / "rows.csv")
    with pytest.raises(ConfigError, match=r"rows\.json: cannot be written \(No such file"):
        export_instructions(tmp_path / "corpus", tmp_path / "none" / "rows.json")


def test_several_codebooks_have_no_chat_form(tmp_path):
    path = write_corpus(tmp_path / "corpus")
    info = Corpus.open(path).info
    codec = dataclasses.replace(info.codec, num_codebooks=2)
    write_info(path, dataclasses.replace(info, codec=codec))
    with pytest.raises(DataError, match="corpus: 2 codebooks, the chat form holds one"):
        export_instructions(path, tmp_path / "rows.json")


@pytest.mark.parametrize(
    ("code", "size", "name"),
    [
        (7, 9, "<|sound_0007|>"),
        (209, 512, "<|sound_0209|>"),
        (9999, 10000, "<|sound_9999|>"),
        (7, 10001, "<|sound_00007|>"),
        (65535, 65536, "<|sound_65535|>"),
        (512, 512, "<|sound_mask|>"),
    ],
)
def test_the_number_of_a_sound_token_has_four_digits_or_more(code, size, name):
    assert render_sound(np.array([code]), size) == START + name + END
    assert_array_equal(parse_sound(START + name + END, size), [code])


def test_names_are_those_of_the_vocabulary():
    from stage1_llm.vocab import Extras, build_token_map, token_names

    tokens = build_token_map(("a",), 10001, Extras(has_mask=True, max_run=99))
    names = token_names(tokens, "chat")
    rendered = render_sound(np.array([12, 10001]), 10001)
    expected = [tokens.audio_start, tokens.semantic_offset + 12, tokens.mask, tokens.audio_end]
    assert rendered == "".join(names[token_id] for token_id in expected)
    stretched = render_sound(np.full(99, 5), 10001, durations=True)
    assert names[tokens.duration_offset + 97] in stretched


def test_a_long_run_is_split_at_two_digits():
    found = render_sound(np.full(100, 5), 512, durations=True)
    assert found == f"{START}<|duration_99|><|sound_0005|><|sound_0005|>{END}"


def run_command(*words) -> str:
    """Output of a command of this group."""
    import typer
    from typer.testing import CliRunner

    from tts_stack.commands.instructions import register

    app = typer.Typer(pretty_exceptions_enable=False)
    register(app)
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_commands_import_and_export(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "rows.jsonl", [*odd_rows(), row("...")])
    output = run_command("import-instructions", "rows.jsonl", "corpus", "--seed", "1")
    assert "kept 15 of 16 rows" in output
    assert "row 16: text" in output
    assert "next: tts-stack train-llm corpus=corpus llm=qwen2_5_0_5b prompt.format=chat" in output
    info = Corpus.open(tmp_path / "corpus").info
    assert (info.codec.id, info.codec.codebook_size) == ("whisper-vq", 512)
    assert info.codec_audio.token_rate == 25
    assert "back.json: 15 rows" in run_command("export-instructions", "corpus", "back.json")
    assert json.loads((tmp_path / "back.json").read_text(encoding="utf-8")) == odd_rows()
    command = ("export-instructions", "corpus", "part.jsonl", "--split", "validation")
    assert f"part.jsonl: {info.num_utterances['validation']} rows" in run_command(*command)


def test_the_command_imports_tokens(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "corpus")  # 960 samples each at 24 kHz: one token of 960 samples
    ids = [f"s{index}" for index in range(16)]
    write_jsonl(tmp_path / "t.jsonl", [{"id": id, "semantic_tokens": [[1, 2]]} for id in ids])
    sizes = ("--codebook-size", 64, "--num-codebooks", 2)
    rates = ("--sample-rate", 24000, "--hop-length", 480, "--frames-per-token", 2)
    output = run_command("import-tokens", "corpus", "t.jsonl", "--codec-id", "snac", *sizes, *rates)
    assert "16 utterances, 16 tokens of snac" in output
    assert "next: tts-stack train-llm corpus=corpus" in output
    assert Corpus.open(tmp_path / "corpus").tokenized("train")[0].semantic_tokens.tolist() == [
        [1, 2]
    ]
