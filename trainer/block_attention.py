"""Attention of many blocks to one context, computing only scores that the rule of `block_mask_dense` lets through.

A dense mask makes every slot score every slot of every block: with N blocks that work and memory grows with N squared.
Here a slot scores the context and its own block. Plain matrix products, so it runs on every device.
"""

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dflash_hf.trainer.block_mask import BlockLayout

# The name must not contain "flash", which makes Transformers look for a kernel of that name.
BLOCK_ATTENTION = "block_context_attention"


def block_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: BlockLayout | torch.Tensor | None,
    scaling: float,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attention output of shape (batch, N * block_size, heads, head_dim).

    Args:
        module (`nn.Module`): The attention layer.
        query (`torch.Tensor`): Shape (batch, heads, N * block_size, head_dim).
        key, value (`torch.Tensor`): Shape (batch, key-value heads, context + N * block_size, head_dim).
        attention_mask ([`BlockLayout`]): Which scores count. Anything else is a single block, as `generate()` of a
            target with a freshly trained drafter gives it, and takes stock SDPA.
        scaling (`float`): Factor on the scores.
    """
    if not isinstance(attention_mask, BlockLayout):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    batch, heads, num_slots, head_dim = query.shape
    key_heads = key.shape[1]
    groups = heads // key_heads
    block_size = attention_mask.sees_slot.shape[0]
    num_blocks = num_slots // block_size
    context_length = attention_mask.sees_context.shape[-1]
    context_key, block_key = key.split([context_length, num_slots], dim=2)
    context_value, block_value = value.split([context_length, num_slots], dim=2)
    block_shape = (batch, key_heads, num_blocks, block_size, head_dim)
    block_key, block_value = block_key.reshape(block_shape), block_value.reshape(block_shape)

    # (B, key heads, N, groups * block, head_dim): the query heads of a group become rows of one head.
    query = query.reshape(batch, key_heads, groups, num_blocks, block_size, head_dim)
    query = (query * scaling).transpose(2, 3).reshape(batch, key_heads, num_blocks, groups * block_size, head_dim)
    context_scores = query.flatten(2, 3) @ context_key.transpose(-1, -2)
    context_scores = context_scores.view(batch, key_heads, num_blocks, groups, block_size, context_length)
    block_scores = (query @ block_key.transpose(-1, -2)).view(
        batch, key_heads, num_blocks, groups, block_size, block_size
    )
    lowest = torch.finfo(context_scores.dtype).min
    context_scores = context_scores.masked_fill(~attention_mask.sees_context[:, None, :, None], lowest)
    block_scores = block_scores.masked_fill(~attention_mask.sees_slot, lowest)
    weights = torch.cat([context_scores, block_scores], dim=-1).softmax(dim=-1).to(value.dtype)
    context_weights, block_weights = weights.split([context_length, block_size], dim=-1)
    output = context_weights.reshape(batch, key_heads, -1, context_length) @ context_value
    output = output.view(batch, key_heads, num_blocks, groups * block_size, head_dim)
    output = output + block_weights.reshape(*output.shape[:4], block_size) @ block_value
    output = output.view(batch, key_heads, num_blocks, groups, block_size, head_dim)
    # to (B, N, block, key heads, groups, head_dim)
    return output.permute(0, 2, 4, 1, 3, 5).reshape(batch, num_slots, heads, head_dim), None


AttentionInterface.register(BLOCK_ATTENTION, block_attention)
