"""The drafter's side of one decoding call: the context features that come in, and the draft of a block."""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from .context_cache_dflash import ContextCache, ContextColumns
from .pending_features_dflash import PendingFeatures
from .target_dflash import draft_logits, embed_tokens

logger = logging.get_logger(__name__)

ROUNDS_BEFORE_ALARM = 16


class BlockDrafter:
    """Draft logits of one decoding call, whose drafter cache it holds.

    Args:
        drafter ([`DFlashDraftModel`]): The drafter, checked to fit the target.
        target ([`PreTrainedModel`]): Lends its embedding and head.
        num_unseen (`list[int]`): For each row, the text tokens before the first context feature, whose features are
            unknown because a given cache holds them.
        draft_window (`int`, *optional*): Blocks see only this many of the newest context features, besides what the
            windows of the drafter's layers hide. Default: no limit of the call.
    Raises:
        ValueError: If `draft_window` is not a positive integer.
    """

    is_warming_up = False  # only a compiled draft does

    def __init__(
        self,
        drafter: PreTrainedModel,
        target: PreTrainedModel,
        num_unseen: list[int],
        draft_window: int | None = None,
    ):
        self.drafter = drafter
        self.target = target
        windows = context_windows(drafter, draft_window)
        self._cache = ContextCache(len(windows), len(num_unseen), windows)
        # How many of the newest context features some layer sees; None: all of them. Older ones need not be added.
        self.max_context = widest_window(windows)
        self._pending = PendingFeatures(num_unseen, self.max_context)
        self._mask_ids = torch.full((1, drafter.config.block_size - 1), drafter.config.mask_token_id)

    @property
    def num_held_bytes(self) -> int:
        """Memory of the keys and values that the drafter holds of the context."""
        return self._cache.num_bytes

    def add_features(self, features: torch.Tensor, num_new: list[int], num_left_out: list[int] | None = None) -> None:
        """Appends context features for the next draft.

        Args:
            features (`torch.Tensor`): Shape (rows, tokens, len(target_layer_ids) * D).
            num_new (`list[int]`): How many of its first tokens are real, for each row.
            num_left_out (`list[int]`, *optional*): Text tokens of each row before these, whose features were left out
                because `max_context` newer ones follow.
        """
        self._pending.add(features, num_new, num_left_out)

    def logits(self, anchors: torch.LongTensor, num_slots: int) -> torch.Tensor:
        """Draft logits of the first `num_slots` slots after the anchor; the block is drafted at full width.

        A failure leaves the features for the next call.

        Args:
            anchors (`torch.LongTensor`): Each row's newest token, shape (rows, 1).
            num_slots (`int`): 1 to `block_size - 1`.
        Returns:
            `torch.Tensor` of shape (rows, num_slots, vocab_size) on the anchors' device.
        Raises:
            RuntimeError: If there are no features, or a float16 drafter overflows.
        """
        drafter, config = self.drafter, self.drafter.config
        features, num_new = self._pending.merge()
        rows, width = anchors.shape[0], config.block_size
        block_ids = torch.cat([anchors, self._mask_ids.to(anchors.device).expand(rows, -1)], dim=1)
        noise_embeds = embed_tokens(self.target, block_ids, config).to(drafter.device, drafter.dtype)
        self._cache.expect(num_new)
        hidden_states = drafter(
            noise_embeds=noise_embeds,
            context_hidden_states=features.to(drafter.device, drafter.dtype),
            position_ids=self._positions(features.shape[1], num_new, width).to(drafter.device),
            attention_mask=self._attention_mask(width),
            cache=self._cache,
        ).last_hidden_state
        if drafter.dtype == torch.float16 and not hidden_states.isfinite().all():
            raise RuntimeError("The drafter overflows in float16. Load it in bfloat16 or float32.")
        self._cache.keep_context()
        self._pending.clear()
        return draft_logits(self.target, hidden_states[:, 1 : num_slots + 1], config).to(anchors.device)

    def select_rows(self, rows: list[int]) -> None:
        """Keeps these rows of the batch."""
        self._pending.select_rows(rows)
        self._cache.select_rows(rows)

    def _positions(self, num_features: int, num_new: list[int], width: int) -> torch.LongTensor:
        """A plain counter of text tokens, shape (rows, num_features + width); also for targets with several axes."""
        starts = [unseen + held for unseen, held in zip(self._pending.num_unseen, self._cache.lengths, strict=True)]
        if len(set(starts)) == len(set(num_new)) == 1:
            return torch.arange(starts[0], starts[0] + num_features + width).unsqueeze(0)
        steps = torch.arange(num_features + width).expand(len(starts), -1)
        # A shorter row's block follows its own context, not the padding behind it.
        is_slot = steps >= num_features
        padding = num_features - torch.tensor(num_new)
        return torch.tensor(starts)[:, None] + steps - is_slot * padding[:, None]

    def _attention_mask(self, width: int) -> dict[str, torch.Tensor | None] | None:
        """What slots see, by layer type, where rows see different columns; None where the layers know it."""
        masks: dict[str, torch.Tensor | None] = {}
        for layer, columns in zip(self.drafter.layers, self._cache.columns, strict=True):
            layer_type = self.drafter.config.layer_types[layer.self_attn.layer_idx]
            if layer_type not in masks:
                masks[layer_type] = None if columns.is_uniform else self._layer_mask(layer.self_attn, columns, width)
        return masks if any(mask is not None for mask in masks.values()) else None

    def _layer_mask(self, attention: nn.Module, columns: ContextColumns, width: int) -> torch.Tensor:
        device = self.drafter.device
        starts, ends = (torch.tensor(bounds, device=device)[:, None] for bounds in (columns.starts, columns.ends))
        last = max(columns.ends)
        column = torch.arange(min(columns.starts), last + width, device=device)[None]
        is_slot = column >= last
        is_real = is_slot | ((column >= starts) & (column < ends))
        if "flash" in self.drafter.config._attn_implementation:
            return is_real.long()
        positions = torch.where(is_slot, column - last + ends, column)  # counted in columns; slots come last
        distance = positions[:, -width:, None] - positions[:, None, :]  # (rows, slots, keys)
        visible = is_real[:, None].expand_as(distance)
        if attention.is_causal:
            visible = visible & (distance >= 0)
        if attention.sliding_window is not None:
            visible = visible & (distance.abs() < attention.sliding_window)
        return visible[:, None]


