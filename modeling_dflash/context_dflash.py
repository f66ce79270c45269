"""The drafter's side of one decoding call: its cache of context keys and values, and the draft of a block."""

from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.utils import logging

from .target_dflash import draft_logits, embed_tokens

logger = logging.get_logger(__name__)

ROUNDS_BEFORE_ALARM = 16


class ContextCache:
    """Keys and values of the drafter's context features, in buffers that grow by doubling.

    Every row's context starts at column 0. A block's own keys are written behind the longest context and overwritten
    in the next round, so nothing is ever cropped or moved.

    Args:
        num_layers (`int`): Layers of the drafter.
        num_rows (`int`): Prompts of the call.
    """

    def __init__(self, num_layers: int, num_rows: int = 1):
        self.lengths = [0] * num_rows
        self._keys: list[Any] = [None] * num_layers
        self._values: list[Any] = [None] * num_layers
        self._incoming = [0] * num_rows

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Context tokens of the longest row."""
        return max(self.lengths)

    def expect(self, num_new: list[int]) -> None:
        """Announces the context tokens that the next forward brings for each row, padded to the longest."""
        self._incoming = num_new

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All context keys and values, then the block's; `key` and `value` are (rows, heads, new, head_dim)."""
        num_slots = key.shape[2] - max(self._incoming)
        context_length = max(map(sum, zip(self.lengths, self._incoming, strict=True)))
        needed = context_length + num_slots
        for buffers, states in ((self._keys, key), (self._values, value)):
            buffer = buffers[layer_idx]
            if buffer is None or buffer.shape[2] < needed:
                grown = states.new_zeros(*states.shape[:2], 2 * needed, states.shape[3])
                if buffer is not None:
                    held = max(self.lengths)
                    grown[:, :, :held] = buffer[:, :, :held]
                buffers[layer_idx] = buffer = grown
            if len(set(self.lengths)) == len(set(self._incoming)) == 1:
                buffer[:, :, self.lengths[0] : needed] = states
                continue
            for row, (held, new) in enumerate(zip(self.lengths, self._incoming, strict=True)):
                buffer[row, :, held : held + new] = states[row, :, :new]
            buffer[:, :, context_length:needed] = states[:, :, -num_slots:]
        return self._keys[layer_idx][:, :, :needed], self._values[layer_idx][:, :, :needed]

    def keep_context(self) -> None:
        """Keeps the announced context rows of the last update; the block's rows behind them are given up."""
        self.lengths = [held + new for held, new in zip(self.lengths, self._incoming, strict=True)]

    def select_rows(self, rows: list[int]) -> None:
        """Keeps these rows of the batch."""
        self.lengths = [self.lengths[row] for row in rows]
        for buffers in (self._keys, self._values):
            for layer_idx, buffer in enumerate(buffers):
                if buffer is not None:
                    buffers[layer_idx] = buffer[rows]


