import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch
from stage1_support import TOKENS, make_contract, tiny_network
from torch.testing import assert_close

from stage1_llm import generate as generation
from stage1_llm.decoder import Decoded
from stage1_llm.generate import (
    SamplingSettings,
    TokenBounds,
    TokenStream,
    choose_token,
    generate,
    is_stuck,
    keep_top_p,
    token_bounds,
)
from tts_stack.contract import LengthSpec
from tts_stack.errors import ConfigError, DataError

TEXT = (TOKENS.text_offset, TOKENS.text_offset + 1)
GREEDY = SamplingSettings(temperature=0)


class Script:
    """A decoder that prefers given ids in turn; its state counts positions."""

    def __init__(self, ids):
        self.ids, self.count, self.read = iter(ids), 0, []

    def _next(self):
        logits = torch.zeros(TOKENS.vocab_size)
        logits[next(self.ids)] = 5
        logits[TOKENS.audio_end] += 1  # a strong second choice
        self.count += 1
        state = torch.tensor([float(self.count - 1)])
        return Decoded(state, logits, state)

    def prefill(self, prefix):
        return self._next()

    def step(self, token_id, position, codes=()):
        self.read.append((token_id, position))
        return self._next()


def speak(monkeypatch, ids, settings=GREEDY, contract=None):
    script = Script(ids)
    monkeypatch.setattr(generation, "make_decoder", lambda *args, **kwargs: script)
    contract = contract or make_contract()
    network = SimpleNamespace(codebooks=None)
    return generate(network, contract, TEXT, settings, torch.Generator()), script


def semantic(*tokens):
    return [TOKENS.semantic_offset + token for token in tokens]


def test_generation_stops_at_the_end_token(monkeypatch):
    spoken, script = speak(monkeypatch, [*semantic(3, 1), TOKENS.audio_end])
    assert spoken.semantic_tokens.tolist() == [3, 1]
    assert spoken.finish_reason == "end"
    assert script.read == [(7, 4.0), (5, 5.0)]


@pytest.mark.parametrize(("position", "states"), [("reads", [1, 2]), ("predicts", [0, 1])])
def test_each_token_has_the_state_of_the_contracts_position(monkeypatch, position, states):
    contract = make_contract(state_position=position)
    spoken, _ = speak(monkeypatch, [*semantic(3, 1), TOKENS.audio_end], contract=contract)
    assert spoken.hidden_states[:, 0].tolist() == states


def test_aligned_audio_is_read_at_positions_from_one(monkeypatch):
    contract = make_contract(position_scheme="aligned", text_stride=2.0)
    _, script = speak(monkeypatch, [*semantic(3, 1), TOKENS.audio_end], contract=contract)
    assert [position for _, position in script.read] == [1.0, 2.0]


def test_the_end_is_forbidden_below_the_lower_bound(monkeypatch):
    settings = dataclasses.replace(GREEDY, min_tokens=3)
    spoken, _ = speak(monkeypatch, [TOKENS.audio_end] * 9, settings)
    assert len(spoken.semantic_tokens) == 3
    assert spoken.finish_reason == "end"


def test_the_upper_bound_ends_an_utterance_and_says_so(monkeypatch):
    settings = dataclasses.replace(GREEDY, max_tokens=4)
    spoken, _ = speak(monkeypatch, itertools.cycle(semantic(1, 2, 3, 4, 5)), settings)
    assert spoken.semantic_tokens.tolist() == [1, 2, 3, 4]
    assert spoken.hidden_states[:, 0].tolist() == [1, 2, 3, 4]
    assert spoken.finish_reason == "length"


@pytest.mark.parametrize("cycle", [(3,), (3, 4), (1, 2, 3, 4, 5, 6, 7, 8)])
def test_a_short_cycle_is_reported_as_repetition(monkeypatch, cycle):
    settings = dataclasses.replace(GREEDY, max_tokens=200, stuck_tokens=20)
    spoken, _ = speak(monkeypatch, itertools.cycle(semantic(*cycle)), settings)
    assert spoken.finish_reason == "repetition"
    assert len(spoken.semantic_tokens) == 28


