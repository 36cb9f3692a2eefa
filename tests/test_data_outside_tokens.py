import dataclasses
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.testing import assert_array_equal

from tts_stack.contract import AudioSpec, TextSpec
from tts_stack.data.outside_tokens import import_tokens, outside_codec
from tts_stack.errors import ConfigError, DataError
from tts_stack.records import Utterance
from tts_stack.shards import SPLITS, Corpus, CorpusInfo, write_info, write_shard

RATE = 16000
AUDIO = AudioSpec(RATE, 160, 2)  # 320 samples a token
LENGTHS = {"a": 5, "b": 3, "c": 4}  # tokens
SINGLE = outside_codec("x-codec2", 100)
DOUBLE = outside_codec("mimi", 100, 2)


@pytest.fixture
def corpus(tmp_path):
    """Utterances a and b to train on, c for validation; the last token of each is half full."""
    path = tmp_path / "corpus"
    path.mkdir()
    rows = [
        Utterance(id, id.upper(), id, "", "en-us", np.zeros(320 * length - 160, np.float32))
        for id, length in LENGTHS.items()
    ]
    for split, part in zip(SPLITS, (rows[:2], rows[2:]), strict=True):
        file = path / f"{split}-00000.parquet"
        write_shard(file, part, sample_rate=RATE, config_hash="h")
    info = CorpusInfo(
        sample_rate=RATE,
        text=TextSpec("raw", "en-us"),
        symbols=("a", "b"),
        config_hash="h",
        shards={split: (f"{split}-00000.parquet",) for split in SPLITS},
        num_utterances={"train": 2, "validation": 1},
        seconds={"train": 0.1, "validation": 0.1},
    )
    write_info(path, info)
    return path


def codes(num_tokens: int, num_codebooks: int = 1) -> list:
    found = np.arange(num_tokens * num_codebooks).reshape(num_tokens, -1)
    return found.tolist() if num_codebooks > 1 else found.reshape(-1).tolist()


def rows(num_codebooks: int = 1, **changes) -> dict:
    return {id: codes(length, num_codebooks) for id, length in LENGTHS.items()} | changes


def write_jsonl(corpus, values: dict):
    path = corpus.parent / "tokens.jsonl"
    lines = [json.dumps({"id": id, "semantic_tokens": row}) for id, row in values.items()]
    path.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    return path


def write_parquet(corpus, values: dict):
    path = corpus.parent / "tokens.parquet"
    table = {"id": list(values), "semantic_tokens": list(values.values())}
    pq.write_table(pa.table(table), path)
    return path


WRITERS = pytest.mark.parametrize("write", [write_jsonl, write_parquet])


def refuse(corpus, values: dict, message: str, codec=SINGLE):
    with pytest.raises(DataError, match=message):
        import_tokens(corpus, write_jsonl(corpus, values), codec, AUDIO)
    assert Corpus.open(corpus).info.codec is None  # the corpus is as it was


@WRITERS
def test_tokens_of_one_codebook_arrive_in_the_corpus(corpus, write):
    done = []
    report = import_tokens(
        corpus, write(corpus, rows()), SINGLE, AUDIO, on_progress=lambda *now: done.append(now)
    )
    opened = Corpus.open(corpus)
    assert (opened.info.codec, opened.audio_spec) == (SINGLE, AUDIO)
    found = {row.id: row for split in SPLITS for row in opened.tokenized(split)}
    assert list(found) == ["a", "b", "c"]
    for id, length in LENGTHS.items():
        assert_array_equal(found[id].semantic_tokens, np.arange(length))
    assert found["a"].model_text == "a"
    assert len(list(opened.utterances("train"))) == 2  # the audio is still there
    assert (report.num_utterances, report.num_tokens, report.codes_used) == (3, 12, 5)
    assert (report.num_extended, report.num_shortened, report.unknown_ids) == (0, 0, ())
    assert done == [(2, 3), (3, 3)]


@WRITERS
def test_tokens_of_several_codebooks_keep_their_order(corpus, write):
    report = import_tokens(corpus, write(corpus, rows(2)), DOUBLE, AUDIO)
    found = Corpus.open(corpus).tokenized("validation")[0].semantic_tokens
    assert_array_equal(found, [[0, 1], [2, 3], [4, 5], [6, 7]])
    assert report.codes_used == 10


def test_one_codebook_may_be_written_as_rows_of_one_code(corpus):
    nested = {id: [[code] for code in row] for id, row in rows().items()}
    import_tokens(corpus, write_jsonl(corpus, nested), SINGLE, AUDIO)
    assert_array_equal(Corpus.open(corpus).tokenized("train")[1].semantic_tokens, [0, 1, 2])


