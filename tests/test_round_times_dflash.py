"""The cost curve of rounds is convex, and follows the machine."""

import random

import pytest

from dflash_hf.round_times_dflash import RoundTimes


def timed(seconds_of, sizes, *, noise=0.0, seed=0, repeats=1):
    rng, times = random.Random(seed), RoundTimes(7)
    for _ in range(repeats):
        for size in sizes:
            times.add(size, seconds_of(size) * rng.uniform(1 - noise, 1 + noise))
    return times


def steps(times):
    costs = [times.relative(size) for size in range(128)]
    return [after - before for before, after in zip(costs, costs[1:], strict=False)]


def test_first_guess_is_that_nodes_are_cheap():
    times = RoundTimes(7)
    assert times.num_plain == 0 and times.drafted_sizes == []
    assert times.relative(0) == 1.0 and 1.1 < times.relative(7) < 1.4
    assert 0.8 < times.relative_plain() < 1.0


@pytest.mark.parametrize("seed", range(6))
def test_one_more_node_never_costs_less_than_the_one_before(seed):
    rng = random.Random(seed)
    sizes = [rng.choice([1, 3, 7, 15, 20, 40, 70, 127]) for _ in range(40)]
    times = timed(lambda size: rng.uniform(0.5, 3.0), [0, *sizes], noise=0.3, seed=seed)
    found = steps(times)
    assert all(later >= earlier - 1e-9 for earlier, later in zip(found, found[1:], strict=False)) and min(found) >= 0.0


def test_straight_line_is_found_within_a_few_rounds():
    times = timed(lambda size: 1.2 + 0.05 * size if size else 1.0, [0, 7, 3, 12, 5, 9], noise=0.02, repeats=3)
    assert times.base == pytest.approx(1.2, rel=0.05) and times.base * times.slope == pytest.approx(0.05, rel=0.2)
    assert times.relative_plain() == pytest.approx(1 / 1.2, rel=0.05)


def test_bend_is_found_where_nodes_become_dear():
    def bent(size):
        return 1.2 + 0.01 * min(size, 32) + 0.1 * max(size - 32, 0)

    times = timed(bent, [0, 4, 12, 24, 30, 44, 60] * 9)
    for size in (4, 12, 30, 44, 60):
        assert times.base * times.relative(size) == pytest.approx(bent(size), rel=0.12)
    found = steps(times)
    assert times.base * found[50] > 0.07 and times.base * found[20] < 0.02


def test_slow_outliers_change_nothing():
    def line(size):
        return 1.2 + 0.04 * size

    calm = timed(line, [7, 3, 10] * 6)
    stalled = timed(line, [7, 3, 10] * 3)
    stalled.add(5, 9.0)
    for size in [7, 3, 10] * 3:
        stalled.add(size, line(size))
    assert stalled.relative(12) == pytest.approx(calm.relative(12), rel=0.03)


@pytest.mark.parametrize("factor", [0.4, 3.0])
def test_drift_of_the_machine_scales_the_curve_and_keeps_its_shape(factor):
    def line(size):
        return 1.2 + 0.04 * size if size else 1.0

    times = timed(line, [0, 7, 3, 10] * 6)
    base, relative = times.base, times.relative(12)
    for size in [7, 3, 10, 7, 3]:
        times.add(size, factor * line(size))
    assert times.base == pytest.approx(factor * base, rel=0.15)
    assert times.relative(12) == pytest.approx(relative, rel=0.08)
    assert times.plain_seconds() == pytest.approx(factor, rel=0.1)
