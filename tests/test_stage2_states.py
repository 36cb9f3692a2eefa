import dataclasses
import json
import pickle

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from safetensors.torch import load_file, save_file
from stage2_support import HIDDEN_SIZE, LLM, make_corpus, make_states, row_states

from stage2_vocoder.state_folder import clear_store, found_identity, store_bytes
from stage2_vocoder.states import (
    SplitStates,
    StateIdentity,
    StateStore,
    StateWriter,
    corpus_hash,
    shard_path,
)
from tts_stack.errors import CheckpointError, ConfigError, DataError


@pytest.fixture
def corpus(tmp_path):
    return make_corpus(tmp_path / "corpus")


@pytest.fixture
def folder(tmp_path, corpus):
    make_states(tmp_path / "states", corpus)
    return tmp_path / "states"


def writer(folder, num_rows=2, llm=LLM):
    return StateWriter(
        folder,
        StateIdentity(llm, "corpus"),
        hidden_size=3,
        num_rows={"train": num_rows},
        rows_per_shard=2,
    )


def test_rows_come_back_in_corpus_order_as_float16(folder, corpus):
    rows = StateStore.open(folder, corpus, llm_sha256=LLM).split("train")
    assert len(rows) == 6
    for row in (5, 0, 3):
        assert_array_equal(rows[row], row_states("train", row).astype(np.float16))


def test_a_slice_of_a_row_is_read_alone(folder, corpus):
    rows = StateStore.open(folder, corpus).split("train")
    assert_array_equal(rows.read(4, 2, 5), row_states("train", 4).astype(np.float16)[2:5])


def test_an_opened_split_can_be_sent_to_a_worker(folder, corpus):
    rows = pickle.loads(pickle.dumps(StateStore.open(folder, corpus).split("train")))
    assert rows[1].shape == (rows.num_tokens(1), HIDDEN_SIZE)


def test_an_interrupted_extraction_goes_on_with_the_missing_shards(tmp_path):
    first = writer(tmp_path, num_rows=5)
    assert first.missing("train") == [range(0, 2), range(2, 4), range(4, 5)]
    first.write("train", range(2, 4), [np.ones((1, 3)), np.ones((2, 3))])
    assert writer(tmp_path, num_rows=5).missing("train") == [range(0, 2), range(4, 5)]


def test_an_unfinished_store_is_refused(tmp_path, corpus):
    with pytest.raises(DataError, match="1 shards of split train are missing, first rows 0 to 1"):
        writer(tmp_path / "new").finish()
    with pytest.raises(CheckpointError, match=r"no states\.json in it"):
        StateStore.open(tmp_path / "new", corpus)


def test_states_of_another_llm_are_refused_and_both_are_named(folder, corpus):
    with pytest.raises(CheckpointError, match=f"of the LLM {LLM}, expected the LLM other"):
        StateStore.open(folder, corpus, llm_sha256="other")


def test_states_of_another_corpus_are_refused(folder, corpus, tmp_path):
    other = make_corpus(tmp_path / "other")
    other.info.num_utterances["train"] = 5
    with pytest.raises(CheckpointError, match=f"corpus {corpus_hash(corpus)}, expected the corpus"):
        StateStore.open(folder, other)


def test_writing_over_another_llms_shards_is_refused(tmp_path):
    writer(tmp_path).write("train", range(2), [np.ones((1, 3))] * 2)
    with pytest.raises(CheckpointError, match="delete the folder and extract the states again"):
        writer(tmp_path, llm="other")


def test_one_shard_of_another_llm_is_found(folder, corpus, tmp_path):
    make_states(tmp_path / "foreign", corpus, llm_sha256="other")
    shard_path(tmp_path / "foreign", "train", 1).replace(shard_path(folder, "train", 1))
    with pytest.raises(
        CheckpointError, match=r"train-00001\.safetensors: hidden states of the LLM"
    ):
        StateStore.open(folder, corpus).split("train")


