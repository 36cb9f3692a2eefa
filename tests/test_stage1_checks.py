"""Each check passes on sound code, and names the claim that is broken."""

import dataclasses

import numpy as np
import pytest
import torch
from base_models import write_tiny_base
from stage1_support import (
    CODEBOOK_SIZE,
    batching_config,
    make_samples,
    prompt_config,
    tiny_config,
    train_config,
    write_corpus,
)

import stage1_llm.attention as attention
import stage1_llm.build as build
import stage1_llm.checks.adapter as adapter
import stage1_llm.checks.collate as collate
import stage1_llm.loss as loss
import stage1_llm.merge as merge
import stage1_llm.stream as stream
from stage1_llm.checks.layout import decode_audio, expected_groups
from stage1_llm.checks.report import close, identical
from stage1_llm.checks.run import CHECKS, run_check
from stage1_llm.checks.setup import open_setup
from stage1_llm.checks.shrink import shrink_settings, tiny_heads
from stage1_llm.config import CurriculumConfig, LLMConfig, OptimizerConfig, WeightConfig
from stage1_llm.dataset import Sample, sample_prompt
from stage1_llm.lora_config import LoraSettings
from stage1_llm.merge import MergeReport
from stage1_llm.module import LLMTask
from stage1_llm.prompt import GROUP_NAMES, GROUP_NONE
from stage1_llm.text import EncodedText, TokenizerEncoder
from stage1_llm.vocab import Extras, build_token_map
from tts_stack.contract import CodecIdentity, PromptSpec
from tts_stack.errors import CheckpointError, ConfigError, DataError
from tts_stack.shards import SPLITS, Corpus, add_tokens, read_info, write_info
from tts_stack.training import EMA, TrainerConfig

LORA = LoraSettings(r=4, alpha=8, dropout=0.05, embeddings=True)
PACKING = batching_config(kind="packing", curriculum=CurriculumConfig(8, 100))
ADAMW = OptimizerConfig("adamw", 0.0, 0.01, 0.1, 0.9, 0.95, 1.0, 0.9)  # with averaged weights


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("checks") / "corpus", num_train=20)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    top = tmp_path_factory.mktemp("bases")
    return {
        "tied": write_tiny_base(top / "tied", "qwen2", tie=True),
        "untied": write_tiny_base(top / "untied", "llama", tie=False, template="llama3"),
    }


