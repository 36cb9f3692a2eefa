import math

import pytest
from stage1_support import batching_config, loss_config, tiny_config

from stage1_llm.config import LLMTrainConfig, OptimizerConfig, SamplingConfig
from tts_stack.config import load_config
from tts_stack.errors import ConfigError

REQUIRED = ["corpus=a", "run=b"]


@pytest.mark.parametrize("choice", ["llama_5m", "llama_10m", "qwen3_5m", "tiny"])
def test_every_model_choice_loads(choice):
    config = load_config(LLMTrainConfig, "train_llm", [*REQUIRED, f"llm={choice}"])
    assert config.llm.base_model is None


@pytest.mark.parametrize("choice", ["demo_llm", "joe_llm"])
def test_every_experiment_loads(choice):
    config = load_config(LLMTrainConfig, "train_llm", [*REQUIRED, f"experiment={choice}"])
    assert config.schedule.warmup_steps < config.trainer.max_steps


def test_an_override_beats_the_experiment():
    overrides = [*REQUIRED, "experiment=demo_llm", "trainer.max_steps=7"]
    assert load_config(LLMTrainConfig, "train_llm", overrides).trainer.max_steps == 7


def test_corpus_and_run_must_be_given():
    with pytest.raises(ConfigError, match="corpus, run must be given"):
        load_config(LLMTrainConfig, "train_llm")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tiny_config(architecture="gpt"), "llm.architecture is 'gpt', expected one of"),
        (lambda: tiny_config(num_heads=3), "hidden_size is 32, expected a multiple of twice"),
        (lambda: tiny_config(num_kv_heads=3), "num_kv_heads is 3, expected a divisor"),
        (
            lambda: batching_config(max_tokens=10, max_length=20),
            "max_length is 20, expected at most",
        ),
        (lambda: loss_config(-1.0), "loss.text_weight.value is -1.0, expected at least 0"),
        (lambda: loss_config(1, math.nan), "loss.audio_weight.value is nan, expected at least 0"),
        (lambda: tiny_config(head_dim=7), "head_dim is 7, expected an even number"),
        (lambda: tiny_config(dropout=1.0), "llm.dropout is 1.0, expected at least 0 and below 1"),
        (lambda: OptimizerConfig(lr=math.nan), "optimizer.lr is nan, expected at least 0"),
        (lambda: OptimizerConfig(beta2=1.0), "optimizer.beta2 is 1.0, expected at least 0 and"),
        (lambda: SamplingConfig(0.5, 0.0), "sampling.top_p is 0.0, expected more than 0 and"),
        (lambda: OptimizerConfig(kind="sgd"), "optimizer.kind is 'sgd'"),
        (
            lambda: LLMTrainConfig(token_noise=1.5),
            "token_noise is 1.5, expected at least 0 and below 1",
        ),
    ],
)
def test_values_out_of_range_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{value: 0.1}", [0.1, 0.1, 0.1]),
        ("{kind: hold, value: 0.1, steps: 5, final: 0.01}", [0.1, 0.01, 0.01]),
        ("{kind: linear, value: 0.2, steps: 8, final: 0.1}", [0.2, 0.15, 0.1]),
    ],
)
def test_a_weight_schedule_is_one_line(line, expected):
    override = f"loss.text_weight={line}".replace(": ", ":").replace(", ", ",")
    weight = load_config(LLMTrainConfig, "train_llm", [*REQUIRED, override]).loss.text_weight
    steps = [0, 5, 9] if "hold" in line else [0, 4, 9]
    assert [weight.at(step) for step in steps] == pytest.approx(expected)


def test_a_value_for_a_group_names_a_setting_inside_it():
    with pytest.raises(ConfigError, match=r"give one of them: loss.text_weight.value=0.5$"):
        load_config(LLMTrainConfig, "train_llm", [*REQUIRED, "loss.text_weight=0.5"])
