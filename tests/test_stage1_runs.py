import itertools

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from stage1_llm.runs import (
    Runs,
    collapse_runs,
    durations_as_codebook,
    durations_from_codebook,
    expand_runs,
    interleave_durations,
    length_saved,
    read_durations,
)
from tts_stack.contract import MIN_RUN
from tts_stack.errors import ConfigError

SHAPES = [(length, codebooks) for length in (0, 1, 2, 3, 17, 200) for codebooks in (0, 1, 2, 4)]
CASES = [(*shape, max_run) for shape in SHAPES for max_run in (1, 2, 3, 8, 99)]


def random_tokens(length: int, codebooks: int, seed: int = 0) -> np.ndarray:
    """[S], or [S, K]; two codes alone, so that there are long runs."""
    random = np.random.default_rng([seed, length, codebooks])
    shape = (length, codebooks) if codebooks else (length,)
    return random.integers(0, 2, shape)


def read_stream(runs: Runs) -> Runs:
    """Through the stream and back, as a model would write it."""
    stream = interleave_durations(runs)
    tokens = runs.tokens[stream.run]
    tokens[stream.durations > 0] = -1  # a token id of its own, no code
    return read_durations(tokens, stream.durations)


@pytest.mark.parametrize(("length", "codebooks", "max_run"), CASES)
def test_expanding_gives_back_the_original(length, codebooks, max_run):
    for seed in range(5):
        tokens = random_tokens(length, codebooks, seed)
        runs = collapse_runs(tokens, max_run)
        assert_array_equal(expand_runs(runs), tokens)
        assert expand_runs(runs).shape == tokens.shape
        assert len(runs.lengths) == len(runs.tokens)
        assert not length or (runs.lengths.min() >= 1 and runs.lengths.max() <= max_run)


@pytest.mark.parametrize(("length", "codebooks", "max_run"), CASES)
def test_no_shorter_sequence_of_runs_exists(length, codebooks, max_run):
    tokens = random_tokens(length, codebooks)
    groups = [len(list(group)) for _, group in itertools.groupby(map(str, tokens.tolist()))]
    assert len(collapse_runs(tokens, max_run).tokens) == sum(-(-g // max_run) for g in groups)


@pytest.mark.parametrize(("length", "codebooks", "max_run"), CASES)
def test_both_forms_of_durations_give_back_the_runs(length, codebooks, max_run):
    runs = collapse_runs(random_tokens(length, codebooks), max_run)
    for found in (read_stream(runs), durations_from_codebook(durations_as_codebook(runs))):
        assert_array_equal(found.tokens.reshape(runs.tokens.shape), runs.tokens)
        assert_array_equal(found.lengths, runs.lengths)


def test_a_run_of_seven_is_split_at_three():
    runs = collapse_runs(np.array([5, 5, 5, 5, 5, 5, 5, 6]), 3)
    assert_array_equal(runs.tokens, [5, 5, 5, 6])
    assert_array_equal(runs.lengths, [3, 3, 1, 1])


def test_neighbours_that_differ_in_one_codebook_stay_apart():
    runs = collapse_runs(np.array([[1, 2], [1, 2], [1, 3], [0, 3]]), 9)
    assert_array_equal(runs.tokens, [[1, 2], [1, 3], [0, 3]])
    assert_array_equal(runs.lengths, [2, 1, 1])


def test_a_run_of_one_has_no_duration_and_a_longer_one_has_it_before_its_token():
    stream = interleave_durations(Runs(np.array([7, 8, 9]), np.array([1, MIN_RUN, 40])))
    assert_array_equal(stream.durations, [0, 2, 0, 40, 0])
    assert_array_equal(stream.run, [0, 1, 1, 2, 2])


def test_of_several_durations_the_last_counts_and_one_at_the_end_is_dropped():
    tokens = np.array([0, 0, 7, 8, 0])
    runs = read_durations(tokens, np.array([5, 3, 0, 0, 9]))
    assert_array_equal(runs.tokens, [7, 8])
    assert_array_equal(runs.lengths, [3, 1])
    assert_array_equal(expand_runs(runs), [7, 7, 7, 8])


def test_durations_alone_are_no_runs():
    assert not len(read_durations(np.array([0, 0]), np.array([5, 3])).tokens)


def test_the_codebook_of_durations_counts_from_zero():
    codes = durations_as_codebook(Runs(np.array([[7, 1], [8, 2]]), np.array([1, 4])))
    assert_array_equal(codes, [[7, 1, 0], [8, 2, 3]])


def test_the_saved_length_counts_duration_tokens():
    assert length_saved(10, 6) == pytest.approx(0.4)
    assert length_saved(4, 4) == 0.0
    assert length_saved(0, 0) == 0.0


def test_a_run_of_less_than_one_is_refused():
    with pytest.raises(ConfigError, match=r"prompt\.max_run is 0, expected at least 1"):
        collapse_runs(np.array([1]), 0)
