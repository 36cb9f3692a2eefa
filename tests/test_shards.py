import dataclasses

import numpy as np
import pyarrow.parquet as pq
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from tts_stack.contract import AudioSpec, CodecIdentity, TextSpec
from tts_stack.errors import DataError
from tts_stack.records import Utterance
from tts_stack.shards import (
    ROWS_PER_GROUP,
    Corpus,
    CorpusInfo,
    SplitAudio,
    TokenRow,
    add_tokens,
    decode_audio,
    encode_audio,
    read_info,
    read_utterances,
    shard_codec,
    write_info,
    write_shard,
    write_token_shard,
)

RATE = 16000
HASH = "0123456789abcdef"
CODEC = CodecIdentity("fsq-test", "ab" * 32, 1000)
NUM_ROWS = ROWS_PER_GROUP + 3  # two row groups


def utterance(index: int) -> Utterance:
    audio = np.full(1600 + index, index / 100, np.float32)
    return Utterance(f"clip-{index}", f"Text {index}", f"text {index}", "joe", "en-us", audio)


def corpus_info(**changes) -> CorpusInfo:
    info = CorpusInfo(
        sample_rate=RATE,
        text=TextSpec("raw", "en-us"),
        symbols=(" ", "t", "ˈ"),
        config_hash=HASH,
        shards={"train": ("train-00000.parquet",), "validation": ()},
        num_utterances={"train": NUM_ROWS, "validation": 0},
        seconds={"train": 1.1, "validation": 0.0},
    )
    return dataclasses.replace(info, **changes)


@pytest.fixture
def folder(tmp_path):
    rows = [utterance(index) for index in range(NUM_ROWS)]
    write_shard(tmp_path / "train-00000.parquet", rows, sample_rate=RATE, config_hash=HASH)
    write_info(tmp_path, corpus_info())
    return tmp_path


def tokenized(folder, codec=CODEC, tokens=None):
    tokens = tokens or [np.arange(index) for index in range(NUM_ROWS)]
    add_tokens(folder / "train-00000.parquet", tokens, codec)
    audio = AudioSpec(RATE, 160, 4)
    write_info(folder, corpus_info(codec=codec, codec_audio=audio))
    return Corpus.open(folder)


def test_utterances_read_back_as_written(folder):
    found = list(Corpus.open(folder).utterances("train"))
    assert [row.id for row in found] == [f"clip-{index}" for index in range(NUM_ROWS)]
    last = utterance(NUM_ROWS - 1)
    assert dataclasses.replace(found[-1], audio=last.audio) == last
    assert_allclose(found[-1].audio, last.audio, atol=1e-4)
    assert not list(folder.glob("*.partial"))


def test_info_reads_back_as_written(folder):
    info = corpus_info(codec=CODEC, codec_audio=AudioSpec(RATE, 160, 4))
    write_info(folder, info)
    assert read_info(folder) == info


def test_tokens_keep_the_other_columns_and_replace_older_tokens(folder):
    tokenized(folder, tokens=[np.zeros(3, np.int64)] * NUM_ROWS)
    rows = tokenized(folder).tokenized("train")
    assert [len(row.semantic_tokens) for row in rows] == list(range(NUM_ROWS))
    assert_array_equal(rows[3].semantic_tokens, [0, 1, 2])
    assert (rows[3].id, rows[3].model_text, rows[3].speaker) == ("clip-3", "text 3", "joe")
    assert len(list(read_utterances(folder / "train-00000.parquet"))) == NUM_ROWS
    assert shard_codec(folder / "train-00000.parquet") == CODEC.weights_sha256


def test_tokens_of_several_codebooks_keep_their_shape(folder):
    codec = dataclasses.replace(CODEC, num_codebooks=2)
    tokens = [np.arange(6).reshape(3, 2)] * NUM_ROWS
    assert_array_equal(
        tokenized(folder, codec, tokens).tokenized("train")[0].semantic_tokens[2], [4, 5]
    )