def context_windows(drafter: PreTrainedModel, draft_window: int | None = None) -> list[int | None]:
    """How many of the newest context features each layer of a drafter sees; None: all of them.

    Args:
        drafter ([`DFlashDraftModel`]): The drafter.
        draft_window (`int`, *optional*): The call's own limit; a layer with a smaller window keeps it.
    Raises:
        ValueError: If `draft_window` is not a positive integer.
    """
    if draft_window is not None and (type(draft_window) is not int or draft_window < 1):
        raise ValueError(
            f"`draft_window` is {draft_window!r}; it counts context tokens before a block, so it must be an integer "
            "of at least 1. Leave it out for no limit."
        )
    windows: list[int | None] = []
    for layer in drafter.layers:
        # The anchor sees `sliding_window - 1` tokens before itself, later slots fewer.
        sliding_window = layer.self_attn.sliding_window
        limits = [draft_window, None if sliding_window is None else sliding_window - 1]
        windows.append(min((limit for limit in limits if limit is not None), default=None))
    return windows


def widest_window(windows: list[int | None]) -> int | None:
    """How many of the newest context features the layer sees that sees most; None: all of them."""
    return None if None in windows else max(window for window in windows if window is not None)


def warn_of_useless_drafter() -> None:
    """Names the likely causes when no proposal was accepted in `ROUNDS_BEFORE_ALARM` rounds."""
    logger.warning(
        f"No proposal was accepted in {ROUNDS_BEFORE_ALARM} rounds. The output is right, but slow: check that the "
        "drafter belongs to this target, its dtype (float16 can overflow), and the chat template that it was trained "
        "with."
    )
