"""One sample token by token, as training reads it."""

from collections.abc import Iterator

from stage1_llm.checks.layout import Ints
from stage1_llm.checks.report import ShownToken
from stage1_llm.checks.setup import Setup
from stage1_llm.collate import collate_prompts
from stage1_llm.prompt import GROUP_NAMES, GROUP_NONE, Prompt
from stage1_llm.stream import IGNORE_INDEX
from stage1_llm.vocab import token_names


def show_prompt(prompt: Prompt, setup: Setup) -> Iterator[ShownToken]:
    """Each position with its label, and the label's weight at step 0."""
    weights = setup.config.loss.weights(0)
    names = _names(setup, prompt.token_ids)
    batch = collate_prompts([prompt], pad_id=setup.contract.tokens.pad)
    rows = zip(
        batch.input_ids[0].tolist(),
        batch.groups[0].tolist(),
        batch.labels[0].tolist(),
        batch.position_ids[0].tolist(),
        batch.codes[0].tolist(),
        strict=True,
    )
    for token_id, group, label, position, codes in rows:
        has_label = group != GROUP_NONE
        yield ShownToken(
            token_id,
            names[token_id],
            GROUP_NAMES[group] if has_label else "",
            label if label != IGNORE_INDEX else None,
            weights[group] if has_label else 0.0,
            position,
            tuple(code for code in codes if code != IGNORE_INDEX),
        )


def _names(setup: Setup, ids: Ints) -> dict[int, str]:
    """Names of the tokens of a prompt: of the voice, else of the tokenizer."""
    tokens = setup.contract.tokens
    names = token_names(tokens, setup.contract.prompt.format)
    names |= {tokens.text_offset + i: symbol for i, symbol in enumerate(tokens.symbols)}
    base = setup.language.base
    others = [] if base is None else [i for i in ids.tolist() if i not in names]
    return names | {i: base.tokenizer.decode([i]) for i in others if base is not None}
