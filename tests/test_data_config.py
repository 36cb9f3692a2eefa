import pytest
from data_support import prepare_config

from tts_stack.config import load_config
from tts_stack.data.config import PrepareConfig, TextConfig
from tts_stack.errors import ConfigError


def test_the_shipped_settings_load_once_source_and_corpus_are_given():
    config = load_config(PrepareConfig, "prepare", ["source=in", "corpus=out"])
    assert (config.source, config.corpus, config.sample_rate) == ("in", "out", 24000)
    assert config.text.spec().kind == "phonemes"


def test_source_and_corpus_must_be_given():
    with pytest.raises(ConfigError, match="corpus, source must be given"):
        load_config(PrepareConfig, "prepare", [])


def test_loudness_can_be_switched_off_on_the_command_line():
    config = load_config(PrepareConfig, "prepare", ["source=a", "corpus=b", "loudness_db=null"])
    assert config.loudness_db is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sample_rate": 0}, "sample_rate is 0, expected at least 1"),
        ({"shard_size": 0}, "shard_size is 0, expected at least 1"),
        ({"num_workers": -1}, "num_workers is -1, expected 0 or more"),
        ({"trim_threshold_db": -40.0}, "trim_threshold_db is -40.0, expected a positive"),
        ({"loudness_db": 3.0}, "loudness_db is 3.0, expected at most 0 or null"),
        ({"validation_fraction": 1.0}, "validation_fraction is 1.0, expected between 0 and 1"),
        ({"min_seconds": 9.0}, r"min_seconds is 9.0, expected less than max_seconds \(5.0\)"),
        ({"min_characters_per_second": 50.0}, "expected less than max_characters_per_second"),
        ({"text": TextConfig("spoken", "en-us", "gruut")}, "text.kind is 'spoken', expected one"),
    ],
)
def test_settings_that_break_a_rule_are_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        prepare_config(tmp_path, tmp_path, **changes)
