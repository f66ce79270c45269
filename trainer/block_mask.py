"""The sparse attention rule of training: many blocks of one row in one forward, each as alone as in generation."""

import torch


def block_mask_dense(
    anchors: torch.LongTensor,
    is_valid: torch.BoolTensor,
    context_length: int,
    block_size: int,
    *,
    sliding_window: int | None = None,
    is_causal: bool = False,
) -> torch.BoolTensor:
    """Which keys each slot of each block sees.

    A slot sees the context strictly before its anchor and the slots of its own block; nothing of other blocks. In
    sliding layers a key is visible if `query - key < sliding_window`, in causal layers slots see no later slots.
    Unused blocks see themselves only, so that no row of the softmax is empty.

    Args:
        anchors (`torch.LongTensor`): Shape (batch, num_anchors).
        is_valid (`torch.BoolTensor`): False for unused anchors, same shape.
        context_length (`int`): Tokens of the row; padding must be on the right.
        block_size (`int`): Tokens per block, anchor included.
        sliding_window (`int`, *optional*): Window of the layer in tokens; None for full attention.
        is_causal (`bool`): Whether slots see earlier slots only.
    Returns:
        `torch.BoolTensor` of shape (batch, num_anchors * block_size, context_length + num_anchors * block_size);
        context columns come first.
    Source: arXiv 2602.06036, figure 4; window and causality as the published checkpoints (`z-lab`, version 0.1.0).
    """
    batch, num_anchors = anchors.shape
    slots = torch.arange(block_size, device=anchors.device)
    context = torch.arange(context_length, device=anchors.device)
    sees_context = (context < anchors[:, :, None, None]) & is_valid[:, :, None, None]
    if sliding_window is not None:
        positions = anchors[:, :, None, None] + slots[:, None]
        sees_context = sees_context & (positions - context < sliding_window)
    sees_context = sees_context.expand(batch, num_anchors, block_size, context_length)

    distance = slots[:, None] - slots[None, :]
    sees_slot = torch.ones(block_size, block_size, dtype=torch.bool, device=anchors.device)
    if is_causal:
        sees_slot &= distance >= 0
    if sliding_window is not None:
        sees_slot &= distance.abs() < sliding_window
    same_block = torch.eye(num_anchors, dtype=torch.bool, device=anchors.device)
    sees_own_block = same_block[:, None, :, None] & sees_slot[None, :, None, :]
    num_slots = num_anchors * block_size
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
        `torch.LongTensor` of shape (batch, context_length + num_anchors * block_size).
    """
    context = torch.arange(context_length, device=anchors.device).expand(anchors.shape[0], -1)
    slots = anchors[:, :, None] + torch.arange(block_size, device=anchors.device)
    return torch.cat([context, slots.flatten(1)], dim=1)
