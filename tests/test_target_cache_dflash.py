"""The target's cache holds the accepted nodes of each row and nothing else, whatever was read and rejected."""

import random

import pytest
import torch
from generation_material import cache_argument, make_target
from transformers import DynamicCache, GenerationConfig, StaticCache
from transformers.cache_utils import DynamicLayer

from dflash_hf.target_cache_dflash import TargetCache
from dflash_hf.tree_dflash import TokenTree
from dflash_hf.verification_dflash import Verifier

WINDOW = 8
PROMPTS = [[5, 17, 3, 42, 8, 29], [11, 4, 60, 7], [23], [9, 9, 70]]
LONGEST = 200


def make_verifier(target, rows, kind="dynamic"):
    """A verifier that has read the prompts of these rows, padded on the left."""
    longest = max(len(PROMPTS[row]) for row in rows)
    ids = torch.tensor([[1] * (longest - len(PROMPTS[row])) + PROMPTS[row] for row in rows])
    mask = torch.tensor([[0] * (longest - len(PROMPTS[row])) + [1] * len(PROMPTS[row]) for row in rows])
    cache = StaticCache(config=target.config, max_cache_len=LONGEST) if kind == "static" else None
    cache = cache or DynamicCache(config=target.config)
    kwargs = {
        cache_argument(target): cache,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(dim=1) - 1).clamp_min(0),
        "use_cache": True,
    }
    sizes = {"num_rows": len(rows), "num_prompt": longest, "max_length": longest + LONGEST}
    verifier = Verifier(target, [0], GenerationConfig(), kwargs, **sizes)
    verifier.read_prompt(ids)
    return verifier


class Twin:
    """The kept tokens of each row, and what the target's cache holds after reading just these, alone."""

    def __init__(self, target, rows):
        self.target, self.texts = target, [list(PROMPTS[row]) for row in rows]

    def keep(self, tree, paths):
        for text, tokens, path in zip(self.texts, tree.tokens.tolist(), paths, strict=True):
            text += [tokens[node] for node in path]

    def check(self, cache):
        """Keys and values of each row, its gaps left out; sliding layers hold the newest tokens only."""
        for row, text in enumerate(self.texts):
            expected = DynamicCache(config=self.target.config)
            self.target(torch.tensor([text]), use_cache=True, **{cache_argument(self.target): expected})
            is_text = torch.ones(cache.num_columns, dtype=torch.bool)
            if cache.padding_mask is not None:
                is_text = cache.padding_mask[row].bool()
            assert int(is_text.sum()) == len(text)
            for layer, twin in zip(cache.cache.layers, expected.layers, strict=True):
                for name in ("keys", "values"):
                    ours, theirs = getattr(layer, name)[row], getattr(twin, name)[0]
                    ours = ours[:, : len(is_text)] if cache.is_static else ours
                    ours = ours[:, is_text[len(is_text) - ours.shape[1] :]]
                    held = min(len(text), WINDOW - 1) if getattr(layer, "is_sliding", False) else len(text)
                    torch.testing.assert_close(ours[:, -held:], theirs[:, -held:], atol=2e-4, rtol=2e-4)


def random_tree(rng, num_rows, num_nodes, is_chain):
    tokens = torch.tensor([[rng.randrange(2, 97) for _ in range(num_nodes)] for _ in range(num_rows)])
    if is_chain:
        return TokenTree.chain(tokens)
    return TokenTree(tokens, [[-1] + [rng.randrange(node) for node in range(1, num_nodes)] for _ in range(num_rows)])


def random_path(rng, parents):
    node, path = rng.randrange(len(parents)), []
    while node != -1:
        path.append(node)
        node = parents[node]
    return path[::-1]


