"""`run_check`: one check by its name, on a user's own settings."""

from collections.abc import Callable

from stage1_llm.checks.adapter import check_lora, require_adapter
from stage1_llm.checks.collate import check_collate
from stage1_llm.checks.merged import check_merge
from stage1_llm.checks.pack import check_pack
from stage1_llm.checks.report import Report
from stage1_llm.checks.resume import check_resume
from stage1_llm.checks.setup import Setup, open_setup
from stage1_llm.config import LLMTrainConfig
from tts_stack.errors import ConfigError

CHECKS: dict[str, Callable[[Setup], Report]] = {
    "collate": check_collate,
    "pack": check_pack,
    "lora": check_lora,
    "merge": check_merge,
    "resume": check_resume,
}
NEED_ADAPTER = ("lora", "merge")


def run_check(name: str, config: LLMTrainConfig) -> Report:
    """Prove the claims of one check with a tiny random model; writes nothing that stays.

    Args:
        name: one of CHECKS.
        config: settings of `tts-stack train-llm`.

    Raises:
        ConfigError: there is no such check, or the settings do not fit together or to the check.
        DataError: the corpus is not tokenised, or holds nothing to train on.
        CheckpointError: the base model is not found, or has no tokenizer that fits.
    """
    if name not in CHECKS:
        raise ConfigError(f"check is {name!r}, expected one of {', '.join(CHECKS)}")
    if name in NEED_ADAPTER:
        require_adapter(config, name)
    with open_setup(config) as setup:
        return CHECKS[name](setup)