@pytest.fixture(scope="module")
def wide_corpus(tmp_path_factory):
    """Four codebooks, with runs of equal tokens."""
    path = write_corpus(tmp_path_factory.mktemp("checks") / "wide", num_train=12)
    codec = CodecIdentity("wide", "cd" * 32, CODEBOOK_SIZE, num_codebooks=4)
    random = np.random.default_rng(0)
    for split in SPLITS:
        file = path / f"{split}-00000.parquet"
        rows = Corpus.open(path).tokenized(split)
        codes = [random.integers(0, CODEBOOK_SIZE, (len(r.semantic_tokens), 4)) for r in rows]
        add_tokens(file, [code[: len(code) // 2].repeat(2, axis=0) for code in codes], codec)
    write_info(path, dataclasses.replace(read_info(path), codec=codec))
    return path


def scratch(corpus, **changes):
    trainer = TrainerConfig(200, 50, 50, device="cpu", accumulate=2)
    return train_config(corpus, "unused", **{"trainer": trainer, **changes})


def adapted(corpus, base, prompt_format="chat", **changes):
    values = {
        "llm": LLMConfig(architecture="base_model", dropout=0.0, base_model=str(base)),
        "lora": LORA,
        "prompt": prompt_config(format=prompt_format, position_scheme="plain"),
        "batching": batching_config(max_tokens=512, max_length=256),
        "optimizer": ADAMW,
    }
    return scratch(corpus, **{**values, **changes})


def failed(name, config):
    return [claim.name for claim in run_check(name, config).failed]


def assert_passes(name, config):
    report = run_check(name, config)
    assert not report.failed
    assert len(report.claims) >= 4
    assert any("largest difference" in claim.detail for claim in report.claims)


@pytest.mark.parametrize("name", ["collate", "pack", "resume"])
@pytest.mark.parametrize("kind", ["dynamic", "packing"])
def test_checks_pass_for_a_model_from_scratch(corpus, name, kind):
    batching = PACKING if kind == "packing" else batching_config()
    assert_passes(name, scratch(corpus, batching=batching, llm=tiny_config(dropout=0.1)))


@pytest.mark.parametrize("name", CHECKS)
def test_checks_pass_for_adapters_on_a_tied_base_model(corpus, bases, name):
    assert_passes(name, adapted(corpus, bases["tied"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("durations", ["none", "tokens", "codebook"])
@pytest.mark.parametrize("prompt_format", ["tagged", "chat"])
def test_checks_pass_for_codebooks_durations_and_untied_base_models(
    wide_corpus, bases, name, durations, prompt_format
):
    prompt = prompt_config(format=prompt_format, durations=durations, position_scheme="plain")
    batching = batching_config(
        kind="packing", max_tokens=512, max_length=256, curriculum=CurriculumConfig(40, 150)
    )
    config = adapted(wide_corpus, bases["untied"], prompt=prompt, batching=batching)
    assert_passes(name, config)


@pytest.mark.parametrize("name", ["collate", "pack"])
@pytest.mark.parametrize("durations", ["tokens", "codebook"])
def test_checks_pass_for_several_codebooks_and_durations(wide_corpus, name, durations):
    assert_passes(name, scratch(wide_corpus, prompt=prompt_config(durations=durations)))


def test_packing_cannot_be_checked_on_a_single_sample(corpus, monkeypatch):
    monkeypatch.setattr("stage1_llm.checks.setup.NUM_SAMPLES", 1)
    with pytest.raises(DataError, match="train: 1 utterance .* check pack needs 2; add some"):
        run_check("pack", scratch(corpus))


def test_a_sample_is_shown_token_by_token(corpus):
    shown = run_check("collate", scratch(corpus)).sample
    assert [shown[0].name, shown[0].group, shown[0].label] == ["[TEXT]", "", None]
    assert (shown[1].group, shown[1].weight, shown[1].label) == ("text", 0.1, shown[1].token_id)
    assert (shown[-1].name, shown[-1].group, shown[-1].weight) == ("[STOP]", "end", 1.0)
    sounds = [token for token in shown if token.group == "audio"]
    assert {token.name[:9] for token in sounds} == {"<|sound_0"}
    shortest = min(make_samples(24)[:20], key=lambda sample: sample.length)
    assert len(sounds) == len(shortest.semantic_tokens)


def test_a_base_models_tokens_have_the_tokenizers_names(corpus, bases):
    names = [token.name for token in run_check("collate", adapted(corpus, bases["tied"])).sample]
    assert names[0] == "<|im_start|>"
    assert names.count("<|text_to_semantic|>") == names.count("<|sound_start|>") == 1
    assert set("abc") & set(names)


# What each check says when the code is broken.


def after(function, change):
    """`function`, its result changed."""

    def changed(*args, **kwargs):
        return change(function(*args, **kwargs))

    return changed


def with_labelled_padding(batch):
    groups = batch.groups.masked_fill(~batch.attention_mask, 1)
    labels = batch.labels.where(batch.attention_mask, batch.input_ids)
    return batch._replace(labels=labels, groups=groups)


def with_a_labelled_template(batch):
    labels, groups = batch.labels.clone(), batch.groups.clone()
    labels[:, 0], groups[:, 0] = batch.input_ids[:, 0], 0
    return batch._replace(labels=labels, groups=groups)


def without_an_end(batch):
    return batch._replace(labels=batch.labels.masked_fill(batch.groups == 2, -100))


def with_shifted_labels(batch):
    return batch._replace(labels=batch.labels.roll(1, dims=1))


@pytest.mark.parametrize(
    ("change", "claim"),
    [
        (with_labelled_padding, "padding, template, tags and masked tokens are never labelled"),
        (with_a_labelled_template, "padding, template, tags and masked tokens are never labelled"),
        (without_an_end, "every audio token, every end and every text token is labelled once"),
        (with_shifted_labels, "every audio token, every end and every text token is labelled once"),
    ],
)
def test_wrong_labels_are_found(corpus, monkeypatch, change, claim):
    monkeypatch.setattr(collate, "collate_prompts", after(collate.collate_prompts, change))
    assert any(name.startswith(claim) for name in failed("collate", scratch(corpus)))


def test_labelled_tags_in_a_packed_row_are_found(corpus, monkeypatch):
    monkeypatch.setattr(
        collate, "pack_prompts", after(collate.pack_prompts, with_a_labelled_template)
    )
    claims = failed("collate", scratch(corpus, batching=PACKING))
    assert "padding, template, tags and masked tokens are never labelled" in claims


def test_a_batch_that_changes_the_logits_is_found(corpus, monkeypatch):
    def squeezed(batch):
        return batch._replace(position_ids=batch.position_ids / len(batch.input_ids))

    monkeypatch.setattr(collate, "collate_prompts", after(collate.collate_prompts, squeezed))
    assert failed("collate", scratch(corpus)) == [
        "a padded batch of 4 samples gives the logits of each sample alone"
    ]


def test_weights_that_count_padding_are_found(corpus, monkeypatch):
    monkeypatch.setattr(loss, "_is_used", lambda groups, weights: torch.ones_like(groups) > 0)
    assert "the weights at step 0 add up" in failed("collate", scratch(corpus))


def test_lost_durations_are_found(wide_corpus, monkeypatch):
    def forget(runs):
        return dataclasses.replace(runs, lengths=np.ones_like(runs.lengths))

    monkeypatch.setattr(stream, "collapse_runs", after(stream.collapse_runs, forget))
    config = scratch(wide_corpus, prompt=prompt_config(durations="tokens"))
    assert failed("collate", config) == [
        "the audio of a prompt decodes to the corpus's speech tokens"
    ]


def test_text_that_does_not_come_back_is_found(corpus, bases, monkeypatch):
    def drop_one(encoded):
        return EncodedText(encoded.ids[:-1], 0)

    monkeypatch.setattr(TokenizerEncoder, "__call__", after(TokenizerEncoder.__call__, drop_one))
    report = run_check("collate", adapted(corpus, bases["tied"]))
    assert [claim.name for claim in report.failed] == [
        "the text ids decode to the text of the corpus"
    ]
    assert "s0: " in report.failed[0].detail


@pytest.fixture
def use_attention(monkeypatch):
    """Put another function in the place of packed attention, and the true one back afterwards."""
    true = attention.packed_attention

    def use(function, *, is_probed):
        if not is_probed:
            monkeypatch.setattr(attention, "_find_fault", lambda *args: "")
        monkeypatch.setattr(attention, "packed_attention", function)

    yield use
    attention.AttentionInterface.register(attention.PACKED_ATTENTION, true)


def without_segments(*args, segments=None, **kwargs):
    return TRUE_ATTENTION(*args, **kwargs)


def without_gradient_of_values(module, query, key, value, *args, segments=None, **kwargs):
    if segments is not None:
        value = value.detach()
    return TRUE_ATTENTION(module, query, key, value, *args, segments=segments, **kwargs)


TRUE_ATTENTION = attention.packed_attention


def test_attention_across_packed_samples_is_found(corpus, use_attention):
    use_attention(without_segments, is_probed=False)
    assert failed("pack", scratch(corpus)) == [
        "logits of a packed row equal those of each sample alone",
        "gradients of a packed row equal those of the samples alone, added up",
        "in a packed row no sample's loss depends on its neighbours or on padding",
    ]


def test_a_model_that_cannot_pack_is_named(corpus, use_attention):
    use_attention(without_segments, is_probed=True)
    report = run_check("pack", scratch(corpus))
    assert [claim.name for claim in report.failed] == ["the model keeps packed samples apart"]
    assert "LlamaForCausalLM lets packed samples see each other" in report.failed[0].detail
    assert len(report.claims) == 4  # padded batches are looked at all the same


def test_wrong_gradients_of_a_packed_row_are_found(corpus, use_attention):
    use_attention(without_gradient_of_values, is_probed=False)
    assert failed("pack", scratch(corpus)) == [
        "gradients of a packed row equal those of the samples alone, added up"
    ]


def test_padding_that_is_seen_is_found(corpus, use_attention):
    def see_all(module, query, key, value, *args, segments=None, **kwargs):
        if segments is not None:
            return TRUE_ATTENTION(module, query, key, value, *args, segments=segments, **kwargs)
        scores = (query @ key.mT).softmax(-1)
        return (scores @ value).transpose(1, 2).contiguous(), None

    use_attention(see_all, is_probed=True)
    claims = failed("pack", scratch(corpus))
    assert "logits of a padded batch equal those of each sample alone" in claims
    assert "in a padded batch no sample's loss depends on its neighbours or on padding" in claims


def parameters_named(model, part):
    return [parameter for name, parameter in model.named_parameters() if part in name]


@torch.no_grad()
def start_elsewhere(model):
    for parameter in parameters_named(model, ".lora_B"):
        parameter.fill_(1e-3)
    return model


def thaw_a_norm(model):
    parameters_named(model, "norm.weight")[0].requires_grad_(True)
    return model


def freeze_new_rows(model):
    parameters_named(model, "new_rows")[0].requires_grad_(False)
    return model


AT_STEP_0 = "at step 0 the logits are those of the base model, bit for bit"
GRADIENTS = "gradients reach every adapter, the new rows and codebook heads, and nothing else"
UNTOUCHED = "after 3 steps the weights of the base model are what they were"
HOLDS = "a checkpoint holds the adapters and the new rows, whole, and nothing of the base model"


@pytest.mark.parametrize(
    ("change", "claims"),
    [
        (start_elsewhere, [AT_STEP_0]),
        (thaw_a_norm, [GRADIENTS, UNTOUCHED]),
        (freeze_new_rows, [GRADIENTS]),
    ],
)
def test_a_wrong_adapter_is_found(corpus, bases, monkeypatch, change, claims):
    monkeypatch.setattr(build, "apply_lora", after(build.apply_lora, change))
    assert failed("lora", adapted(corpus, bases["tied"])) == claims


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_checkpoint_with_too_much_or_too_little_is_found(corpus, bases, monkeypatch, is_whole):
    def change(weights):
        if is_whole:
            return {**weights, "model.norm.weight": torch.ones(32)}
        return dict(list(weights.items())[1:])

    monkeypatch.setattr(adapter, "network_weights", after(adapter.network_weights, change))
    assert failed("lora", adapted(corpus, bases["tied"])) == [HOLDS]


def test_growing_that_changes_old_rows_is_found(corpus, bases, monkeypatch):
    true = build.grow_model

    def grow(model, tokens, *, seed):
        true(model, tokens, seed=seed)
        model.get_input_embeddings().weight.data[5] += 1

    monkeypatch.setattr(build, "grow_model", grow)
    assert failed("lora", adapted(corpus, bases["tied"])) == [
        "growing the vocabulary keeps the rows of the tokenizer's own ids"
    ]


@torch.no_grad()
def with_a_changed_row(model):
    model.get_output_embeddings().weight[330] += 0.5
    return model


def with_a_cut_tie(model):
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().flip(0))
    model.config.tie_word_embeddings = False
    return model


def test_a_merge_with_a_changed_row_is_refused(corpus, bases, monkeypatch):
    monkeypatch.setattr(merge, "merge_lora", after(merge.merge_lora, with_a_changed_row))
    report = run_check("merge", adapted(corpus, bases["tied"]))
    assert [claim.name for claim in report.failed] == ["merge-lora accepts its own result"]
    assert "the merged model is not base + adapter" in report.failed[0].detail


@pytest.mark.parametrize("change", [with_a_changed_row, with_a_cut_tie])
def test_a_wrong_merge_is_found_even_where_merging_does_not_look(
    corpus, bases, monkeypatch, change
):
    monkeypatch.setattr(merge, "merge_lora", after(merge.merge_lora, change))
    monkeypatch.setattr(
        merge, "compare", lambda a, b, place, tolerance: MergeReport(place, 0, 1, 1, 1, 1)
    )
    claims = failed("merge", adapted(corpus, bases["tied"]))
    assert any(name.startswith("read back by plain transformers") for name in claims)
    is_cut = any(name.startswith("embedding and head are one matrix") for name in claims)
    assert is_cut == (change is with_a_cut_tie)


def forget_the_optimizer(self, state):
    TRUE_LOAD(self, {**state, "optimizers": [one.state_dict() for one in self.optimizers]})


def forget_the_average(self, state):
    TRUE_LOAD(self, state)
    self.average = EMA(self.network, 0.9)


def start_over_with_the_data(self, start_step, stop_step):
    return TRUE_BATCHES(self, 0, stop_step - start_step)


TRUE_LOAD, TRUE_BATCHES = LLMTask.load_state_dict, LLMTask.batches
RESUMED = "after 10 + 10 steps the {} are those of 20 steps"
FIGURES = "every figure of the log is the same: losses, gradient norms, rates, validation"


@pytest.mark.parametrize(
    ("name", "broken", "claims"),
    [
        ("load_state_dict", forget_the_optimizer, ["weights", "optimiser states"]),
        ("load_state_dict", forget_the_average, ["averaged weights", "best weights"]),
        ("batches", start_over_with_the_data, ["weights", "optimiser states"]),
        ("_seed_dropout", lambda self, step: None, ["weights", "optimiser states"]),
    ],
)
def test_a_resume_that_forgets_something_is_found(corpus, monkeypatch, name, broken, claims):
    monkeypatch.setattr(LLMTask, name, broken)
    config = scratch(corpus, optimizer=ADAMW, llm=tiny_config(dropout=0.1))
    found = failed("resume", config)
    assert {RESUMED.format(claim) for claim in claims} | {FIGURES} <= set(found)


def test_a_training_that_learns_nothing_proves_nothing(corpus):
    optimizer = OptimizerConfig("adamw", 0.0, 0.0, 0.0, 0.9, 0.95, 1.0, 0.0)
    assert failed("resume", scratch(corpus, optimizer=optimizer)) == [
        "the training stopped at step 10, and learnt after it"
    ]


# Bad input.


def test_an_unknown_check_is_refused(corpus):
    with pytest.raises(ConfigError, match="'speed', expected one of collate, pack, lora, merge"):
        run_check("speed", scratch(corpus))


@pytest.mark.parametrize("name", ["lora", "merge"])
def test_adapter_checks_want_a_base_model_and_settings(corpus, bases, name):
    with pytest.raises(ConfigError, match=f"check {name}: llm is built from scratch.* llm=FOLDER"):
        run_check(name, scratch(corpus))
    with pytest.raises(ConfigError, match="lora is null, expected .* give .lora=r_8_alpha_16"):
        run_check(name, adapted(corpus, bases["tied"], lora=None))


def test_a_corpus_where_nothing_fits_is_refused(corpus):
    batching = batching_config(max_length=3)
    with pytest.raises(DataError, match="no utterance .* of at most batching.max_length=3 tokens"):
        run_check("pack", scratch(corpus, batching=batching))


def test_a_base_model_that_is_not_there_is_refused(corpus, tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        run_check("pack", adapted(corpus, tmp_path / "gone"))


# The parts.


def test_a_setup_keeps_the_users_choices_and_leaves_no_file(corpus, bases):
    batching = batching_config(kind="packing", max_tokens=512, max_length=256)
    config = adapted(corpus, bases["untied"], batching=batching)
    with open_setup(config) as setup:
        assert setup.folder.is_dir()
        assert setup.config.batching.kind == "packing"
        assert (setup.config.lora, setup.user) == (LORA, config)
        assert setup.language.base.model.config.tie_word_embeddings is False
        assert len(setup.samples) == 20
        first, second = setup.network(), setup.network()
        assert torch.equal(first.llm.lm_head.weight, second.llm.lm_head.weight)
    assert not setup.folder.exists()


def test_samples_are_cut_where_the_vocabulary_is_large(corpus, bases, monkeypatch):
    monkeypatch.setattr("stage1_llm.checks.setup.MAX_LOGITS", 1000)
    with open_setup(adapted(corpus, bases["tied"], "tagged")) as setup:
        lengths = [sample.length for sample in setup.samples]
        assert max(lengths) <= 3 + 24
        assert len(set(lengths[:4])) > 1  # a batch still has padding
        assert all(len(s.text_ids) and len(s.semantic_tokens) for s in setup.samples)
        whole = [example.sample.length for example in setup.examples]
        assert any(short < long for short, long in zip(lengths, whole, strict=True)) == (
            max(whole) > 27
        )


def test_steps_are_scaled_to_a_training_of_twenty():
    curriculum = CurriculumConfig(6, 1000)
    config = train_config(
        trainer=TrainerConfig(2000, 100, 100, devices=2, accumulate=3, compile=True),
        batching=batching_config(curriculum=curriculum),
    )
    config.loss.text_weight = WeightConfig(0.1, "hold", 1)
    tiny = shrink_settings(config, [5, 10, 15], config.llm, config.corpus)
    assert tiny.schedule.warmup_steps == 1
    assert tiny.batching.curriculum == CurriculumConfig(6, 10)
    assert (tiny.batching.max_tokens, tiny.batching.max_length) == (45, 40)
    assert (tiny.loss.text_weight.steps, tiny.loss.audio_weight.steps) == (1, 0)
    assert (tiny.trainer.max_steps, tiny.trainer.accumulate, tiny.trainer.devices) == (20, 4, 1)
    assert not tiny.trainer.compile


@pytest.mark.parametrize(
    ("heads", "tiny"), [((14, 2), (4, 2)), ((32, 8), (4, 2)), ((4, 4), (2, 2)), ((4, 1), (2, 1))]
)
def test_grouped_heads_stay_grouped(heads, tiny):
    assert tiny_heads(*heads) == tiny


def test_masked_tokens_and_their_durations_are_expected_without_a_label():
    tokens = build_token_map(("a",), 10, Extras(has_mask=True, max_run=9, speakers=("ann",)))
    spec = PromptSpec(durations="tokens", max_run=9)
    audio = np.array([10, 10, 3, 3, 3, 4])  # masked twice, 3 three times
    sample = Sample("x", (tokens.text_offset,), audio, 0, (tokens.tag_offset,))
    groups = expected_groups(sample, tokens, spec)
    #      [TEXT] ann a  [START] <2> mask <3>  3  4  [STOP]
    assert groups.tolist() == [-1, -1, 0, 0, -1, -1, 1, 1, 1, 2]
    prompt = sample_prompt(sample, tokens, spec)
    assert np.array_equal(prompt.groups, groups)
    assert [GROUP_NAMES[group] for group in groups if group != GROUP_NONE][-1] == "end"


@pytest.mark.parametrize("durations", ["none", "tokens", "codebook"])
def test_audio_decodes_to_what_was_encoded(durations):
    tokens = build_token_map(("a",), 10, Extras(max_run=3))
    spec = PromptSpec(durations=durations, max_run=3)
    audio = np.array([[7, 1], [7, 1], [7, 1], [7, 1], [2, 5], [2, 6]])
    prompt = sample_prompt(Sample("x", (tokens.text_offset,), audio, 0), tokens, spec)
    part = slice(prompt.num_text + 1, -1)
    decoded = decode_audio(prompt.token_ids[part], prompt.codes[part], tokens, spec)
    assert decoded.tolist() == audio.tolist()


def test_tensors_are_close_within_a_share_of_the_largest_value():
    wanted = [torch.tensor([1.0, 100.0]), torch.tensor([])]
    assert close("x", [torch.tensor([1.0009, 100.0]), torch.tensor([])], wanted).is_met
    assert not close("x", [torch.tensor([1.002, 100.0]), torch.tensor([])], wanted).is_met
    assert not close("x", [torch.tensor([torch.nan, 100.0]), torch.tensor([])], wanted).is_met
    assert close("x", [torch.ones(2)], [torch.ones(3)]).detail == "shape [2], expected [3]"


def test_identical_names_what_differs():
    one = {"a": torch.ones(2), "b": torch.zeros(2)}
    assert identical("x", one, one).detail == "2 tensors, 4 values, largest difference 0"
    other = {"a": torch.ones(2), "b": torch.tensor([0.0, 0.25])}
    assert identical("x", other, one).detail == (
        "1 of 2 tensors differ, b among them; largest difference 0.25"
    )
    assert identical("x", {"a": torch.ones(2)}, one).detail == "b is on one side alone"
