import pytest
from stage1_support import TOKENS

from stage1_llm.vocab import build_token_map, encode_text
from tts_stack.errors import DataError


def test_ids_are_specials_then_semantic_tokens_then_symbols():
    tokens = build_token_map("ab", 1000)
    assert (tokens.pad, tokens.text_start, tokens.audio_start, tokens.audio_end) == (0, 1, 2, 3)
    assert (tokens.semantic_offset, tokens.semantic_stop, tokens.text_offset) == (4, 1004, 1004)
    assert tokens.vocab_size == 1024  # 1006 ids in rows of 64


def test_unknown_symbols_are_dropped_and_counted():
    encoded = encode_text("aXc!", TOKENS)
    assert encoded.ids == (TOKENS.text_offset, TOKENS.text_offset + 2)
    assert encoded.num_dropped == 2


def test_a_marker_written_in_the_text_is_only_letters():
    tokens = build_token_map(sorted(set("<|audio_end|>")), 10)
    encoded = encode_text("<|audio_end|>", tokens)
    assert len(encoded.ids) == len("<|audio_end|>")
    assert min(encoded.ids) >= tokens.text_offset


@pytest.mark.parametrize(
    ("symbols", "message"),
    [((), "symbols: none"), (("a", "a"), "a found twice"), (("ab",), "has 2 characters")],
)
def test_impossible_symbols_are_refused(symbols, message):
    with pytest.raises(DataError, match=message):
        build_token_map(symbols, 10)
