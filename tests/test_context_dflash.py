"""The drafter's cache of context, and drafts of rows with contexts of different lengths."""

import pytest
import torch
from generation_material import BLOCK, make_config, make_drafter, make_target

from dflash_hf import DFlashDraftModel
from dflash_hf.context_dflash import BlockDrafter, ContextCache

# The cache


def update(cache, num_new, num_slots=6, num_layers=1, heads=2):
    """New random states of each layer, and what the cache returns for them."""
    cache.expect(num_new)
    width = max(num_new) + num_slots
    states = [[torch.randn(len(num_new), heads, width, 4) for _ in range(2)] for _ in range(num_layers)]
    return states, [list(cache.update(*pair, layer)) for layer, pair in enumerate(states)]


def test_context_cache_grows_and_keeps_its_content_and_gives_up_the_block():
    cache = ContextCache(num_layers=2)
    kept = [[torch.empty(1, 2, 0, 4)] * 2 for _ in range(2)]
    for num_context in (3, 1, 9, 2, 40, 5):
        assert cache.get_seq_length(1) == kept[0][0].shape[2]
        new, found = update(cache, [num_context], num_layers=2)
        expected = [
            [torch.cat(pair, dim=2) for pair in zip(kept[layer], new[layer], strict=True)] for layer in range(2)
        ]
        torch.testing.assert_close(found, expected, atol=0, rtol=0)
        kept = [[states[:, :, :-6].clone() for states in layer] for layer in expected]
        cache.keep_context()
    assert cache.get_seq_length() == 3 + 1 + 9 + 2 + 40 + 5


def test_update_that_was_not_kept_is_overwritten():
    cache = ContextCache(num_layers=1)
    first, _ = update(cache, [4])
    cache.keep_context()
    update(cache, [3])  # and the drafter failed
    assert cache.get_seq_length() == 4
    second, found = update(cache, [3])
    expected = [torch.cat([old[:, :, :4], new], dim=2) for old, new in zip(first[0], second[0], strict=True)]
    torch.testing.assert_close(found[0], expected, atol=0, rtol=0)


def test_context_cache_copies_its_buffers_only_when_they_double():
    cache = ContextCache(num_layers=1)
    addresses = []
    for _ in range(64):
        cache.expect([1])
        states = torch.zeros(1, 1, 1 + 3, 2)
        key, _ = cache.update(states, states, 0)
        addresses.append(key.data_ptr())
        cache.keep_context()
    num_moves = sum(before != after for before, after in zip(addresses, addresses[1:], strict=False))
    assert num_moves <= 4  # from 8 rows to 16, 32, 64 and 128


@pytest.mark.parametrize("rounds", [[[3, 1, 2], [1, 4, 0], [2, 2, 7]], [[2, 2, 2], [5, 1, 30]]], ids=str)
def test_every_row_has_its_context_at_the_front_and_its_block_behind_the_longest(rounds):
    cache = ContextCache(num_layers=1, num_rows=3)
    kept = [torch.empty(2, 0, 4) for _ in range(3)]
    for num_new in rounds:
        ((key, _),), ((found, _),) = update(cache, num_new)
        cache.keep_context()
        kept = [torch.cat([kept[row], key[row, :, :new]], dim=1) for row, new in enumerate(num_new)]
        assert cache.lengths == [states.shape[1] for states in kept]
        assert found.shape[2] == cache.get_seq_length() + 6
        for row, states in enumerate(kept):
            torch.testing.assert_close(found[row, :, : states.shape[1]], states, atol=0, rtol=0)
        torch.testing.assert_close(found[:, :, -6:], key[:, :, -6:], atol=0, rtol=0)


def test_selected_rows_keep_their_context():
    cache = ContextCache(num_layers=1, num_rows=3)
    ((key, _),), _ = update(cache, [3, 1, 2])
    cache.keep_context()
    cache.select_rows([2, 0])
    assert cache.lengths == [2, 3]
    _, ((found, _),) = update(cache, [1, 1])
    torch.testing.assert_close(found[0, :, :2], key[2, :, :2], atol=0, rtol=0)
    torch.testing.assert_close(found[1, :, :3], key[0, :, :3], atol=0, rtol=0)


