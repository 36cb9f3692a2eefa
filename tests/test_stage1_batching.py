import itertools

import numpy as np

from stage1_llm.batching import iterate_batches, plan_epoch

LENGTHS = np.random.default_rng(0).integers(10, 200, 300).tolist()


def test_every_sample_is_in_exactly_one_batch_of_an_epoch():
    plan = plan_epoch(LENGTHS, max_tokens=1000, seed=0, epoch=0)
    assert sorted(itertools.chain(*plan.batches)) == list(range(300))


def test_no_batch_is_empty_or_over_the_budget():
    plan = plan_epoch(LENGTHS, max_tokens=200, seed=0, epoch=0)
    for batch in plan.batches:
        assert batch
        assert len(batch) * max(LENGTHS[i] for i in batch) <= 200


def test_padding_and_largest_batch_are_reported_by_hand():
    plan = plan_epoch([10, 10, 4], max_tokens=20, seed=0, epoch=0)
    assert sorted(map(sorted, plan.batches)) in ([[0, 1], [2]], [[0, 2], [1]], [[0], [1, 2]])
    plan = plan_epoch([10, 10], max_tokens=20, seed=0, epoch=0)
    assert (plan.padding_share, plan.largest) == (0.0, (2, 10))


def test_similar_lengths_keep_padding_under_six_per_cent():
    assert plan_epoch(LENGTHS, max_tokens=1000, seed=0, epoch=0).padding_share < 0.06


def test_a_later_start_continues_the_same_sequence_across_epochs():
    per_epoch = len(plan_epoch(LENGTHS, max_tokens=1000, seed=3, epoch=0).batches)

    def take(start, count):
        stream = iterate_batches(LENGTHS, max_tokens=1000, seed=3, start_step=start)
        return list(itertools.islice(stream, count))

    whole = take(0, 3 * per_epoch)
    for start in (1, per_epoch, per_epoch + 2, 2 * per_epoch + 1):
        assert take(start, 3) == whole[start : start + 3]


def test_epochs_and_seeds_differ():
    plans = {
        plan_epoch(LENGTHS, max_tokens=1000, seed=seed, epoch=epoch).batches
        for seed, epoch in [(0, 0), (0, 1), (1, 0)]
    }
    assert len(plans) == 3
