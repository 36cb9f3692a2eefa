import json

import pytest
from data_support import write_ljspeech, write_tone

from tts_stack.data.corpora.detect import read_corpus
from tts_stack.errors import DataError


def ljspeech(folder, metadata: bytes, *names: str):
    (folder / "wavs").mkdir()
    for name in names:
        (folder / "wavs" / name).touch()
    (folder / "metadata.csv").write_bytes(metadata)
    return read_corpus(folder)


def manifest(folder, *lines):
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    (folder / "train.jsonl").write_text(text, encoding="utf-8")
    return read_corpus(folder / "train.jsonl")


def reasons(corpus):
    return [(item.place, item.reason) for item in corpus.rejected]


def test_ljspeech_takes_the_normalised_text_and_falls_back_to_the_raw_one(tmp_path):
    corpus = ljspeech(tmp_path, b"a|Dr. X|Doctor X\nb|plain\nc|raw|\n", "a.wav", "b.wav", "c.wav")
    assert corpus.layout == "ljspeech"
    assert [(item.id, item.text) for item in corpus.items] == [
        ("a", "Doctor X"),
        ("b", "plain"),
        ("c", "raw"),
    ]
    assert corpus.items[0].audio_path == str(tmp_path / "wavs" / "a.wav")
    assert not corpus.rejected


def test_ljspeech_survives_byte_order_mark_crlf_blank_lines_and_quotes(tmp_path):
    data = '\ufeffa|He said "no", twice.\r\n\r\nb|"quoted"\r\n'.encode()
    corpus = ljspeech(tmp_path, data, "a.wav", "b.wav")
    assert [(item.id, item.text, item.place) for item in corpus.items] == [
        ("a", 'He said "no", twice.', "metadata.csv:1"),
        ("b", '"quoted"', "metadata.csv:3"),
    ]


def test_ljspeech_finds_any_audio_extension_and_prefers_lossless(tmp_path):
    names = ("a.OPUS", "b.mp3", "b.flac", "c.d.ogg", "e.wav")
    corpus = ljspeech(tmp_path, b"a|x\nb|x\nc.d|x\ne.wav|x\n", *names)
    found = [item.audio_path.rsplit("/", 1)[-1] for item in corpus.items]
    assert found == ["a.OPUS", "b.flac", "c.d.ogg", "e.wav"]


def test_ljspeech_leaves_out_bad_lines_with_place_and_reason(tmp_path):
    data = b"../a|x\na/b|x\n|x\na\na|b|c|d\nmissing|x\na|first\na|second\n"
    corpus = ljspeech(tmp_path, data, "a.wav")
    assert [item.text for item in corpus.items] == ["first"]
    assert reasons(corpus) == [
        ("metadata.csv:1", "bad_line"),
        ("metadata.csv:2", "bad_line"),
        ("metadata.csv:3", "bad_line"),
        ("metadata.csv:4", "bad_line"),
        ("metadata.csv:5", "bad_line"),
        ("metadata.csv:6", "missing_audio"),
        ("metadata.csv:8", "duplicate_id"),
    ]
    messages = [item.message for item in corpus.rejected]
    assert "id '../a' contains a path" in messages[0]
    assert "found 1 columns, expected id|text" in messages[3]
    assert "needs a JSONL manifest" in messages[4]
    assert "found no audio file wavs/missing.*" in messages[5]
    assert "already used by metadata.csv:7" in messages[6]


def test_ljspeech_without_wavs_is_an_error(tmp_path):
    (tmp_path / "metadata.csv").write_text("a|x\n")
    with pytest.raises(DataError, match="has metadata.csv but no folder wavs/"):
        read_corpus(tmp_path)


def test_text_that_is_not_utf8_is_an_error_that_names_the_line(tmp_path):
    with pytest.raises(DataError, match=r"metadata\.csv:2: byte 0xe9 is not UTF-8; save .* as"):
        ljspeech(tmp_path, b"a|x\nb|caf\xe9\n", "a.wav")


def test_an_empty_metadata_file_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"metadata\.csv: is empty"):
        ljspeech(tmp_path, b"\n\n")


