"""Trees of proposals: their shape, what their nodes see, and decoding with them."""

import random

import pytest
import torch
from generation_material import (
    BATCH,
    BLOCK,
    NEW,
    PROMPT,
    generate,
    generate_batch,
    make_batch_oracle,
    make_oracle,
    make_target,
)
from oracle_drafters import always_right, expected_lengths

from dflash_hf import decoding_dflash
from dflash_hf.tree_dflash import TokenTree, tree_attention_mask

# Each node's parent.
CHAIN = [-1, 0, 1, 2, 3]
STAR = [-1, 0, 0, 0, 0]
BUSH = [-1, 0, 0, 1, 1, 2, 5, 3]


def make_tree(*parents, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 5, (len(parents), len(parents[0])), generator=generator)
    return TokenTree(tokens, [list(row) for row in parents])


def path_of(parents, node):
    path = []
    while node != -1:
        path.append(node)
        node = parents[node]
    return path[::-1]


def random_parents(rng, num_nodes):
    """Some trees are bushy, some slim; none is deeper than a block has slots."""
    parents, depths, reach = [-1], [0], rng.choice([1, 2, 4, num_nodes])
    for node in range(1, num_nodes):
        parent = rng.randrange(max(0, node - reach), node)
        while depths[parent] >= BLOCK - 1:
            parent = parents[parent]
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return parents


# The tree


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([[-1, 0]], r"2 rows of 3 nodes, .* got \[2\]"),
        ([[-1, 0, 1], [-1, 0]], r"2 rows of 3 nodes, .* got \[3, 2\]"),
        ([[-1, 0, 1], [0, 0, 1]], r"earlier node for every other; got \[0, 0, 1\]"),
        ([[-1, 0, 1], [-1, 0, 2]], r"earlier node for every other; got \[-1, 0, 2\]"),
        ([[-1, -1, 1], [-1, 0, 1]], r"earlier node for every other; got \[-1, -1, 1\]"),
    ],
)
def test_parents_that_make_no_tree_are_refused_with_their_values(parents, message):
    with pytest.raises(ValueError, match=message):
        TokenTree(torch.zeros(2, 3, dtype=torch.long), parents)


def test_chain_is_the_tree_with_one_path():
    tokens = torch.tensor([[5, 6, 7], [8, 9, 5]])
    tree = TokenTree.chain(tokens)
    assert tree.parents == [[-1, 0, 1], [-1, 0, 1]] and tree.num_nodes == 3
    assert tree.is_chain and not make_tree(CHAIN, STAR).is_chain and make_tree(CHAIN).is_chain
    assert TokenTree.chain(tokens[:, :1]).is_chain
    assert tree.depths.tolist() == [[0, 1, 2]] * 2
    assert torch.equal(tree.ancestors, torch.ones(2, 3, 3, dtype=torch.bool).tril())


def test_depths_and_ancestors_equal_walks_to_the_anchor():
    rng = random.Random(1)
    rows = [random_parents(rng, 13) for _ in range(20)] + [BUSH + [7, 8, 8, 1, 0], STAR + [0] * 8]
    tree = make_tree(*rows)
    for row, parents in enumerate(rows):
        for node in range(13):
            path = path_of(parents, node)
            assert int(tree.depths[row, node]) == len(path) - 1
            assert tree.ancestors[row, node].nonzero().flatten().tolist() == sorted(path)


def test_child_is_the_first_node_that_proposes_the_token():
    tree = TokenTree(torch.tensor([[9, 4, 4, 6, 6, 4]]), [[-1, 0, 0, 1, 2, 1]])
    assert tree.child(0, 0, 4) == 1  # and not its twin
    assert tree.child(0, 1, 6) == 3 and tree.child(0, 2, 6) == 4 and tree.child(0, 1, 4) == 5
    assert tree.child(0, 0, 6) is None and tree.child(0, 5, 4) is None and tree.child(0, 0, 9) is None


