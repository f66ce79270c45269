"""From rows to batches: anchors, labels, loss weights and, in packed rows, where each document begins."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from dflash_hf.trainer.anchors import block_targets, row_generator, select_anchors
from dflash_hf.trainer.data import first_supervised

NO_DOCUMENT = -1


@dataclass
class AnchorCollator:
    """Batches of right-padded rows with their anchors, labels and loss weights.

    A row holds one document or, as `{"documents": [...]}`, several in a row. A document's anchors depend on (seed,
    epoch, document number) only, so packing, batch size and process change nothing. The anchor width is the largest
    number in use in the batch.

    Args:
        num_anchors (`int`): Most anchors per document.
        slot_weights (`torch.Tensor`): Weight per slot, shape (block_size,).
        seed (`int`): Seed of the anchors.
        hides_prompt (`bool`): Whether blocks see no context before their document's first supervised token.
        token_multiple, anchor_multiple (`int`): Row length and anchor width are padded to multiples of these, so that
            compiled code meets few shapes.
    """

    num_anchors: int
    slot_weights: torch.Tensor
    seed: int
    hides_prompt: bool = False
    token_multiple: int = 1
    anchor_multiple: int = 1

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """The batch of B rows with up to T tokens, D documents and N anchors.

        Returns:
            `input_ids`, `loss_mask` and `positions` (within the document), each (B, T); `document_lengths` (B, D), 0
            where there is none, and `rows` (B, D), the documents' numbers; `anchors`, `is_valid` and `context_starts`
            (the first column that a block may see: where its document begins), each (B, N); `labels` and `weights`,
            (B, N, S); `active`, the flat indices of slots with weight, rising.
        """
        packed = [self._pack(row.get("documents", [row])) for row in rows]
        batch = {
            name: _pad([row[name] for row in packed], value, multiple)
            for name, value, multiple in (
                ("input_ids", 0, self.token_multiple),
                ("loss_mask", 0, self.token_multiple),
                ("positions", 0, self.token_multiple),
                ("document_lengths", 0, 1),
                ("rows", NO_DOCUMENT, 1),
                ("anchors", 0, self.anchor_multiple),
                ("is_valid", False, self.anchor_multiple),
                ("context_starts", 0, self.anchor_multiple),
                ("labels", 0, self.anchor_multiple),
                ("weights", 0.0, self.anchor_multiple),
            )
        }
        # Found on the CPU: on a GPU it would stop the queue to learn its size.
        batch["active"] = batch["weights"].flatten().nonzero(as_tuple=True)[0]
        return batch

    def choose_anchors(self, loss_mask: torch.Tensor, document: dict[str, Any]) -> torch.LongTensor:
        """The anchors of a document, rising; drawn from the document alone, so that nothing around it matters.

        Args:
            loss_mask (`torch.Tensor`): Shape (1, tokens).
            document (`dict`): `row` is its number, `epoch` the pass over the data.
        """
        generator = row_generator(self.seed, document["epoch"], document["row"])
        anchors, is_valid = select_anchors(
            loss_mask, self.num_anchors, self.slot_weights.shape[0], generator=generator
        )
        return anchors[is_valid]

    def _pack(self, documents: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        parts = [self._document(document) for document in documents]
        start = 0
        for part in parts:
            part["anchors"] += start
            part["context_starts"] += start
            start += part["input_ids"].shape[0]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _document(self, document: dict[str, Any]) -> dict[str, torch.Tensor]:
        input_ids = torch.tensor([document["input_ids"]])
        loss_mask = torch.tensor([document["loss_mask"]])
        anchors = self.choose_anchors(loss_mask, document)[None]
        is_valid = torch.ones_like(anchors, dtype=torch.bool)
        labels, weights = block_targets(input_ids, loss_mask, anchors, is_valid, self.slot_weights)
        first_context = first_supervised(document["loss_mask"]) if self.hides_prompt else 0
        return {
            "input_ids": input_ids[0],
            "loss_mask": loss_mask[0],
            "positions": torch.arange(input_ids.shape[1]),
            "document_lengths": torch.tensor([input_ids.shape[1]]),
            "rows": torch.tensor([document["row"]]),
            "anchors": anchors[0],
            "is_valid": is_valid[0],
            "context_starts": torch.full_like(anchors[0], first_context),
            "labels": labels[0],
            "weights": weights[0],
        }


def _pad(rows: list[torch.Tensor], value: float, multiple: int) -> torch.Tensor:
    """Rows of different lengths under each other, padded behind to a multiple, at least one entry wide."""
    width = max(1, max(row.shape[0] for row in rows))
    width = -(-width // multiple) * multiple
    return torch.stack([F.pad(row, (0, 0) * (row.dim() - 1) + (0, width - row.shape[0]), value=value) for row in rows])