def play(target, rows, *, num_rounds, is_chain, kind="dynamic", drop_at=(), seed=0):
    """Rounds of random trees and random kept paths; yields the cache after each, checked against the twin."""
    rng = random.Random(seed)
    verifier, twin = make_verifier(target, rows, kind), Twin(target, rows)
    for step in range(num_rounds):
        tree = random_tree(rng, len(twin.texts), rng.randint(1, 9), is_chain)
        verifier.verify(tree)
        paths = [random_path(rng, parents) for parents in tree.parents]
        verifier.keep_nodes(tree, paths)
        twin.keep(tree, paths)
        if step in drop_at:
            kept = sorted(rng.sample(range(len(twin.texts)), 2))
            verifier.select_rows(kept)
            twin.texts = [twin.texts[row] for row in kept]
        twin.check(verifier.cache)
        yield verifier.cache, paths


def is_left_padding(mask):
    return mask is None or bool((mask.diff(dim=1) >= 0).all())


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("is_chain", [True, False], ids=["chains", "trees"])
@torch.no_grad()
def test_one_row_keeps_its_accepted_path_over_many_rounds(kind, is_chain):
    target = make_target(kind)
    for cache, _ in play(target, [0], num_rounds=25, is_chain=is_chain):
        assert cache.padding_mask is None or bool(cache.padding_mask.all())


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("is_chain", [True, False], ids=["chains", "trees"])
@torch.no_grad()
def test_rows_keep_their_own_accepted_paths_and_may_be_dropped(kind, is_chain):
    target = make_target(kind)
    rounds = list(play(target, [0, 1, 2, 3], num_rounds=14, is_chain=is_chain, drop_at=(9,)))
    assert any(len({len(path) for path in paths}) > 1 for _, paths in rounds)


@torch.no_grad()
def test_gaps_of_full_attention_are_closed_late_and_stay_few():
    had_gaps, num_closed, columns_before = False, 0, 0
    for cache, _ in play(make_target("llama"), [0, 1, 2], num_rounds=24, is_chain=True):
        lengths = cache.padding_mask.sum(dim=1)
        has_gaps = not is_left_padding(cache.padding_mask)
        had_gaps |= has_gaps
        num_closed += cache.num_columns < columns_before
        columns_before = cache.num_columns
        assert cache.num_columns <= 1.25 * int(lengths.max())
    assert had_gaps and 1 <= num_closed < 20


@pytest.mark.parametrize(("target_kind", "cache_kind"), [("gemma3", "dynamic"), ("llama", "static")])
@torch.no_grad()
def test_gaps_are_closed_at_once_where_columns_count(target_kind, cache_kind):
    target = make_target(target_kind)
    for cache, _ in play(target, [0, 1, 2], num_rounds=12, is_chain=True, kind=cache_kind):
        assert is_left_padding(cache.padding_mask)
        longest = cache.num_columns if cache.padding_mask is None else int(cache.padding_mask.sum(dim=1).max())
        assert cache.num_columns == longest
        if cache_kind == "static":
            assert cache.num_free_columns == LONGEST - longest
            assert {int(layer.cumulative_length) for layer in cache.cache.layers} == {longest}


@torch.no_grad()
def test_padding_mask_marks_prompt_padding_and_gaps():
    target = make_target("llama")
    verifier = make_verifier(target, [0, 1])
    assert verifier.cache.padding_mask.tolist() == [[1] * 6, [0, 0, 1, 1, 1, 1]]
    tree = TokenTree.chain(torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]]))
    verifier.verify(tree)
    verifier.keep_nodes(tree, [[0], [0, 1]])
    assert verifier.cache.padding_mask.tolist() == [[1] * 7 + [0], [0, 0] + [1] * 6]
    assert verifier.cache.num_columns == int(verifier.cache.cache.get_seq_length()) == 8
    verifier.cache.stop_recording()
    # The first row has 7 tokens, the second 6.
    assert verifier.cache.padding_mask.tolist() == [[1] * 7, [0] + [1] * 6]
    assert int(verifier.cache.cache.get_seq_length()) == 7


