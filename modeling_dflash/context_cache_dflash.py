"""The drafter's cache of context keys and values, as far back as its layers see."""

from typing import Any

import torch

_SLACK_DIVISOR = 4
_MIN_CAPACITY = 64


class ContextColumns:
    """Where each row's context lies in the buffers of layers that see equally far back.

    A row's context is a run of columns, oldest first. Only the newest `window` of them are seen; older ones are
    overwritten when the buffer is full and every row's run moves to the front. That happens once in
    `window / _SLACK_DIVISOR` tokens, so a token costs a constant number of copies.

    Args:
        window (`int`, *optional*): How many of the newest context tokens are seen; None: all of them.
        num_rows (`int`): Prompts of the call.
    """

    def __init__(self, window: int | None, num_rows: int):
        self.window = window
        self.capacity = 0
        self.num_incoming = [0] * num_rows
        # How far each row has moved to the left since the beginning: a buffer that lags behind has moved less.
        self.num_moved = [0] * num_rows
        self._held_ends = [0] * num_rows

    @property
    def ends(self) -> list[int]:
        """The column behind each row's newest token, those that are announced included."""
        return [held + new for held, new in zip(self._held_ends, self.num_incoming, strict=True)]

    @property
    def starts(self) -> list[int]:
        """The column of each row's oldest token that is still seen."""
        return [0 if self.window is None else max(0, end - self.window) for end in self.ends]

    @property
    def is_uniform(self) -> bool:
        """Whether every row sees the same columns."""
        return len(set(self.ends)) == 1

    def expect(self, num_new: list[int]) -> None:
        """Makes room for each row's new tokens, or for the newest `window` of them."""
        self.num_incoming = [new if self.window is None else min(new, self.window) for new in num_new]
        if max(self.ends) <= self.capacity:
            return
        steps = [min(held, start) for held, start in zip(self._held_ends, self.starts, strict=True)]
        self._held_ends = [held - step for held, step in zip(self._held_ends, steps, strict=True)]
        self.num_moved = [moved + step for moved, step in zip(self.num_moved, steps, strict=True)]
        grown = max(2 * max(self.ends), _MIN_CAPACITY)
        if self.window is not None:
            grown = min(grown, self.window + max(self.window // _SLACK_DIVISOR, _MIN_CAPACITY))
        self.capacity = max(self.capacity, grown)

    def keep(self) -> None:
        """Keeps the announced tokens."""
        self._held_ends, self.num_incoming = self.ends, [0] * len(self._held_ends)

    def select_rows(self, rows: list[int]) -> None:
        """Keeps these rows of the batch."""
        self.num_incoming = [self.num_incoming[row] for row in rows]
        self.num_moved = [self.num_moved[row] for row in rows]
        self._held_ends = [self._held_ends[row] for row in rows]

    def moved(self, buffer: torch.Tensor | None, num_moved: list[int], like: torch.Tensor, width: int) -> torch.Tensor:
        """A buffer of `width` columns with what `buffer`, whose rows have moved by `num_moved`, holds for them."""
        result = like.new_zeros(*like.shape[:2], width, like.shape[3])
        if buffer is not None:
            for row, (held, old, new) in enumerate(zip(self._held_ends, num_moved, self.num_moved, strict=True)):
                result[row, :, :held] = buffer[row, :, new - old : new - old + held]
        return result

    def write(self, buffer: torch.Tensor, states: torch.Tensor, num_new: list[int]) -> torch.Tensor:
        """What is seen of `buffer`, with `states` of each row's new tokens and of the block written into it.

        Args:
            buffer (`torch.Tensor`): Shape (rows, heads, columns, head_dim).
            states (`torch.Tensor`): Shape (rows, heads, longest new context + slots, head_dim).
            num_new (`list[int]`): How many context tokens `states` has for each row.
        """
        num_slots = states.shape[2] - max(num_new)
        first, last = min(self.starts), max(self.ends)
        if self.is_uniform and len(set(num_new)) == 1:
            num_written = self.num_incoming[0] + num_slots
            buffer[:, :, last + num_slots - num_written : last + num_slots] = states[:, :, -num_written:]
        else:
            for row, (end, written, new) in enumerate(zip(self.ends, self.num_incoming, num_new, strict=True)):
                buffer[row, :, end - written : end] = states[row, :, new - written : new]
            buffer[:, :, last : last + num_slots] = states[:, :, -num_slots:]
        return buffer[:, :, first : last + num_slots]


class ContextCache:
    """Keys and values of the drafter's context features, as far back as each layer sees.

    A block's own keys are written behind the longest context and overwritten in the next round, so nothing is ever
    cropped.

    Args:
        num_layers (`int`): Layers of the drafter.
        num_rows (`int`): Prompts of the call.
        windows (`list[int | None]`, *optional*): How many of the newest context tokens each layer sees, see
            [`context_windows`]; default: every layer sees all.
    """

    def __init__(self, num_layers: int, num_rows: int = 1, windows: list[int | None] | None = None):
        windows = windows or [None] * num_layers
        self.lengths = [0] * num_rows
        by_window = {window: ContextColumns(window, num_rows) for window in windows}
        self.columns = [by_window[window] for window in windows]
        self._keys: list[Any] = [None] * num_layers
        self._values: list[Any] = [None] * num_layers
        self._num_moved = [[0] * num_rows for _ in range(num_layers)]
        self._incoming = [0] * num_rows

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Context tokens of the longest row, those that no layer sees any more included."""
        return max(self.lengths)

    def expect(self, num_new: list[int]) -> None:
        """Announces the context tokens that the next forward brings for each row, padded to the longest.

        If that forward fails, the next one must bring them, too.
        """
        self._incoming = num_new
        for columns in set(self.columns):
            columns.expect(num_new)

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the context that is seen, then the block's.

        `key` and `value` are those of the new context and the block, shape (rows, heads, new, head_dim).
        """
        columns = self.columns[layer_idx]
        width = columns.capacity + key.shape[2] - max(self._incoming)
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        num_moved = self._num_moved[layer_idx]
        if keys is None or keys.shape[2] < width or num_moved != columns.num_moved:
            keys, values = (
                columns.moved(buffer, num_moved, states, width) for buffer, states in ((keys, key), (values, value))
            )
            self._keys[layer_idx], self._values[layer_idx] = keys, values
            self._num_moved[layer_idx] = columns.num_moved
        return columns.write(keys, key, self._incoming), columns.write(values, value, self._incoming)

    def keep_context(self) -> None:
        """Keeps the announced context rows of the last update; the block's rows behind them are given up."""
        self.lengths = [held + new for held, new in zip(self.lengths, self._incoming, strict=True)]
        for columns in set(self.columns):
            columns.keep()

    @property
    def num_bytes(self) -> int:
        """Memory of all keys and values."""
        return sum(buffer.nbytes for buffer in (*self._keys, *self._values) if buffer is not None)

    def select_rows(self, rows: list[int]) -> None:
        """Keeps these rows of the batch."""
        self.lengths = [self.lengths[row] for row in rows]
        self._num_moved = [[num_moved[row] for row in rows] for num_moved in self._num_moved]
        for columns in set(self.columns):
            columns.select_rows(rows)
        for buffers in (self._keys, self._values):
            for layer_idx, buffer in enumerate(buffers):
                if buffer is not None:
                    buffers[layer_idx] = buffer[rows]
