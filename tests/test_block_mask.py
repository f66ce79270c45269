import pytest
import reference_dflash
import torch
from torch._dynamo import config as compiler_config
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from dflash_hf.trainer import block_mask
from dflash_hf.trainer.block_mask import (
    ATTENTION_FORMS,
    BlockLayout,
    attention_masks,
    block_layout,
    block_mask_dense,
    block_mask_flex,
    block_positions,
    is_flex_fused,
)

# Overlapping blocks, a block at position 0, one that runs past the end, unused ones; 13 is no multiple of any block.
ANCHORS = torch.tensor([[3, 5, 6, 12], [0, 7, 0, 0]])
IS_VALID = torch.tensor([[True, True, True, True], [True, True, False, False]])
# Documents begin at columns 0, 5 and 9, and at 0 and 6.
CONTEXT_STARTS = torch.tensor([[0, 5, 5, 9], [0, 6, 0, 0]])
RULES = [(None, False), (None, True), (3, False), (3, True), (1, True), (6, False), (50, False)]


@pytest.mark.parametrize("context_starts", [None, CONTEXT_STARTS], ids=["one document", "packed"])
@pytest.mark.parametrize(("sliding_window", "is_causal"), RULES)
@pytest.mark.parametrize("block_size", [2, 4, 5])
def test_both_forms_of_the_mask_equal_the_brute_force_table(sliding_window, is_causal, block_size, context_starts):
    rule = {"sliding_window": sliding_window, "is_causal": is_causal, "context_starts": context_starts}
    table = reference_dflash.visible_keys(ANCHORS, IS_VALID, 13, block_size, **rule)
    assert torch.equal(block_mask_dense(ANCHORS, IS_VALID, 13, block_size, **rule), table)
    flex = block_mask_flex(block_layout(ANCHORS, IS_VALID, 13, block_size, **rule))
    assert flex.shape == (2, 1, *table.shape[1:])
    assert torch.equal(create_mask(flex.mask_mod, 2, 1, *table.shape[1:], device="cpu")[:, 0], table)


def test_flex_mask_holds_the_tiles_that_the_table_touches_and_no_others():
    anchors = torch.tensor([[20, 130, 299, 0], [0, 0, 0, 0]]).repeat_interleave(10, dim=1)
    is_valid = torch.tensor([[True, True, True, False], [False] * 4]).repeat_interleave(10, dim=1)
    flex = block_mask_flex(block_layout(anchors, is_valid, 300, 8, sliding_window=100))
    table = block_mask_dense(anchors, is_valid, 300, 8, sliding_window=100)
    tiles = torch.nn.functional.max_pool2d(table.float(), 128, ceil_mode=True).long()
    assert torch.equal(flex.to_dense()[:, 0].long(), tiles)
    assert 0 < tiles.sum() <= tiles.numel() / 2


@pytest.mark.slow
def test_new_anchors_of_the_same_shape_use_the_compiled_mask_creation_again(monkeypatch):
    compiled = torch.compile(create_block_mask, backend="eager")
    monkeypatch.setattr(block_mask, "is_flex_fused", lambda device: True)
    monkeypatch.setattr(block_mask, "_compiled_create_block_mask", lambda: compiled)
    block_mask_flex(block_layout(ANCHORS, IS_VALID, 13, 4))
    with compiler_config.patch(error_on_recompile=True):
        for anchors, rule in ((ANCHORS // 2, {}), (ANCHORS, {"sliding_window": 3, "is_causal": True})):
            rule |= {"context_starts": anchors // 2}
            flex = block_mask_flex(block_layout(anchors, IS_VALID, 13, 4, **rule))
            table = block_mask_dense(anchors, IS_VALID, 13, 4, **rule)
            assert torch.equal(create_mask(flex.mask_mod, 2, 1, *table.shape[1:], device="cpu")[:, 0], table)


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


def test_block_of_a_packed_row_sees_nothing_of_the_document_before_its_own():
    is_valid = torch.ones(1, 3, dtype=torch.bool)
    mask = block_mask_dense(torch.tensor([[2, 3, 5]]), is_valid, 6, 2, context_starts=torch.tensor([[0, 3, 3]]))
    assert mask[0, ::2, :6].long().tolist() == [[1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 0]]


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


def test_every_form_gives_one_mask_per_layer_type_in_what_its_attention_takes(tiny_config):
    config = type(tiny_config)(
        **tiny_config.to_dict()
        | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3, "block_size": 4}
    )
    assert config.layer_is_causal(0) and not config.layer_is_causal(1)
    with torch.no_grad():
        masks = {
            form: attention_masks(
                form, config, ANCHORS, IS_VALID, 13, context_starts=CONTEXT_STARTS, dtype=torch.bfloat16
            )
            for form in ATTENTION_FORMS
        }
    for layer_type, rule in (("sliding_attention", {"sliding_window": 3, "is_causal": True}), ("full_attention", {})):
        table = reference_dflash.visible_keys(ANCHORS, IS_VALID, 13, 4, context_starts=CONTEXT_STARTS, **rule)
        blocks, sdpa, eager, flex = (masks[form][layer_type] for form in ATTENTION_FORMS)
        assert isinstance(blocks, BlockLayout) and blocks.context_length == 13
        assert torch.equal(sdpa, table[:, None])
        assert eager.dtype == torch.bfloat16 and torch.equal(eager == 0, table[:, None])
        assert (eager[~table[:, None]] == torch.finfo(torch.bfloat16).min).all()
        assert torch.equal(create_mask(flex.mask_mod, 2, 1, *table.shape[1:], device="cpu"), table[:, None])


def test_flex_attention_without_a_gpu_is_refused_for_training_and_warned_of_otherwise(tiny_config, caplog):
    with pytest.raises(ValueError, match="no backward of it on cpu.*'blocks'"):
        attention_masks("flex_attention", tiny_config, ANCHORS, IS_VALID, 13)
    block_mask.logger.warning_once.cache_clear()
    with torch.no_grad(), caplog.at_level("WARNING"):
        attention_masks("flex_attention", tiny_config, ANCHORS, IS_VALID, 13)
    assert "flex_attention is not fused on cpu" in caplog.text


def test_flex_attention_is_fused_on_a_gpu_with_a_compiler_only(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(block_mask.importlib.util, "find_spec", lambda name: name)
    assert is_flex_fused(gpu) and not is_flex_fused(torch.device("cpu"))
    with compiler_config.patch(disable=True):
        assert not is_flex_fused(gpu)
    monkeypatch.setattr(block_mask.importlib.util, "find_spec", lambda name: None)
    assert not is_flex_fused(gpu)


def test_positions_count_text_and_go_on_from_each_anchor():
    positions = block_positions(torch.tensor([[1, 3]]), torch.arange(4)[None], 3)
    assert positions.tolist() == [[0, 1, 2, 3, 1, 2, 3, 3, 4, 5]]


def test_positions_begin_anew_in_every_document():
    positions = block_positions(torch.tensor([[1, 3, 4]]), torch.tensor([[0, 1, 2, 0, 1]]), 2)
    assert positions.tolist() == [[0, 1, 2, 0, 1, 1, 2, 0, 1, 1, 2]]
