import itertools

import numpy as np
import pytest

from stage1_llm.batching import NUM_STAGES, describe_plan, plan_epoch, plan_steps
from stage1_llm.config import BatchingConfig, CurriculumConfig
from tts_stack.errors import ConfigError, DataError
from tts_stack.training import TrainerConfig

LENGTHS = np.random.default_rng(0).integers(10, 200, 300)
KINDS = ["dynamic", "packing"]
GROWTH = CurriculumConfig(start_length=40, steps=80)


def ljspeech_lengths(count):
    return np.clip(np.random.default_rng(1).normal(265, 80, count), 60, 420).astype(np.int32)


def steps(count, lengths=LENGTHS, **changes):
    values = {
        "kind": "dynamic",
        "max_tokens": 1000,
        "curriculum": None,
        "seed": 3,
        "num_micro": 1,
        "start_step": 0,
    }
    return list(itertools.islice(plan_steps(lengths, **{**values, **changes}), count))


def positions(batch, kind, lengths=LENGTHS):
    sizes = [int(lengths[i]) for i in batch]
    return sum(sizes) if kind == "packing" else len(batch) * max(sizes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_tokens", [200, 1000, 10**6])
def test_every_sample_is_in_exactly_one_batch_of_an_epoch(kind, max_tokens):
    plan = plan_epoch(LENGTHS, max_tokens=max_tokens, seed=0, epoch=0, kind=kind)
    assert sorted(itertools.chain(*plan.batches)) == list(range(300))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_tokens", [199, 1000])
def test_no_batch_is_empty_or_over_the_budget(kind, max_tokens):
    plan = plan_epoch(LENGTHS, max_tokens=max_tokens, seed=0, epoch=0, kind=kind)
    sizes = [positions(batch, kind) for batch in plan.batches if batch]
    assert len(sizes) == len(plan.batches)
    assert max(sizes) <= max_tokens


def test_padding_and_largest_batch_are_reported_by_hand():
    plan = plan_epoch([10, 10, 4], max_tokens=20, seed=0, epoch=0)
    assert sorted(map(sorted, plan.batches)) in ([[0, 1], [2]], [[0, 2], [1]], [[0], [1, 2]])
    plan = plan_epoch([10, 10], max_tokens=20, seed=0, epoch=0)
    assert (plan.padding_share, plan.largest) == (0.0, (2, 10))
    plan = plan_epoch([10, 8], max_tokens=20, seed=0, epoch=0)
    assert (plan.padding_share, plan.largest) == (1 - 18 / 20, (2, 10))


def test_unused_budget_of_packed_rows_is_reported_by_hand():
    plan = plan_epoch([10, 4, 5], max_tokens=15, seed=0, epoch=0, kind="packing")
    assert sorted(map(sorted, plan.batches)) in ([[0, 1], [2]], [[0, 2], [1]], [[0], [1, 2]])
    assert plan.padding_share == 1 - 19 / 30
    assert plan.largest in ((1, 14), (1, 15), (1, 10))
    assert plan.largest[1] == max(positions(b, "packing", [10, 4, 5]) for b in plan.batches)


@pytest.mark.parametrize("max_tokens", [2048, 4096, 8192])
def test_dynamic_batches_of_speech_waste_under_five_per_cent(max_tokens):
    plan = plan_epoch(ljspeech_lengths(5000), max_tokens=max_tokens, seed=0, epoch=0)
    assert plan.padding_share < 0.05


@pytest.mark.parametrize("max_tokens", [1024, 2048, 8192])
def test_packed_rows_of_speech_leave_under_one_per_cent_unused(max_tokens):
    lengths = ljspeech_lengths(5000)
    plan = plan_epoch(lengths, max_tokens=max_tokens, seed=0, epoch=0, kind="packing")
    assert plan.padding_share < 0.01


def test_packed_rows_mix_lengths():
    lengths = ljspeech_lengths(5000)
    plan = plan_epoch(lengths, max_tokens=2048, seed=0, epoch=0, kind="packing")
    spreads = [np.std(lengths[list(batch)]) for batch in plan.batches]
    assert np.mean(spreads) > 0.8 * lengths.std()


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_arguments_give_the_same_plan_and_others_another(kind):
    def plan(seed, epoch):
        return plan_epoch(LENGTHS, max_tokens=1000, seed=seed, epoch=epoch, kind=kind)

    assert plan(0, 0) == plan(0, 0)
    assert len({plan(seed, epoch).batches for seed, epoch in [(0, 0), (0, 1), (1, 0)]}) == 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_micro", [1, 4])
@pytest.mark.parametrize("curriculum", [None, GROWTH])
def test_a_later_start_continues_the_same_sequence(kind, num_micro, curriculum):
    changes = {"kind": kind, "num_micro": num_micro, "curriculum": curriculum}
    whole = steps(200, **changes)
    for start in (1, 7, 79, 80, 81, 150):
        assert steps(3, start_step=start, **changes) == whole[start : start + 3]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_micro", [1, 3, 8, 1000])
def test_steps_walk_through_whole_epochs_without_a_pause(kind, num_micro):
    batches = list(itertools.chain(*steps(1000 // num_micro * 3 + 1, num_micro=num_micro)))
    seen = list(itertools.chain(*batches))
    for epoch in range(len(seen) // 300):
        assert sorted(seen[300 * epoch : 300 * (epoch + 1)]) == list(range(300))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_micro", [1, 2, 5])
@pytest.mark.parametrize("lengths", [[50], [50, 60, 70], LENGTHS])
def test_every_step_is_full_and_no_batch_is_empty_or_over_the_budget(kind, num_micro, lengths):
    for step in steps(100, lengths, kind=kind, num_micro=num_micro, max_tokens=200):
        assert len(step) == num_micro
        for batch in step:
            assert 0 < positions(batch, kind, lengths) <= 200


def test_processes_divide_what_one_process_accumulates():
    """Rank r of R takes micro[r::R]; the plan does not know how a step is divided."""
    whole = steps(40, num_micro=4)
    for world_size in (1, 2, 4):
        by_rank = [[step[rank::world_size] for step in whole] for rank in range(world_size)]
        assert all(len(part) == 4 // world_size for part in itertools.chain(*by_rank))
        together = [sorted(itertools.chain(*parts)) for parts in zip(*by_rank, strict=True)]
        assert together == [sorted(step) for step in whole]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("epoch", [0, 1])
def test_the_micro_batches_of_a_step_are_of_similar_size(kind, epoch):
    lengths = ljspeech_lengths(3005)
    first = plan_epoch(lengths, max_tokens=2048, seed=3, epoch=0, kind=kind)
    per_epoch = len(first.batches) // 8
    assert len(first.batches) % 8  # the next epoch starts in the middle of a step
    start = 1 + epoch * (1 + per_epoch)
    waits = []
    found = steps(per_epoch - 3, lengths, kind=kind, num_micro=8, max_tokens=2048, start_step=start)
    for step in found:
        sizes = [positions(batch, kind, lengths) for batch in step]
        waits.append(1 - np.mean(sizes) / max(sizes))
    assert np.mean(waits) < 0.01  # 0.06 for dynamic batches in random order


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_micro", [1, 3])
def test_a_curriculum_raises_the_longest_sample_in_equal_stages(kind, num_micro):
    whole = steps(160, kind=kind, num_micro=num_micro, curriculum=GROWTH)
    longest = [max(LENGTHS[i] for i in itertools.chain(*step)) for step in whole]
    top = int(LENGTHS.max())
    for stage in range(NUM_STAGES):
        limit = 40 + (top - 40) * stage // NUM_STAGES
        assert 0.85 * limit < max(longest[10 * stage : 10 * (stage + 1)]) <= limit
    assert max(longest[80:]) == top


def test_a_curriculum_drops_no_sample():
    whole = steps(400, curriculum=GROWTH)
    assert set(itertools.chain(*itertools.chain(*whole[80:]))) == set(range(300))


def test_an_epoch_ends_early_where_the_limit_grows():
    """No batch planned under the old limit is trained on after the border."""
    whole = steps(80, curriculum=CurriculumConfig(100, 80), num_micro=2)
    unlimited = steps(80, curriculum=CurriculumConfig(100, 800), num_micro=2)
    assert whole[:10] == unlimited[:10]
    first_epoch = plan_epoch(LENGTHS[LENGTHS <= 100], max_tokens=1000, seed=3, epoch=0)
    assert len(first_epoch.batches) % 20 not in (0, 1)  # it would have gone on
    assert whole[10] != unlimited[10]


def test_the_token_budget_stays_while_lengths_grow():
    lengths = np.tile(LENGTHS, 10)
    whole = steps(160, lengths, curriculum=GROWTH, kind="packing")
    used = [sum(lengths[i] for i in step[0]) for step in whole]
    assert np.mean(used[:10]) > 900
    assert max(used) <= 1000


@pytest.mark.parametrize(
    "curriculum", [CurriculumConfig(40, 0), CurriculumConfig(500, 99), CurriculumConfig(40, 1)]
)
def test_a_curriculum_that_is_off_or_over_is_no_curriculum(curriculum):
    after = curriculum.steps if curriculum.start_length < 200 else 0
    assert len(steps(5, curriculum=curriculum, start_step=after)) == 5
    if not after:
        assert steps(20, curriculum=curriculum) == steps(20)


def test_a_curriculum_below_the_shortest_sample_is_an_error():
    with pytest.raises(ConfigError, match=r"start_length is 5, expected at least 10, the length"):
        steps(1, curriculum=CurriculumConfig(5, 100))


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_over_the_budget_is_an_error_that_names_it(kind):
    message = r"sample 1 has 30 tokens, expected at most max_tokens \(20\); raise batching"
    with pytest.raises(DataError, match=message):
        plan_epoch([10, 30], max_tokens=20, seed=0, epoch=0, kind=kind)
    with pytest.raises(DataError, match=message):
        steps(1, [10, 30], kind=kind, max_tokens=20)


def test_no_sample_at_all_is_an_error():
    with pytest.raises(DataError, match="0 samples, expected at least one"):
        plan_epoch([], max_tokens=20, seed=0, epoch=0)


def test_the_plan_is_described_by_hand():
    batching = BatchingConfig("dynamic", 20, 20, 10**6, CurriculumConfig(10, 0))
    trainer = TrainerConfig(100, 10, 10, accumulate=2)
    assert describe_plan([10, 10, 20, 18, 18], batching, trainer) == (
        "5 samples, 76 tokens; dynamic batches of at most 20 positions, 2 a step, "
        "2.0 steps an epoch; padding 0.0%; largest batch 2 x 10 = 20 positions"
    )
    batching = BatchingConfig("packing", 20, 20, 10**6, CurriculumConfig(10, 40))
    assert describe_plan([10, 10, 20, 18, 18], batching, trainer) == (
        "5 samples, 76 tokens; packing batches of at most 20 positions, 2 a step, "
        "2.0 steps an epoch; padding 5.0%; largest batch 1 x 20 = 20 positions; "
        "curriculum: 2 samples of at most 10 tokens at first, all of them from step 40"
    )