def test_tokens_read_one_at_a_time_equal_those_read_at_once(folder):
    corpus = tokenized(folder)
    expected, rows = corpus.tokenized("train"), corpus.token_rows("train")
    assert len(rows) == len(expected) == NUM_ROWS
    streamed = list(corpus.iter_tokenized("train"))
    for index in (NUM_ROWS - 1, 0, ROWS_PER_GROUP, -1, -NUM_ROWS):
        for found in (rows[index], streamed[index]):
            assert_array_equal(found.semantic_tokens, expected[index].semantic_tokens)
            tokens = found.semantic_tokens
            assert found == dataclasses.replace(expected[index], semantic_tokens=tokens)
            assert (found.id, found.language) == (f"clip-{index % NUM_ROWS}", "en-us")
    for index in (NUM_ROWS, -NUM_ROWS - 1):
        with pytest.raises(IndexError, match=f"row {index} of {NUM_ROWS}"):
            rows[index]


def test_token_rows_leave_the_audio_on_disk(folder, monkeypatch):
    corpus, columns = tokenized(folder), []
    read, stream = pq.ParquetFile.read_row_group, pq.ParquetFile.iter_batches

    def spy(inner):
        def call(file, *args, **kwargs):
            columns.append(kwargs["columns"])
            return inner(file, *args, **kwargs)

        return call

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", spy(read))
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", spy(stream))
    corpus.token_rows("train")[0]
    list(corpus.iter_tokenized("train"))
    names = ["id", "model_text", "speaker", "language", "semantic_tokens"]
    assert columns == [names, names]


def test_tokens_of_another_codec_are_refused_however_they_are_read(folder):
    tokenized(folder)
    other = dataclasses.replace(CODEC, weights_sha256="cd" * 32)
    write_info(folder, corpus_info(codec=other, codec_audio=AudioSpec(RATE, 160, 4)))
    corpus = Corpus.open(folder)
    for ask in (lambda: corpus.token_rows("train"), lambda: next(corpus.iter_tokenized("train"))):
        with pytest.raises(DataError, match="tokens from codec abababababab"):
            ask()


def test_split_audio_gives_any_row_in_the_order_of_the_tokens(folder):
    audio = Corpus.open(folder).audio("train")
    assert len(audio) == NUM_ROWS
    for index in (NUM_ROWS - 1, 0, ROWS_PER_GROUP):
        assert len(audio[index]) == 1600 + index


def test_split_audio_travels_to_other_processes_without_its_open_files(folder):
    import pickle

    audio = Corpus.open(folder).audio("train")
    assert len(pickle.loads(pickle.dumps(audio))[2]) == len(audio[2])
    assert len(pickle.loads(pickle.dumps(audio))[2]) == 1602  # also once files are open


def test_a_shard_is_read_by_any_parquet_reader(folder):
    table = pq.read_table(folder / "train-00000.parquet")
    assert table.column_names[:3] == ["id", "text", "model_text"]
    assert table.column("num_samples").to_pylist()[:2] == [1600, 1601]


def test_flac_round_trips_sixteen_bits():
    audio = np.linspace(-1, 1, 999, dtype=np.float32)
    assert_allclose(decode_audio(encode_audio(audio, RATE), "here"), audio, atol=1e-4)


def test_audio_that_does_not_decode_names_its_place():
    with pytest.raises(DataError, match=r"train\.parquet: row 3: audio does not decode"):
        decode_audio(b"no audio", "train.parquet: row 3")


