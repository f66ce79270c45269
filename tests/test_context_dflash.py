"""Drafts of rows with contexts of different lengths."""

import pytest
import torch
from generation_material import BLOCK, make_config, make_drafter, make_target

from dflash_hf import DFlashDraftModel
from dflash_hf.context_dflash import BlockDrafter

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