def test_one_shard_of_another_type_is_found(folder, corpus):
    path = shard_path(folder, "train", 1)
    tensors = load_file(path)
    identity = StateIdentity(LLM, corpus_hash(corpus), dtype="bfloat16")
    metadata = {"tts_stack.states": json.dumps(dataclasses.asdict(identity))}
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(CheckpointError, match="of the type bfloat16, expected the type float16"):
        StateStore.open(folder, corpus).split("train")


def test_a_damaged_shard_is_named(folder, corpus):
    shard_path(folder, "train", 0).write_bytes(b"garbage")
    with pytest.raises(CheckpointError, match=r"train-00000\.safetensors: not a readable shard"):
        StateStore.open(folder, corpus).split("train")


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([np.ones((2, 3))], "1 rows given, expected 2"),
        ([np.ones((2, 3)), np.ones((2, 4))], r"row 1: states of shape \[2, 4\], expected \[S, 3\]"),
        ([np.ones((2, 3)), np.full((2, 3), 1e6)], "row 1: states are not finite in float16"),
    ],
)
def test_wrong_states_are_not_written(tmp_path, states, message):
    with pytest.raises(DataError, match=message), np.errstate(over="ignore"):
        writer(tmp_path).write("train", range(2), states)
    assert writer(tmp_path).missing("train") == [range(0, 2)]


def test_a_shard_cut_for_another_number_of_rows_counts_as_missing(tmp_path):
    first = writer(tmp_path, num_rows=3)
    for rows in first.missing("train"):
        first.write("train", rows, [np.ones((1, 3))] * len(rows))
    assert first.missing("train") == []
    other = StateWriter(
        tmp_path, StateIdentity(LLM, "corpus"), hidden_size=3, num_rows={"train": 3},
        rows_per_shard=3,
    )  # fmt: skip
    assert other.missing("train") == [range(0, 3)]


def test_an_empty_row_is_a_row_without_tokens(tmp_path):
    store = writer(tmp_path, num_rows=2)
    store.write("train", range(2), [np.zeros((0, 3)), np.ones((2, 3))])
    rows = SplitStates([shard_path(tmp_path, "train", 0)])
    assert [rows.num_tokens(row) for row in range(2)] == [0, 2]
    assert rows[0].shape == (0, 3)


def test_no_more_files_stay_open_than_allowed(folder, corpus, monkeypatch):
    monkeypatch.setattr("stage2_vocoder.states.MAX_OPEN_FILES", 1)
    rows = StateStore.open(folder, corpus).split("train")
    for row in (0, 5, 1, 4):
        assert_array_equal(rows[row], row_states("train", row).astype(np.float16))
    assert len(rows._files) == 1


def test_a_store_written_by_an_older_release_is_still_read(folder, corpus):
    file = folder / "states.json"
    values = json.loads(file.read_text())
    del values["num_mixed_layers"], values["identity"]["dtype"]
    file.write_text(json.dumps(values))
    assert len(StateStore.open(folder, corpus).split("train")) == 6


def test_an_unknown_type_is_refused():
    with pytest.raises(ConfigError, match="states_dtype is 'int8', expected float16 or bfloat16"):
        StateIdentity(LLM, "corpus", dtype="int8")


def test_float16_overflow_names_the_way_out(tmp_path):
    with pytest.raises(DataError, match="try data.states_dtype=bfloat16, or train the LLM again"):
        writer(tmp_path).write("train", range(2), [np.ones((2, 3)), np.full((2, 3), 1e6)])
    wide = StateWriter(
        tmp_path / "wide", StateIdentity(LLM, "corpus", dtype="bfloat16"), hidden_size=3,
        num_rows={"train": 1},
    )  # fmt: skip
    wide.write("train", range(1), [np.full((2, 3), 1e6)])
    assert wide.missing("train") == []


def test_only_the_files_of_a_store_are_deleted(folder):
    (folder / "notes.txt").write_text("mine")
    assert store_bytes(folder) > 0 and found_identity(folder).llm_sha256 == LLM
    clear_store(folder)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    assert store_bytes(folder) == 0 and found_identity(folder) is None
