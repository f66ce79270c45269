import copy

import pytest
import torch
import torch.nn.functional as F

from dflash_hf import DFlashDraftModel
from dflash_hf.trainer.block_attention import BLOCK_ATTENTION, block_attention
from dflash_hf.trainer.block_mask import block_layout, block_mask_dense, block_positions

# Overlapping blocks, one at position 0, one past the end, unused ones; 13 is no multiple of the block.
ANCHORS = torch.tensor([[3, 5, 6, 12], [0, 7, 0, 0]])
IS_VALID = torch.tensor([[True, True, True, True], [True, True, False, False]])
CONTEXT, BLOCK = 13, 4
RULES = [(None, False), (None, True), (3, False), (3, True), (50, True)]


def dense_attention(query, key, value, mask, scaling):
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None], scale=scaling)
    return output.transpose(1, 2)


@pytest.mark.parametrize(("sliding_window", "is_causal"), RULES)
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (6, 2), (3, 1)])
def test_block_attention_equals_dense_attention_in_output_and_gradients(heads, key_heads, sliding_window, is_causal):
    rule = {"sliding_window": sliding_window, "is_causal": is_causal}
    num_slots, head_dim = ANCHORS.shape[1] * BLOCK, 6
    query = torch.randn(2, heads, num_slots, head_dim, dtype=torch.float64)
    key, value = torch.randn(2, 2, key_heads, CONTEXT + num_slots, head_dim, dtype=torch.float64)
    output_gradient = torch.randn(2, num_slots, heads, head_dim, dtype=torch.float64)

    def run(attention, mask):
        tensors = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
        output = attention(*tensors, mask)
        return [output, *torch.autograd.grad(output, tensors, output_gradient)]

    sparse = run(
        lambda q, k, v, mask: block_attention(None, q, k, v, mask, scaling=0.3)[0],
        block_layout(ANCHORS, IS_VALID, CONTEXT, BLOCK, **rule),
    )
    dense = run(
        lambda q, k, v, mask: dense_attention(q, k, v, mask, scaling=0.3),
        block_mask_dense(ANCHORS, IS_VALID, CONTEXT, BLOCK, **rule),
    )
    for ours, expected in zip(sparse, dense, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


def test_large_scores_neither_overflow_nor_leak_through_the_mask():
    num_slots = ANCHORS.shape[1] * BLOCK
    query, key = 300 * torch.randn(2, 2, num_slots, 4), 300 * torch.randn(2, 2, CONTEXT + num_slots, 4)
    value = torch.randn(2, 2, CONTEXT + num_slots, 4)
    output, _ = block_attention(None, query, key, value, block_layout(ANCHORS, IS_VALID, CONTEXT, BLOCK), scaling=1.0)
    expected = dense_attention(query, key, value, block_mask_dense(ANCHORS, IS_VALID, CONTEXT, BLOCK), 1.0)
    torch.testing.assert_close(output, expected)


def drafter_pair(config) -> tuple[DFlashDraftModel, DFlashDraftModel]:
    sparse, dense = DFlashDraftModel(config).eval(), DFlashDraftModel(copy.deepcopy(config)).eval()
    dense.load_state_dict(sparse.state_dict())
    sparse.set_attn_implementation(BLOCK_ATTENTION)
    dense.set_attn_implementation("sdpa")
    return sparse, dense


@pytest.mark.parametrize("is_causal", [None, False])
def test_drafter_with_block_attention_equals_drafter_with_the_dense_mask(tiny_config, is_causal):
    fields = tiny_config.to_dict() | {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 5,
        "is_causal": is_causal,
        "block_size": BLOCK,
    }
    sparse, dense = drafter_pair(type(tiny_config)(**fields))
    noise_embeds = torch.randn(2, ANCHORS.shape[1] * BLOCK, 32)
    context = torch.randn(2, CONTEXT, 3 * 32)

    def run(drafter, make_mask):
        rules = {
            layer_type: {
                "sliding_window": 5 if layer_type == "sliding_attention" else None,
                "is_causal": drafter.config.layer_is_causal(drafter.config.layer_types.index(layer_type)),
            }
            for layer_type in drafter.config.layer_types
        }
        return drafter(
            noise_embeds=noise_embeds,
            context_hidden_states=context,
            attention_mask={name: make_mask(rule) for name, rule in rules.items()},
            position_ids=block_positions(ANCHORS, CONTEXT, BLOCK),
        ).last_hidden_state

    ours = run(sparse, lambda rule: block_layout(ANCHORS, IS_VALID, CONTEXT, BLOCK, **rule))
    expected = run(dense, lambda rule: block_mask_dense(ANCHORS, IS_VALID, CONTEXT, BLOCK, **rule)[:, None])
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layer_types", [["full_attention"] * 2, ["sliding_attention", "full_attention"]])
def test_drafter_set_up_for_training_still_takes_a_single_block_without_layout(tiny_config, layer_types):
    config = type(tiny_config)(**tiny_config.to_dict() | {"layer_types": layer_types, "sliding_window": 5})
    sparse, plain = drafter_pair(config)
    inputs = {"noise_embeds": torch.randn(1, 8, 32), "context_hidden_states": torch.randn(1, 11, 96)}
    torch.testing.assert_close(sparse(**inputs).last_hidden_state, plain(**inputs).last_hidden_state)
