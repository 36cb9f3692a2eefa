import json

import pyarrow.parquet as pq
import pytest
from data_support import build_broken, build_upper, prepare_config, write_ljspeech, write_tone

from tts_stack.data.prepare import prepare
from tts_stack.errors import DataError
from tts_stack.shards import Corpus, read_info

NUM_CLIPS = 10


@pytest.fixture
def source(tmp_path):
    return write_ljspeech(tmp_path / "in", NUM_CLIPS)


@pytest.fixture
def config(source, tmp_path):
    return prepare_config(source, tmp_path / "out")


def run(config, **changes):
    return prepare(config, **{"build_frontend": build_upper, **changes})


def ids(corpus, split):
    return [utterance.id for utterance in corpus.utterances(split)]


def contents(folder):
    """Bytes of everything a reader of the corpus sees."""
    names = ["corpus.json", "report.json", "rejected.jsonl"]
    names += sorted(path.name for path in folder.glob("*.parquet"))
    return {name: (folder / name).read_bytes() for name in names}


def test_a_prepared_corpus_opens_with_every_line_in_one_split(config, tmp_path):
    report = run(config)
    corpus = Corpus.open(tmp_path / "out")
    train, validation = ids(corpus, "train"), ids(corpus, "validation")
    assert sorted(train + validation) == [f"clip-{index}" for index in range(NUM_CLIPS)]
    assert corpus.info.num_utterances == report.kept
    assert report.kept == {"train": len(train), "validation": len(validation)}
    assert len(validation) >= 1
    assert report.hours * 3600 == pytest.approx(NUM_CLIPS, abs=0.5)
    assert corpus.info.sample_rate == config.sample_rate
    assert corpus.info.codec is None


def test_symbols_are_those_of_the_training_split(config, tmp_path):
    run(config)
    corpus = Corpus.open(tmp_path / "out")
    texts = "".join(utterance.model_text for utterance in corpus.utterances("train"))
    assert corpus.info.symbols == tuple(sorted(set(texts)))
    missing = {id.removeprefix("clip-") for id in ids(corpus, "validation")}
    assert missing.isdisjoint(corpus.info.symbols)  # a digit names one clip


def test_progress_ends_with_every_line_done(config):
    seen = []
    run(config, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 10), (4, 10), (8, 10), (10, 10)]


