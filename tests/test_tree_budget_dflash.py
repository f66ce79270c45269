"""The size of trees follows a simulated clock and acceptance; what the draft says is corrected by outcomes."""

import itertools
import math
import random

import pytest

from dflash_hf.tree_budget_dflash import MAX_NODES, ChanceCalibration, TreeBudget
from dflash_hf.tree_growth_dflash import SlotCandidates

SLOTS, RANKS = 7, 8
IDS = [[100 * slot + rank for rank in range(RANKS)] for slot in range(SLOTS)]


def draw_draft(rng: random.Random, confidence: float) -> list[list[float]]:
    """Draft probabilities by slot and rank, sure of some rounds and unsure of others."""
    level = min(max(rng.gauss(confidence, 0.25), 0.05), 0.98)
    slots = []
    for slot in range(SLOTS):
        first = level * 0.85**slot
        slots.append([first] + [min(first, (1 - first) * 0.45**rank) for rank in range(1, RANKS)])
    return slots


class Clock:
    """Seconds of a round: 1 for a plain one, a draft, each node up to 16, each further one; some rounds stall."""

    def __init__(
        self, slope: float, steep: float | None = None, draft: float = 0.2, noise: float = 0.0, seed: int = 0
    ):
        self.slope, self.steep, self.draft, self.noise = slope, steep or slope, draft, noise
        self.random = random.Random(seed)

    def true(self, nodes: int) -> float:
        return 1.0 + (self.draft if nodes else 0.0) + self.slope * min(nodes, 16) + self.steep * max(nodes - 16, 0)

    def measured(self, nodes: int) -> float:
        stall = 5.0 if self.noise and self.random.random() < 1 / 30 else 1.0
        return self.true(nodes) * stall * self.random.uniform(1 - self.noise, 1 + self.noise)


def simulate(budget, clock, num_rounds=200, *, confidence=0.6, honesty=1.0, rows=1, seed=0, sizes=None) -> float:
    """Tokens a second of each row; the target follows the draft's probabilities times `honesty`.

    A seed gives the same drafts and choices to every budget.
    """
    rng = random.Random(100 + seed)
    tokens = seconds = 0.0
    for _ in range(num_rounds):
        drafts = [draw_draft(rng, confidence) for _ in range(rows)]
        ranks = [
            [next(iter(rng.choices(range(RANKS + 1), [*chances, 0.0]))) if rng.random() < honesty else RANKS
             for chances in slots]
            for slots in drafts
        ]  # fmt: skip
        nodes, lengths = 0, [1] * rows
        if num_slots := budget.pick():
            candidates = SlotCandidates([IDS[:num_slots]] * rows, [slots[:num_slots] for slots in drafts])
            grown, nodes = budget.grow(candidates, [False] * rows)
            for row, paths in enumerate(grown):
                kept = range(1, min(nodes + 1, paths.num_nodes))
                children = {(paths.parents[node], paths.ranks[node]): node for node in kept}
                node = 0
                for rank in ranks[row]:
                    if (node := children.get((node, rank))) is None:
                        break
                    lengths[row] += 1
        choices = [
            [*(100 * slot + rank for slot, rank in enumerate(chosen)), 0][:length]
            for chosen, length in zip(ranks, lengths, strict=True)
        ]
        budget.record(nodes, choices, clock.measured(nodes))
        tokens += sum(lengths) / rows
        seconds += clock.true(nodes)
        if sizes is not None:
            sizes.append(nodes)
    return tokens / seconds


def mean_rate(num_nodes, clock, noise=0.0, num_seeds=4, menu=None, **options) -> float:
    rates = []
    for seed in range(num_seeds):
        own_clock = Clock(clock.slope, clock.steep, noise=noise, seed=seed)
        rates.append(simulate(TreeBudget(SLOTS, num_nodes, sizes=menu), own_clock, seed=seed, **options))
    return sum(rates) / num_seeds


def best_fixed(clock, **options) -> tuple[float, int]:
    return max((mean_rate(size, clock, **options), size) for size in (1, 3, 5, 7, 11, 15, 23, 31, 63))


CLOCKS = {
    "nearly free": Clock(0.001, 0.004),
    "as SmolLM2 on a CPU": Clock(0.02, 0.026),
    "steep": Clock(0.08),
    "a step at 16": Clock(0.004, 0.1),
}


@pytest.mark.parametrize("honesty", [1.0, 0.7], ids=["honest draft", "boastful draft"])
@pytest.mark.parametrize("name", CLOCKS)
def test_speed_is_near_that_of_the_best_fixed_size_from_the_first_round_on(name, honesty):
    best, size = best_fixed(CLOCKS[name], honesty=honesty)
    found = mean_rate(None, CLOCKS[name], noise=0.1, honesty=honesty)
    print(f"{name}: best {best:.3f} with {size} nodes, found {found:.3f}")
    assert found >= 0.965 * best


