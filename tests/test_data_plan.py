import os

import pytest
from data_support import prepare_config, write_ljspeech

from tts_stack.data.config import TextConfig
from tts_stack.data.corpora.detect import read_corpus
from tts_stack.data.plan import choose_validation, make_plan, open_output
from tts_stack.errors import ConfigError, DataError

IDS = [f"clip-{index}" for index in range(1000)]


def choose(ids, *, seed=0, fraction=0.1, max_count=1000):
    return choose_validation(ids, seed=seed, fraction=fraction, max_count=max_count)


def plan_of(source, corpus, **changes):
    config = prepare_config(source, corpus, **changes)
    return make_plan(config, read_corpus(source).items), config


def test_the_split_has_about_the_wanted_size_and_depends_on_the_seed():
    assert 70 <= len(choose(IDS)) <= 130
    assert choose(IDS) != choose(IDS, seed=1)


def test_the_split_does_not_depend_on_order_or_on_other_recordings():
    assert choose(IDS[::-1]) == choose(IDS)
    assert choose(IDS[:500]) == choose(IDS) & set(IDS[:500])


def test_the_split_is_the_same_on_every_machine():
    # The ids for which `printf 0:clip-N | b2sum -l 64` is below a tenth of its range.
    assert choose(IDS[:20]) == {"clip-14", "clip-16", "clip-17", "clip-19"}


def test_the_validation_split_is_capped():
    assert len(choose(IDS, max_count=7)) == 7
    assert choose(IDS, max_count=7) <= choose(IDS)


@pytest.mark.parametrize("fraction", [1e-9, 0.5, 1 - 1e-9])
def test_of_two_recordings_each_split_gets_one(fraction):
    assert len(choose(["a", "b"], fraction=fraction)) == 1


def test_a_single_recording_goes_to_training():
    assert choose(["a"], fraction=0.99) == frozenset()


def test_shards_cover_the_items_in_order(tmp_path):
    plan, _ = plan_of(write_ljspeech(tmp_path / "in", 10), tmp_path / "out")
    assert plan.num_shards == 3
    assert [item.id for item in plan.shard_items(2)] == ["clip-8", "clip-9"]


def test_the_config_hash_covers_settings_and_texts_but_not_places(tmp_path):
    first = write_ljspeech(tmp_path / "in", 2)
    copy = write_ljspeech(tmp_path / "copy", 2)
    plan, _ = plan_of(first, tmp_path / "out")
    assert plan_of(copy, tmp_path / "b", num_workers=2)[0].config_hash == plan.config_hash
    assert plan_of(first, tmp_path / "out", seed=1)[0].config_hash != plan.config_hash
    (copy / "metadata.csv").write_text("clip-0|other\nclip-1|clip number 1\n")
    assert plan_of(copy, tmp_path / "out")[0].config_hash != plan.config_hash


def shards_made(tmp_path, **changes):
    """An output folder with work in it."""
    source = write_ljspeech(tmp_path / "in", 3)
    plan, config = plan_of(source, tmp_path / "out", **changes)
    open_output(tmp_path / "out", plan, config)
    (tmp_path / "out" / "train-00000.parquet").touch()
    return source


def test_the_same_plan_may_continue_in_its_folder(tmp_path):
    source = shards_made(tmp_path)
    plan, config = plan_of(source, tmp_path / "out", num_workers=2)
    open_output(tmp_path / "out", plan, config)
    assert (tmp_path / "out" / "train-00000.parquet").exists()


def test_other_settings_are_refused_and_named(tmp_path):
    source = shards_made(tmp_path)
    text = TextConfig("raw", "de", "gruut")
    plan, config = plan_of(source, tmp_path / "out", max_seconds=9.0, text=text)
    message = r"other settings \(max_seconds=5.0 there, 9.0 here; text.language=en-us there, de"
    with pytest.raises(DataError, match=message):
        open_output(tmp_path / "out", plan, config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda source: write_ljspeech(source, 4), r"another source \(3 lines there, 4 here\)"),
        (
            lambda source: (source / "metadata.csv").write_text("clip-0|a\nclip-1|b\nclip-2|c\n"),
            "another source \\(texts or file names differ\\)",
        ),
        (
            lambda source: os.utime(source / "wavs" / "clip-0.wav", (1, 1)),
            "other recordings \\(their sizes or times have changed\\)",
        ),
    ],
)
def test_a_source_that_has_changed_is_refused(tmp_path, change, message):
    source = shards_made(tmp_path)
    change(source)
    plan, config = plan_of(source, tmp_path / "out")
    with pytest.raises(DataError, match=message + "; choose another folder"):
        open_output(tmp_path / "out", plan, config)


def test_a_folder_of_somebody_else_is_refused(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.doc").touch()
    plan, config = plan_of(write_ljspeech(tmp_path / "in", 1), tmp_path / "out")
    with pytest.raises(DataError, match=r"out: is not empty and holds no plan\.json"):
        open_output(tmp_path / "out", plan, config)


def test_the_source_folder_is_refused_as_output(tmp_path):
    source = write_ljspeech(tmp_path / "in", 1)
    plan, config = plan_of(source, source)
    with pytest.raises(DataError, match="is not empty"):
        open_output(source, plan, config)


def test_an_output_path_that_is_a_file_is_an_error(tmp_path):
    (tmp_path / "out").touch()
    plan, config = plan_of(write_ljspeech(tmp_path / "in", 1), tmp_path / "out")
    with pytest.raises(ConfigError, match="out: cannot write"):
        open_output(tmp_path / "out", plan, config)