def test_text_and_markers_are_never_spoken(monkeypatch):
    forbidden = [TOKENS.text_offset, TOKENS.audio_start, TOKENS.pad, TOKENS.text_start]
    spoken, _ = speak(
        monkeypatch, forbidden * 3, dataclasses.replace(GREEDY, min_tokens=8, max_tokens=8)
    )
    assert len(spoken.semantic_tokens) == 8
    assert 0 <= spoken.semantic_tokens.min() <= spoken.semantic_tokens.max() < TOKENS.codebook_size


def test_a_varied_tail_is_not_stuck():
    assert not is_stuck([1, 2] * 9 + [3], 10)
    assert not is_stuck([1] * 10, 10)  # too short to know
    assert not is_stuck([1] * 100, 0)


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others():
    network, settings = tiny_network(), SamplingSettings(1.0, 1.0, min_tokens=20, max_tokens=20)

    def tokens(seed):
        generator = torch.Generator().manual_seed(seed)
        return generate(
            network, make_contract(), TEXT, settings, generator
        ).semantic_tokens.tolist()

    assert tokens(1) == tokens(1) != tokens(2)


def test_a_stream_yields_what_generate_returns():
    network, settings = tiny_network(), SamplingSettings(min_tokens=5, max_tokens=9)
    whole = generate(network, make_contract(), TEXT, settings, torch.Generator().manual_seed(0))
    stream = TokenStream(network, make_contract(), TEXT, settings, torch.Generator().manual_seed(0))
    steps = list(stream)
    assert [step.semantic_token for step in steps] == whole.semantic_tokens.tolist()
    assert_close(torch.stack([step.hidden_state for step in steps]), whole.hidden_states)
    assert stream.finish_reason == whole.finish_reason


def test_bounds_grow_with_the_text_and_settings_come_first():
    length = LengthSpec(tokens_per_symbol=2.0, low=1.0, high=3.0, fixed_tokens=5.0)
    assert token_bounds(10, length, GREEDY) == TokenBounds(12, 56)  # 0.8 * 15, 1.3 * 35 + 10
    assert token_bounds(10, length, dataclasses.replace(GREEDY, max_tokens=7)) == (7, 7)
    assert token_bounds(10, LengthSpec(), GREEDY) == TokenBounds(1, 1000)


def test_top_p_keeps_the_fewest_tokens_that_hold_it():
    probabilities = torch.tensor([0.2, 0.5, 0.1, 0.2])
    assert_close(keep_top_p(probabilities, 0.4), torch.tensor([0.0, 0.5, 0.0, 0.0]))
    assert keep_top_p(probabilities, 0.6).count_nonzero() == 2
    assert_close(keep_top_p(probabilities, 1.0), probabilities)


def test_repetition_aware_sampling_leaves_a_worn_out_token():
    scores = torch.tensor([2.0, 1.9, 1.8])
    settings = SamplingSettings(1.0, 0.01, repetition_window=4, repetition_share=0.5)
    generator = torch.Generator().manual_seed(0)
    fresh = {choose_token(scores, -torch.inf, [], settings, generator) for _ in range(20)}
    worn = {choose_token(scores, -torch.inf, [0] * 4, settings, generator) for _ in range(40)}
    assert fresh == {0}
    assert worn == {0, 1, 2}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_p": 0.0}, "top_p is 0.0, expected above 0"),
        ({"max_tokens": 3, "min_tokens": 5}, "max_tokens is 3, expected at least 1 and min_tokens"),
    ],
)
def test_impossible_settings_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        SamplingSettings(**values)


def test_an_empty_text_is_refused():
    with pytest.raises(DataError, match="no text symbol"):
        generate(tiny_network(), make_contract(), (), GREEDY, torch.Generator())