def test_longest_chain_is_each_rows_deepest_path_cut_to_the_shortest():
    tokens = torch.arange(16).view(2, 8)
    tree = TokenTree(tokens, [BUSH, [-1, 0, 1, 2, 3, 0, 5, 6]])
    chain = tree.longest_chain()
    assert chain.is_chain
    assert chain.tokens.tolist() == [[0, 2, 5, 6], [8, 9, 10, 11]]
    star = TokenTree(torch.arange(5)[None], [STAR]).longest_chain()
    assert star.tokens.tolist() == [[0, 1]]


# What nodes see


@pytest.mark.parametrize("sliding_window", [None, 1, 4, 100])
@pytest.mark.parametrize("num_cached", [0, 1, 9])
@pytest.mark.parametrize("is_padded", [False, True])
def test_mask_equals_a_table_made_node_by_node(sliding_window, num_cached, is_padded):
    rng = random.Random(2)
    rows = [BUSH, CHAIN + [0, 1, 1], random_parents(rng, 8)]
    tree = make_tree(*rows)
    padding = None
    if is_padded:
        # On the left, and a gap; the last row is full.
        kept = [[column > 2 for column in range(num_cached)], [column != 5 for column in range(num_cached)]]
        padding = torch.tensor([*kept, [True] * num_cached]).view(3, num_cached).long()
    for num_hidden in (0, num_cached // 2):
        num_keys = num_cached + 8 - num_hidden
        mask = tree_attention_mask(tree, padding, num_cached, num_keys, sliding_window)
        assert mask.shape == (3, 1, 8, num_keys) and mask.dtype == torch.bool
        for row, parents in enumerate(rows):
            for node in range(8):
                path = path_of(parents, node)
                query = num_cached + len(path) - 1
                visible = []
                for column in range(num_hidden, num_cached):
                    is_text = padding is None or bool(padding[row, column])
                    visible.append(is_text and (sliding_window is None or query - column < sliding_window))
                for key in range(8):
                    distance = len(path) - len(path_of(parents, key))
                    is_near = sliding_window is None or distance < sliding_window
                    visible.append(key in path and is_near)
                assert mask[row, 0, node].tolist() == visible


# Decoding


class RandomTrees:
    """Trees of random shapes: `chance` of each node to hold the token that the oracle knows to be right."""

    def __init__(self, drafter, num_nodes, chance, seed=0):
        self.drafter, self.num_nodes, self.chance = drafter, num_nodes, chance
        self.rng = random.Random(seed)
        self.rounds: list[dict[int, TokenTree]] = []  # by row

    def __call__(self, logits, anchors):
        best = logits.argmax(dim=-1).tolist()
        tokens, all_parents = [], []
        for anchor, right in zip(anchors[:, 0].tolist(), best, strict=True):
            parents, row = random_parents(self.rng, self.num_nodes), [anchor]
            for node in range(1, self.num_nodes):
                token = right[len(path_of(parents, node)) - 2]
                row.append(token if self.rng.random() < self.chance else (token + self.rng.randint(1, 3)) % 90)
            tokens.append(row)
            all_parents.append(parents)
        tree = TokenTree(torch.tensor(tokens), all_parents)
        singles = [TokenTree(tree.tokens[i : i + 1], [parents]) for i, parents in enumerate(all_parents)]
        self.rounds.append(dict(zip(self.drafter.rows, singles, strict=True)))
        return tree


def walk_lengths(trees, text, max_new_tokens, row):
    """Accepted lengths of a row whose greedy new tokens are `text`, by walking each round's tree along them."""
    lengths, num_new = [], 1
    for trees_of_round in trees:
        if num_new >= max_new_tokens:
            break
        tree = trees_of_round[row]
        tokens, parents = tree.tokens[0].tolist(), tree.parents[0]
        reached = {0}
        length = 1
        while num_new + length < max_new_tokens:
            token = text[num_new + length - 1]
            # Twins stand for the same text, but only the first of them is walked on from.
            hits = [node for node in range(1, len(tokens)) if parents[node] in reached and tokens[node] == token]
            if not hits:
                break
            reached = {hits[0]}
            length += 1
        lengths.append(length)
        num_new += length
    if num_new < max_new_tokens:  # a last round with room for one token has no tree
        lengths.append(1)
    return lengths


SHAPES = {"three nodes": (3, 0.6), "fifteen nodes": (15, 0.6), "many right": (24, 0.9), "many wrong": (24, 0.2)}


@pytest.mark.parametrize("num_nodes, chance", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2"])
def test_text_equals_plain_and_lengths_equal_a_walk_of_the_trees(kind, num_nodes, chance):
    target = make_target(kind)
    drafter = make_oracle(target)
    trees = RandomTrees(drafter, num_nodes, chance)
    output = generate(target, custom_generate=drafter.decode, tree_builder=trees)
    assert output.tolist() == generate(target).tolist()
    lengths = walk_lengths(trees.rounds, output[0, PROMPT.shape[1] :].tolist(), NEW, 0)
    assert drafter.accepted_lengths == lengths
    assert len(set(lengths)) > 1 or chance < 0.5


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2"])
def test_rows_of_a_batch_have_their_own_trees(kind, implementation):
    target = make_target(kind)
    target.set_attn_implementation(implementation)
    drafter = make_batch_oracle(target, [always_right] * len(BATCH))
    trees = RandomTrees(drafter, 12, 0.6)
    output = generate_batch(target, custom_generate=drafter.decode, tree_builder=trees)
    assert output.tolist() == generate_batch(target).tolist()
    for row in range(len(BATCH)):
        text = output[row, BATCH.shape[1] :].tolist()
        assert drafter.all_accepted_lengths[row] == walk_lengths(trees.rounds, text, NEW, row)
    assert len({tuple(lengths) for lengths in drafter.all_accepted_lengths}) == len(BATCH)


@pytest.mark.parametrize("window", [3, 5])
def test_trees_are_right_when_the_text_outgrows_a_small_sliding_window(window):
    target = make_target("gemma3", sliding_window=window)
    drafter = make_oracle(target)
    trees = RandomTrees(drafter, 16, 0.8)
    output = generate(target, custom_generate=drafter.decode, tree_builder=trees)
    assert output.tolist() == generate(target).tolist()
    lengths = walk_lengths(trees.rounds, output[0, PROMPT.shape[1] :].tolist(), NEW, 0)
    assert drafter.accepted_lengths == lengths and max(lengths) > window


def right_path_among_wrong_ones(logits, anchors):
    """The likeliest token of each slot behind a wrong sibling, so that the right path's nodes lie apart."""
    best = logits.argmax(dim=-1)
    columns, parents = [anchors], [-1]
    node = 0
    for slot in range(best.shape[1]):
        right = best[:, slot : slot + 1]
        columns += [(right + 1) % 90, right]
        parents += [node, node]
        node += 2
    return TokenTree(torch.cat(columns, dim=1), [parents] * len(anchors))


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2"])
def test_tree_that_holds_the_right_path_commits_its_whole_depth(kind):
    target = make_target(kind)
    drafter = make_batch_oracle(target, [always_right] * len(BATCH))
    options = {"custom_generate": drafter.decode, "tree_builder": right_path_among_wrong_ones}
    output = generate_batch(target, **options)
    assert output.tolist() == generate_batch(target).tolist()
    assert drafter.all_accepted_lengths == [expected_lengths(always_right, NEW, BLOCK)] * len(BATCH)


def test_target_that_takes_no_mask_verifies_the_longest_path_and_says_so_once(monkeypatch):
    messages = []
    monkeypatch.setattr(decoding_dflash.logger, "warning_once", messages.append)
    target = make_target("gemma3", sliding_window=PROMPT.shape[1] + NEW)
    drafter = make_oracle(target)
    trees = RandomTrees(drafter, 12, 0.7)
    options = {"custom_generate": drafter.decode, "tree_builder": trees, "cache_implementation": "static"}
    output = generate(target, **options)
    assert output.tolist() == generate(target).tolist()
    assert set(messages) == {
        "Gemma3ForCausalLM with this cache and attention cannot take the mask of a tree: each tree is cut to its "
        "longest path."
    }
    cut = [{0: tree.longest_chain()} for round_trees in trees.rounds for tree in round_trees.values()]
    lengths = walk_lengths(cut, output[0, PROMPT.shape[1] :].tolist(), NEW, 0)
    assert drafter.accepted_lengths == lengths and max(lengths) > 1
