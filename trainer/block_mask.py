"""The sparse attention rule of training: many blocks of one row in one forward, each as alone as in generation."""

from dataclasses import dataclass

import torch


@dataclass
class BlockLayout:
    """Which keys the slots see, without the empty part of the dense mask: other blocks.

    Args:
        sees_context (`torch.BoolTensor`): Shape (batch, N, block_size or 1, context).
        sees_slot (`torch.BoolTensor`): Shape (block_size, block_size): visibility inside a block.
    """

    sees_context: torch.BoolTensor
    sees_slot: torch.BoolTensor


def block_layout(
    anchors: torch.LongTensor,
    is_valid: torch.BoolTensor,
    context_length: int,
    block_size: int,
    *,
    sliding_window: int | None = None,
    is_causal: bool = False,
) -> BlockLayout:
    """The rule of training: a slot sees the context strictly before its anchor and the slots of its own block.

    In sliding layers a key is visible if `query - key < sliding_window`; in causal layers slots see no later slots.
    Unused blocks see themselves only, so that no row of the softmax is empty.

    Args:
        anchors (`torch.LongTensor`): Shape (batch, N).
        is_valid (`torch.BoolTensor`): False for unused anchors, same shape.
        context_length (`int`): Tokens of the row; padding must be on the right.
        block_size (`int`): Tokens per block, anchor included.
        sliding_window (`int`, *optional*): Window of the layer in tokens; None for full attention.
        is_causal (`bool`): Whether slots see earlier slots only.
    Source: arXiv 2602.06036, figure 4; window and causality as the published checkpoints (`z-lab`, version 0.1.0).
    """
    slots = torch.arange(block_size, device=anchors.device)
    context = torch.arange(context_length, device=anchors.device)
    sees_context = (context < anchors[:, :, None, None]) & is_valid[:, :, None, None]
    distance = slots[:, None] - slots[None, :]
    sees_slot = torch.ones_like(distance, dtype=torch.bool)
    if is_causal:
        sees_slot &= distance >= 0
    if sliding_window is not None:
        positions = anchors[:, :, None, None] + slots[:, None]
        sees_context = sees_context & (positions - context < sliding_window)
        sees_slot &= distance.abs() < sliding_window
    return BlockLayout(sees_context, sees_slot)


def block_mask_dense(
    anchors: torch.LongTensor,
    is_valid: torch.BoolTensor,
    context_length: int,
    block_size: int,
    *,
    sliding_window: int | None = None,
    is_causal: bool = False,
) -> torch.BoolTensor:
    """[`block_layout`] as one mask for attention functions that take a dense one.

    Returns:
        `torch.BoolTensor` of shape (batch, N * block_size, context_length + N * block_size); context columns come
        first, and a slot sees nothing of other blocks.
    """
    layout = block_layout(
        anchors, is_valid, context_length, block_size, sliding_window=sliding_window, is_causal=is_causal
    )
    batch, num_anchors = anchors.shape
    num_slots = num_anchors * block_size
    sees_context = layout.sees_context.expand(batch, num_anchors, block_size, context_length)
    same_block = torch.eye(num_anchors, dtype=torch.bool, device=anchors.device)
    sees_own_block = same_block[:, None, :, None] & layout.sees_slot[None, :, None, :]
    return torch.cat(
        [
            sees_context.reshape(batch, num_slots, context_length),
            sees_own_block.reshape(1, num_slots, num_slots).expand(batch, -1, -1),
        ],
        dim=2,
    )


def block_positions(anchors: torch.LongTensor, context_length: int, block_size: int) -> torch.LongTensor:
    """Positions of context and slots for [`DFlashDraftModel`]: 0, 1, 2, ... and anchor, anchor + 1, ... per block.

    Returns:
        `torch.LongTensor` of shape (batch, context_length + N * block_size).
    """
    context = torch.arange(context_length, device=anchors.device).expand(anchors.shape[0], -1)
    slots = anchors[:, :, None] + torch.arange(block_size, device=anchors.device)
    return torch.cat([context, slots.flatten(1)], dim=1)
