"""Best-first trees: the likeliest paths of all, in an order in which parents come first."""

import itertools
import random

import pytest
import torch
from reference_dflash import best_paths

from dflash_hf.tree_growth_dflash import GrownPaths, SlotCandidates, build_tree, grow_paths

SLOTS, RANKS = 4, 3


def random_chances(rng):
    """Chances that fall with the rank, by slot."""
    rows = []
    for _ in range(SLOTS):
        weights = sorted((rng.random() ** rng.choice([1, 4]) for _ in range(RANKS)), reverse=True)
        total = sum(weights) * rng.uniform(1.0, 1.5)
        rows.append([weight / total for weight in weights])
    return rows


def children_of(main, side=None):
    """Candidates from chances by slot and rank, below the main path and (default: the same) elsewhere."""

    def children(slot, is_below_main, parent):
        chances = (main if is_below_main or side is None else side)[slot]
        return [(chance, rank) for rank, chance in enumerate(chances)]

    return children


def random_children(rng):
    """Candidates that depend on everything that they may depend on, in any order of ranks."""
    places = itertools.product(range(SLOTS), (True, False), range(RANKS))
    candidates = {}
    for place in places:
        ranks = rng.sample(range(RANKS), RANKS)
        candidates[place] = list(zip(random_chances(rng)[0], ranks, strict=True))
    return lambda *place: candidates[place]


def ranks_of(paths: GrownPaths, node: int) -> tuple[int, ...]:
    ranks = []
    while node:
        ranks.append(paths.ranks[node])
        node = paths.parents[node]
    return tuple(ranks[::-1])


@pytest.mark.parametrize("num_nodes", [1, 2, 7, 31, 1000])
def test_grown_nodes_are_the_likeliest_of_all_paths(num_nodes):
    rng = random.Random(num_nodes)
    for _ in range(30):
        children = random_children(rng)
        paths = grow_paths(children, SLOTS, num_nodes)
        expected = best_paths(children, SLOTS, RANKS, num_nodes)
        assert [ranks_of(paths, node) for node in range(1, paths.num_nodes)] == [ranks for ranks, _ in expected]
        assert paths.chances[1:] == pytest.approx([chance for _, chance in expected])
        assert paths.num_nodes == 1 + min(num_nodes, sum(RANKS**depth for depth in range(1, SLOTS + 1)))


def test_parents_come_first_and_chances_never_rise():
    rng = random.Random(1)
    paths = grow_paths(random_children(rng), SLOTS, 40)
    assert paths.parents[0] == -1 and paths.depths[0] == 0 and paths.chances[0] == 1.0
    for node in range(1, paths.num_nodes):
        assert 0 <= paths.parents[node] < node
        assert paths.depths[node] == paths.depths[paths.parents[node]] + 1
        assert paths.chances[node] <= paths.chances[node - 1]


def test_unlikely_nodes_are_left_out_but_never_all_of_them():
    chances = [[0.5, 0.3, 0.1], [0.6, 0.2, 0.1]]
    paths = grow_paths(children_of(chances), 2, 20, min_chance=0.15)
    assert paths.chances == pytest.approx([1.0, 0.5, 0.3, 0.3, 0.18])
    assert grow_paths(children_of(chances), 2, 20, min_chance=0.9).chances == [1.0, 0.5]


def test_certain_draft_gives_a_chain():
    chances = [[1.0, 0.0]] * 5
    paths = grow_paths(children_of(chances), 5, 5)
    assert paths.parents == [-1, 0, 1, 2, 3, 4] and paths.main_path(6) == [0, 1, 2, 3, 4, 5]


def test_candidates_are_the_likeliest_tokens_with_their_probabilities():
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 70_000) * 3
    logits[1, 2, 69_999] = 30.0
    candidates = SlotCandidates.from_logits(logits, 5)
    top = logits.softmax(dim=-1).topk(5, dim=-1)
    assert candidates.tokens == top.indices.tolist()
    torch.testing.assert_close(torch.tensor(candidates.chances), top.values)
    assert candidates.tokens[1][2][0] == 69_999
    few = SlotCandidates.from_logits(torch.randn(1, 2, 3).bfloat16(), 8)
    assert [len(slot) for slot in few.tokens[0]] == [3, 3]


def test_tree_puts_the_main_path_first_and_fills_short_rows_with_twins():
    candidates = SlotCandidates([[[10, 11], [20, 21]], [[30, 31], [40, 41]]], [[[0.6, 0.25], [0.5, 0.4]]] * 2)
    full = grow_paths(children_of(candidates.chances[0]), 2, 5)
    # By chance: 10 (0.6), 10 20 (0.3), 11 (0.25), 10 21 (0.24), 11 20 (0.125).
    tree = build_tree([1, 2], candidates, [full, grow_paths(children_of(candidates.chances[1]), 2, 1)], 5)
    assert tree.tokens.tolist() == [[1, 10, 20, 11, 21, 20], [2, 30, 30, 30, 30, 30]]
    assert tree.parents == [[-1, 0, 1, 0, 1, 3], [-1, 0, 0, 0, 0, 0]]
    assert tree.token_lists == tree.tokens.tolist()
    cut = build_tree([1, 2], candidates, [full, full], 2)
    assert cut.tokens.tolist() == [[1, 10, 20], [2, 30, 40]] and cut.is_chain


def test_tokens_of_a_tree_follow_the_ranks_of_its_paths():
    rng = random.Random(3)
    chances = random_chances(rng)
    tokens = [[100 * slot + rank for rank in range(RANKS)] for slot in range(SLOTS)]
    paths = grow_paths(children_of(chances, random_chances(rng)), SLOTS, 30)
    tree = build_tree([7], SlotCandidates([tokens], [chances]), [paths], 30)
    found = set()
    for node in range(1, tree.num_nodes):
        path = []
        while node:
            path.append(tree.token_lists[0][node])
            node = tree.parents[0][node]
        found.add(tuple(path[::-1]))
    expected = [ranks_of(paths, node) for node in range(1, 31)]
    assert found == {tuple(tokens[slot][rank] for slot, rank in enumerate(ranks)) for ranks in expected}
