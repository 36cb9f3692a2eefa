import dataclasses
from dataclasses import dataclass, field

import pytest
from omegaconf import MISSING

from tts_stack.errors import ConfigError
from tts_stack.runtime import open_run_dir
from tts_stack.training import ScheduleConfig, TrainerConfig


@dataclass
class Optimizer:
    lr: float = MISSING
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])


@dataclass
class Phase:
    max_steps: int | None = None
    batch_size: int = 4


@dataclass
class Lora:
    r: int = 8


@dataclass
class Config:
    corpus: str = "corpus"
    run: str = "run"
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(0.002))
    schedule: ScheduleConfig = field(default_factory=lambda: ScheduleConfig("constant", 0))
    trainer: TrainerConfig = field(default_factory=lambda: TrainerConfig(10, 5, 5))
    phase: Phase = field(default_factory=Phase)
    lora: Lora | None = None


def config(trainer=(), **changes):
    return Config(trainer=TrainerConfig(**{**TRAINER, **dict(trainer)}), **changes)


TRAINER = {"max_steps": 10, "validate_every": 5, "checkpoint_every": 5}


@pytest.fixture
def run(tmp_path):
    """A folder in which a training with the settings of `config()` has left a checkpoint."""
    folder = open_run_dir(tmp_path / "llm", config(), resume=False)
    leave_checkpoint(folder)
    return folder


def leave_checkpoint(folder):
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / "checkpoints" / "last.ckpt").write_bytes(b"")


def test_one_difference_is_told_in_one_line(run):
    with pytest.raises(ConfigError) as found:
        open_run_dir(run, config(optimizer=Optimizer(0.001)), resume=True)
    assert str(found.value) == (
        f"{run}: --resume with other settings: optimizer.lr was 0.002, is 0.001; "
        "use the old values or another run=…"
    )


def test_several_differences_are_told_one_a_line(run):
    other = config({"seed": 3}, optimizer=Optimizer(0.001, [0.9, 0.999]), lora=Lora(4))
    with pytest.raises(ConfigError) as found:
        open_run_dir(run, other, resume=True)
    assert str(found.value).splitlines()[1:-1] == [
        "  lora was null, is not set;",
        "  lora.r was not set, is 4;",
        "  optimizer.betas was [0.9, 0.95], is [0.9, 0.999];",
        "  optimizer.lr was 0.002, is 0.001;",
        "  trainer.seed was 0, is 3;",
    ]


def test_a_refused_resume_leaves_the_old_settings_on_record(run):
    before = (run / "config.yaml").read_text(encoding="utf-8")
    with pytest.raises(ConfigError):
        open_run_dir(run, config({"seed": 3}), resume=True)
    assert (run / "config.yaml").read_text(encoding="utf-8") == before


@pytest.mark.parametrize(
    "change",
    [
        {"max_steps": 20},
        {"validate_every": 1, "checkpoint_every": 1, "log_every": 1},
        {"device": "cpu", "num_threads": 2, "strategy": "ddp"},
        {"compile": True, "gradient_checkpointing": True},
        {"max_nonfinite_steps": 1, "wandb_project": "speech"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_settings_that_do_not_change_the_mathematics_may_change(run, change):
    open_run_dir(run, config(change), resume=True)
    assert f"{list(change)[0]}: {next(iter(change.values()))}".lower() in (
        (run / "config.yaml").read_text(encoding="utf-8").lower()
    )


def test_corpus_and_run_may_move_and_phases_may_get_longer(run):
    moved = config(corpus="elsewhere", run="there", phase=Phase(max_steps=100))
    open_run_dir(run, moved, resume=True)


def test_a_step_may_be_divided_otherwise_but_not_grow(tmp_path):
    folder = open_run_dir(tmp_path / "llm", config({"accumulate": 4}), resume=False)
    leave_checkpoint(folder)
    open_run_dir(folder, config({"accumulate": 1, "devices": 2, "num_nodes": 2}), resume=True)
    with pytest.raises(ConfigError, match=r"trainer\.devices was 2, is 4"):
        open_run_dir(folder, config({"devices": 4, "num_nodes": 2}), resume=True)


def test_a_group_that_a_run_does_not_use_may_change(run):
    other = config(phase=Phase(batch_size=8))
    with pytest.raises(ConfigError, match=r"phase\.batch_size was 4, is 8"):
        open_run_dir(run, other, resume=True)
    open_run_dir(run, other, resume=True, unused=("phase",))


def test_a_setting_newer_than_the_run_counts_as_its_default(run):
    path = run / "config.yaml"
    lines = path.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if "batch_size" not in line and "precision" not in line]
    path.write_text("\n".join(kept), encoding="utf-8")
    open_run_dir(run, config(), resume=True)
    path.write_text("\n".join(kept), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"trainer\.precision was 32-true, is bf16-mixed"):
        open_run_dir(run, config({"precision": "bf16-mixed"}), resume=True)


def test_a_longer_run_under_a_cosine_is_warned_of(tmp_path, caplog):
    schedule = ScheduleConfig("cosine", 0)
    folder = open_run_dir(tmp_path / "llm", config(schedule=schedule), resume=False)
    leave_checkpoint(folder)
    open_run_dir(folder, config(schedule=schedule), resume=True)
    assert not caplog.records
    open_run_dir(folder, config({"max_steps": 20}, schedule=schedule), resume=True)
    (record,) = caplog.records
    assert "trainer.max_steps was 10, is 20; a cosine schedule depends on" in record.getMessage()


def test_a_longer_run_under_a_constant_rate_is_not(run, caplog):
    open_run_dir(run, config({"max_steps": 20}), resume=True)
    assert not caplog.records


def test_a_damaged_record_of_the_settings_is_named(run):
    (run / "config.yaml").write_text("trainer: [", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.yaml: cannot be read"):
        open_run_dir(run, config(), resume=True)


def test_a_folder_without_a_checkpoint_takes_any_settings(tmp_path):
    open_run_dir(tmp_path, config(), resume=False)
    open_run_dir(tmp_path, dataclasses.replace(config(), corpus="b", lora=Lora()), resume=True)


def test_processes_beside_the_main_one_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    open_run_dir(tmp_path / "llm", config(), resume=False)
    assert not (tmp_path / "llm").exists()
