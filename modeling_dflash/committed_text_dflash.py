"""The text of one decoding call, and when each of its rows ends."""

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList


class CommittedText:
    """Prompts and committed tokens of a batch, with stopping criteria checked as if tokens had come one by one.

    Args:
        prompts (`torch.LongTensor`): Shape (rows, tokens), padded on the left.
        criteria ([`StoppingCriteriaList`]): Those of the call.
        max_length (`int`): Longest text, prompt included.
        num_scratch (`int`): Columns behind the longest text, for proposals.
    """

    def __init__(self, prompts: torch.LongTensor, criteria: StoppingCriteriaList, max_length: int, num_scratch: int):
        num_rows, self.num_prompt = prompts.shape
        self.max_length = max_length
        self.ids = prompts.new_zeros(num_rows, max(max_length, self.num_prompt) + num_scratch)
        self.ids[:, : self.num_prompt] = prompts
        self.new_tokens: list[list[int]] = [[] for _ in range(num_rows)]
        self._num_written = [0] * num_rows  # of the new tokens, in `ids`
        self._ended_at: list[int | None] = [None] * num_rows
        self._has_end_tokens = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self._end_ids: set[int] = set()
        self._other_criteria = []
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                self._end_ids |= set(criterion.eos_token_id.flatten().tolist())
            elif type(criterion) is MaxLengthCriteria:
                self.max_length = min(self.max_length, criterion.max_length)
            else:
                self._other_criteria.append(criterion)

    @property
    def asks_criteria(self) -> bool:
        """Whether there are criteria other than end tokens and the length."""
        return bool(self._other_criteria)

    @property
    def device(self) -> torch.device:
        return self.ids.device

    def length(self, row: int) -> int:
        """Tokens of a row, its prompt and padding included."""
        return self.num_prompt + len(self.new_tokens[row])

    def last_tokens(self, rows: list[int]) -> torch.LongTensor:
        """The newest token of each row, shape (rows, 1)."""
        return torch.tensor([[self.new_tokens[row][-1]] for row in rows], device=self.device)

    def up_to(self, length: int) -> torch.LongTensor:
        """The first `length` tokens of every row, shape (all rows, length); behind a row's end stands anything."""
        for row, tokens in enumerate(self.new_tokens):
            start = self._num_written[row]
            if start < len(tokens):
                new = torch.tensor(tokens[start:], device=self.device)
                self.ids[row, self.num_prompt + start : self.num_prompt + len(tokens)] = new
                self._num_written[row] = len(tokens)
        return self.ids[:, :length]

    def commit(self, row: int, token: int, scores: tuple[torch.Tensor, ...] | None) -> None:
        """Appends a token to a row; `scores` are those of its steps so far, for criteria that look at them."""
        self.new_tokens[row].append(token)
        if self._ended_at[row] is None and self._meets_criteria(row, token, scores):
            self._ended_at[row] = len(self.new_tokens[row])

    def is_over(self, row: int) -> bool:
        """Whether a row needs no more tokens. Without end tokens plain decoding goes on until every row has ended."""
        ended = self._ended_at[row]
        if ended is None or self._has_end_tokens or len(self._ended_at) == 1 or self.length(row) >= self.max_length:
            return ended is not None
        return None not in self._ended_at and len(self.new_tokens[row]) >= self.num_steps

    @property
    def num_steps(self) -> int:
        """New tokens of the row that ended last."""
        return max(ended for ended in self._ended_at if ended is not None)

    @property
    def num_new(self) -> list[int]:
        """New tokens of each row, those after the end of the last row to end left out."""
        return [min(len(tokens), self.num_steps) for tokens in self.new_tokens]

    def sequences(self, pad_id: int) -> torch.LongTensor:
        """Prompts and new tokens, shorter rows filled with `pad_id`."""
        sequences = self.up_to(self.num_prompt + self.num_steps).clone()
        for row, length in enumerate(self.num_new):
            sequences[row, self.num_prompt + length :] = pad_id
        return sequences

    def _meets_criteria(self, row: int, token: int, scores: tuple[torch.Tensor, ...] | None) -> bool:
        is_end = token in self._end_ids or self.length(row) >= self.max_length
        if not self._other_criteria:
            return is_end
        text = self.up_to(self.length(row))[row : row + 1]
        # All of them, as plain decoding does: a criterion may count its calls.
        met = [bool(torch.as_tensor(criterion(text, scores)).any()) for criterion in self._other_criteria]
        return is_end or any(met)