def test_one_token_too_few_or_too_many_is_mended_and_counted(corpus):
    values = rows(a=[7, 8, 9, 6], b=[1, 2, 3, 4], c=codes(5))
    report = import_tokens(corpus, write_jsonl(corpus, values), SINGLE, AUDIO)
    found = Corpus.open(corpus).tokenized("train")
    assert_array_equal(found[0].semantic_tokens, [7, 8, 9, 6, 6])
    assert_array_equal(found[1].semantic_tokens, [1, 2, 3])
    assert (report.num_extended, report.num_shortened, report.num_tokens) == (1, 2, 12)
    assert report.lines()[1] == (
        "1 utterances were a token short (the last one is repeated), 2 a token long (the last one "
        "is dropped)"
    )


def test_unknown_ids_are_counted_and_listed(corpus):
    more = {f"x{index}": [1] for index in range(7)}
    report = import_tokens(corpus, write_jsonl(corpus, rows(**more)), SINGLE, AUDIO)
    assert report.unknown_ids == tuple(more)
    assert report.lines()[-1] == (
        "7 ids of the file are not in the corpus and were ignored: x0, x1, x2, x3, x4, …"
    )
    assert report.num_utterances == 3


def test_a_codec_kept_by_an_earlier_tokenize_goes(corpus):
    (corpus / "codec").mkdir()
    import_tokens(corpus, write_jsonl(corpus, rows()), SINGLE, AUDIO)
    assert not (corpus / "codec").exists()


def test_tokens_of_another_codec_replace_the_first_ones(corpus):
    import_tokens(corpus, write_jsonl(corpus, rows()), SINGLE, AUDIO)
    import_tokens(corpus, write_jsonl(corpus, rows(2)), DOUBLE, AUDIO)
    assert Corpus.open(corpus).tokenized("train")[0].semantic_tokens.shape == (5, 2)


@pytest.mark.parametrize("difference", [-2, 2, 30])
def test_a_length_that_breaks_the_rate_law_is_refused(corpus, difference):
    message = (
        rf"tokens\.jsonl, 16000 Hz at 50 tokens/s: {4 + difference} tokens for c, expected 4; "
        "check --sample-rate, --hop-length and --frames-per-token"
    )
    refuse(corpus, rows(c=codes(4 + difference)), message)


def test_an_utterance_without_tokens_is_refused(corpus):
    refuse(corpus, rows(c=[]), "0 tokens for c, expected 4")


def test_a_single_token_is_never_made_up(corpus):
    audio = AudioSpec(RATE, 160, 16)  # one token each
    file = write_jsonl(corpus, {"a": [1], "b": [1], "c": []})
    with pytest.raises(DataError, match="0 tokens for c, expected 1"):
        import_tokens(corpus, file, SINGLE, audio)


def test_missing_utterances_are_counted_and_listed(corpus):
    message = (
        r"tokens\.jsonl: no tokens for 2 of 3 utterances of .*corpus: a, c; add them, or prepare "
        "the corpus without these recordings"
    )
    refuse(corpus, {"b": codes(3)}, message)


@pytest.mark.parametrize("code", [100, -1, 2**40, 2**70])
def test_a_code_outside_the_codebook_names_file_row_and_id(corpus, code):
    message = (
        rf"tokens\.jsonl:2: semantic_tokens of b: code {code}, expected 0 \.\. 99; correct "
        "--codebook-size"
    )
    refuse(corpus, rows(b=[1, code, 2]), message)


def test_a_code_outside_the_codebook_in_parquet_names_the_row(corpus):
    file = write_parquet(corpus, rows(b=[1, 100, 2]))
    with pytest.raises(DataError, match=r"tokens\.parquet: row 2: semantic_tokens of b: code 100"):
        import_tokens(corpus, file, SINGLE, AUDIO)


def test_ragged_rows_are_refused(corpus):
    message = r"tokens\.jsonl:2: semantic_tokens of b: is ragged \(1, 2 codes a token\), expected 2"
    refuse(corpus, rows(2, b=[[1, 2], [3], [4, 5]]), message, DOUBLE)
    refuse(corpus, rows(2, b=[[1, 2], 3, [4, 5]]), r"is ragged \(0, 2 codes a token\)", DOUBLE)


def test_another_number_of_codebooks_is_refused(corpus):
    message = "semantic_tokens of a: 2 codes a token, expected 1; correct --num-codebooks"
    refuse(corpus, rows(2), message)
    refuse(corpus, rows(3), "a: 3 codes a token, expected 2; correct --num-codebooks", DOUBLE)