class BlockDrafter:
    """Draft logits of one decoding call, whose drafter cache it holds.

    Args:
        drafter ([`DFlashDraftModel`]): The drafter, checked to fit the target.
        target ([`PreTrainedModel`]): Lends its embedding and head.
        num_unseen (`list[int]`): For each row, the text tokens before the first context feature, whose features are
            unknown because a given cache holds them.
    """

    def __init__(self, drafter: PreTrainedModel, target: PreTrainedModel, num_unseen: list[int]):
        self.drafter = drafter
        self.target = target
        self._cache = ContextCache(drafter.config.num_hidden_layers, len(num_unseen))
        self._num_unseen = num_unseen
        self._pending: list[tuple[torch.Tensor, list[int]]] = []
        self._mask_ids = torch.full((1, drafter.config.block_size - 1), drafter.config.mask_token_id)

    def add_features(self, features: torch.Tensor, num_new: list[int]) -> None:
        """Appends context features for the next draft.

        Args:
            features (`torch.Tensor`): Shape (rows, tokens, len(target_layer_ids) * D).
            num_new (`list[int]`): How many of its first tokens are real, for each row.
        """
        self._pending.append((features, num_new))

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
        features, num_new = self._merge_pending()
        rows, width = anchors.shape[0], config.block_size
        block_ids = torch.cat([anchors, self._mask_ids.to(anchors.device).expand(rows, -1)], dim=1)
        noise_embeds = embed_tokens(self.target, block_ids, config).to(drafter.device, drafter.dtype)
        self._cache.expect(num_new)
        hidden_states = drafter(
            noise_embeds=noise_embeds,
            context_hidden_states=features.to(drafter.device, drafter.dtype),
            position_ids=self._positions(features.shape[1], num_new, width).to(drafter.device),
            attention_mask=self._attention_mask(num_new, width),
            cache=self._cache,
        ).last_hidden_state
        if drafter.dtype == torch.float16 and not hidden_states.isfinite().all():
            raise RuntimeError("The drafter overflows in float16. Load it in bfloat16 or float32.")
        self._cache.keep_context()
        self._pending.clear()
        return draft_logits(self.target, hidden_states[:, 1 : num_slots + 1], config).to(anchors.device)

    def select_rows(self, rows: list[int]) -> None:
        """Keeps these rows of the batch."""
        self._num_unseen = [self._num_unseen[row] for row in rows]
        pending, self._pending = self._pending, []
        for features, num_new in pending:
            staying = [num_new[row] for row in rows]
            self._pending.append((features[rows, : max(staying)], staying))
        self._cache.select_rows(rows)

    def _merge_pending(self) -> tuple[torch.Tensor, list[int]]:
        if not self._pending:
            raise RuntimeError("The drafter has got no context features since its last draft.")
        pieces = self._pending
        if all(set(num_new) == {features.shape[1]} for features, num_new in pieces):
            merged = torch.cat([features for features, _ in pieces], dim=1)
            num_new = [merged.shape[1]] * merged.shape[0]
        elif len(pieces) == 1:
            features, num_new = pieces[0]
            merged = features[:, : max(num_new)]
        else:
            rows = [
                torch.cat([features[row, : num_new[row]] for features, num_new in pieces])
                for row in range(len(pieces[0][1]))
            ]
            num_new = [len(row) for row in rows]
            merged = pad_sequence(rows, batch_first=True)
        self._pending = [(merged, num_new)]
        return merged, num_new

    def _positions(self, num_features: int, num_new: list[int], width: int) -> torch.LongTensor:
        """A plain counter of text tokens, shape (rows, num_features + width); also for targets with several axes."""
        starts = [unseen + held for unseen, held in zip(self._num_unseen, self._cache.lengths, strict=True)]
        if len(set(starts)) == len(set(num_new)) == 1:
            return torch.arange(starts[0], starts[0] + num_features + width).unsqueeze(0)
        steps = torch.arange(num_features + width).expand(len(starts), -1)
        # A shorter row's block follows its own context, not the padding behind it.
        is_slot = steps >= num_features
        padding = num_features - torch.tensor(num_new)
        return torch.tensor(starts)[:, None] + steps - is_slot * padding[:, None]

    def _attention_mask(self, num_new: list[int], width: int) -> torch.Tensor | dict[str, torch.Tensor] | None:
        """What each slot sees when rows have contexts of different lengths; None otherwise."""
        lengths = [held + new for held, new in zip(self._cache.lengths, num_new, strict=True)]
        if len(set(lengths)) == 1:
            return None
        device, longest = self.drafter.device, max(lengths)
        ends = torch.tensor(lengths, device=device)[:, None]
        columns = torch.arange(longest + width, device=device).expand(len(lengths), -1)
        is_real = (columns < ends) | (columns >= longest)
        if "flash" in self.drafter.config._attn_implementation:
            return is_real.long()
        positions = torch.where(columns < longest, columns, columns - longest + ends)  # of keys; slots come last
        distance = positions[:, -width:, None] - positions[:, None, :]  # (rows, slots, keys)
        masks = {}
        for layer in self.drafter.layers:
            attention = layer.self_attn
            visible = is_real[:, None].expand_as(distance)
            if attention.is_causal:
                visible = visible & (distance >= 0)
            if attention.sliding_window is not None:
                visible = visible & (distance.abs() < attention.sliding_window)
            masks[self.drafter.config.layer_types[attention.layer_idx]] = visible[:, None]
        return masks


def warn_of_useless_drafter() -> None:
    """Names the likely causes when no proposal was accepted in `ROUNDS_BEFORE_ALARM` rounds."""
    logger.warning(
        f"No proposal was accepted in {ROUNDS_BEFORE_ALARM} rounds. The output is right, but slow: check that the "
        "drafter belongs to this target, its dtype (float16 can overflow), and the chat template that it was trained "
        "with."
    )
