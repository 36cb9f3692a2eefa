import dataclasses

import pytest
import torch
from base_models import write_tiny_base
from stage1_support import (
    CODEBOOK_SIZE,
    CODEC,
    make_contract,
    prompt_config,
    tiny_config,
    tiny_network,
    train_config,
    write_corpus,
)

from stage1_llm.build import build_language, build_trained_network
from stage1_llm.checkpoint import load_llm, save_llm
from stage1_llm.lora_config import LoraSettings
from tts_stack.contract import CODEBOOKS_FILE
from tts_stack.errors import CheckpointError, ConfigError
from tts_stack.shards import Corpus
from tts_stack.training import load_weights, save_weights

LORA = LoraSettings(r=2, alpha=4, dropout=0.0, embeddings=True)


@pytest.fixture
def corpus(tmp_path):
    return Corpus.open(write_corpus(tmp_path / "corpus"))


def config_for(tmp_path, *, template="chatml", lora=None, **prompt):
    base = write_tiny_base(tmp_path / "base", template=template)
    llm = tiny_config(base_model=str(base))
    return train_config(llm=llm, lora=lora, prompt=prompt_config(**prompt))


def test_from_scratch_the_symbols_of_the_corpus_are_the_text(corpus):
    language = build_language(train_config(), corpus)
    assert (language.base, language.tokens.symbols) == (None, ("a", "b", "c"))
    assert language.encode("abz").num_dropped == 1


def test_the_chat_form_has_start_end_and_mask_beside_its_sound_tokens(corpus, tmp_path):
    language = build_language(config_for(tmp_path, format="chat"), corpus)
    tokens, spec = language.tokens, language.spec
    assert tokens.semantic_stop - tokens.text_start == CODEBOOK_SIZE + 4  # task, start, end, mask
    assert tokens.mask == tokens.audio_end + 1
    assert spec.before_text[-1] == tokens.text_start and spec.after_text
    tagged = build_language(config_for(tmp_path / "tagged"), corpus)
    assert (tagged.tokens.mask, tagged.spec.before_text) == (-1, ())


def test_duration_tokens_are_laid_out_only_where_they_are_written(corpus):
    for durations, expected in (("none", 0), ("codebook", 0), ("tokens", 8)):
        language = build_language(
            train_config(prompt=prompt_config(durations=durations, max_run=9)), corpus
        )
        assert language.tokens.num_durations == expected
        assert language.spec.max_run == (1 if durations == "none" else 9)


def test_with_adapters_only_they_and_the_new_rows_train(corpus, tmp_path):
    config = config_for(tmp_path, lora=LORA)
    language = build_language(config, corpus)
    network = build_trained_network(config, language, (10,))
    trained = {name for name, weight in network.named_parameters() if weight.requires_grad}
    assert all("lora_" in n or "new_rows" in n or n.startswith("codebooks.") for n in trained)
    assert any(name.startswith("codebooks.") for name in trained)


def test_a_run_without_a_base_takes_no_adapter(corpus):
    config = train_config(lora=LORA)
    with pytest.raises(ConfigError, match="lora adapts a base model, but llm is built from"):
        build_trained_network(config, build_language(config, corpus), ())


def test_the_hash_of_an_llm_covers_its_codebook_heads(tmp_path):
    contract = dataclasses.replace(
        make_contract(), codec=dataclasses.replace(CODEC, num_codebooks=2)
    )
    network = tiny_network(codebook_sizes=(CODEBOOK_SIZE,))
    sealed = save_llm(network, contract, tmp_path)
    loaded = load_llm(tmp_path).network
    assert torch.equal(loaded.codebooks.heads[0].weight, network.codebooks.heads[0].weight)
    heads = load_weights(tmp_path / CODEBOOKS_FILE)
    heads["heads.0.weight"][0] += 1
    save_weights(heads, tmp_path / CODEBOOKS_FILE)
    with pytest.raises(CheckpointError, match=f"voice.json names {sealed.llm_sha256[:12]}"):
        load_llm(tmp_path)


def test_mixed_layers_reach_the_contract_and_too_many_are_refused_before_training(corpus):
    config = train_config(prompt=prompt_config(num_mixed_layers=3))
    language = build_language(config, corpus)
    assert language.spec.num_mixed_layers == 3
    build_trained_network(config, language, ())
    config = train_config(prompt=prompt_config(num_mixed_layers=4))
    with pytest.raises(ConfigError, match="num_mixed_layers is 4, expected 1 .. 3"):
        build_trained_network(config, language, ())


@pytest.mark.parametrize(("kind", "warns"), [("phonemes", True), ("normalized", False)])
def test_a_base_model_on_phonemes_is_warned_of(corpus, tmp_path, caplog, kind, warns):
    info = dataclasses.replace(corpus.info, text=dataclasses.replace(corpus.info.text, kind=kind))
    build_language(config_for(tmp_path), dataclasses.replace(corpus, info=info))
    assert ("re-run tts-stack prepare with text.kind=normalized" in caplog.text) is warns