def test_codebooks_written_as_rows_are_told_to_be_transposed(corpus):
    message = "semantic_tokens of a: 5 codes a token, expected 2; transpose it: one row a token"
    refuse(corpus, rows(2, a=[[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]]), message, DOUBLE)


def test_a_flat_list_is_refused_for_several_codebooks(corpus):
    message = "semantic_tokens of a: is a flat list, expected rows of 2 codes"
    refuse(corpus, rows(), message, DOUBLE)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(1.5, "1.5"), (True, "True"), ("7", "'7'"), (None, "None"), ([[1]], r"\[1\]")],
)
def test_codes_must_be_whole_numbers(corpus, value, shown):
    refuse(corpus, rows(b=[value] * 3), f"of b: holds {shown}, expected whole numbers")


def test_tokens_must_be_a_list(corpus):
    refuse(corpus, rows(b="1 2 3"), "of b: is str, expected a list of whole numbers")


def test_an_id_must_be_a_string_and_occur_once(corpus):
    file = corpus.parent / "tokens.jsonl"
    file.write_text('{"id": 5, "semantic_tokens": [1]}\n')
    with pytest.raises(DataError, match=r"tokens\.jsonl:1: id is 5, expected a string"):
        import_tokens(corpus, file, SINGLE, AUDIO)
    file.write_text('{"id": "a", "semantic_tokens": [1]}\n' * 2)
    with pytest.raises(DataError, match=r"jsonl:2: id 'a' is already used by tokens\.jsonl:1"):
        import_tokens(corpus, file, SINGLE, AUDIO)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no rows, expected one an utterance"),
        (b"{\n", r"tokens\.jsonl:1: not JSON"),
        (b"[1]\n", r"tokens\.jsonl:1: found list, expected id and semantic_tokens"),
        (b'{"id": "a", "codes": [1]}\n', "1: found id, codes, expected id and semantic_tokens"),
        (b"{}\n", "1: found nothing, expected id and semantic_tokens"),
        (b"\xff\n", "cannot be read as UTF-8 text"),
    ],
)
def test_a_damaged_file_is_an_error(corpus, content, message):
    file = corpus.parent / "tokens.jsonl"
    file.write_bytes(content)
    with pytest.raises(DataError, match=message):
        import_tokens(corpus, file, SINGLE, AUDIO)


def test_a_missing_file_is_an_error(corpus):
    with pytest.raises(DataError, match=r"none\.jsonl: cannot be read as UTF-8 text"):
        import_tokens(corpus, corpus / "none.jsonl", SINGLE, AUDIO)


def test_damaged_parquet_and_missing_columns_are_errors(corpus):
    file = corpus.parent / "tokens.parquet"
    file.write_bytes(b"no")
    with pytest.raises(DataError, match="not readable as Parquet"):
        import_tokens(corpus, file, SINGLE, AUDIO)
    pq.write_table(pa.table({"id": ["a"], "codes": [[1]]}), file)
    with pytest.raises(
        DataError, match=r"no column 'semantic_tokens' \(columns found: id, codes\)"
    ):
        import_tokens(corpus, file, SINGLE, AUDIO)


def test_another_sample_rate_is_refused(corpus):
    audio = dataclasses.replace(AUDIO, sample_rate=24000)
    with pytest.raises(
        DataError, match="sample_rate is 16000 Hz, codec x-codec2 has 24000 Hz; re-run tts-stack"
    ):
        import_tokens(corpus, write_jsonl(corpus, rows()), SINGLE, audio)


def test_a_corpus_without_recordings_is_refused(corpus):
    info = Corpus.open(corpus).info
    write_info(corpus, dataclasses.replace(info, has_audio=False))
    with pytest.raises(DataError, match="corpus: no recordings; the corpus holds text and tokens"):
        import_tokens(corpus, write_jsonl(corpus, rows()), SINGLE, AUDIO)


def test_a_codec_is_known_by_its_hash_or_else_by_name_and_sizes():
    assert outside_codec("mimi", 100, 2) == DOUBLE
    hashes = {outside_codec(*facts).weights_sha256 for facts in (("a", 9), ("b", 9), ("a", 8))}
    assert len(hashes) == 3
    assert outside_codec("mimi", 100, 2, "ab" * 32).weights_sha256 == "ab" * 32


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ((" ", 9), "codec id is empty, expected a name"),
        (("a", 0), "codebook_size is 0, expected at least 1"),
        (("a", 9, 0), "num_codebooks is 0, expected at least 1"),
    ],
)
def test_a_codec_needs_a_name_and_sizes(facts, message):
    with pytest.raises(ConfigError, match=message):
        outside_codec(*facts)