@pytest.mark.parametrize("name", CLOCKS)
def test_trees_have_the_sizes_of_a_menu_and_those_that_pay(name):
    menu, sizes = [7, 15, 31, 63, 127], []
    best = max(mean_rate(size, CLOCKS[name]) for size in menu[:-1])
    found = mean_rate(None, CLOCKS[name], noise=0.1, menu=menu, sizes=sizes)
    assert found >= 0.955 * best and set(sizes) <= {0, *menu}


def test_batch_gets_one_size_that_pays_for_its_mean_row():
    clock = CLOCKS["as SmolLM2 on a CPU"]
    best, _ = best_fixed(clock, rows=4, num_seeds=2)
    assert mean_rate(None, clock, rows=4, num_seeds=2) >= 0.97 * best


def test_sure_rounds_get_chains_and_unsure_ones_broad_trees():
    budget = TreeBudget(SLOTS)
    simulate(budget, Clock(0.02), 200)
    sure = [[0.97] + [0.03 / 2**rank for rank in range(1, RANKS)] for _ in range(SLOTS)]
    unsure = [[0.3, 0.25, 0.2, 0.1, 0.05, 0.02, 0.01, 0.01] for _ in range(SLOTS)]
    for slots, depth, width in ((sure, SLOTS, 1), (unsure, 3, 4)):
        grown, nodes = budget.grow(SlotCandidates([IDS], [slots]), [False])
        depths = grown[0].depths[1 : nodes + 1]
        assert max(depths) == depth if width == 1 else max(depths) <= depth
        assert depths.count(1) >= width
        budget.record(nodes, [[0]], None)


@pytest.mark.parametrize(("noise", "bar"), [(0.0, 0.965), (0.15, 0.96)])
def test_useless_drafter_costs_little_of_plain_speed(noise, bar):
    assert mean_rate(None, Clock(0.02), noise=noise, honesty=0.0, num_seeds=8) >= bar


def test_fixed_size_is_always_taken_whatever_it_costs_and_nothing_is_timed():
    budget, sizes = TreeBudget(SLOTS, 9), []
    before = repr(vars(budget.times))
    simulate(budget, Clock(0.5), 60, honesty=0.0, sizes=sizes)
    assert set(sizes) == {9} and repr(vars(budget.times)) == before


def test_nodes_of_a_fixed_tree_follow_corrected_chances():
    def main_path_length(budget: TreeBudget) -> int:
        grown, nodes = budget.grow(SlotCandidates([tokens], [[[0.4, 0.35, 0.2]] * SLOTS]), [False])
        return len(grown[0].main_path(nodes + 1)) - 1

    tokens = [slot[:3] for slot in IDS]
    budget = TreeBudget(SLOTS, SLOTS)
    assert main_path_length(budget) < SLOTS  # as the draft has it, runners-up are nearly as likely
    for _ in range(60):
        budget.record(SLOTS, [[*(slot[0] for slot in tokens), 0]], 1.0)
        length = main_path_length(budget)
    assert length == SLOTS


def test_draft_has_one_slot_more_than_the_deepest_of_the_last_trees():
    budget = TreeBudget(SLOTS)
    deep = [[0.97] + [0.03 / 2**rank for rank in range(1, RANKS)]] * SLOTS
    flat = [[0.1] * RANKS] * SLOTS
    found = []
    for slots in [deep, *[flat] * 5, *[deep] * 7]:
        num_slots = budget.pick()
        grown, nodes = budget.grow(SlotCandidates([IDS[:num_slots]], [slots[:num_slots]]), [False])
        found.append((num_slots, max(grown[0].depths[: nodes + 1])))
        is_right = slots is deep
        budget.record(nodes, [[*(slot[0] for slot in IDS[:num_slots]), 0] if is_right else [IDS[0][0], 0, 0]], None)
    (first, *flats), deeps = found[:6], found[6:]
    assert first == (SLOTS, SLOTS)
    assert flats[:4] == [(SLOTS, 1)] * 4 and flats[4] == (2, 1)
    assert deeps[0] == (2, 2) and [slots for slots, _ in deeps[1:]] == [min(3 + i, SLOTS) for i in range(6)]


def test_sizes_repeat_and_stay_in_bounds():
    runs = [[], []]
    for sizes in runs:
        simulate(TreeBudget(SLOTS), Clock(0.0, noise=0.1), 300, sizes=sizes)
    assert runs[0] == runs[1] and max(runs[0]) <= MAX_NODES
    for chance in (0.0, 0.5, 1.0):
        budget = TreeBudget(1)
        for _ in range(30):
            if budget.pick():
                grown, nodes = budget.grow(SlotCandidates([[[3, 4]]], [[[0.7, 0.2]]]), [False])
                assert 1 <= nodes <= 2
                budget.record(nodes, [[3 if chance else 5]], 1.0)
            else:
                budget.record(0, [[3]], 1.0)


def test_rows_that_are_over_cost_nothing_but_a_node():
    budget = TreeBudget(SLOTS)
    draft = draw_draft(random.Random(0), 0.6)
    grown, nodes = budget.grow(SlotCandidates([IDS, IDS], [draft, draft]), [False, True])
    assert grown[1].num_nodes == 2 <= nodes < grown[0].num_nodes


