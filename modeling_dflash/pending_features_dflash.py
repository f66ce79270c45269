"""Context features that wait for the next draft."""

import torch
from torch.nn.utils.rnn import pad_sequence


class PendingFeatures:
    """Context features of one call from the verify forwards that bring them to the draft that reads them.

    Args:
        num_unseen (`list[int]`): For each row, the text tokens before the first context feature.
        max_context (`int`, *optional*): How many of the newest features a draft looks at; older ones are dropped.
            Default: all of them.
    Attributes:
        num_unseen (`list[int]`): The same, with those that were dropped since.
        pieces (`list[tuple[torch.Tensor, list[int]]]`): Features of shape (rows, tokens, len(target_layer_ids) * D),
            and how many of their first tokens are real for each row.
    """

    def __init__(self, num_unseen: list[int], max_context: int | None = None):
        self.num_unseen = num_unseen
        self.max_context = max_context
        self.pieces: list[tuple[torch.Tensor, list[int]]] = []

    def add(self, features: torch.Tensor, num_new: list[int], num_left_out: list[int] | None = None) -> None:
        """Appends features; arguments as in [`BlockDrafter.add_features`]."""
        if num_left_out is not None:
            self._count_unseen(num_left_out)
        self.pieces.append((features, num_new))
        if self.max_context is not None:
            num_pending = sum(features.shape[1] for features, _ in self.pieces)
            if num_pending > 2 * self.max_context:
                self.merge()

    def merge(self) -> tuple[torch.Tensor, list[int]]:
        """All features as one piece, padded behind the rows that have fewer; they stay until [`clear`].

        Raises:
            RuntimeError: If there are none.
        """
        if not self.pieces:
            raise RuntimeError("The drafter has got no context features since its last draft.")
        pieces = self.pieces
        if len(pieces) == 1:
            features, num_new = pieces[0]
            merged = features[:, : max(num_new)]
        elif all(set(num_new) == {features.shape[1]} for features, num_new in pieces):
            merged = torch.cat([features for features, _ in pieces], dim=1)
            num_new = [merged.shape[1]] * merged.shape[0]
        else:
            rows = [
                torch.cat([features[row, : num_new[row]] for features, num_new in pieces])
                for row in range(len(pieces[0][1]))
            ]
            num_new = [len(row) for row in rows]
            merged = pad_sequence(rows, batch_first=True)
        if self.max_context is not None and merged.shape[1] > self.max_context:
            merged, num_new = self._newest(merged, num_new, self.max_context)
        self.pieces = [(merged, num_new)]
        return merged, num_new

    def clear(self) -> None:
        """To be called when they have been read."""
        self.pieces = []

    def select_rows(self, rows: list[int]) -> None:
        """Keeps these rows of the batch."""
        self.num_unseen = [self.num_unseen[row] for row in rows]
        pieces, self.pieces = self.pieces, []
        for features, num_new in pieces:
            staying = [num_new[row] for row in rows]
            self.pieces.append((features[rows, : max(staying)], staying))

    def _newest(self, features: torch.Tensor, num_new: list[int], num_kept: int) -> tuple[torch.Tensor, list[int]]:
        """The newest `num_kept` features of each row, in memory of their own."""
        starts = [max(0, new - num_kept) for new in num_new]
        self._count_unseen(starts)
        rows = [features[row, start:new] for row, (start, new) in enumerate(zip(starts, num_new, strict=True))]
        return pad_sequence(rows, batch_first=True), [len(row) for row in rows]

    def _count_unseen(self, num_tokens: list[int]) -> None:
        self.num_unseen = [unseen + new for unseen, new in zip(self.num_unseen, num_tokens, strict=True)]
