"""The target's cache between verify forwards: accepted tokens stay, rejected ones go, whatever the kind of cache."""

from typing import Any

import torch

# Kinds of cache layers that can be put back to any earlier token. Names, because releases have different sets of them.
_DYNAMIC = "DynamicLayer"
_SLIDING = "DynamicSlidingWindowLayer"
_STATIC = ("StaticLayer", "StaticSlidingWindowLayer")
_RECURRENT = "LinearAttentionLayer"
_EMPTY = "DummyLayer"
# Recurrent layers of these model types read a block from a given state as they read its tokens one by one.
_REPLAYABLE = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
# Rows with fewer accepted tokens leave gaps in the cache; they are closed when there are this many for each token.
_MAX_GAP_SHARE = 0.25


class TargetCache:
    """A [`Cache`] of the target that is wound back to the accepted nodes after each verify forward.

    Rows of a batch accept different numbers of tokens, but share the columns of the cache. A row that accepted fewer
    has gaps, which `padding_mask` hides. They are closed by moving a row's keys to the right, at once where columns
    count (sliding windows, static caches without a `num_reserved`), otherwise when many have gathered.

    Args:
        cache ([`Cache`]): The call's cache; it may hold a prefix.
        model_type (`str`): Model type of the target's text config.
        num_rows (`int`): Rows of the batch.
        max_columns (`int`): The longest text that the cache will hold.
    Raises:
        ValueError: If a layer of the cache cannot be wound back.
    """

    def __init__(self, cache: Any, model_type: str, num_rows: int, max_columns: int):
        self.cache = cache
        self.padding_mask: torch.Tensor | None = None
        kinds = (
            {type(layer).__name__ for layer in cache.layers} if hasattr(cache, "layers") else {type(cache).__name__}
        )
        unknown = sorted(kinds - {_DYNAMIC, _SLIDING, *_STATIC, _RECURRENT, _EMPTY})
        if unknown:
            raise ValueError(
                f"DFlash must take rejected tokens back out of the cache, which {', '.join(unknown)} cannot do. "
                "Leave `cache_implementation` unset or use 'dynamic', 'offloaded' or 'static'."
            )
        self.is_static = bool(kinds & set(_STATIC))
        self.has_sliding = _SLIDING in kinds
        self.is_recurrent = _RECURRENT in kinds
        if self.is_recurrent:
            _check_recurrent(kinds, model_type, num_rows)
        for layer in self._layers_of(_STATIC[1]):
            if layer.max_cache_len < max_columns:
                raise ValueError(
                    "A static cache of a sliding-window layer forgets tokens that a rejected block pushed out. "
                    "Use a dynamic cache (leave `cache_implementation` unset) with this target."
                )
        # Whether a compiled forward can use it: others count their tokens outside of tensors, or grow.
        self.is_compilable = kinds == {_STATIC[0]}
        # Gaps in a static cache may stay as long as so many columns are free; None: no gaps stay.
        self.num_reserved: int | None = None
        # Columns of text in a static cache, whose own count lies on its device.
        self._num_static: int | None = None
        # Tokens of each row, without gaps and padding; None until they are needed.
        self._row_lengths: list[int] | None = None
        self.has_forgotten_rows = self._has_gaps = False
        self._snapshot: list[tuple[Any, dict, dict]] = []

    @property
    def num_columns(self) -> int:
        """Columns of text in the cache, gaps included."""
        if self.padding_mask is not None:
            return self.padding_mask.shape[1]
        return int(self.cache.get_seq_length()) if self._num_static is None else self._num_static

    @property
    def max_columns(self) -> int | None:
        """Columns of a static cache; None without a limit."""
        if not self.is_static:
            return None
        return min(layer.max_cache_len for layer in self.cache.layers if type(layer).__name__ in _STATIC)

    @property
    def num_free_columns(self) -> int | None:
        """Columns that a static cache has left; None without a limit."""
        max_columns = self.max_columns
        return None if max_columns is None else max_columns - self.num_columns

    def num_keys(self, layer_type: str, num_nodes: int) -> int:
        """Keys that a layer of this type sees in the next forward of `num_nodes` tokens."""
        is_sliding = layer_type == "sliding_attention"
        for layer in self.cache.layers:
            if getattr(layer, "is_sliding", False) == is_sliding and type(layer).__name__ not in (_RECURRENT, _EMPTY):
                return int(layer.get_mask_sizes(num_nodes)[0])
        return self.num_columns + num_nodes

    def forget_rows(self, rows: list[int]) -> None:
        """Gives up the tokens of rows that have ended but stay in the batch: in a static cache they take room."""
        if self.padding_mask is None:
            columns = self.num_columns
            num_rows = self._attention_layers()[0].keys.shape[0]
            self.padding_mask = torch.ones(num_rows, columns, dtype=torch.long, device=self._device())
        self.padding_mask[rows] = 0
        if self._row_lengths is not None:
            self._row_lengths = [0 if row in rows else held for row, held in enumerate(self._row_lengths)]
        self.has_forgotten_rows = self._has_gaps = True
        self._close_gaps()

    def start_recording(self) -> None:
        """To be called after the prompt was read: from now on sliding windows keep what a block pushes out."""
        if self.is_static:
            self._num_static = int(self.cache.get_seq_length())
        for layer in self._layers_of(_SLIDING):
            layer.activate_past_recording()

    def remember_states(self) -> None:
        """Keeps the recurrent states before a forward that may have to be taken back."""
        self._snapshot = [
            (
                layer,
                {i: state.clone() for i, state in layer.conv_states.items() if state is not None},
                {i: state.clone() for i, state in layer.recurrent_states.items() if state is not None},
            )
            for layer in self._layers_of(_RECURRENT)
        ]

    def forget_block(self, num_nodes: int) -> None:
        """Takes the last forward of `num_nodes` tokens back, recurrent states included."""
        self._crop(num_nodes)
        for layer, conv_states, recurrent_states in self._snapshot:
            for i, state in conv_states.items():
                layer.conv_states[i].copy_(state)
            for i, state in recurrent_states.items():
                layer.recurrent_states[i].copy_(state)

    def keep_nodes(self, num_nodes: int, paths: list[list[int]]) -> None:
        """Keeps the accepted nodes of the last forward, and no others.

        Args:
            num_nodes (`int`): Nodes that the forward read.
            paths (`list[list[int]]`): For each row, the kept nodes from the anchor on.
        Raises:
            ValueError: If a path has more nodes than were read.
        """
        longest = max(map(len, paths))
        if longest > num_nodes:
            raise ValueError(f"{longest} nodes cannot be kept of a forward that read {num_nodes}.")
        if any(path != list(range(len(path))) for path in paths):
            self._move_nodes(num_nodes, paths)
        is_ragged = any(len(path) < longest for path in paths)
        self._has_gaps |= is_ragged
        if self.padding_mask is None and is_ragged:
            columns = int(self.cache.get_seq_length()) - num_nodes if self._num_static is None else self._num_static
            self.padding_mask = torch.ones(len(paths), columns, dtype=torch.long, device=self._device())
        if self.padding_mask is not None:
            added = torch.tensor([[1] * len(path) + [0] * (longest - len(path)) for path in paths])
            self.padding_mask = torch.cat([self.padding_mask, added.to(self.padding_mask)], dim=1)
        if self._row_lengths is not None:
            self._row_lengths = [held + len(path) for held, path in zip(self._row_lengths, paths, strict=True)]
        if self._num_static is not None:
            self._num_static += longest
        num_rejected = num_nodes - longest
        if self.has_sliding and self._has_gaps:
            # Before the rejected nodes go: with them a full window drops old columns that slower rows still need.
            self._align_rows(num_rejected)
        self._crop(num_rejected)
        if self._has_gaps:
            self._close_gaps()

    def take_back_forward(self) -> None:
        """Gives up what a forward that failed has put into a static cache."""
        for layer in self._layers_of(_STATIC[0]):
            layer.cumulative_length.fill_(self.num_columns)

    def select_rows(self, rows: list[int]) -> None:
        """Keeps these rows of the batch."""
        index = torch.tensor(rows)  # on the CPU: layers may be on several devices
        self.cache.batch_select_indices(index)
        if self.padding_mask is not None:
            self.padding_mask = self.padding_mask[index]
        if self._row_lengths is not None:
            self._row_lengths = [self._row_lengths[row] for row in rows]
        if self._has_gaps:
            self._close_gaps()

    def stop_recording(self) -> None:
        """Leaves the cache as plain decoding leaves it, for whoever goes on with it."""
        if self._has_gaps:
            self._close_gaps(at_once=True)
        for layer in self._layers_of(_SLIDING):
            layer.record_past = False

    def _layers_of(self, kind: str) -> list[Any]:
        return [layer for layer in self.cache.layers if type(layer).__name__ == kind]

    def _attention_layers(self) -> list[Any]:
        skipped = (_RECURRENT, _EMPTY)
        return [layer for layer in self.cache.layers if type(layer).__name__ not in skipped and layer.is_initialized]

    def _device(self) -> torch.device:
        return self._attention_layers()[0].keys.device

    def _crop(self, num_tokens: int) -> None:
        for layer in self._attention_layers():
            if type(layer).__name__ in _STATIC:
                self._shrink_static(layer, num_tokens)  # Transformers 5.15 has no crop() for these
            else:
                layer.crop(-num_tokens)

    def _move_nodes(self, num_nodes: int, paths: list[list[int]]) -> None:
        """Moves each row's kept nodes to the front of the last `num_nodes` columns, all rows at once."""
        longest = max(map(len, paths))
        # Behind a shorter path every node stays where it is.
        kept = torch.tensor([path + list(range(len(path), longest)) for path in paths])[:, None, :, None]
        for layer in self._attention_layers():
            end = layer.keys.shape[-2] if self._num_static is None else self._num_static + num_nodes
            kept = kept.to(layer.keys.device)  # layers may be on several devices
            for states in (layer.keys, layer.values):
                block = states[:, :, end - num_nodes : end]
                index = kept.expand(-1, block.shape[1], -1, block.shape[3])
                block[:, :, :longest] = block.gather(2, index)

    def _close_gaps(self, at_once: bool = False) -> None:
        """Moves each row's tokens to the right, and cuts off the columns on the left that no row needs any more."""
        mask = self.padding_mask
        if mask is None:
            return
        if self._row_lengths is None:
            self._row_lengths = mask.sum(dim=1).tolist()
        columns, longest = mask.shape[1], max(self._row_lengths)
        if not self.has_sliding:
            if not (at_once or self._are_gaps_due(columns, longest)):
                return
            self._align_rows(0)
        num_cut = columns - longest
        if self._num_static is not None:
            self._num_static = longest
        for layer in self._attention_layers():
            if type(layer).__name__ in _STATIC:
                self._shrink_static(layer, num_cut)
                continue
            if type(layer).__name__ == _SLIDING:
                layer.cumulative_length -= num_cut
            layer.keys = layer.keys[:, :, -longest:]
            layer.values = layer.values[:, :, -longest:]
        steps = torch.arange(longest, device=mask.device)
        lengths = torch.tensor(self._row_lengths, device=mask.device)[:, None]
        self.padding_mask = None if min(self._row_lengths) == longest else (steps >= longest - lengths).long()
        self._has_gaps = False

    def _are_gaps_due(self, columns: int, longest: int) -> bool:
        if not self.is_static:
            return columns - longest > _MAX_GAP_SHARE * longest
        return self.num_reserved is None or (self.num_free_columns or 0) < self.num_reserved

    def _align_rows(self, num_rejected: int) -> None:
        """Moves each row's tokens to the right, before the last `num_rejected` columns.

        In a static cache they end at the longest row's length, because it is filled from the left.
        """
        mask = self.padding_mask.bool()  # type: ignore[union-attr]
        rows = mask.tolist()  # once for all layers
        columns, longest = mask.shape[1], max(map(sum, rows))
        for layer in self._attention_layers():
            is_static = type(layer).__name__ in _STATIC
            # A full sliding window holds the newest columns only.
            held = columns if is_static else layer.keys.shape[-2] - num_rejected
            end = longest if is_static else held
            for row, is_text in enumerate(rows):
                kept = [column for column, is_kept in enumerate(is_text[columns - held :]) if is_kept]
                start = end - len(kept)
                if kept == list(range(start, end)):
                    continue
                for states in (layer.keys, layer.values):
                    states[row, :, start:end] = states[row, :, kept]

    def _shrink_static(self, layer: Any, num_tokens: int) -> None:
        layer.cumulative_length.sub_(num_tokens)
        if hasattr(layer, "cumulative_length_int"):
            layer.cumulative_length_int -= num_tokens


def _check_recurrent(kinds: set[str], model_type: str, num_rows: int) -> None:
    if kinds <= {_RECURRENT, _EMPTY} or model_type not in _REPLAYABLE:
        raise ValueError(
            f"Targets of type {model_type!r} keep a recurrent state that cannot be taken back to an earlier token, "
            f"so DFlash does not run with them. Recurrent targets that it runs with: {', '.join(_REPLAYABLE)}."
        )
    if num_rows > 1:
        raise ValueError(
            f"A target with recurrent layers ({model_type!r}) decodes one prompt at a time with a drafter, got "
            f"{num_rows} rows: rows would be taken back to different tokens. Call generate() per prompt."
        )
