"""Attention of many blocks to one context, computing only scores that the rule of `block_layout` lets through.

A dense mask makes every slot score every slot of every block: with N blocks that work and memory grows with N squared.
Here a slot scores its own block and the context columns that its piece of blocks sees. Scores exist for one piece at
a time and are computed again in the backward, so that nothing of their size is kept. Plain matrix products, so it runs
on every device.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dflash_hf.trainer.block_mask import BlockLayout, check_attention_form

# The name must not contain "flash", which makes Transformers look for a kernel of that name.
BLOCK_ATTENTION = "block_context_attention"

# Slots of one row that are scored together on a CPU: few, so that the scores stay in its cache.
_CPU_SLOTS = 64
# Elsewhere: scores that are computed together, of all heads and rows.
_DEVICE_SCORES = 2**25


def attention_implementation(form: str) -> str:
    """What to give to `drafter.set_attn_implementation` for masks of this form, see [`attention_masks`].

    Args:
        form (`str`): "blocks" (this file), or Transformers' "sdpa", "eager" or "flex_attention".
    """
    check_attention_form(form)
    return BLOCK_ATTENTION if form == "blocks" else form


def block_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: BlockLayout | torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
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
        dropout (`float`): Must be 0 with a layout.
    """
    if not isinstance(attention_mask, BlockLayout):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    if dropout > 0:
        raise ValueError(
            f"`attention_dropout` is {dropout}, which `attention` 'blocks' cannot do. Set it to 0 in the drafter's "
            "config, or train with `attention` 'sdpa'."
        )
    dtype = value.dtype
    if torch.amp.is_autocast_available(query.device.type) and torch.is_autocast_enabled(query.device.type):
        # Autocast does not reach the backward of a custom function, so its cast is made here.
        dtype = torch.get_autocast_dtype(query.device.type)
    return _BlockAttention.apply(query.to(dtype), key.to(dtype), value.to(dtype), attention_mask, scaling), None


AttentionInterface.register(BLOCK_ATTENTION, block_attention)


class _BlockAttention(torch.autograd.Function):
    """Piece by piece in both directions; only arguments and output are kept in between.

    Shapes in a piece: R rows, H key-value heads with G query heads each, C blocks of S slots, T context columns.
    """

    @staticmethod
    def forward(ctx, query, key, value, layout, scaling):
        batch, heads, num_slots, head_dim = query.shape
        key_heads = key.shape[1]
        output = query.new_empty(batch, num_slots, heads, head_dim)
        for piece in _pieces(layout, heads):
            keys, values = _at_keys(key, layout, piece), _at_keys(value, layout, piece)
            slots = _at_slots(query.transpose(1, 2), key_heads, layout, piece) * scaling
            weights = _weights(slots, keys, layout, piece)
            _at_slots(output, key_heads, layout, piece).copy_(_combine(weights.to(query.dtype), *values))
        ctx.save_for_backward(query, key, value, output)
        ctx.layout, ctx.scaling = layout, scaling
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, output_gradient):
        query, key, value, output = ctx.saved_tensors
        layout, scaling, key_heads = ctx.layout, ctx.scaling, key.shape[1]
        query_gradient = torch.empty_like(query)
        # Exact, because many pieces add to the same columns.
        key_gradient, value_gradient = (
            torch.zeros_like(tensor, dtype=_exact(tensor.dtype)) for tensor in (key, value)
        )
        for piece in _pieces(layout, query.shape[1]):
            keys, values = _at_keys(key, layout, piece), _at_keys(value, layout, piece)
            slots = _at_slots(query.transpose(1, 2), key_heads, layout, piece) * scaling
            slot_outputs = _at_slots(output, key_heads, layout, piece)
            gradients = _at_slots(output_gradient, key_heads, layout, piece)
            weights = _weights(slots, keys, layout, piece)
            mean = (gradients.to(weights.dtype) * slot_outputs).sum(dim=-1, keepdim=True)
            score_gradients = _scores(gradients, *values).to(weights.dtype).sub_(mean).mul_(weights).to(query.dtype)
            slot_gradients = _combine(score_gradients, *keys) * scaling
            _at_slots(query_gradient.transpose(1, 2), key_heads, layout, piece).copy_(slot_gradients)
            _add(_at_keys(key_gradient, layout, piece), _spread(score_gradients, slots))
            _add(_at_keys(value_gradient, layout, piece), _spread(weights.to(query.dtype), gradients))
        return query_gradient, key_gradient.to(key.dtype), value_gradient.to(value.dtype), None, None


class _Piece(NamedTuple):
    rows: slice
    blocks: slice
    columns: slice


