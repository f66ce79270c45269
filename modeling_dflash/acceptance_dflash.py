"""Which proposals of a verified tree stay: those that the target's own choices follow, token by token."""

from typing import Any

import torch
from transformers import LogitsProcessorList

from .committed_text_dflash import CommittedText
from .outputs_dflash import OutputRecorder
from .sampling_dflash import StepNoise, choose_after_drafts, choose_tokens, group_by_length, is_prefix_free
from .tree_dflash import TokenTree


class Acceptance:
    """Commits the tokens that plain decoding of the target would choose.

    Args:
        text ([`CommittedText`]): The texts of the call.
        processors ([`LogitsProcessorList`]): Those of the call.
        recorder ([`OutputRecorder`]): Gets the scores of each committed token.
        draws_after_drafts (`bool`): Proposals were drawn, and are kept by the rule of speculative sampling.
    Attributes:
        noise ([`StepNoise`], *optional*): The random numbers of plain sampling; None: choices are greedy.
    """

    noise: StepNoise | None = None

    def __init__(
        self,
        text: CommittedText,
        processors: LogitsProcessorList,
        recorder: OutputRecorder,
        *,
        draws_after_drafts: bool,
    ):
        self._text, self._processors, self._recorder = text, processors, recorder
        self._draws_after_drafts = draws_after_drafts
        self._is_prefix_free = is_prefix_free(processors)

    def accept(
        self, rows: list[int], tree: TokenTree, logits: torch.Tensor, draft_scores: torch.Tensor | None
    ) -> list[list[int]]:
        """Commits each row's new tokens and returns the nodes that they follow.

        Tokens are committed one by one, with processors and stopping criteria called as in plain decoding.

        Args:
            rows (`list[int]`): The texts that the tree's rows belong to.
            logits (`torch.Tensor`): The target's, shape (rows, nodes, vocab_size).
            draft_scores (`torch.Tensor`, *optional*): What proposals were drawn from, shape (rows, slots, vocab_size).
        """
        text = self._text
        logits = logits.to(text.device, torch.float32)
        if self._draws_after_drafts and draft_scores is None:
            draft_scores = logits[:, :0]
        scores: Any = None
        choices: Any = None
        if self._is_prefix_free:
            scores, choices = self._choose_at_once(rows, tree, logits, draft_scores)
        paths: list[list[int]] = [[] if text.is_over(row) else [0] for row in rows]
        frontier = {i: 0 for i, path in enumerate(paths) if path}
        while frontier:
            if choices is None:
                lengths = {i: text.length(rows[i]) for i in frontier}
                node_logits = {i: logits[i, node] for i, node in frontier.items()}
                step_scores = process(self._processors, text, rows, lengths, node_logits)
                tokens = {
                    i: self._choose_one(rows[i], step_scores[i], *_next_proposal(tree, i, node, draft_scores))
                    for i, node in frontier.items()
                }
            else:
                step_scores = {i: scores[i, node] for i, node in frontier.items()}
                tokens = {i: choices[i][node] for i, node in frontier.items()}
            deeper = {}
            for i, node in frontier.items():
                row = rows[i]
                self._recorder.add_step(row, step_scores[i], logits[i, node])
                text.commit(row, tokens[i], self._recorder.scores_so_far(row) if text.asks_criteria else None)
                child = tree.child(i, node, tokens[i])
                if child is not None and not text.is_over(row):
                    paths[i].append(child)
                    deeper[i] = child
            frontier = deeper
        return paths

    def _choose_at_once(
        self, rows: list[int], tree: TokenTree, logits: torch.Tensor, draft_scores: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[list[int]]]:
        """Scores and choices of all nodes, for processors that look at nothing but the scores."""
        num_rows, nodes, vocab_size = logits.shape
        scores = logits
        if self._processors:
            no_text = self._text.ids.new_zeros(num_rows * nodes, 1)
            scores = self._processors(no_text, logits.flatten(0, 1).clone()).view(num_rows, nodes, vocab_size)
        if draft_scores is not None:
            return scores, tree.to_host(choose_after_drafts(scores, draft_scores, tree.tokens[:, 1:]))
        noise = None
        if self.noise is not None:
            noise = torch.ones_like(scores)
            for i, row in enumerate(rows):
                if self._text.is_over(row):
                    continue
                for node, depth in enumerate(tree.depth_lists[i]):
                    noise[i, node] = self._step_noise(row, depth)
        return scores, tree.to_host(choose_tokens(scores, noise))

    def _choose_one(
        self, row: int, scores: torch.Tensor, proposal: torch.LongTensor, draft_scores: torch.Tensor | None
    ) -> int:
        if draft_scores is not None:
            pair = scores.expand(1, 1 + proposal.shape[1], -1)
            return int(choose_after_drafts(pair, draft_scores, proposal)[0, 0])
        return int(choose_tokens(scores, None if self.noise is None else self._step_noise(row, 0)))

    def _step_noise(self, row: int, depth: int) -> torch.Tensor:
        assert self.noise is not None
        return self.noise.get(row, len(self._text.new_tokens[row]) + depth)


def process(
    processors: LogitsProcessorList,
    text: CommittedText,
    rows: list[int],
    lengths: dict[int, int],
    logits: dict[int, torch.Tensor],
) -> dict[int, torch.Tensor]:
    """Processed scores after `lengths` tokens, by calls like those of plain decoding.

    Args:
        rows (`list[int]`): The texts that the keys of `lengths` and `logits` belong to.
        lengths (`dict[int, int]`): Tokens of the text that count for each.
        logits (`dict[int, torch.Tensor]`): Shape (vocab_size,) each.
    """
    found: dict[int, torch.Tensor] = {}
    for length, members in group_by_length(lengths).items():
        # Processors may know rows by their place in the batch, so each call has the whole batch.
        ids = text.up_to(length)
        scores = logits[members[0]].new_zeros(ids.shape[0], logits[members[0]].shape[0])
        for i in members:
            scores[rows[i]] = logits[i]
        scores = processors(ids, scores)
        found |= {i: scores[rows[i]] for i in members}
    return {i: found[i] for i in lengths}


def _next_proposal(
    tree: TokenTree, i: int, node: int, draft_scores: torch.Tensor | None
) -> tuple[torch.LongTensor, torch.Tensor | None]:
    """The proposal after a node of a drawn chain and the scores that it was drawn from; empty after the last one."""
    next_slot = slice(node, node + 1)
    scores = None if draft_scores is None else draft_scores[i : i + 1, next_slot]
    return tree.tokens[i : i + 1, 1:][:, next_slot], scores
