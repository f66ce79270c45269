"""SDPA for grouped-query attention that never copies keys: on a CPU, batched decoding is many times faster with it.

Transformers repeats keys and values for every query head when a mask is given. Here the query heads of one group
become rows of one head instead, which is the same sum. Used where many rows are decoded at once
(`dflash-regenerate`); on accelerators the stock kernels are better.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

# Without "flash" in the name: Transformers would look for a flash-attention kernel of that name.
GROUPED_ATTENTION = "grouped_sdpa"


def grouped_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attention output of shape (batch, query length, heads, head_dim), as Transformers' attention functions give it.

    Args:
        module (`nn.Module`): The attention layer; unused.
        query (`torch.Tensor`): Shape (batch, heads, query length, head_dim).
        key, value (`torch.Tensor`): Shape (batch, key-value heads, key length, head_dim).
        attention_mask (`torch.Tensor`, *optional*): Bool, shape (batch, 1, query length, key length); None is causal.
        scaling (`float`, *optional*): Factor on the scores; default head_dim ** -0.5.
    """
    batch, heads, query_length, head_dim = query.shape
    key_heads, key_length = key.shape[1], key.shape[2]
    groups = heads // key_heads
    if attention_mask is None:
        is_visible = torch.ones(query_length, key_length, dtype=torch.bool, device=query.device)
        is_visible = is_visible.tril(key_length - query_length)[None, None]
    else:
        is_visible = attention_mask[..., :key_length]
    grouped_query = query.reshape(batch, key_heads, groups * query_length, head_dim)
    if query_length == 1:
        scale = head_dim**-0.5 if scaling is None else scaling
        scores = grouped_query @ key.transpose(-1, -2) * scale
        scores = scores.masked_fill(~is_visible, torch.finfo(scores.dtype).min)
        output = scores.softmax(dim=-1) @ value
    else:
        output = F.scaled_dot_product_attention(
            grouped_query, key, value, attn_mask=is_visible.repeat(1, 1, groups, 1), scale=scaling
        )
    return output.reshape(batch, heads, query_length, head_dim).transpose(1, 2).contiguous(), None


def register_grouped_attention() -> str:
    """Makes `attn_implementation=GROUPED_ATTENTION` known to Transformers and returns that name."""
    AttentionInterface.register(GROUPED_ATTENTION, grouped_attention)
    AttentionMaskInterface.register(GROUPED_ATTENTION, sdpa_mask)
    return GROUPED_ATTENTION