def test_rejections_are_listed_with_place_and_reason(config, source, tmp_path):
    write_tone(source / "wavs" / "clip-3.wav", 9)
    (source / "wavs" / "clip-5.wav").write_bytes(b"damaged")
    with (source / "metadata.csv").open("a") as file:
        file.write("ghost|no recording\n")
    report = run(config)
    assert report.num_kept == 8
    assert report.rejected == {"missing_audio": 1, "too_long": 1, "unreadable_audio": 1}
    lines = (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()
    assert [(json.loads(line)["place"], json.loads(line)["reason"]) for line in lines] == [
        ("metadata.csv:11", "missing_audio"),
        ("metadata.csv:4", "too_long"),
        ("metadata.csv:6", "unreadable_audio"),
    ]
    assert json.loads((tmp_path / "out" / "report.json").read_text())["rejected"] == report.rejected


def test_the_same_source_gives_the_same_bytes_with_one_worker_and_with_two(source, tmp_path):
    run(prepare_config(source, tmp_path / "one"))
    run(prepare_config(source, tmp_path / "two", num_workers=2))
    one, two = contents(tmp_path / "one"), contents(tmp_path / "two")
    for report in (one, two):
        report.pop("report.json")  # names its folder
    assert one == two


class KilledError(Exception):
    """Stands for a kill in the middle of the work."""


def test_a_killed_run_continues_and_ends_like_an_unbroken_one(config, source, tmp_path):
    write_tone(source / "wavs" / "clip-1.wav", 9)  # its rejection must survive too
    unbroken = run(config)
    expected = contents(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "expected")

    def kill(done, total):
        if done == 4:
            raise KilledError

    with pytest.raises(KilledError):
        run(config, on_progress=kill)
    with pytest.raises(DataError, match="not a finished corpus"):
        Corpus.open(tmp_path / "out")
    (tmp_path / "out" / "train-00001.parquet.partial").write_bytes(b"half a shard")
    first = (tmp_path / "out" / "train-00000.parquet").stat().st_mtime_ns
    seen = []
    report = run(config, on_progress=lambda done, total: seen.append(done))
    assert seen == [4, 8, 10]
    assert (tmp_path / "out" / "train-00000.parquet").stat().st_mtime_ns == first
    assert report == unbroken
    assert contents(tmp_path / "out") == expected


def test_a_finished_corpus_is_left_as_it_is(config, tmp_path):
    report = run(config)
    before = contents(tmp_path / "out")
    assert run(config, build_frontend=build_broken) == report
    assert contents(tmp_path / "out") == before


def test_a_lost_shard_is_made_again(config, tmp_path):
    run(config)
    before = contents(tmp_path / "out")
    (tmp_path / "out" / "train-00001.parquet").unlink()
    run(config)
    assert contents(tmp_path / "out") == before


def test_other_settings_in_the_same_folder_are_refused(config, source, tmp_path):
    run(config)
    with pytest.raises(DataError, match=r"other settings \(seed=0 there, 5 here\)"):
        run(prepare_config(source, tmp_path / "out", seed=5))


def test_nothing_kept_is_an_error_that_counts_the_reasons_and_can_be_tried_again(source, tmp_path):
    message = r"none of 10 lines can be used \(10 shorter than min_seconds\); the first is "
    with pytest.raises(DataError, match=message + r"metadata\.csv:1: 1\.00 s of sound"):
        run(prepare_config(source, tmp_path / "out", min_seconds=3.0))
    assert len((tmp_path / "out" / "rejected.jsonl").read_text().splitlines()) == 10
    assert run(prepare_config(source, tmp_path / "out")).num_kept == 10


def test_a_source_of_bad_lines_alone_is_an_error(tmp_path):
    source = write_ljspeech(tmp_path / "in", 1)
    (source / "metadata.csv").write_text("ghost|x\n")
    with pytest.raises(DataError, match=r"none of 1 lines can be used \(1 no audio file\)"):
        run(prepare_config(source, tmp_path / "out"))


@pytest.mark.parametrize("emptied", ["train", "validation"])
def test_rejections_never_empty_a_split(source, tmp_path, emptied):
    fraction = 0.2 if emptied == "validation" else 0.8
    trial = prepare_config(source, tmp_path / "trial", validation_fraction=fraction)
    run(trial)
    victims = ids(Corpus.open(tmp_path / "trial"), emptied)
    for victim in victims:
        write_tone(source / "wavs" / f"{victim}.wav", 9)
    report = run(prepare_config(source, tmp_path / "out", validation_fraction=fraction))
    assert report.num_kept == NUM_CLIPS - len(victims)
    corpus = Corpus.open(tmp_path / "out")
    assert len(ids(corpus, emptied)) == 1
    names = {path.name for path in (tmp_path / "out").glob("*.parquet")}
    assert names == {name for names in corpus.info.shards.values() for name in names}


def test_a_single_recording_is_kept_for_training_and_the_report_says_so(tmp_path):
    source = write_ljspeech(tmp_path / "in", 1)
    report = run(prepare_config(source, tmp_path / "out"))
    assert report.kept == {"train": 1, "validation": 0}
    assert "no validation split" in report.lines()[-1]
    assert read_info(tmp_path / "out").shards["validation"] == ()


def test_the_folder_records_settings_and_versions(config, tmp_path):
    run(config)
    assert "max_seconds: 5.0" in (tmp_path / "out" / "config.yaml").read_text()
    assert "python" in json.loads((tmp_path / "out" / "versions.json").read_text())


def test_a_full_disk_is_an_error_that_says_that_finished_shards_are_kept(config, monkeypatch):
    def no_space(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tts_stack.data.part.write_shard", no_space)
    with pytest.raises(DataError, match=r"shard 0 cannot be written \(No space left .* are kept"):
        run(config)


def test_shards_are_plain_parquet_with_encoded_audio(config, tmp_path):
    run(config)
    path = Corpus.open(tmp_path / "out").shard_paths("train")[0]
    row = pq.read_table(path).to_pylist()[0]
    assert row["audio"]["bytes"][:4] == b"fLaC"
    assert row["audio"]["path"] == f"{row['id']}.flac"


@pytest.mark.slow
def test_the_shared_recordings_prepare_with_the_real_front_end(shared_data, tmp_path):
    pytest.importorskip("gruut")
    from tts_stack.config import load_config
    from tts_stack.data.config import PrepareConfig

    source = shared_data / "speech" / "ljspeech32"
    given = [f"source={source}", f"corpus={tmp_path / 'out'}", "num_workers=1"]
    report = prepare(load_config(PrepareConfig, "prepare", given))
    assert (report.num_kept, report.num_rejected) == (32, 0)
