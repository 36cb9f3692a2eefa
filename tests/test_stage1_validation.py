import math

import pytest
import torch
from stage1_support import TOKENS

from stage1_llm.network import Predictions
from stage1_llm.validation import length_error, stop_sums

END = TOKENS.audio_end


def test_a_model_that_stops_where_it_should_has_no_length_error():
    assert float(length_error(torch.tensor([0.0, 0.0, 0.0, 1.0]))) == 0


def test_the_expected_length_by_hand():
    # Stops after 1 token with 1/2, after 2 with 1/2 * 1: E = 1/2 * 1 + 1/2 * 2 = 1.5 of 2.
    assert float(length_error(torch.tensor([0.0, 0.5, 1.0]))) == pytest.approx(0.25)
    # Never before the end; there with 1/2 at every further token: one token too many on average.
    assert float(length_error(torch.tensor([0.0, 0.0, 0.5]))) == pytest.approx(0.5)


def test_a_model_that_never_stops_errs_by_one_length():
    assert float(length_error(torch.zeros(5))) == pytest.approx(1.0)


def test_stops_are_counted_where_they_belong_and_where_not():
    labels = torch.tensor([TOKENS.text_offset, 5, 6, END, 7, END])
    groups = torch.tensor([0, 1, 1, 2, 1, 2])
    said = torch.tensor([END, 5, END, END, 9, 8])  # one true stop, one false, one missed
    logits = torch.full((6, TOKENS.vocab_size), -math.inf).scatter(1, said[:, None], 0.0)
    logits = logits.clamp(min=-50)
    found = stop_sums(Predictions(logits, labels, groups, (), torch.zeros(6, 0)), END)
    assert (found.samples, found.true_stops, found.false_stops) == (2, 1, 1)
    assert found.first_audio_hits == 1  # 5 was right, 9 was not 7
    assert found.length_error == pytest.approx(0.5 + 1.0)
