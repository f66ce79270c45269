import math
import random
import statistics

import pytest

from dflash_hf.eval import metrics

LENGTHS = [[3, 3], [1, 1, 1, 1], []]


def test_mean_tau_weighs_answers_equally_and_pooled_tau_rounds():
    assert metrics.tau_mean(LENGTHS) == pytest.approx((3 + 1) / 2)
    assert metrics.tau_pooled(LENGTHS) == pytest.approx(10 / 6)
    assert metrics.tau_mean([[]]) is None and metrics.tau_pooled([]) is None


def test_counts_and_acceptance_per_slot_agree_with_tau():
    assert metrics.accepted_length_counts(LENGTHS, 4) == [4, 0, 2, 0]
    acceptance = metrics.acceptance_per_slot(LENGTHS, 4)
    assert acceptance == pytest.approx([2 / 6, 2 / 6, 0.0])
    assert 1 + sum(acceptance) == pytest.approx(metrics.tau_pooled(LENGTHS))
    assert metrics.full_block_rate(LENGTHS, 4) == 0.0
    assert metrics.full_block_rate(LENGTHS, 3) == pytest.approx(2 / 6)
    assert metrics.acceptance_per_slot([], 4) is None and metrics.full_block_rate([[]], 4) is None


@pytest.mark.parametrize("length", [0, 5])
def test_a_round_that_no_block_can_give_is_an_error(length):
    with pytest.raises(ValueError, match=f"committed {length} tokens"):
        metrics.accepted_length_counts([[length]], 4)


def test_a_drafter_of_known_slot_accuracy_shows_it():
    generator = random.Random(0)

    def accepted() -> int:
        return next((k for k in range(1, 8) if generator.random() > 0.9), 8)

    acceptance = metrics.acceptance_per_slot([[accepted() for _ in range(20000)]], 8)
    assert acceptance == pytest.approx([0.9**k for k in range(1, 8)], abs=0.01)


def test_interval_of_a_mean_is_students():
    values = [1.0, 2.0, 4.0, 7.0, 8.0]
    low, high = metrics.mean_interval(values)
    half = 2.7764 * statistics.stdev(values) / math.sqrt(5)  # t with four degrees of freedom
    assert (low, high) == pytest.approx((4.4 - half, 4.4 + half), abs=0.01 * half)
    assert metrics.mean_interval(values[:3]) is None


def test_turns_of_one_prompt_are_not_independent():
    values = [1.0, 2.0, 4.0, 7.0]
    alone = metrics.mean_interval(values)
    assert metrics.mean_interval([*values, *values], [0, 1, 2, 3] * 2) == pytest.approx(alone)


def test_interval_of_a_ratio_covers_the_truth_as_often_as_it_says():
    generator = random.Random(0)
    covered = 0
    for _ in range(1000):
        slow = [generator.expovariate(1.0) + 1 for _ in range(30)]
        fast = [value * generator.uniform(0.4, 0.6) for value in slow]
        low, high = metrics.ratio_of_means_interval(slow, fast)
        covered += low <= 2.0 <= high
    assert 920 <= covered <= 970


def test_geometric_mean_of_speedups():
    assert metrics.geometric_mean([1.0, 4.0]) == pytest.approx(2.0)


def test_first_difference():
    assert metrics.first_difference([1, 2, 3], [1, 2, 3]) is None
    assert metrics.first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert metrics.first_difference([1, 2], [1, 2, 3]) == 2


def test_repeated_4grams_of_a_loop_and_of_fresh_text():
    assert metrics.repeated_4gram_share([[1, 2, 3, 4] * 3]) == pytest.approx(5 / 9)
    assert metrics.repeated_4gram_share([list(range(7))]) == 0.0
    assert metrics.repeated_4gram_share([[1, 2, 3]]) is None
