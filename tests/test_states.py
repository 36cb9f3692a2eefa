"""Hidden states of a run: what tts_stack.states extracts, computes on the fly, and leaves out."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from stage1_support import ENCODE, make_contract, tiny_network, write_corpus

from stage1_llm.checkpoint import save_llm
from stage1_llm.hidden_states import teacher_forced_states
from stage2_vocoder.config import VocoderTrainConfig
from stage2_vocoder.live_states import LiveStates
from stage2_vocoder.states import StateStore, shard_path
from tts_stack.config import load_config
from tts_stack.errors import CheckpointError, DataError
from tts_stack.shards import Corpus, add_tokens, read_utterances, write_shard
from tts_stack.states import (
    ensure_states,
    extract_states,
    live_states,
    load_frozen_llm,
    open_states,
)

CPU = torch.device("cpu")
UNKNOWN_ROW = 5


@pytest.fixture
def corpus(tmp_path):
    return Corpus.open(write_corpus(tmp_path / "corpus"))


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


def make_run(folder, seed=0, **prompt):
    save_llm(tiny_network(seed), make_contract(**prompt), folder / "llm" / "model")
    return folder


def forget_symbols(corpus):
    """Row 5 of the training split says what no voice of a, b, c can read."""
    path = corpus.shard_paths("train")[0]
    tokens = [row.semantic_tokens for row in corpus.tokenized("train")]
    rows = list(read_utterances(path))
    rows[UNKNOWN_ROW] = dataclasses.replace(rows[UNKNOWN_ROW], model_text="?!")
    write_shard(path, rows, sample_rate=24000, config_hash="h")
    add_tokens(path, tokens, corpus.require_codec())


def extract(run, corpus, **settings):
    return extract_states(run, corpus.path, device=CPU, **settings)


def test_every_row_has_the_teacher_forced_states_of_its_tokens(run, corpus):
    report = extract(run, corpus)
    store = StateStore.open(report.folder, corpus, llm_sha256=report.llm_sha256)
    for split in ("train", "validation"):
        rows, utterances = store.split(split), corpus.tokenized(split)
        wanted = teacher_forced_states(tiny_network(), make_contract(), ENCODE, utterances)
        for row, states in enumerate(wanted):
            assert_allclose(rows[row], states.numpy(), atol=2e-3)


def test_the_report_says_where_the_store_is_and_how_large(run, corpus):
    report = extract(run, corpus)
    num_tokens = sum(
        len(row.semantic_tokens)
        for split in ("train", "validation")
        for row in corpus.tokenized(split)
    )
    assert (report.folder, report.num_rows, report.num_new) == (run / "states", 16, 16)
    assert report.num_tokens == num_tokens and report.width == 32
    assert report.num_bytes >= num_tokens * 32 * 2
    assert f"{run / 'states'}: hidden states of 16 utterances" in report.describe()


def test_progress_counts_the_utterances_of_all_splits_and_never_goes_back(run, corpus):
    seen = []
    extract(run, corpus, on_progress=lambda done, total: seen.append((done, total)))
    assert seen[0] == (0, 16) and seen[-1] == (16, 16)
    assert seen == sorted(seen)


def test_an_interrupted_extraction_goes_on_and_gives_the_same_files(run, corpus, monkeypatch):
    monkeypatch.setattr("tts_stack.states.ROWS_PER_SHARD", 4)
    whole = extract(run, corpus)
    wanted = {path.name: path.read_bytes() for path in whole.folder.iterdir()}
    assert len(wanted) == 5  # 12 + 4 rows, 4 a shard, and states.json
    for name in ("train-00001.safetensors", "states.json"):
        (whole.folder / name).unlink()
    again = extract(run, corpus)
    assert again.num_new == 4
    assert {path.name: path.read_bytes() for path in again.folder.iterdir()} == wanted


def test_a_damaged_shard_is_written_again(run, corpus):
    folder = extract(run, corpus).folder
    shard_path(folder, "train", 0).write_bytes(b"garbage")
    assert extract(run, corpus).num_new == 12
    assert len(StateStore.open(folder, corpus).split("train")) == 12


def test_nothing_is_computed_twice(run, corpus, monkeypatch):
    extract(run, corpus)
    monkeypatch.setattr("tts_stack.states.teacher_forced_states", None)
    assert extract(run, corpus).num_new == 0


@pytest.mark.parametrize("is_finished", [True, False])
def test_states_of_an_older_llm_of_the_run_are_replaced(run, corpus, is_finished):
    old = extract(run, corpus)
    if not is_finished:
        (old.folder / "states.json").unlink()
    (old.folder / "notes.txt").write_text("mine", encoding="utf-8")
    shutil.rmtree(run / "llm")
    new = extract(make_run(run, seed=1), corpus)
    assert new.num_new == 16 and new.llm_sha256 != old.llm_sha256
    StateStore.open(new.folder, corpus, llm_sha256=new.llm_sha256).split("train")
    assert (new.folder / "notes.txt").exists()  # only the store's own files go


def test_states_of_another_layer_position_or_type_are_replaced(run, corpus):
    extract(run, corpus)
    assert extract(run, corpus, dtype="bfloat16").num_new == 16
    make_run(run, hidden_layer=1)
    assert extract(run, corpus, dtype="bfloat16").num_new == 16


def test_bfloat16_states_come_back_with_bfloat16_precision(run, corpus):
    report = extract(run, corpus, dtype="bfloat16")
    found = StateStore.open(report.folder, corpus).split("train")[0]
    wanted = teacher_forced_states(
        tiny_network(), make_contract(), ENCODE, corpus.tokenized("train")[:1]
    )[0]
    assert found.dtype == np.float32
    assert_array_equal(found, wanted.bfloat16().float().numpy())


def test_mixed_layers_are_stored_side_by_side(tmp_path, corpus):
    report = extract(make_run(tmp_path / "mixed", num_mixed_layers=2), corpus)
    store = StateStore.open(report.folder, corpus)
    assert (store.info.hidden_size, store.info.num_mixed_layers, report.width) == (32, 2, 64)
    assert store.split("train")[0].shape[1] == 64
    assert store.info.identity.reading == "layer -1 and 1 below, reads"


def test_an_utterance_without_a_known_symbol_is_left_out_and_named(run, corpus, caplog):
    forget_symbols(corpus)
    corpus = Corpus.open(corpus.path)
    report = extract(run, corpus)
    assert report.left_out == (f"s{UNKNOWN_ROW}",)
    assert "1 utterances without a symbol that the voice knows" in caplog.text
    assert f"left out: s{UNKNOWN_ROW}" in caplog.text
    rows = StateStore.open(report.folder, corpus).split("train")
    assert [row for row in range(len(rows)) if not rows.num_tokens(row)] == [UNKNOWN_ROW]
    assert "hidden states of 15 utterances" in report.describe()


def test_states_on_the_fly_are_those_on_disk(run, corpus):
    forget_symbols(corpus)
    corpus = Corpus.open(corpus.path)
    report = extract(run, corpus)
    stored = StateStore.open(report.folder, corpus)
    live = live_states(run, corpus.path, device=CPU)
    assert live.info.identity == stored.info.identity
    assert live.info.width == stored.info.width
    for split in ("train", "validation"):
        one, other = stored.split(split), live.split(split)
        assert len(one) == len(other)
        for row in range(len(one)):
            assert one.num_tokens(row) == other.num_tokens(row)
            count = one.num_tokens(row)
            if count:
                assert other.read(row, 0, count).dtype == np.float16
                assert_allclose(other.read(row, 1, count), one.read(row, 1, count), atol=2e-3)


def test_the_llm_is_frozen(run, corpus):
    network = load_frozen_llm(run, corpus, CPU).network
    assert not network.training
    assert not any(parameter.requires_grad for parameter in network.parameters())


def test_a_full_disk_is_found_before_the_work_begins(run, corpus, monkeypatch):
    usage = shutil._ntuple_diskusage(100, 90, 10)
    monkeypatch.setattr("tts_stack.states.shutil.disk_usage", lambda path: usage)
    with pytest.raises(DataError, match="the hidden states take about .* GB, 0.0 GB are free"):
        extract(run, corpus)


def test_a_run_without_an_llm_names_the_command(tmp_path, corpus):
    with pytest.raises(CheckpointError, match="no LLM in this run; run tts-stack train-llm"):
        ensure_states(tmp_path / "new", corpus.path, device=CPU)
    (tmp_path / "new" / "llm" / "adapter").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="was not merged into .*; run tts-stack merge-lora"):
        ensure_states(tmp_path / "new", corpus.path, device=CPU)


def test_an_llm_of_another_codec_is_refused(tmp_path, corpus):
    contract = make_contract()
    codec = dataclasses.replace(contract.codec, weights_sha256="ff" * 32)
    run = tmp_path / "other"
    save_llm(tiny_network(), dataclasses.replace(contract, codec=codec), run / "llm" / "model")
    with pytest.raises(CheckpointError, match="train the LLM on this corpus"):
        ensure_states(run, corpus.path, device=CPU)


def test_another_process_waits_for_the_main_one_and_writes_nothing(run, corpus, monkeypatch):
    from tts_stack import states

    waits = []

    def sleep(seconds):
        waits.append(seconds)
        monkeypatch.setattr(states, "is_main_process", lambda: True)
        extract(run, corpus)

    monkeypatch.setattr(states, "is_main_process", lambda: False)
    monkeypatch.setattr(states.time, "sleep", sleep)
    report = extract(run, corpus)
    assert len(waits) == 1 and report.num_new == 0 and report.num_rows == 16


@pytest.mark.parametrize(("kind", "wanted"), [("cached", StateStore), ("on_the_fly", LiveStates)])
def test_the_configuration_chooses_where_states_come_from(run, corpus, kind, wanted):
    given = [f"corpus={corpus.path}", f"run={run}", f"data.states={kind}"]
    config = load_config(
        VocoderTrainConfig, "train_vocoder", [*given, "data.states_dtype=bfloat16"]
    )
    reader = open_states(config, device=CPU)
    assert isinstance(reader, wanted)
    assert reader.info.identity.dtype == "bfloat16"
    assert (run / "states").exists() == (kind == "cached")