def test_a_missing_folder_or_an_unfinished_corpus_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no such corpus folder; make one with tts-stack prepare"):
        Corpus.open(tmp_path / "no")
    with pytest.raises(DataError, match=r"no corpus\.json in it, so it is not a finished corpus"):
        Corpus.open(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format_version": 1}'])
def test_a_damaged_info_file_is_an_error(tmp_path, text):
    (tmp_path / "corpus.json").write_text(text)
    with pytest.raises(DataError, match=r"corpus\.json: cannot be read"):
        read_info(tmp_path)


def test_another_format_version_is_refused(folder):
    write_info(folder, corpus_info(format_version=99))
    with pytest.raises(DataError, match="format_version is 99, this release reads 1"):
        read_info(folder)


def test_a_missing_shard_is_an_error_that_names_it(folder):
    (folder / "train-00000.parquet").unlink()
    with pytest.raises(DataError, match=r"train-00000\.parquet: shard is missing"):
        Corpus.open(folder)


def test_a_damaged_shard_is_an_error_that_names_it(folder):
    (folder / "train-00000.parquet").write_bytes(b"half a file")
    with pytest.raises(DataError, match=r"train-00000\.parquet: not a Parquet shard"):
        Corpus.open(folder)


def test_a_shard_of_other_settings_is_refused(folder):
    write_info(folder, corpus_info(config_hash="other"))
    with pytest.raises(DataError, match=f"made with settings {HASH}, corpus.json says other"):
        Corpus.open(folder)


def test_tokens_are_asked_for_before_they_exist(folder):
    corpus = Corpus.open(folder)
    for ask in (corpus.require_codec, lambda: corpus.audio_spec, lambda: corpus.tokenized("train")):
        with pytest.raises(DataError, match="no semantic tokens yet; run tts-stack tokenize"):
            ask()


def test_a_shard_tokenised_by_another_codec_is_refused(folder):
    tokenized(folder)
    other = dataclasses.replace(CODEC, weights_sha256="cd" * 32)
    write_info(folder, corpus_info(codec=other, codec_audio=AudioSpec(RATE, 160, 4)))
    with pytest.raises(
        DataError, match=r"tokens from codec abababababab, corpus.json says fsq-test"
    ):
        Corpus.open(folder).tokenized("train")


@pytest.fixture
def tokens_only(tmp_path):
    """A corpus of text and tokens, without recordings."""
    rows = [
        TokenRow(f"row-{i}", "Hi.", "hi", "joe", "en-us", np.arange(i + 1), f'{{"row": {i}}}')
        for i in range(3)
    ]
    path, audio = tmp_path / "train-00000.parquet", AudioSpec(RATE, 160, 4)
    write_token_shard(path, rows, codec=CODEC, audio=audio, config_hash=HASH)
    info = corpus_info(codec=CODEC, codec_audio=audio, has_audio=False)
    write_info(tmp_path, info)
    return Corpus.open(tmp_path)


def test_rows_without_recordings_read_back_as_tokens(tokens_only):
    found = tokens_only.tokenized("train")
    assert [(row.id, row.model_text, len(row.semantic_tokens)) for row in found] == [
        ("row-0", "hi", 1),
        ("row-1", "hi", 2),
        ("row-2", "hi", 3),
    ]
    table = pq.read_table(tokens_only.shard_paths("train")[0])
    assert table.column("num_samples").to_pylist() == [640, 1280, 1920]
    assert table.column("audio").to_pylist() == [None, None, None]
    assert table.column("instruction").to_pylist()[1] == '{"row": 1}'


def test_rows_without_recordings_say_so_to_whatever_reads_audio(tokens_only):
    path = tokens_only.shard_paths("train")[0]
    for ask in (
        tokens_only.require_audio,
        lambda: tokens_only.audio("train"),
        lambda: list(tokens_only.utterances("train")),
        lambda: list(read_utterances(path)),
        lambda: SplitAudio([path])[1],
    ):
        with pytest.raises(
            DataError, match="no recording.*; the corpus holds text and tokens only"
        ):
            ask()


def test_a_corpus_of_recordings_has_audio(folder):
    Corpus.open(folder).require_audio()


def test_an_older_info_file_means_recordings(folder):
    import json

    file = folder / "corpus.json"
    values = json.loads(file.read_text())
    del values["has_audio"]
    file.write_text(json.dumps(values))
    assert read_info(folder).has_audio
