import pytest
import reference_dflash
import torch

from dflash_hf.trainer.block_mask import block_mask_dense, block_positions

# Overlapping blocks, a block at position 0, one that runs past the end, unused ones; 13 is no multiple of any block.
ANCHORS = torch.tensor([[3, 5, 6, 12], [0, 7, 0, 0]])
IS_VALID = torch.tensor([[True, True, True, True], [True, True, False, False]])
RULES = [(None, False), (None, True), (3, False), (3, True), (1, True), (6, False), (50, False)]


@pytest.mark.parametrize(("sliding_window", "is_causal"), RULES)
@pytest.mark.parametrize("block_size", [2, 4, 5])
def test_mask_equals_the_brute_force_table(sliding_window, is_causal, block_size):
    rule = {"sliding_window": sliding_window, "is_causal": is_causal}
    mask = block_mask_dense(ANCHORS, IS_VALID, 13, block_size, **rule)
    torch.testing.assert_close(mask, reference_dflash.visible_keys(ANCHORS, IS_VALID, 13, block_size, **rule))


def test_overlapping_blocks_see_their_own_context_and_slots_only():
    mask = block_mask_dense(torch.tensor([[1, 2]]), torch.ones(1, 2, dtype=torch.bool), 4, 2)
    expected = [
        # 4 context columns, then 2 slots of each block
        [1, 0, 0, 0, 1, 1, 0, 0],
        [1, 0, 0, 0, 1, 1, 0, 0],
        [1, 1, 0, 0, 0, 0, 1, 1],
        [1, 1, 0, 0, 0, 0, 1, 1],
    ]
    assert mask[0].long().tolist() == expected


def test_sliding_causal_block_by_hand():
    mask = block_mask_dense(
        torch.tensor([[3]]), torch.ones(1, 1, dtype=torch.bool), 5, 3, sliding_window=2, is_causal=True
    )
    assert mask[0].long().tolist() == [
        [0, 0, 1, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 1, 1],
    ]


@pytest.mark.parametrize(("sliding_window", "is_causal"), RULES)
def test_every_slot_sees_itself_even_in_unused_blocks(sliding_window, is_causal):
    mask = block_mask_dense(ANCHORS, IS_VALID, 13, 4, sliding_window=sliding_window, is_causal=is_causal)
    assert mask[:, :, 13:].diagonal(dim1=1, dim2=2).all()
    unused = mask.unflatten(1, (4, 4))[1, 2:]
    assert not unused[..., :13].any()


def test_mask_is_for_one_row_at_a_time():
    together = block_mask_dense(ANCHORS, IS_VALID, 13, 4)
    for row in range(2):
        alone = block_mask_dense(ANCHORS[row : row + 1], IS_VALID[row : row + 1], 13, 4)
        assert torch.equal(together[row : row + 1], alone)


def test_longer_padding_adds_only_invisible_columns():
    short, long = block_mask_dense(ANCHORS, IS_VALID, 13, 4), block_mask_dense(ANCHORS, IS_VALID, 20, 4)
    assert torch.equal(long[:, :, :13], short[:, :, :13])
    assert not long[:, :, 13:20].any()
    assert torch.equal(long[:, :, 20:], short[:, :, 13:])


def test_positions_count_text_and_go_on_from_each_anchor():
    assert block_positions(torch.tensor([[1, 3]]), 4, 3).tolist() == [[0, 1, 2, 3, 1, 2, 3, 3, 4, 5]]
