"""The drafter's cache of context keys and values."""

import pytest
import torch

from dflash_hf.context_cache_dflash import ContextCache


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
