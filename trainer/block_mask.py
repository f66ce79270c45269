"""The sparse attention rule of training: many blocks of one row in one forward, each as alone as in generation."""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import PretrainedConfig
from transformers.utils import logging

logger = logging.get_logger(__name__)

ATTENTION_FORMS = ("blocks", "sdpa", "eager", "flex_attention")


@dataclass
class BlockLayout:
    """Which keys each slot sees: an interval of the context and an interval of its own block.

    An interval whose end is not above its start is empty.

    Args:
        context_starts (`torch.LongTensor`): First visible context column, shape (batch, N, block_size).
        context_ends (`torch.LongTensor`): The column after the last visible one, shape (batch, N).
        slot_starts, slot_ends (`torch.LongTensor`): The same for the slots of the own block, shape (block_size,).
        context_length (`int`): Context columns of a row.
    """

    context_starts: torch.LongTensor
    context_ends: torch.LongTensor
    slot_starts: torch.LongTensor
    slot_ends: torch.LongTensor
    context_length: int

    @property
    def block_size(self) -> int:
        """Slots of a block."""
        return self.slot_starts.shape[0]

    @property
    def sees_slot(self) -> torch.BoolTensor:
        """Visibility inside a block, shape (block_size, block_size)."""
        slots = torch.arange(self.block_size, device=self.slot_starts.device)
        return (slots >= self.slot_starts[:, None]) & (slots < self.slot_ends[:, None])


