"""Rows of token ids and loss masks: files, the training dataset and the batch collator."""

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from dflash_hf.trainer.anchors import block_targets, row_generator, select_anchors


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
        masks = (self[i]["loss_mask"] for i in range(len(rows)))
        if not any(first and second for mask in masks for first, second in itertools.pairwise(mask)):
            raise ValueError(
                f"None of the {len(rows)} rows has two supervised tokens in a row, so there is nothing to learn from. "
                "Check the loss mask: it must be 1 on the target's answers."
            )

    def set_epoch(self, epoch: int) -> None:
        """Called by the dataloader; anchors are drawn anew for every epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        input_ids = list(row["input_ids"])[: self.max_length]
        if "loss_mask" in row:
            loss_mask = list(row["loss_mask"])[: self.max_length]
        elif "prompt_length" in row:
            loss_mask = [int(position >= row["prompt_length"]) for position in range(len(input_ids))]
        else:
            raise ValueError(f"Row {index} has neither `loss_mask` nor `prompt_length`; it has {sorted(row)}.")
        if len(loss_mask) != len(input_ids):
            raise ValueError(f"Row {index} has {len(input_ids)} token ids but a loss mask of {len(loss_mask)}.")
        return {"input_ids": input_ids, "loss_mask": loss_mask, "row": index, "epoch": self.epoch}


@dataclass
class AnchorCollator:
    """Batches of right-padded rows with their anchors, labels and loss weights.

    A row's anchors depend on (seed, epoch, row) only. The anchor width is the largest number in use in the batch.

    Args:
        num_anchors (`int`): Most anchors per row.
        slot_weights (`torch.Tensor`): Weight per slot, shape (block_size,).
        seed (`int`): Seed of the anchors.
    """

    num_anchors: int
    slot_weights: torch.Tensor
    seed: int

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """`input_ids` (B, T); `lengths`, `rows` (B,); `anchors`, `is_valid` (B, N); `labels`, `weights` (B, N, S)."""
        block_size = self.slot_weights.shape[0]
        lengths = [len(row["input_ids"]) for row in rows]
        input_ids = torch.zeros(len(rows), max(lengths), dtype=torch.long)
        loss_mask = torch.zeros_like(input_ids)
        selections = []
        for i, row in enumerate(rows):
            input_ids[i, : lengths[i]] = torch.tensor(row["input_ids"])
            loss_mask[i, : lengths[i]] = torch.tensor(row["loss_mask"])
            generator = row_generator(self.seed, row["epoch"], row["row"])
            # Drawn from the row alone: padding must not change the draw.
            own_mask = loss_mask[i : i + 1, : lengths[i]]
            selections.append(select_anchors(own_mask, self.num_anchors, block_size, generator=generator))
        anchors = torch.cat([anchors for anchors, _ in selections])
        is_valid = torch.cat([is_valid for _, is_valid in selections])
        width = max(1, int(is_valid.sum(dim=1).max()))
        anchors, is_valid = anchors[:, :width], is_valid[:, :width]
        labels, weights = block_targets(input_ids, loss_mask, anchors, is_valid, self.slot_weights)
        return {
            "input_ids": input_ids,
            "lengths": torch.tensor(lengths),
            "rows": torch.tensor([row["row"] for row in rows]),
            "anchors": anchors,
            "is_valid": is_valid,
            "labels": labels,
            "weights": weights,
        }
