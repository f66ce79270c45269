"""Several documents in one row, so that little of a batch is padding."""

import bisect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from dflash_hf.trainer.data import StreamedRows, TokenRows

_WINDOW = 1024


def pack_documents(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Documents put together into rows of at most `max_length` tokens: best fit, longest first.

    Args:
        lengths (`list[int]`): Tokens of each document, each at most `max_length`.
        max_length (`int`): Tokens of a row.
    Returns:
        A list of rows, each a list of document numbers in rising order; every document is in exactly one row. Rows are
        ordered by their first document.
    Raises:
        ValueError: If a document is longer than a row.
    """
    longest = max(lengths, default=0)
    if longest > max_length:
        raise ValueError(f"A document of {longest} tokens does not fit into a packed row of {max_length} tokens.")
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), sorted
    for document in sorted(range(len(lengths)), key=lambda document: -lengths[document]):
        place = bisect.bisect_left(room, (lengths[document], -1))
        if place < len(room):
            free, row = room.pop(place)
        else:
            free, row = max_length, len(rows)
            rows.append([])
        rows[row].append(document)
        bisect.insort(room, (free - lengths[document], row))
    return sorted(sorted(row) for row in rows)


class PackedRows(Dataset):
    """[`TokenRows`] packed into rows of at most `max_length` tokens; a document keeps its number and its anchors.

    Args:
        rows ([`TokenRows`]): The documents; their `max_length` must be set.
    """

    def __init__(self, rows: TokenRows):
        self.documents = rows
        self.packs = pack_documents([len(row["input_ids"]) for row in rows], _row_length(rows.max_length))  # type: ignore[attr-defined]

    def set_epoch(self, epoch: int) -> None:
        """Called when an epoch begins; the documents draw their anchors anew."""
        self.documents.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"documents": [self.documents[document] for document in self.packs[index]]}


class PackedStream(IterableDataset):
    """[`StreamedRows`] packed within a window of 1,024 documents at a time."""

    def __init__(self, rows: StreamedRows):
        self.documents = rows
        self.max_length = _row_length(rows.max_length)

    def set_epoch(self, epoch: int) -> None:
        """Called when an epoch begins; the documents draw their anchors anew."""
        self.documents.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for window in _windows(self.documents):
            for pack in pack_documents([len(row["input_ids"]) for row in window], self.max_length):
                yield {"documents": [window[document] for document in pack]}


def _row_length(max_length: int | None) -> int:
    if max_length is None:
        raise ValueError("Packing needs `max_length`, the tokens of a packed row; the documents have none.")
    return max_length


def _windows(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    window: list[dict[str, Any]] = []
    for row in rows:
        window.append(row)
        if len(window) == _WINDOW:
            yield window
            window = []
    if window:
        yield window