# Drafts of rows with contexts of different lengths


DRAFTERS = {
    "full": {},
    "sliding and full": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5},
    "all sliding": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5},
    "causal": {"is_causal": True},
    "causal and sliding": {"is_causal": True, "layer_types": ["sliding_attention"] * 2, "sliding_window": 5},
}
# Context tokens that each round brings to each row.
ROUNDS = [[6, 4, 1], [1, 8, 3], [8, 1, 2], [2, 1, 8]]


@pytest.fixture
def target():
    return make_target("llama")


def draft(drafter, target, num_unseen, rounds, features, anchors):
    """Draft logits of each round; `features` and `anchors` are those of the whole text, (rows, tokens, ...)."""
    block_drafter = BlockDrafter(drafter, target, list(num_unseen))
    starts, found = [0] * len(num_unseen), []
    for index, num_new in enumerate(rounds):
        pieces = torch.full((len(starts), max(num_new), features.shape[2]), 99.0)  # what must not be read
        for row, (start, new) in enumerate(zip(starts, num_new, strict=True)):
            pieces[row, :new] = features[row, start : start + new]
        block_drafter.add_features(pieces, num_new)
        starts = [start + new for start, new in zip(starts, num_new, strict=True)]
        found.append(block_drafter.logits(anchors[:, index : index + 1], BLOCK - 1))
    return found


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", DRAFTERS)
@torch.no_grad()
def test_rows_of_a_batch_are_drafted_as_each_row_alone(name, implementation, target):
    drafter = make_drafter(target, DFlashDraftModel, **DRAFTERS[name])
    drafter.set_attn_implementation(implementation)
    features = torch.randn(3, 30, 3 * 32)
    anchors = torch.randint(97, (3, len(ROUNDS)))
    num_unseen = [0, 2, 5]
    together = draft(drafter, target, num_unseen, ROUNDS, features, anchors)
    for row in range(3):
        rounds = [[num_new[row]] for num_new in ROUNDS]
        only = slice(row, row + 1)
        alone = draft(drafter, target, num_unseen[only], rounds, features[only], anchors[only])
        for logits, wanted in zip(together, alone, strict=True):
            torch.testing.assert_close(logits[only], wanted, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_pieces_that_wait_for_a_draft_are_joined_row_by_row(target):
    drafter = make_drafter(target, DFlashDraftModel)
    features, anchors = torch.randn(2, 30, 3 * 32), torch.tensor([[3], [4]])
    joined = draft(drafter, target, [0, 0], [[7, 5]], features, anchors)[0]
    block_drafter = BlockDrafter(drafter, target, [0, 0])
    for (start, new), (other_start, other_new) in (((0, 4), (0, 1)), ((4, 1), (1, 3)), ((5, 2), (4, 1))):
        piece = torch.full((2, max(new, other_new), 3 * 32), 99.0)
        piece[0, :new] = features[0, start : start + new]
        piece[1, :other_new] = features[1, other_start : other_start + other_new]
        block_drafter.add_features(piece, [new, other_new])
    torch.testing.assert_close(block_drafter.logits(anchors, BLOCK - 1), joined, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_selected_rows_are_drafted_as_before(target):
    drafter = make_drafter(target, DFlashDraftModel)
    features, anchors = torch.randn(3, 30, 3 * 32), torch.tensor([[3], [4], [5]])

    def start():
        block_drafter = BlockDrafter(drafter, target, [0, 3, 1])
        block_drafter.add_features(features[:, :6], [6, 2, 4])
        block_drafter.logits(anchors, BLOCK - 1)
        block_drafter.add_features(features[:, 6:9], [1, 3, 2])
        return block_drafter

    wanted = start().logits(anchors, BLOCK - 1)
    selected = start()
    selected.select_rows([2, 1])
    logits = selected.logits(anchors[[2, 1]], BLOCK - 1)
    torch.testing.assert_close(logits, wanted[[2, 1]], atol=1e-5, rtol=1e-5)


def test_draft_without_new_features_is_refused(target):
    block_drafter = BlockDrafter(DFlashDraftModel(make_config(target)), target, [0])
    with pytest.raises(RuntimeError, match="no context features"):
        block_drafter.logits(torch.tensor([[3]]), 2)