def test_jsonl_reads_required_and_optional_keys(tmp_path):
    corpus = manifest(
        tmp_path,
        {"audio": "clips/a.wav", "text": "one", "duration": 3},
        {"audio": "/abs/b.wav", "text": "a|b", "id": "B", "speaker": "s", "language": "DE"},
        {"audio": "c.wav", "text": "x", "speaker": None},
    )
    assert corpus.layout == "jsonl"
    first, second, third = corpus.items
    assert (first.id, first.audio_path) == ("clips_a", str(tmp_path / "clips" / "a.wav"))
    assert (second.id, second.audio_path, second.text) == ("B", "/abs/b.wav", "a|b")
    assert (second.speaker, second.language, second.place) == ("s", "de", "train.jsonl:2")
    assert (third.speaker, third.language) == ("", "")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "found a list, expected an object"),
        ({"audio_filepath": "a.wav", "text": "x"}, "'audio' is missing .*audio_filepath, text"),
        ({"audio": "a.wav"}, "'text' is missing"),
        ({"audio": "a.wav", "text": None}, "text is null, expected a string"),
        ({"audio": 3, "text": "x"}, "audio is 3, expected a string"),
        ({"audio": " ", "text": "x"}, "audio is ' ', expected a path"),
        ({"audio": "a.wav", "text": "x", "id": "../x"}, "contains a path"),
        ({"audio": "a.wav", "text": "x", "id": "a\nb"}, "control characters"),
        ({"audio": "a.wav", "text": "x", "id": "a" * 201}, "201 bytes, expected at most 200"),
    ],
)
def test_a_bad_manifest_line_is_left_out_with_its_place(tmp_path, line, message):
    corpus = manifest(tmp_path, {"audio": "ok.wav", "text": "ok"}, line)
    assert len(corpus.items) == 1
    assert reasons(corpus) == [("train.jsonl:2", "bad_line")]
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(corpus.rejected[0].message)


def test_the_id_of_a_manifest_line_never_holds_a_path(tmp_path):
    corpus = manifest(tmp_path, {"audio": "../up/./a.wav", "text": "x"})
    assert corpus.items[0].id == "up_a"


def test_pairs_are_found_in_subfolders_with_txt_or_lab(tmp_path):
    write_tone(tmp_path / "a.wav")
    write_tone(tmp_path / "p" / "b.flac")
    (tmp_path / "a.txt").write_text("\ufefftwo\r\nlines\n", encoding="utf-8")
    (tmp_path / "p" / "b.lab").write_text("label")
    corpus = read_corpus(tmp_path)
    assert corpus.layout == "pairs"
    assert [(item.id, item.text, item.place) for item in corpus.items] == [
        ("a", "two lines", "a.txt"),
        ("p_b", "label", "p/b.lab"),
    ]


def test_pairs_report_what_lacks_its_other_half(tmp_path):
    for name in ("a.wav", "alone.mp3", "latin.wav"):
        (tmp_path / name).touch()
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "README.txt").write_text("x")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    corpus = read_corpus(tmp_path)
    assert [item.id for item in corpus.items] == ["a"]
    assert reasons(corpus) == [
        ("alone.mp3", "missing_text"),
        ("latin.txt", "bad_line"),
        ("README.txt", "missing_audio"),
    ]


def test_recordings_without_any_transcript_are_an_error(tmp_path):
    write_tone(tmp_path / "a.wav")
    with pytest.raises(DataError, match=r"found 1 audio files and none with a transcript"):
        read_corpus(tmp_path)


def test_a_manifest_in_a_folder_is_found_when_it_is_the_only_one(tmp_path):
    manifest(tmp_path, {"audio": "a.wav", "text": "x"})
    assert read_corpus(tmp_path).layout == "jsonl"
    (tmp_path / "other.jsonl").touch()
    with pytest.raises(DataError, match=r"2 manifests \(other\.jsonl, train\.jsonl\); name one"):
        read_corpus(tmp_path)


def test_metadata_csv_may_be_named_itself(tmp_path):
    write_ljspeech(tmp_path, 1)
    assert read_corpus(tmp_path / "metadata.csv").layout == "ljspeech"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda path: None,
            "no such file or folder; expected an LJSpeech folder .* JSONL .* x.wav",
        ),
        (lambda path: path.mkdir(), "is empty; expected"),
        (lambda path: (path / "sub").mkdir(parents=True), "holds no audio files; expected"),
        (lambda path: path.write_text("x"), "not a corpus; expected"),
    ],
)
def test_a_source_that_is_not_understood_says_which_layouts_are(tmp_path, make, message):
    make(tmp_path / "source")
    with pytest.raises(DataError, match=message):
        read_corpus(tmp_path / "source")


def test_a_prepared_corpus_is_no_source(tmp_path):
    (tmp_path / "corpus.json").touch()
    with pytest.raises(DataError, match="is a prepared corpus already"):
        read_corpus(tmp_path)


def test_the_shared_ljspeech_clips_are_understood(shared_data):
    corpus = read_corpus(shared_data / "speech" / "ljspeech32")
    assert (len(corpus.items), len(corpus.rejected)) == (32, 0)