def _pieces(layout: BlockLayout, heads: int) -> Iterator[_Piece]:
    """Blocks that are scored together, with the context columns that any of them may see."""
    is_on_host = layout.context_starts.device.type == "cpu"
    return _narrow_pieces(layout) if is_on_host else _wide_pieces(layout, heads)


def _narrow_pieces(layout: BlockLayout) -> Iterator[_Piece]:
    """Few blocks of one row; neighbours have near anchors, so columns after the last one are left out."""
    batch, num_blocks, block_size = layout.context_starts.shape
    step = max(1, _CPU_SLOTS // block_size)
    for row in range(batch):
        for first in range(0, num_blocks, step):
            rows, blocks = slice(row, row + 1), slice(first, first + step)
            start = int(layout.context_starts[rows, blocks].min())
            end = int(layout.context_ends[rows, blocks].max())
            yield _Piece(rows, blocks, slice(start, max(start, end)))


def _wide_pieces(layout: BlockLayout, heads: int) -> Iterator[_Piece]:
    """Many blocks of all rows with the whole context: to read the anchors would stop the queue of a GPU."""
    batch, num_blocks, block_size = layout.context_starts.shape
    step = max(1, _DEVICE_SCORES // (batch * heads * block_size * (layout.context_length + block_size)))
    for first in range(0, num_blocks, step):
        yield _Piece(slice(0, batch), slice(first, first + step), slice(0, layout.context_length))


def _at_slots(tensor: torch.Tensor, key_heads: int, layout: BlockLayout, piece: _Piece) -> torch.Tensor:
    """View of shape (R, H, G, C, S, head_dim) into a tensor of shape (batch, N * block_size, heads, head_dim)."""
    blocks = tensor.unflatten(1, (-1, layout.block_size)).unflatten(3, (key_heads, -1))
    return blocks[piece.rows, piece.blocks].permute(0, 3, 4, 1, 2, 5)


def _at_keys(tensor: torch.Tensor, layout: BlockLayout, piece: _Piece) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of shapes (R, H, T, head_dim) and (R, H, C, S, head_dim) into keys, values or their gradients."""
    rows = tensor[piece.rows]
    blocks = rows[:, :, layout.context_length :].unflatten(2, (-1, layout.block_size))
    return rows[:, :, piece.columns], blocks[:, :, piece.blocks]


def _weights(
    slots: torch.Tensor, keys: tuple[torch.Tensor, torch.Tensor], layout: BlockLayout, piece: _Piece
) -> torch.Tensor:
    """Softmax of the scores that the layout lets through, at least float32."""
    scores = _scores(slots, *keys)
    columns = torch.arange(piece.columns.start, piece.columns.stop, device=scores.device)
    starts = layout.context_starts[piece.rows, piece.blocks, :, None]  # (R, C, S, 1)
    ends = layout.context_ends[piece.rows, piece.blocks, None, None]
    is_hidden = (columns < starts) | (columns >= ends)
    scores[..., : columns.shape[0]].masked_fill_(is_hidden[:, None, None], -torch.inf)
    scores[..., columns.shape[0] :].masked_fill_(~layout.sees_slot, -torch.inf)
    return scores.softmax(dim=-1, dtype=_exact(scores.dtype))


def _scores(slots: torch.Tensor, context: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """Products of slots with their keys, shape (R, H, G, C, S, T + S): context first, then the own block."""
    num_columns, block_size = context.shape[2], block.shape[3]
    scores = slots.new_empty(*slots.shape[:-1], num_columns + block_size)
    scores[..., :num_columns] = (slots.flatten(2, 4) @ context.transpose(-1, -2)).view(*slots.shape[:-1], num_columns)
    scores[..., num_columns:] = slots @ block.transpose(-1, -2)[:, :, None]
    return scores


def _combine(weights: torch.Tensor, context: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """Sums of keys or values with these weights, shape (R, H, G, C, S, head_dim)."""
    num_columns = context.shape[2]
    combined = (weights[..., :num_columns].flatten(2, 4) @ context).view(*weights.shape[:-1], -1)
    return combined + weights[..., num_columns:] @ block[:, :, None]


def _spread(weights: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The transpose of [`_combine`]: what each key gets from the slots, in the shapes of [`_at_keys`]."""
    num_columns = weights.shape[-1] - weights.shape[-2]
    context = weights[..., :num_columns].flatten(2, 4).transpose(-1, -2) @ slots.flatten(2, 4)
    return context, (weights[..., num_columns:].transpose(-1, -2) @ slots).sum(dim=2)


def _add(sums: tuple[torch.Tensor, torch.Tensor], parts: tuple[torch.Tensor, torch.Tensor]) -> None:
    for total, part in zip(sums, parts, strict=True):
        total += part


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
