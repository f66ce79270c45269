"""Rows of token ids and loss masks: files and training datasets."""

import hashlib
import itertools
import json
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, IterableDataset


def read_json_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSONL file.

    Raises:
        ValueError: If a line is not valid JSON; the message names file and line.
    """
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number} is not valid JSON ({error}).") from error


def write_json_lines(path: str | Path, rows: Iterable[dict[str, Any]]) -> int:
    """Writes `rows` to a temporary name, renames it to `path`, and returns the number of rows."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    count = 0
    with open(temporary, "w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    os.replace(temporary, path)
    return count


class TokenRows(Dataset):
    """Rows of token ids with a loss mask, each with its row number and the epoch that asks for it.

    Args:
        rows: A sequence or `datasets.Dataset` of rows with `input_ids` and `loss_mask` (1 = supervised), or with
            `input_ids` and `prompt_length`, as `dflash-regenerate` writes them.
        max_length (`int`, *optional*): Longer rows are cut at the end, in tokens.
    Raises:
        ValueError: If a row has neither a loss mask nor a prompt length, or no row has a token to learn from.
    """

    def __init__(self, rows: Sequence[dict[str, Any]], max_length: int | None = None):
        self.rows = rows
        self.max_length = max_length
        self.epoch = 0
        if not any(_has_anchor(self[i]["loss_mask"]) for i in range(len(rows))):
            raise ValueError(
                f"None of the {len(rows)} rows has two supervised tokens in a row, so there is nothing to learn from. "
                "Check the loss mask: it must be 1 on the target's answers."
            )

    def set_epoch(self, epoch: int) -> None:
        """Called when an epoch begins; anchors are drawn anew for every epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return token_row(self.rows[index], index, self.epoch, self.max_length)


class StreamedRows(IterableDataset):
    """[`TokenRows`] of a stream of unknown length, such as a `datasets.IterableDataset`, pass after pass without end.

    The passes follow each other here, because Trainer takes `max_steps` of a stream for one epoch and would skip
    wrongly on a resume. A row's number is a hash of its token ids, so its anchors do not depend on where in the stream
    it came. Rows without anything to learn from are left out.

    Args:
        stream: Can be iterated again and again; its `set_epoch` is called with the number of the pass if it has one.
        max_length (`int`, *optional*): Longer rows are cut at the end, in tokens.
    """

    def __init__(self, stream: Iterable[dict[str, Any]], max_length: int | None = None):
        self.stream = stream
        self.max_length = max_length
        self.first_epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The number of the next iteration's first pass."""
        self.first_epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for epoch in itertools.count(self.first_epoch):
            if hasattr(self.stream, "set_epoch"):
                self.stream.set_epoch(epoch)
            is_empty = True
            for row in self.stream:
                digest = hashlib.blake2b(array("q", row["input_ids"]).tobytes(), digest_size=7).digest()
                numbered = token_row(row, int.from_bytes(digest, "little"), epoch, self.max_length)
                if _has_anchor(numbered["loss_mask"]):
                    is_empty = False
                    yield numbered
            if is_empty:
                raise ValueError("The stream has no row with two supervised tokens in a row: nothing to learn from.")


def token_row(row: dict[str, Any], number: int, epoch: int, max_length: int | None = None) -> dict[str, Any]:
    """One training row: `input_ids`, `loss_mask`, `row` (its number) and `epoch`.

    Raises:
        ValueError: If `row` has neither `loss_mask` nor `prompt_length`, or a mask of another length.
    """
    input_ids = list(row["input_ids"])[:max_length]
    if row.get("loss_mask") is not None:
        loss_mask = list(row["loss_mask"])[:max_length]
    elif row.get("prompt_length") is not None:
        loss_mask = [int(position >= row["prompt_length"]) for position in range(len(input_ids))]
    else:
        raise ValueError(f"Row {number} has neither `loss_mask` nor `prompt_length`; it has {sorted(row)}.")
    if len(loss_mask) != len(input_ids):
        raise ValueError(f"Row {number} has {len(input_ids)} token ids but a loss mask of {len(loss_mask)}.")
    return {"input_ids": input_ids, "loss_mask": loss_mask, "row": number, "epoch": epoch}


def first_supervised(loss_mask: Sequence[int]) -> int:
    """Position of the first supervised token; the length if there is none."""
    return loss_mask.index(1) if 1 in loss_mask else len(loss_mask)


def _has_anchor(loss_mask: Sequence[int]) -> bool:
    return any(first and second for first, second in itertools.pairwise(loss_mask))
