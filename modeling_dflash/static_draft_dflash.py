"""Drafts of fixed shapes for `torch.compile`: a static context, and one function from features to draft logits."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .compilation_dflash import CompiledRuns
from .context_dflash import context_windows, widest_window
from .pending_features_dflash import PendingFeatures
from .target_dflash import draft_logits, embed_tokens


class StaticContext:
    """Keys and values of the drafter's context in buffers whose size never changes.

    A layer's buffer holds the newest context tokens that the layer sees, token t in column `t % columns`, then the
    keys of the block's slots. How many tokens it holds is an argument of each draft, so a draft that failed leaves
    nothing behind.

    Args:
        drafter ([`DFlashDraftModel`]): The drafter.
        num_rows (`int`): Rows of the batch.
        max_context (`int`): Tokens of the longest context.
        windows (`list[int | None]`): See [`context_windows`].
    """

    def __init__(self, drafter: PreTrainedModel, num_rows: int, max_context: int, windows: list[int | None]):
        config = drafter.config
        self.num_slots = config.block_size
        self.num_columns = [max_context if window is None else min(window, max_context) for window in windows]
        self.layers = [layer.self_attn for layer in drafter.layers]
        self.keys, self.values = (
            [
                torch.zeros(
                    (num_rows, config.num_key_value_heads, columns + self.num_slots, config.head_dim),
                    dtype=drafter.dtype,
                    device=drafter.device,
                )
                for columns in self.num_columns
            ]
            for _ in range(2)
        )
        for buffer in (*self.keys, *self.values):
            torch._dynamo.mark_static_address(buffer)  # or CUDA graphs would copy it in and out

    @property
    def num_bytes(self) -> int:
        """Memory of all keys and values."""
        return sum(buffer.nbytes for buffer in (*self.keys, *self.values))


class ContextUpdate:
    """One draft's view of a [`StaticContext`]: where its keys go, what its slots see, and the positions of both.

    It takes the place of a cache in the drafter's forward.

    Args:
        context ([`StaticContext`]): The buffers.
        num_features (`int`): New context tokens that the draft reads for each row, padding behind them included.
        counts (`torch.LongTensor`): For each row the text tokens before the first context token, the context tokens
            that are held, and those of the new ones that are real; shape (3, rows).
    """

    def __init__(self, context: StaticContext, num_features: int, counts: torch.LongTensor):
        self._context = context
        unseen, held, new = counts[:, :, None]
        self._ends = held + new
        self._tokens = held + torch.arange(num_features, device=counts.device)
        slots = torch.arange(context.num_slots, device=counts.device)
        self._rows = torch.arange(counts.shape[1], device=counts.device)[:, None]
        # Padding may share a position with a slot; nobody looks at it.
        self.position_ids = unseen + torch.cat([self._tokens, self._ends + slots], dim=1)
        self._columns = {columns: self._columns_for(columns) for columns in set(context.num_columns)}

    def masks(self, layer_types: list[str]) -> dict[str, torch.Tensor]:
        """What the slots see, by layer type: bool of shape (rows, 1, slots, columns + slots)."""
        masks: dict[str, torch.Tensor] = {}
        for layer_type, layer, columns in zip(
            layer_types, self._context.layers, self._context.num_columns, strict=True
        ):
            if layer_type not in masks:
                masks[layer_type] = self._layer_mask(layer, columns)
        return masks

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's whole buffers, with keys and values of the new context and of the block written into them.

        `key` and `value` have shape (rows, heads, new context + slots, head_dim).
        """
        context = self._context
        columns = self._columns[context.num_columns[layer_idx]]
        for buffer, states in ((context.keys[layer_idx], key), (context.values[layer_idx], value)):
            new, slots = states.split([columns.shape[1], context.num_slots], dim=2)
            buffer[self._rows, :, columns] = new.transpose(1, 2)
            buffer[:, :, -context.num_slots :] = slots
        return context.keys[layer_idx], context.values[layer_idx]

    def _columns_for(self, num_columns: int) -> torch.LongTensor:
        """Where new tokens go; those that are padding, or too old to be seen, where a slot is written afterwards."""
        is_kept = (self._tokens < self._ends) & (self._tokens >= self._ends - num_columns)
        return torch.where(is_kept, self._tokens % num_columns, num_columns)

    def _layer_mask(self, attention: nn.Module, num_columns: int) -> torch.Tensor:
        column = torch.arange(num_columns, device=self._ends.device)
        last = self._ends - 1
        tokens = last - (last - column) % num_columns  # the newest token that belongs in each column
        slots = self._ends + torch.arange(self._context.num_slots, device=self._ends.device)
        keys = torch.cat([tokens, slots], dim=1)
        distance = slots[:, :, None] - keys[:, None]
        visible = (keys >= 0)[:, None].expand_as(distance)
        if attention.is_causal:
            visible = visible & (distance >= 0)
        if attention.sliding_window is not None:
            visible = visible & (distance.abs() < attention.sliding_window)
        return visible[:, None]