# Calibration


def chances_of(calibration, slots, slot=0, is_below_main=True, parent=0, tokens=IDS) -> list[float]:
    """Corrected chances by rank."""
    candidates = calibration.corrected(tokens, slots)(slot, is_below_main, parent)
    return [chance for chance, _ in sorted(candidates, key=lambda candidate: candidate[1])]


def learned(true_chance, draft_chance, rounds, seed=0):
    calibration, rng = ChanceCalibration(), random.Random(seed)
    for _ in range(rounds):
        calibration.learn([[1, 2]], [[draft_chance, 0.1]], [1 if rng.random() < true_chance else 9])
    return calibration


def test_draft_is_believed_before_anything_was_seen():
    for is_below_main in (True, False):
        chances = chances_of(ChanceCalibration(), [[0.7, 0.2, 0.1]], is_below_main=is_below_main)
        assert chances == pytest.approx([0.7, 0.2, 0.1])


@pytest.mark.parametrize(("true_chance", "draft_chance"), [(0.5, 0.8), (0.8, 0.5), (0.1, 0.6)])
def test_chances_move_to_the_frequencies_of_outcomes(true_chance, draft_chance):
    found = [chances_of(learned(true_chance, draft_chance, 150, seed), [[draft_chance, 0.01]])[0] for seed in range(8)]
    assert sum(found) / 8 == pytest.approx(true_chance, abs=0.05)
    early = [chances_of(learned(true_chance, draft_chance, 12, seed), [[draft_chance, 0.01]])[0] for seed in range(8)]
    assert abs(sum(early) / 8 - true_chance) < 0.7 * abs(draft_chance - true_chance)


def test_outcomes_of_a_kind_of_node_leave_the_others_as_they_were():
    slots = [[0.6, 0.3], [0.6, 0.3]]
    calibration = ChanceCalibration()
    for _ in range(30):
        calibration.learn([[1, 2], [3, 4]], slots, [2, 3, 5])  # aside at once, then the likeliest token of slot 1
    assert chances_of(calibration, slots)[0] < 0.6 and chances_of(calibration, slots, 1, False)[0] > 0.6
    assert chances_of(calibration, slots, 1) == pytest.approx([0.6, 0.3])
    assert chances_of(calibration, slots, 0, False) == pytest.approx([0.6, 0.3])


@pytest.mark.parametrize("is_below_main", [True, False])
def test_token_that_repeats_its_parents_is_corrected_by_what_came_of_such_tokens(is_below_main):
    tokens, slots = [[1, 2, 3], [1, 2, 4]], [[0.5, 0.3, 0.1], [0.5, 0.3, 0.1]]
    parent = 0 if is_below_main else 1
    calibration = ChanceCalibration()
    before = chances_of(calibration, slots, 1, is_below_main, parent, tokens)
    for _ in range(60):
        calibration.learn(tokens, slots, [1, 2] if is_below_main else [2, 1])
    chances = chances_of(calibration, slots, 1, is_below_main, parent, tokens)
    assert chances[parent] < 0.1 < before[parent] and chances[1 - parent] > before[1 - parent]
    # Below another parent the same token repeats nothing.
    assert chances_of(calibration, slots, 1, is_below_main, 2, tokens)[parent] > 0.1


def test_corrected_candidates_come_likeliest_first_and_stay_below_one():
    rng = random.Random(2)
    calibration = ChanceCalibration()
    for _ in range(300):
        slots = draw_draft(rng, 0.5)
        choices = [slot[rng.randrange(4)] for slot in IDS]
        calibration.learn(IDS, slots, choices[: rng.randint(1, SLOTS)])
    children = calibration.corrected([[*slot[:4]] for slot in IDS], [[1.0, 1.0, 0.3, 0.0]] * SLOTS)
    for slot, is_below_main, parent in itertools.product(range(SLOTS), (True, False), range(4)):
        chances = [chance for chance, _ in children(slot, is_below_main, parent)]
        assert chances == sorted(chances, reverse=True) and 0.0 < chances[-1] and chances[0] < 1.0
        assert sorted(rank for _, rank in children(slot, is_below_main, parent)) == [0, 1, 2, 3]


def test_broken_draft_spoils_nothing():
    calibration = ChanceCalibration()
    calibration.learn([[1, 2]], [[math.nan, math.nan]], [1])
    assert not any(math.isnan(chance) for chance in chances_of(calibration, [[0.5, 0.2]]))
    budget = TreeBudget(2)
    broken = SlotCandidates([[[1, 2]] * 2], [[[math.nan, math.nan]] * 2])
    _, nodes = budget.grow(broken, [False])
    assert nodes >= 1


def test_copy_is_independent():
    calibration = learned(0.1, 0.8, 20)
    twin = calibration.copy()
    before = chances_of(twin, [[0.8]])
    calibration.learn([[1]], [[0.8]], [1])
    assert chances_of(twin, [[0.8]]) == before != chances_of(calibration, [[0.8]])
