"""One row of instruction data <-> text, semantic tokens and whatever else the row holds.

{"messages": [{"role": "user", "content": "<|text_to_semantic|>hello"},
              {"role": "assistant", "content": "<|sound_start|><|sound_0209|>…<|sound_end|>"}]}
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tts_stack.data.corpora.source import why_unsafe
from tts_stack.data.malformed import MalformedError
from tts_stack.data.sound_tokens import parse_sound, render_sound
from tts_stack.errors import DataError
from tts_stack.shards import TokenRow
from tts_stack.token_names import TASK_TOKEN

JsonObject = dict[str, Any]
_TURN_KEYS = ("messages", "conversations")
_SPELLINGS = (("role", "content"), ("from", "value"))
_ROLES = {"system": "system", "user": "user", "human": "user"} | dict.fromkeys(
    ("assistant", "gpt"), "assistant"
)
_DIALOGUES = (["user", "assistant"], ["system", "user", "assistant"])


@dataclass(frozen=True)
class _Turn:
    role: str  # system, user or assistant
    content: str
    content_key: str


def parse_record(
    record: object, number: int, codebook_size: int, frontend: Callable[[str], str]
) -> TokenRow:
    """Take a row apart: text, tokens, and in `instruction` whatever else it holds.

    Args:
        record: the row as JSON gives it.
        number: of the row, from 1.
        codebook_size: sound tokens.
        frontend: text -> what the LLM reads; raises DataError where there is nothing to speak.

    Raises:
        MalformedError: the row has another form; `reason` says which rule it breaks.
    """
    if not isinstance(record, dict):
        raise MalformedError(
            "not_json", f"found a {type(record).__name__}, expected an object with messages"
        )
    key, turns = _read_turns(record)
    user, assistant = turns[-2], turns[-1]
    prefix, text = _split_task(user.content)
    codes = parse_sound(assistant.content, codebook_size)
    rest: JsonObject = {"row": number, "turns": key, "prefix": prefix}
    rest |= _describe_form(assistant.content, codes, codebook_size)
    rest["record"] = _without_contents(record, key, turns)
    return TokenRow(
        id=_id(record, number),
        text=text,
        model_text=_model_text(text, frontend),
        speaker=_name(record, "speaker"),
        language=_name(record, "language").lower(),
        semantic_tokens=codes,
        instruction=_to_json(rest),
    )


def restore_record(
    text: str, codes: NDArray[np.int64], instruction: str, codebook_size: int
) -> JsonObject:
    """The row that `parse_record` took apart."""
    values = json.loads(instruction)
    record: JsonObject = values["record"]
    turns = record[values["turns"]]
    sound = values.get("sound")
    if sound is None:
        sound = render_sound(codes, codebook_size, durations=values["durations"])
    for turn, content in zip(turns[-2:], (values["prefix"] + text, sound), strict=True):
        turn[_spelling(turn)[1]] = content
    return record


def row_number(instruction: str) -> int:
    """Number of the row in its source, from 1."""
    return int(json.loads(instruction)["row"])


def make_record(
    text: str,
    codes: NDArray[np.int64],
    codebook_size: int,
    *,
    durations: bool = False,
    **others: str,
) -> JsonObject:
    """A row for an utterance that did not come from instruction data; empty `others` are left out.

    Args:
        text: what is spoken.
        codes: semantic tokens [S].
        codebook_size: sound tokens.
        durations: collapse runs and put duration tokens before them.
        **others: id, speaker, language.
    """
    sound = render_sound(codes, codebook_size, durations=durations)
    messages = [
        {"role": "user", "content": TASK_TOKEN + text},
        {"role": "assistant", "content": sound},
    ]
    return {"messages": messages} | {key: value for key, value in others.items() if value}


def _read_turns(record: JsonObject) -> tuple[str, list[_Turn]]:
    found = [key for key in _TURN_KEYS if isinstance(record.get(key), list)]
    if not found:
        keys = ", ".join(sorted(map(str, record))) or "none"
        raise MalformedError(
            "no_turns", f"no list {' or '.join(_TURN_KEYS)}, expected one (keys found: {keys})"
        )
    turns = [_read_turn(turn, index) for index, turn in enumerate(record[found[0]], start=1)]
    roles = [turn.role for turn in turns]
    for role in ("user", "assistant"):
        if role not in roles:
            raise MalformedError(
                "missing_role",
                f"no {role} turn, expected one (found: {', '.join(roles) or 'none'})",
            )
    if roles not in _DIALOGUES:
        raise MalformedError(
            "wrong_turns",
            f"turns are {', '.join(roles)}; expected user, assistant, with at most a system turn "
            "before them",
        )
    return found[0], turns


def _read_turn(turn: object, index: int) -> _Turn:
    if not isinstance(turn, dict):
        raise MalformedError(
            "bad_content", f"turn {index} is a {type(turn).__name__}, expected role and content"
        )
    role_key, content_key = _spelling(turn)
    role, content = turn.get(role_key), turn.get(content_key)
    if not isinstance(content, str):
        raise MalformedError(
            "bad_content",
            f"{content_key} of turn {index} is {type(content).__name__}, expected a string",
        )
    return _Turn(_ROLES.get(str(role), str(role)), content, content_key)


def _spelling(turn: JsonObject) -> tuple[str, str]:
    return next((pair for pair in _SPELLINGS if turn.get(pair[0]) is not None), _SPELLINGS[0])


def _split_task(content: str) -> tuple[str, str]:
    """Everything up to the task token, and the text; control tokens in the text are text."""
    before, task, text = content.partition(TASK_TOKEN)
    if not task or before.strip():
        raise MalformedError(
            "no_task_token",
            f"user turn begins with {content[:24]!r}, expected {TASK_TOKEN} before the text",
        )
    return before + task, text


def _model_text(text: str, frontend: Callable[[str], str]) -> str:
    try:
        text.encode()
        return frontend(text)
    except UnicodeEncodeError as error:
        raise MalformedError(
            "unusable_text", f"text holds half a surrogate pair ({error.reason}), expected Unicode"
        ) from error
    except DataError as error:
        raise MalformedError("unusable_text", str(error)) from error


def _describe_form(content: str, codes: NDArray[np.int64], codebook_size: int) -> JsonObject:
    """How to write the codes again: a rule where it gives the same text, else the text itself."""
    durations = "<|duration_" in content
    if render_sound(codes, codebook_size, durations=durations) == content:
        return {"durations": durations}
    return {"sound": content}


def _without_contents(record: JsonObject, key: str, turns: list[_Turn]) -> JsonObject:
    last = [
        turn | {read.content_key: None}
        for turn, read in zip(record[key][-2:], turns[-2:], strict=True)
    ]
    return record | {key: [*record[key][:-2], *last]}


def _to_json(values: JsonObject) -> str:
    try:
        return json.dumps(values, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise MalformedError(
            "not_json", f"row holds a value that JSON cannot ({error}); drop that column"
        ) from error


def _id(record: JsonObject, number: int) -> str:
    """The row's own id where it can name a file, else its number."""
    id = record.get("id")
    return id if isinstance(id, str) and why_unsafe(id) is None else f"row-{number}"


def _name(record: JsonObject, key: str) -> str:
    value = record.get(key)
    return value if isinstance(value, str) and value.isprintable() else ""
