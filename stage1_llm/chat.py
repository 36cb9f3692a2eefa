"""A base model's chat template, rendered once: ids around the text that the contract then fixes."""

import logging
import re
from typing import Any, NamedTuple

from jinja2 import TemplateError

from stage1_llm.vocab import token_names
from tts_stack.contract import TokenMap
from tts_stack.errors import ConfigError

logger = logging.getLogger(__name__)
# Stand for the text and for the audio while the template renders; no template changes such words.
_TEXT_MARK, _AUDIO_MARK = "TextGoesHere", "AudioGoesHere"
_CONTROL = re.compile(r"<\|[^|<>\s]+\|>")


class ChatTemplate(NamedTuple):
    """Ids around the text of a voice's prompt."""

    before: tuple[int, ...]  # up to and with the task token
    after: tuple[int, ...]  # up to where the assistant's answer begins


def render_chat(tokenizer: Any, tokens: TokenMap) -> ChatTemplate:
    """Render the model's chat template around a text and its audio.

    The user's turn is the task token and the text, the assistant's the sound tokens. The ids come
    from the whole conversation, not from the generation prompt: Qwen3's template puts an empty
    thought before an answer, which its generation prompt leaves out.

    Args:
        tokenizer: knows the voice's tokens, see `stage1_llm.base.add_token_names`.
        tokens: the id space.

    Raises:
        ConfigError: there is no chat template, it fails, drops or changes what it is given, or
            writes control tokens that the tokenizer lacks.
    """
    if not tokenizer.chat_template:
        raise ConfigError(
            f"{tokenizer.name_or_path}: the tokenizer has no chat template, and prompt.format is "
            "chat; give an instruct model, or prompt.format=tagged"
        )
    task = token_names(tokens, "chat")[tokens.text_start]
    rendered = render(tokenizer, task + _TEXT_MARK, _AUDIO_MARK)
    before, _, rest = rendered.partition(_TEXT_MARK)
    after, _, end = rest.partition(_AUDIO_MARK)
    marks = (rendered.count(_TEXT_MARK), rendered.count(_AUDIO_MARK))
    if marks != (1, 1) or not before.endswith(task) or not after:
        raise ConfigError(
            f"{tokenizer.name_or_path}: the chat template drops or changes what it is given: "
            f"{task}{_TEXT_MARK} as the user's turn and {_AUDIO_MARK} as the assistant's became "
            f"{rendered[-200:]!r}; use prompt.format=tagged"
        )
    _check_control_tokens(tokenizer, before + after + end)
    ids = [tokenizer.encode(part, add_special_tokens=False) for part in (before, _TEXT_MARK, after)]
    if sum(ids, []) != tokenizer.encode(before + _TEXT_MARK + after, add_special_tokens=False):
        logger.warning(
            "%s: the chat template lets text run into what follows it, so that other programs may "
            "tokenize the prompt a little differently",
            tokenizer.name_or_path,
        )
    return ChatTemplate(tuple(ids[0]), tuple(ids[2]))


def render(tokenizer: Any, user: str, assistant: str) -> str:
    """A conversation of two turns as the template writes it.

    Raises:
        ConfigError: the template fails.
    """
    turns = [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False))
    except (TemplateError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{tokenizer.name_or_path}: the chat template fails ({error}) on a user's and an "
            "assistant's turn; use prompt.format=tagged"
        ) from error


def _check_control_tokens(tokenizer: Any, rendered: str) -> None:
    known = tokenizer.get_vocab()
    lacking = sorted({name for name in _CONTROL.findall(rendered) if name not in known})
    if lacking:
        raise ConfigError(
            f"{tokenizer.name_or_path}: the chat template writes {', '.join(lacking)}, which the "
            "tokenizer does not know; give the tokenizer that the template was made for, or "
            "prompt.format=tagged"
        )