def draft_block(
    drafter: PreTrainedModel,
    target: PreTrainedModel,
    context: StaticContext,
    anchors: torch.LongTensor,
    features: torch.Tensor,
    counts: torch.LongTensor,
) -> tuple[torch.Tensor]:
    """Draft logits of shape (rows, block_size - 1, vocab_size); writes the features' keys into the context.

    Args:
        anchors (`torch.LongTensor`): Each row's newest token, shape (rows, 1).
        features (`torch.Tensor`): New context features, shape (rows, tokens, len(target_layer_ids) * D).
        counts (`torch.LongTensor`): See [`ContextUpdate`].
    """
    config = drafter.config
    update = ContextUpdate(context, features.shape[1], counts)
    masks = anchors.new_full((anchors.shape[0], config.block_size - 1), config.mask_token_id)
    noise_embeds = embed_tokens(target, torch.cat([anchors, masks], dim=1), config)
    hidden_states = drafter(
        noise_embeds=noise_embeds.to(drafter.dtype),
        context_hidden_states=features.to(drafter.dtype),
        position_ids=update.position_ids,
        attention_mask=update.masks(config.layer_types),
        cache=update,
    ).last_hidden_state
    return (draft_logits(target, hidden_states[:, 1:], config),)


class StaticBlockDrafter:
    """[`BlockDrafter`] with fixed shapes, compiled: the same draft logits.

    A draft that reads more features than a block has slots (the first, or one after a pause) runs eagerly, and so do
    all if the drafter cannot be compiled, after one warning.

    Args:
        drafter ([`DFlashDraftModel`]), target ([`PreTrainedModel`]), num_unseen (`list[int]`), draft_window (`int`,
            *optional*): As for [`BlockDrafter`].
        max_context (`int`): Tokens of the longest context.
        options (`dict`): For `torch.compile`.
    Attributes:
        is_warming_up (`bool`): Whether the last draft took longer than most will.
    Raises:
        ValueError: If `draft_window` is not a positive integer.
    """

    def __init__(
        self,
        drafter: PreTrainedModel,
        target: PreTrainedModel,
        num_unseen: list[int],
        draft_window: int | None = None,
        *,
        max_context: int,
        options: dict[str, Any],
    ):
        self.drafter, self._target = drafter, target
        windows = context_windows(drafter, draft_window)
        self.max_context = widest_window(windows)
        self._pending = PendingFeatures(num_unseen, self.max_context)
        self._context = StaticContext(drafter, len(num_unseen), max_context, windows)
        self._lengths = [0] * len(num_unseen)
        self._width = drafter.config.block_size
        self._runs = CompiledRuns(
            drafter,
            draft_block,
            options,
            key=f"windows {windows}, {type(target).__name__}",
            shape=(len(num_unseen), max_context),
        )
        self.is_warming_up = False

    @property
    def num_held_bytes(self) -> int:
        """Memory of the keys and values that the drafter holds of the context."""
        return self._context.num_bytes

    def add_features(self, features: torch.Tensor, num_new: list[int], num_left_out: list[int] | None = None) -> None:
        """As [`BlockDrafter.add_features`]."""
        self._pending.add(features, num_new, num_left_out)

    def logits(self, anchors: torch.LongTensor, num_slots: int) -> torch.Tensor:
        """As [`BlockDrafter.logits`]."""
        drafter = self.drafter
        features, num_new = self._pending.merge()
        counts = torch.tensor([self._pending.num_unseen, self._lengths, num_new], device=drafter.device)
        num_missing = self._width - features.shape[1]
        if num_missing > 0:
            features = nn.functional.pad(features, (0, 0, 0, num_missing))
        arguments = drafter, self._target, self._context, anchors.to(drafter.device), features, counts
        outputs = None
        self.is_warming_up = num_missing < 0
        if num_missing >= 0 and not self._runs.has_failed:
            outputs = self._runs.run(self._width, *arguments)
            self.is_warming_up = self._runs.is_warming_up
        (logits,) = draft_block(*arguments) if outputs is None else outputs
        if drafter.dtype == torch.float16 and not logits.isfinite().all():
            raise RuntimeError("The drafter overflows in float16. Load it in bfloat16 or float32.")
        self._lengths = [held + new for held, new in zip(self._lengths, num_new, strict=True)]
        self._pending.clear()
        return logits[:, :num_slots].to(anchors.device)


def can_be_static(drafter: PreTrainedModel, target: PreTrainedModel) -> bool:
    """Whether [`StaticBlockDrafter`] works for a pair: both models on one device, and masks as tensors."""
    return drafter.config._attn_implementation in ("eager", "sdpa") and drafter.device == target.device
