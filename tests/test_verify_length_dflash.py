"""The number of verified proposals follows a simulated clock and simulated acceptance to the best fixed number."""

import random
from collections.abc import Callable

import pytest
from transformers import GenerationConfig

from dflash_hf import verify_length_dflash
from dflash_hf.verify_length_dflash import VerifyLength, fixed_proposals

WHOLE = 15
Acceptance = Callable[[int, float], float]  # chance of a slot, at a share of the text


def steady(chance: float) -> Acceptance:
    return lambda slot, share: chance


def fading(slot: int, share: float) -> float:
    return max(0.9 - 0.1 * slot, 0.1)


def changing(first: float, second: float) -> Acceptance:
    return lambda slot, share: first if share < 0.5 else second


class Clock:
    """Seconds of a round: 1 for plain decoding, more for a draft and for each proposal; one round in 30 stalls."""

    def __init__(self, slope: float, draft: float = 0.15, noise: float = 0.0, seed: int = 0):
        self.slope, self.draft, self.noise = slope, draft, noise
        self.random = random.Random(seed)

    def true(self, length: int) -> float:
        return 1.0 + self.slope * length + (self.draft if length else 0.0)

    def measured(self, length: int) -> float:
        if not self.noise:
            return self.true(length)
        stall = 5.0 if self.random.random() < 1 / 30 else 1.0
        return self.true(length) * stall * self.random.uniform(1 - self.noise, 1 + self.noise)


def mean_tokens(length: int, acceptance: Acceptance, share: float) -> float:
    tokens = reached = 1.0
    for slot in range(length):
        reached *= acceptance(slot, share)
        tokens += reached
    return tokens


def simulate(policy, clock, acceptance, num_tokens, *, rows=1, seed=0, picks=None) -> float:
    """Tokens per second, by the expected tokens and true times of the picked lengths."""
    draws = random.Random(1000 + seed)
    tokens = seconds = 0.0
    while tokens < num_tokens:
        share = tokens / num_tokens
        length = policy.pick()
        accepted = [0] * rows
        for row in range(rows):
            while accepted[row] < length and draws.random() < acceptance(accepted[row], share):
                accepted[row] += 1
        policy.record(length, accepted, clock.measured(length))
        tokens += mean_tokens(length, acceptance, share)
        seconds += clock.true(length)
        if picks is not None:
            picks.append(length)
    return tokens / seconds


def best_fixed(slope, acceptance, num_tokens) -> tuple[float, int]:
    rates = [
        (simulate(VerifyLength(WHOLE, length), Clock(slope), acceptance, num_tokens), length)
        for length in range(WHOLE + 1)
    ]
    return max(rates)


def ratio(slope, acceptance, num_tokens, noise=0.0, num_seeds=16, **options) -> float:
    rates = [
        simulate(
            VerifyLength(WHOLE), Clock(slope, noise=noise, seed=seed), acceptance, num_tokens, seed=seed, **options
        )
        for seed in range(num_seeds)
    ]
    return sum(rates) / num_seeds / best_fixed(slope, acceptance, num_tokens)[0]


# Slope, acceptance, best fixed length; least share of its speed over 128 and 512 tokens: exact times, noisy times.
# A fresh call knows nothing: a learner that is told the true times, but not the acceptance, loses 1 to 3% over 128.
CASES = {
    "flat, high": (0.002, steady(0.95), 15, (0.95, 0.98), (0.95, 0.98)),
    "flat, middle": (0.02, steady(0.8), 12, (0.95, 0.98), (0.95, 0.97)),
    "flat, low": (0.02, steady(0.4), 3, (0.97, 0.98), (0.95, 0.97)),
    "middle": (0.06, steady(0.6), 4, (0.95, 0.98), (0.94, 0.97)),
    "steep, high": (0.14, steady(0.9), 9, (0.94, 0.97), (0.94, 0.96)),
    "steep, middle": (0.14, steady(0.6), 3, (0.94, 0.97), (0.93, 0.97)),
    "steep, fading": (0.14, fading, 4, (0.92, 0.96), (0.92, 0.96)),
}


@pytest.mark.parametrize("noise", [0.0, 0.15], ids=["exact times", "noisy times"])
@pytest.mark.parametrize("name", CASES)
def test_speed_is_near_that_of_the_best_fixed_length(name, noise):
    slope, acceptance, best, exact_bars, noisy_bars = CASES[name]
    assert best_fixed(slope, acceptance, 512)[1] == best
    for num_tokens, bar in zip((128, 512), noisy_bars if noise else exact_bars, strict=True):
        assert ratio(slope, acceptance, num_tokens, noise) >= bar


