"""Which positions of a row become anchors, and what the slots of their blocks must predict."""

import hashlib

import torch


def select_anchors(
    loss_mask: torch.Tensor, num_anchors: int, block_size: int, *, generator: torch.Generator
) -> tuple[torch.LongTensor, torch.BoolTensor]:
    """Random anchors without replacement: supervised positions whose successor is supervised too.

    The first answer token is a candidate, because generation's first round has it as its anchor. Positions whose block
    runs past the end are candidates as well; slots past the end carry no weight.

    Args:
        loss_mask (`torch.Tensor`): 1 where the target wrote the token, shape (batch, tokens).
        num_anchors (`int`): Anchor slots per row, at least 1.
        block_size (`int`): Tokens per block, anchor included; at least 2.
        generator (`torch.Generator`): Source of the draw, on the CPU.
    Returns:
        `(anchors, is_valid)`, both of shape (batch, num_anchors): positions in rising order, then unused slots, which
        hold position 0 and False.
    Raises:
        ValueError: If `num_anchors` or `block_size` is too small.
    Source: arXiv 2602.06036, section 4.2.
    """
    if num_anchors < 1 or block_size < 2:
        raise ValueError(
            f"`num_anchors` ({num_anchors}) must be at least 1 and `block_size` ({block_size}) at least 2."
        )
    supervised = loss_mask.bool()
    is_candidate = torch.zeros_like(supervised)
    is_candidate[:, :-1] = supervised[:, :-1] & supervised[:, 1:]
    keys = torch.rand(loss_mask.shape, generator=generator).to(loss_mask.device).masked_fill(~is_candidate, -1.0)
    width = min(num_anchors, loss_mask.shape[1])
    top = keys.topk(width, dim=1)
    past_end = loss_mask.shape[1]
    anchors = torch.where(top.values >= 0, top.indices, past_end).sort(dim=1).values
    anchors = torch.nn.functional.pad(anchors, (0, num_anchors - width), value=past_end)
    is_valid = anchors < past_end
    return anchors.masked_fill(~is_valid, 0), is_valid


def block_targets(
    input_ids: torch.LongTensor,
    loss_mask: torch.Tensor,
    anchors: torch.LongTensor,
    is_valid: torch.BoolTensor,
    slot_weights: torch.Tensor,
) -> tuple[torch.LongTensor, torch.Tensor]:
    """Labels and loss weights of every slot: slot k of a block predicts the token at anchor + k.

    A slot counts only if it and all slots before it are supervised, because a proposal is only reached through the
    earlier ones. The anchor itself, slots past the end and unused blocks have weight 0.

    Args:
        input_ids, loss_mask: Shape (batch, tokens).
        anchors, is_valid: Shape (batch, num_anchors), see [`select_anchors`].
        slot_weights (`torch.Tensor`): Weight per slot, shape (block_size,), see [`decay_weights`].
    Returns:
        `(labels, weights)`, both of shape (batch, num_anchors, block_size).
    """
    num_tokens = input_ids.shape[1]
    positions = anchors[:, :, None] + torch.arange(slot_weights.shape[0], device=anchors.device)
    is_inside = positions < num_tokens
    positions = positions.clamp(max=num_tokens - 1)
    batch_index = torch.arange(input_ids.shape[0], device=input_ids.device)[:, None, None]
    labels = input_ids[batch_index, positions]
    is_supervised = loss_mask.bool()[batch_index, positions] & is_inside & is_valid[:, :, None]
    is_reached = is_supervised.long().cumprod(dim=2).bool()
    return labels, slot_weights * is_reached


def row_generator(seed: int, epoch: int, row: int) -> torch.Generator:
    """A generator that depends on these three numbers only, never on batch, rank or accumulation."""
    digest = hashlib.blake2b(f"{seed} {epoch} {row}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