def block_layout(
    anchors: torch.LongTensor,
    is_valid: torch.BoolTensor,
    context_length: int,
    block_size: int,
    *,
    context_starts: torch.LongTensor | None = None,
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
        context_starts (`torch.LongTensor`, *optional*): First context column that a block may see, same shape: where
            the anchor's document begins, if a row holds several. Default: 0.
        sliding_window (`int`, *optional*): Window of the layer in tokens; None for full attention.
        is_causal (`bool`): Whether slots see earlier slots only.
    Source: arXiv 2602.06036, figure 4; window and causality as the published checkpoints (`z-lab`, version 0.1.0).
    """
    slots = torch.arange(block_size, device=anchors.device)
    context_starts = torch.zeros_like(anchors) if context_starts is None else context_starts
    context_starts = context_starts.masked_fill(~is_valid, context_length)[:, :, None].expand(-1, -1, block_size)
    slot_starts, slot_ends = torch.zeros_like(slots), torch.full_like(slots, block_size)
    if sliding_window is not None:
        # Within a document, columns are as far apart as positions.
        context_starts = torch.maximum(context_starts, anchors[:, :, None] + slots - sliding_window + 1)
        slot_starts = (slots - sliding_window + 1).clamp(min=0)
        slot_ends = (slots + sliding_window).clamp(max=block_size)
    if is_causal:
        slot_ends = slots + 1
    return BlockLayout(context_starts, anchors.masked_fill(~is_valid, 0), slot_starts, slot_ends, context_length)


def block_mask_dense(
    anchors: torch.LongTensor,
    is_valid: torch.BoolTensor,
    context_length: int,
    block_size: int,
    *,
    context_starts: torch.LongTensor | None = None,
    sliding_window: int | None = None,
    is_causal: bool = False,
) -> torch.BoolTensor:
    """The rule of [`block_layout`] as one mask for attention functions that take a dense one.

    Returns:
        `torch.BoolTensor` of shape (batch, N * block_size, context_length + N * block_size); context columns come
        first, and a slot sees nothing of other blocks.
    """
    layout = block_layout(
        anchors,
        is_valid,
        context_length,
        block_size,
        context_starts=context_starts,
        sliding_window=sliding_window,
        is_causal=is_causal,
    )
    return _dense_mask(layout)


def block_mask_flex(layout: BlockLayout) -> BlockMask:
    """The rule of [`block_layout`] for flex_attention, the same for all heads.

    On a GPU a compiled function finds the tiles that hold anything, so the dense mask never exists; new anchors in the
    same shapes use it again. Shapes that change from batch to batch are compiled anew, up to a limit of PyTorch's.

    Returns:
        [`BlockMask`] for N * block_size queries and context_length + N * block_size keys, context first.
    """
    batch_size, num_blocks, block_size = layout.context_starts.shape
    num_slots = num_blocks * block_size
    device = layout.context_starts.device
    context_starts = layout.context_starts.flatten(1)
    context_ends = layout.context_ends.repeat_interleave(block_size, dim=1)
    first_keys = layout.context_length + block_size * torch.arange(num_blocks, device=device)[:, None]
    own_starts, own_ends = (first_keys + layout.slot_starts).flatten(), (first_keys + layout.slot_ends).flatten()

    # Look-ups and comparisons only: integer division in here breaks PyTorch's compiler (2.13, "vr must not be None").
    def is_visible(batch, head, query, key):
        in_context = (key >= context_starts[batch, query]) & (key < context_ends[batch, query])
        return in_context | ((key >= own_starts[query]) & (key < own_ends[query]))

    create = _compiled_create_block_mask() if is_flex_fused(device) else create_block_mask
    return create(is_visible, batch_size, None, num_slots, layout.context_length + num_slots, device=device)


def check_attention_form(form: str) -> None:
    """Raises a `ValueError` if there is no such form of attention."""
    if form not in ATTENTION_FORMS:
        raise ValueError(f"`attention` is {form!r}; choose one of {ATTENTION_FORMS}.")


def is_flex_fused(device: torch.device) -> bool:
    """Whether flex_attention runs as one kernel on `device`; if not, it computes all scores and has no advantage."""
    has_compiler = importlib.util.find_spec("triton") is not None and not torch._dynamo.config.disable
    return device.type in ("cuda", "xpu") and has_compiler


def attention_masks(
    form: str,
    config: PretrainedConfig,
    anchors: torch.LongTensor,
    is_valid: torch.BoolTensor,
    context_length: int,
    *,
    context_starts: torch.LongTensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Masks of a drafter's layer types, as [`DFlashDraftModel`] takes them.

    Args:
        form (`str`): "blocks", "sdpa", "eager" or "flex_attention", see [`attention_implementation`].
        config ([`DFlashConfig`]): The drafter's config.
        dtype (`torch.dtype`): Of the additive masks that eager attention takes.
        Others: As in [`block_layout`].
    Returns:
        A mask per layer type: a [`BlockLayout`]; a bool mask of shape (batch, 1, N * block_size, keys), or an additive
        one; or a [`BlockMask`].
    Raises:
        ValueError: If the form is unknown, or flex_attention is to train where PyTorch has no backward of it.
    """
    check_attention_form(form)
    if form == "flex_attention":
        _check_flex(anchors.device)
    masks: dict[str, Any] = {}
    for layer_type in sorted(set(config.layer_types)):
        layout = block_layout(
            anchors,
            is_valid,
            context_length,
            config.block_size,
            context_starts=context_starts,
            sliding_window=config.sliding_window if layer_type == "sliding_attention" else None,
            is_causal=config.layer_is_causal(config.layer_types.index(layer_type)),
        )
        masks[layer_type] = _mask_of_form(form, layout, dtype)
    return masks


def block_positions(
    anchors: torch.LongTensor, context_positions: torch.LongTensor, block_size: int
) -> torch.LongTensor:
    """Positions of context and slots for [`DFlashDraftModel`]; a block counts on from its anchor's position.

    Args:
        anchors (`torch.LongTensor`): Columns of the anchors, shape (batch, N).
        context_positions (`torch.LongTensor`): Position of every context column in its document, shape
            (batch, context_length): 0, 1, 2, ... from where a document begins.
    Returns:
        `torch.LongTensor` of shape (batch, context_length + N * block_size).
    """
    slots = context_positions.gather(1, anchors)[:, :, None] + torch.arange(block_size, device=anchors.device)
    return torch.cat([context_positions, slots.flatten(1)], dim=1)


def _dense_mask(layout: BlockLayout) -> torch.BoolTensor:
    batch, num_blocks, block_size = layout.context_starts.shape
    num_slots = num_blocks * block_size
    columns = torch.arange(layout.context_length, device=layout.context_starts.device)
    sees_context = (columns >= layout.context_starts[..., None]) & (columns < layout.context_ends[:, :, None, None])
    is_own_block = torch.eye(num_blocks, dtype=torch.bool, device=columns.device)
    sees_own_block = is_own_block[:, None, :, None] & layout.sees_slot[None, :, None, :]
    return torch.cat(
        [sees_context.flatten(1, 2), sees_own_block.reshape(1, num_slots, num_slots).expand(batch, -1, -1)], dim=2
    )


def _mask_of_form(form: str, layout: BlockLayout, dtype: torch.dtype) -> Any:
    if form == "blocks":
        return layout
    if form == "flex_attention":
        return block_mask_flex(layout)
    is_visible = _dense_mask(layout)[:, None]
    if form == "sdpa":
        return is_visible
    additive = torch.zeros(is_visible.shape, dtype=dtype, device=is_visible.device)
    return additive.masked_fill_(~is_visible, torch.finfo(dtype).min)


@functools.cache
def _compiled_create_block_mask() -> Callable[..., BlockMask]:
    return torch.compile(create_block_mask)


def _check_flex(device: torch.device) -> None:
    if is_flex_fused(device):
        return
    if torch.is_grad_enabled() and device.type in ("cpu", "mps"):
        raise ValueError(
            f"`attention` is 'flex_attention', but PyTorch has no backward of it on {device.type}. "
            "Train with `attention` 'blocks', which computes the same."
        )
    logger.warning_once(
        f"flex_attention is not fused on {device.type}, because that takes a GPU, Triton and torch.compile: it will "
        "compute all scores of all blocks. Prefer `attention` 'blocks'."
    )