@pytest.mark.parametrize("name", CASES)
def test_picks_settle_where_the_rate_is_within_three_percent_of_the_best(name):
    slope, acceptance, best, _, _ = CASES[name]
    picks: list[int] = []
    simulate(VerifyLength(WHOLE), Clock(slope), acceptance, 2000, rows=4, picks=picks)
    late = picks[len(picks) // 2 :]
    rate = sum(mean_tokens(n, acceptance, 0) for n in late) / sum(Clock(slope).true(n) for n in late)
    assert rate >= 0.97 * best_fixed(slope, acceptance, 512)[0]
    assert picks[0] == WHOLE


@pytest.mark.parametrize(("noise", "bars"), [(0.0, (0.97, 0.985)), (0.15, (0.955, 0.98))])
def test_useless_drafter_costs_little_of_plain_speed(noise, bars):
    for num_tokens, bar in zip((128, 512), bars, strict=True):
        assert best_fixed(0.02, steady(0.0), num_tokens) == (1.0, 0)
        assert ratio(0.02, steady(0.0), num_tokens, noise, num_seeds=24) >= bar


@pytest.mark.parametrize("noise", [0.0, 0.15])
@pytest.mark.parametrize(("first", "second"), [(0.9, 0.3), (0.1, 0.9), (0.9, 0.0)])
def test_acceptance_that_changes_in_mid_text_is_followed(first, second, noise):
    assert ratio(0.06, changing(first, second), 128, noise) >= 0.97
    assert ratio(0.06, changing(first, second), 512, noise) >= 1.01  # no fixed length suits both halves


def test_first_draft_that_reads_a_long_prompt_says_nothing_about_time():
    policies = [VerifyLength(WHOLE), VerifyLength(WHOLE)]
    for policy, first_seconds in zip(policies, (1.2, 50.0), strict=True):
        policy.record(policy.pick(), [WHOLE], first_seconds)
    picks = [[], []]
    for policy, seen in zip(policies, picks, strict=True):
        simulate(policy, Clock(0.06), steady(0.8), 200, picks=seen)
    assert picks[0] == picks[1]


def test_equal_inputs_give_equal_picks():
    runs: list[list[int]] = [[], []]
    for picks in runs:
        simulate(VerifyLength(WHOLE), Clock(0.06, noise=0.15), steady(0.5), 200, picks=picks)
    assert runs[0] == runs[1]


@pytest.mark.parametrize("slope", [0.02, 0.14])
def test_rows_that_have_left_change_the_unit_of_time_and_nothing_else(slope):
    policy, twin = VerifyLength(WHOLE), VerifyLength(WHOLE)
    for each in (policy, twin):
        simulate(each, Clock(slope), steady(0.6), 80, rows=4)
    policy.rows_have_left()
    for _ in range(12):
        length = twin.pick()
        assert policy.pick() == length
        accepted = [min(length, 2)] * 3
        twin.record(length, accepted, Clock(slope).true(length))
        policy.record(length, accepted, 0.4 * Clock(slope).true(length))


def test_rows_may_leave_before_anything_was_timed():
    policy = VerifyLength(WHOLE)
    policy.rows_have_left()
    assert policy.pick() == WHOLE
    policy.record(WHOLE, [3], 1.0)
    policy.rows_have_left()
    simulate(policy, Clock(0.02), steady(0.6), 60)
    assert 1 <= policy.pick() <= WHOLE


def test_fixed_length_is_always_picked_and_nothing_is_measured():
    policy = VerifyLength(WHOLE, 4)
    before = [{name: repr(value) for name, value in vars(thing).items()} for thing in (policy, policy.times)]
    for _ in range(60):
        assert policy.pick() == 4
        policy.record(4, [0], 1e9)
        policy.record(0, [0], 1e-9)
    policy.rows_have_left()
    assert policy.pick() == 4
    after = [{name: repr(value) for name, value in vars(thing).items()} for thing in (policy, policy.times)]
    before[1]["_is_rescaling"] = "True"
    assert after == before


@pytest.mark.parametrize("max_proposals", [1, 2, 7])
def test_short_blocks_are_picked_from_too(max_proposals):
    for chance in (0.0, 0.5, 1.0):
        picks: list[int] = []
        simulate(VerifyLength(max_proposals), Clock(0.02), steady(chance), 100, picks=picks)
        assert max(picks) == max_proposals and min(picks) >= 0


def test_pause_is_reported_once_and_lasts_longer_each_time(monkeypatch):
    messages = []
    monkeypatch.setattr(verify_length_dflash.logger, "info", messages.append)
    picks: list[int] = []
    simulate(VerifyLength(WHOLE), Clock(0.02), steady(0.0), 400, picks=picks)
    assert len(messages) == 1
    assert "pauses for 8 tokens" in messages[0] and "expected tokens a round do not pay" in messages[0]
    pauses = [len(run) for run in "".join("0" if n == 0 else "x" for n in picks).replace("x", " ").split()]
    long_pauses = [length for length in pauses if length >= 8]
    assert len(long_pauses) >= 4 and long_pauses[:-1] == sorted(long_pauses[:-1])


def test_drafter_that_pays_is_not_reported(monkeypatch):
    messages = []
    monkeypatch.setattr(verify_length_dflash.logger, "info", messages.append)
    simulate(VerifyLength(WHOLE), Clock(0.02), steady(0.8), 400)
    assert messages == []


@pytest.mark.parametrize(("asked", "expected"), [(1, 1), (7, 7), (None, None)])
def test_number_of_assistant_tokens_is_taken_where_one_is_asked_for(asked, expected):
    config = GenerationConfig()
    config.num_assistant_tokens = asked
    assert fixed_proposals(config, 8) == expected


def test_transformers_own_default_is_not_a_wish():
    config = GenerationConfig()
    config.num_assistant_tokens = GenerationConfig._get_default_generation_params()["num_assistant_tokens"]
    assert fixed_proposals(config, 8) is None


@pytest.mark.parametrize("asked", [0, -1, 8, 12])
def test_more_proposals_than_trained_are_refused(asked):
    config = GenerationConfig()
    config.num_assistant_tokens = asked
    with pytest.raises(ValueError, match=rf"`num_assistant_tokens` is {asked}, .*proposes 1 to 7 .*`block_size` 8"):
        fixed_proposals(config, 8)
