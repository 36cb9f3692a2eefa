"""Names of a voice's tokens, in a tokenizer and in instruction data alike (Ichigo's chat form)."""

from functools import lru_cache

TASK_TOKEN = "<|text_to_semantic|>"
SOUND_START, SOUND_END, SOUND_MASK = "<|sound_start|>", "<|sound_end|>", "<|sound_mask|>"
_MIN_DIGITS = 4  # of a sound token's number: <|sound_0209|>


@lru_cache(maxsize=4)
def sound_names(codebook_size: int) -> tuple[str, ...]:
    """Name of each semantic token, in order."""
    digits = max(_MIN_DIGITS, len(str(codebook_size - 1)))
    return tuple(f"<|sound_{code:0{digits}d}|>" for code in range(codebook_size))


def duration_name(length: int) -> str:
    """Name of the token that stretches the one behind it over `length` tokens (Speechless)."""
    return f"<|duration_{length:02d}|>"
