import math

import pytest

from dflash_hf.eval import metrics
from dflash_hf.eval.decode import Answer


def answer(tokens: int, lengths: list[int], seconds: float) -> Answer:
    return Answer(token_ids=list(range(tokens)), accepted_lengths=lengths, prefill_seconds=0.0, decode_seconds=seconds)


FAST = [answer(7, [3, 3], 2.0), answer(5, [1, 1, 1, 1], 4.0)]
PLAIN = [answer(7, [1] * 6, 6.0), answer(5, [1] * 4, 4.0)]


def test_mean_tau_weighs_answers_equally_and_pooled_tau_rounds():
    assert metrics.mean_tau(FAST) == pytest.approx((3 + 1) / 2)
    assert metrics.pooled_tau(FAST) == pytest.approx(10 / 6)


def test_speedup_is_the_ratio_of_mean_times_per_token():
    # plain: 1.0 and 1.0 seconds a token; fast: 1/3 and 1.0
    assert metrics.decode_speedup(FAST, PLAIN) == pytest.approx(1.0 / ((1 / 3 + 1) / 2))
    assert metrics.median_speedup(FAST, PLAIN) == pytest.approx((3.0 + 1.0) / 2)


def test_identical_share_counts_equal_ids():
    changed = Answer([0, 1, 2, 3, 4, 5, 99], [1] * 6, 0.0, 1.0)
    assert metrics.identical_share(FAST, PLAIN) == 1.0
    assert metrics.identical_share([changed, FAST[1]], PLAIN) == 0.5


def test_repeated_4grams_of_a_loop_and_of_fresh_text():
    loop = Answer([1, 2, 3, 4] * 3, [], 0.0, 0.0)
    assert metrics.repeated_4gram_share([loop]) == pytest.approx(5 / 9)
    assert metrics.repeated_4gram_share([PLAIN[0]]) == 0.0
    assert math.isnan(metrics.repeated_4gram_share([answer(3, [], 0.0)]))


def test_interval_is_two_standard_errors_and_unknown_for_one_value():
    assert metrics.interval_95([1.0, 3.0]) == pytest.approx(1.96 * math.sqrt(2) / math.sqrt(2))
    assert math.isnan(metrics.interval_95([1.0]))
