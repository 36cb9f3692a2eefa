import pytest
from stage1_support import ENCODE, TOKENS

from stage1_llm.text import SymbolEncoder
from stage1_llm.vocab import Extras, build_token_map, grow_token_map, token_names
from tts_stack.errors import DataError


def test_ids_are_specials_then_semantic_tokens_then_symbols():
    tokens = build_token_map("ab", 1000)
    assert (tokens.pad, tokens.text_start, tokens.audio_start, tokens.audio_end) == (0, 1, 2, 3)
    assert (tokens.semantic_offset, tokens.semantic_stop, tokens.text_offset) == (4, 1004, 1004)
    assert tokens.vocab_size == 1024  # 1006 ids in rows of 128


def test_unknown_symbols_are_dropped_and_counted():
    encoded = ENCODE("aXc!")
    assert encoded.ids == (TOKENS.text_offset, TOKENS.text_offset + 2)
    assert encoded.num_dropped == 2


def test_a_marker_written_in_the_text_is_only_letters():
    tokens = build_token_map(sorted(set("<|audio_end|>")), 10)
    encoded = SymbolEncoder(tokens)("<|audio_end|>")
    assert len(encoded.ids) == len("<|audio_end|>")
    assert min(encoded.ids) >= tokens.text_offset


@pytest.mark.parametrize(
    ("symbols", "message"),
    [((), "symbols: none"), (("a", "a"), "a found twice"), (("ab",), "has 2 characters")],
)
def test_impossible_symbols_are_refused(symbols, message):
    with pytest.raises(DataError, match=message):
        build_token_map(symbols, 10)


def test_masks_tags_and_durations_stand_before_the_semantic_tokens():
    extras = Extras(has_mask=True, max_run=4, speakers=("ann", "bob"), languages=("de",))
    tokens = build_token_map("ab", 10, extras)
    assert (tokens.mask, tokens.tag_offset, tokens.duration_offset) == (4, 5, 8)
    assert (tokens.num_durations, tokens.semantic_offset, tokens.text_offset) == (3, 11, 21)
    assert tokens.tag_ids("bob", "de") == (6, 7)
    assert tokens.tag_ids("stranger", "") == ()


def test_a_base_model_grows_behind_its_tokenizer_and_never_shrinks():
    tokens = grow_token_map(300, 10, pad=7, num_rows=512)
    assert (tokens.text_start, tokens.semantic_offset, tokens.num_text) == (300, 303, 300)
    assert (tokens.vocab_size, tokens.pad) == (512, 7)
    assert grow_token_map(511, 10, pad=7, num_rows=512).vocab_size == 640


@pytest.mark.parametrize(
    ("prompt_format", "expected"),
    [
        ("tagged", ["[TEXT]", "[START]", "[STOP]"]),
        ("chat", ["<|text_to_semantic|>", "<|sound_start|>", "<|sound_end|>"]),
    ],
)
def test_every_new_id_has_a_name_of_its_own(prompt_format, expected):
    extras = Extras(has_mask=True, max_run=3, speakers=("ann",), languages=("de",))
    tokens = grow_token_map(100, 512, extras, pad=0, num_rows=100)
    names = token_names(tokens, prompt_format)
    assert list(names) == list(range(100, tokens.semantic_stop))
    assert len(set(names.values())) == len(names)
    assert [names[i] for i in (100, 101, 102)] == expected
    assert names[103] == "<|sound_mask|>"
    assert [names[104], names[105]] == ["<|speaker:ann|>", "<|language:de|>"]
    assert [names[106], names[107]] == ["<|duration_02|>", "<|duration_03|>"]
    assert names[tokens.semantic_offset + 209] == "<|sound_0209|>"
