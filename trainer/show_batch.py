"""A batch as text: what is prompt, what is supervised, where the anchors are and what their blocks must predict."""

import itertools
import os
import sys
from collections.abc import Mapping

import torch
from transformers import PreTrainedTokenizerBase

_DIM, _GREEN, _ANCHOR = "2", "32", "7;32"


def show_batch(
    batch: Mapping[str, torch.Tensor],
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    *,
    num_rows: int = 4,
    num_blocks: int = 3,
    use_color: bool | None = None,
) -> str:
    """The first rows of a batch of [`AnchorCollator`], document by document, each with some of its blocks.

    Text that the target read is dim, text that it wrote green, anchors are inverse; without colours the lines say
    `read` and `written`, and anchors are in brackets. A block is its anchor and, for each slot, the token to predict
    with its loss weight, or `-` where the slot has none. The ends of lines are shown as ⏎.

    Args:
        batch: `input_ids`, `loss_mask` (B, T); `document_lengths`, `rows` (B, D); `anchors`, `is_valid` (B, N);
            `labels`, `weights` (B, N, S).
        tokenizer: The target's.
        block_size (`int`): Tokens per block, anchor included.
        num_rows, num_blocks (`int`): How many rows, and blocks of each document, to show.
        use_color (`bool`, *optional*): Defaults to whether the output is a terminal and `NO_COLOR` is not set.
    """
    if use_color is None:
        use_color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    num_tokens = batch["input_ids"].shape[1]
    lines = []
    for row, lengths in enumerate(batch["document_lengths"][:num_rows].tolist()):
        lengths = [length for length in lengths if length]
        padding = num_tokens - sum(lengths)
        lines.append(f"Row {row}: {len(lengths)} document(s), {sum(lengths)} tokens, {padding} of padding")
        ends = list(itertools.accumulate(lengths))
        for number, start, end in zip(batch["rows"][row].tolist(), [0, *ends], ends, strict=False):
            view = _DocumentView(batch, row, start, end, tokenizer, use_color)
            lines.append(f"  Document {number}: {view.counts()}; blocks of {block_size}")
            lines += [*view.text(), *view.blocks(num_blocks)]
    return "\n".join(lines)


class _DocumentView:
    """One document of a packed row: columns `start` to `end`."""

    def __init__(
        self,
        batch: Mapping[str, torch.Tensor],
        row: int,
        start: int,
        end: int,
        tokenizer: PreTrainedTokenizerBase,
        use_color: bool,
    ):
        self.input_ids = batch["input_ids"][row, start:end].tolist()
        self.loss_mask = batch["loss_mask"][row, start:end].tolist()
        anchors = batch["anchors"][row]
        is_ours = batch["is_valid"][row] & (anchors >= start) & (anchors < end)
        self.anchors = (anchors[is_ours] - start).tolist()
        self.labels = batch["labels"][row, is_ours].tolist()
        self.weights = batch["weights"][row, is_ours].tolist()
        self.tokenizer = tokenizer
        self.use_color = use_color

    def counts(self) -> str:
        return f"{len(self.input_ids)} tokens, {sum(self.loss_mask)} supervised, {len(self.anchors)} anchors"

    def text(self) -> list[str]:
        """The tokens, one or more lines for each run with the same mask."""
        lines = []
        anchors = set(self.anchors)
        for is_written, run in itertools.groupby(range(len(self.input_ids)), key=lambda i: bool(self.loss_mask[i])):
            line, name = "", "written" if is_written else "read"
            for position in run:
                token = self._token(self.input_ids[position])
                if position in anchors:
                    line += self._paint(token, _ANCHOR) if self.use_color else f"[{token}]"
                else:
                    line += self._paint(token, _GREEN if is_written else _DIM)
                if token.endswith("⏎"):
                    lines.append(f"    {name:7} | {line}")
                    line, name = "", ""
            if line:
                lines.append(f"    {name:7} | {line}")
        return lines

    def blocks(self, count: int) -> list[str]:
        """Anchor and slots of `count` blocks, spread over the document."""
        step = max(1, len(self.anchors) // count) if count else 1
        lines = []
        for block in range(0, len(self.anchors), step)[:count]:
            anchor = self.anchors[block]
            token = self._token(self.input_ids[anchor])
            slots = [
                f"{self._paint(self._token(label), _GREEN)} {weight:.2f}" if weight else self._paint("-", _DIM)
                for label, weight in zip(self.labels[block][1:], self.weights[block][1:], strict=True)
            ]
            shown = self._paint(token, _ANCHOR) if self.use_color else f"[{token}]"
            lines.append(f"    block at {anchor}: {shown} -> {' | '.join(slots)}")
        return lines

    def _token(self, token: int) -> str:
        text = self.tokenizer.decode([token])
        return "".join(c if c.isprintable() else "⏎" if c == "\n" else repr(c)[1:-1] for c in text)

    def _paint(self, text: str, code: str) -> str:
        return f"\033[{code}m{text}\033[0m" if self.use_color else text