@torch.no_grad()
def test_equal_rows_need_no_mask():
    target = make_target("llama")
    cache = DynamicCache(config=target.config)
    target(torch.tensor([[5, 6, 7], [8, 9, 10]]), use_cache=True, **{cache_argument(target): cache})
    wound = TargetCache(cache, "llama", num_rows=2, max_columns=50)
    wound.keep_nodes(2, [[0], [0]])
    assert wound.padding_mask is None and wound.num_columns == 2
    wound.keep_nodes(1, [[0], []])
    assert wound.padding_mask.tolist() == [[1, 1], [1, 0]]


@torch.no_grad()
def test_more_nodes_than_were_read_cannot_be_kept():
    target = make_target("llama")
    cache = DynamicCache(config=target.config)
    target(torch.tensor([[5, 6, 7, 8]]), use_cache=True, **{cache_argument(target): cache})
    wound = TargetCache(cache, "llama", num_rows=1, max_columns=50)
    with pytest.raises(ValueError, match="3 nodes cannot be kept of a forward that read 2"):
        wound.keep_nodes(2, [[0, 1, 2]])
    assert cache.get_seq_length() == 4


@torch.no_grad()
def test_recurrent_state_goes_back_to_before_the_block():
    target = make_target("qwen3_next")
    verifier = make_verifier(target, [0])
    tree = TokenTree.chain(torch.tensor([[7, 8, 9, 10, 11, 12, 13, 14]]))
    other = TokenTree.chain(torch.tensor([[7, 30, 31, 32, 33, 34, 35, 36]]))
    first = verifier.verify(tree).logits
    verifier.cache.forget_block(8)
    assert verifier.cache.num_columns == 6
    assert not torch.equal(verifier.verify(other).logits, first)
    verifier.cache.forget_block(8)
    assert torch.equal(verifier.verify(tree).logits, first)


@torch.no_grad()
def test_recurrent_target_goes_on_from_the_kept_nodes():
    target = make_target("qwen3_next")
    verifier, rng = make_verifier(target, [0]), random.Random(3)
    text = list(PROMPTS[0])
    for _ in range(10):
        tree = random_tree(rng, 1, rng.randint(1, 8), is_chain=True)
        logits = verifier.verify(tree).logits
        whole = target(torch.tensor([text + tree.tokens[0].tolist()]), use_cache=False).logits
        torch.testing.assert_close(logits, whole[:, len(text) :], atol=5e-3, rtol=5e-3)
        path = list(range(rng.randint(1, tree.num_nodes)))
        verifier.keep_nodes(tree, [path])
        text += tree.tokens[0, : len(path)].tolist()


def test_cache_layers_that_cannot_be_wound_back_are_refused_by_name():
    target = make_target("llama")
    cache = DynamicCache(config=target.config)
    cache.layers = [DynamicLayer(), type("SpiralLayer", (DynamicLayer,), {})()]
    with pytest.raises(ValueError, match="take rejected tokens back out of the cache, which SpiralLayer cannot do"):
        TargetCache(cache, "llama", num_rows=1, max_columns=10)
    with pytest.raises(ValueError, match="which dict cannot do"):
        TargetCache({}, "llama", num_rows=1, max_columns=10)


def test_small_static_windows_and_unknown_recurrent_targets_are_refused():
    target = make_target("gemma3")
    static = StaticCache(config=target.config, max_cache_len=50)
    with pytest.raises(ValueError, match="static cache of a sliding-window layer forgets"):
        TargetCache(static, "gemma3_text", num_rows=1, max_columns=40)
    recurrent = DynamicCache(config=make_target("qwen3_next").config)
    with pytest.raises(ValueError, match="'mamba9' keep a recurrent state .* qwen3_next"):
        TargetCache(recurrent, "mamba9", num_rows=1, max_columns=40)
    with pytest.raises(ValueError, match="one prompt at a time with a drafter, got 2 rows"):
        TargetCache(recurrent, "qwen3_next", num_rows=2, max_columns=40)
