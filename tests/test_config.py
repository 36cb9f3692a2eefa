from dataclasses import dataclass, field

import pytest
from omegaconf import MISSING

from tts_stack import config as config_module
from tts_stack.config import load_config
from tts_stack.errors import ConfigError


@dataclass
class Trainer:
    max_steps: int = MISSING
    seed: int = 0


@dataclass
class Root:
    corpus: str = MISSING
    trainer: Trainer = field(default_factory=Trainer)


@pytest.fixture
def configs(tmp_path, monkeypatch):
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "short.yaml").write_text("max_steps: 5\n", encoding="utf-8")
    (tmp_path / "trainer" / "long.yaml").write_text("max_steps: 500\n", encoding="utf-8")
    (tmp_path / "root.yaml").write_text("defaults:\n- trainer: short\n- _self_\n", encoding="utf-8")
    monkeypatch.setattr(config_module, "config_dir", lambda: tmp_path)
    return tmp_path


def test_yaml_and_overrides_become_a_checked_dataclass(configs):
    config = load_config(Root, "root", ["corpus=a/b", "trainer.seed=7"])
    assert config == Root("a/b", Trainer(5, 7))


def test_a_group_is_chosen_by_name(configs):
    assert load_config(Root, "root", ["corpus=x", "trainer=long"]).trainer.max_steps == 500


@pytest.mark.parametrize("path", ["my corpus (1)", "it's", "a=b", "ü/ä", "a,b", "back\\slash"])
def test_a_path_of_any_characters_arrives_unchanged(configs, path):
    assert load_config(Root, "root", [f"corpus={path}"]).corpus == path


def test_an_unknown_key_names_the_nearest_valid_one(configs):
    with pytest.raises(ConfigError, match=r"unknown key trainer\.max_step; .* trainer\.max_steps"):
        load_config(Root, "root", ["corpus=x", "trainer.max_step=3"])


def test_an_unknown_top_level_key_is_found_too(configs):
    with pytest.raises(ConfigError, match="unknown key corpsu; the nearest valid key is corpus"):
        load_config(Root, "root", ["corpus=x", "corpsu=3"])


def test_an_unknown_choice_names_the_nearest_one(configs):
    with pytest.raises(ConfigError, match=r"no config trainer/lang; did you mean trainer=long"):
        load_config(Root, "root", ["corpus=x", "trainer=lang"])


def test_a_wrong_type_names_key_and_value(configs):
    with pytest.raises(ConfigError, match=r"(?s)seed.*'many'|'many'.*seed"):
        load_config(Root, "root", ["corpus=x", "trainer.seed=many"])


def test_a_missing_value_is_asked_for(configs):
    with pytest.raises(ConfigError, match=r"corpus must be given, as corpus=…"):
        load_config(Root, "root", [])


def test_an_override_without_a_value_is_an_error(configs):
    with pytest.raises(ConfigError, match="'fast' has no value, expected key=value"):
        load_config(Root, "root", ["corpus=x", "fast"])
