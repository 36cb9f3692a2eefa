"""What the command line allows beside Hydra's grammar: llm=FOLDER, llm=HUB/NAME, lora=NAME."""

from collections.abc import Collection, Sequence
from pathlib import Path

_KEY, _LORA = "llm=", "lora="


def resolve_llm_override(overrides: Sequence[str], choices: Collection[str]) -> list[str]:
    """Turn `llm=VALUE` into a base model where VALUE is a folder or a hub name.

    `lora=NAME` becomes `+lora=NAME`, as Hydra wants a group that has no default.

    Args:
        overrides: as the user wrote them.
        choices: files of configs/llm/; they come first, and so does the message on a wrong one.
    """
    found: list[str] = []
    for override in overrides:
        if override.startswith(_LORA) and override != f"{_LORA}null":
            override = f"+{override}"
        value = override.removeprefix(_KEY)
        is_choice = not override.startswith(_KEY) or value in choices
        if is_choice or not ("/" in value or Path(value).expanduser().is_dir()):
            found.append(override)
        else:
            found += [f"{_KEY}base", f"llm.base_model={value}"]
    return found
