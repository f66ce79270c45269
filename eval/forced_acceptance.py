"""Forced acceptance: every round accepts a given number of tokens, to see speed apart from a drafter's quality.

The drafter, its head and the target do all their work; only whether a proposal is right is decided beforehand.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from dflash_hf.tree_dflash import TokenTree


@dataclass
class ForcedChain(TokenTree):
    """A chain whose first `num_accepted` proposals are taken whatever the target chooses."""

    num_accepted: int = 0

    def child(self, row: int, node: int, token: int) -> int | None:
        return node + 1 if node < min(self.num_accepted, self.num_nodes - 1) else None

    def longest_chain(self, max_nodes: int | None = None) -> "ForcedChain":
        chain = super().longest_chain(max_nodes)
        return ForcedChain(chain.tokens, chain.parents, self.num_accepted)


class ForcedProposals:
    """A tree builder whose chains give `accept_length` tokens in each round, bonus token included.

    Between whole numbers the lengths alternate so that their mean is right from the first round on.

    Args:
        accept_length (`float`): Tokens a round, 1 to the drafter's block size.
        answer (`Sequence[int]`, *optional*): The tokens that plain decoding gives. Then the accepted proposals are
            these, and the text is the target's own; without it proposals are the drafter's, and the text is noise.
    Raises:
        ValueError: If a block cannot give so many tokens.
    """

    def __init__(self, accept_length: float, block_size: int, answer: Sequence[int] | None = None):
        if not 1 <= accept_length <= block_size:
            raise ValueError(
                f"`simulate_accept_len` is {accept_length}, but a block of {block_size} gives 1 to {block_size}."
            )
        self.accept_length = accept_length
        self.answer = answer
        self.num_rounds = 0
        self.num_tokens = 1  # the prompt's forward gives the first

    def __call__(self, logits: torch.Tensor, anchors: torch.LongTensor) -> TokenTree:
        total = math.floor((self.num_rounds + 1) * self.accept_length) - math.floor(
            self.num_rounds * self.accept_length
        )
        proposals = logits.max(dim=-1).indices
        if self.answer is not None:
            known = list(self.answer[self.num_tokens : self.num_tokens + total - 1])
            proposals[0, : len(known)] = torch.tensor(known, dtype=proposals.dtype, device=proposals.device)
        self.num_rounds += 1
        self.num_tokens += total
        tokens = torch.cat([anchors, proposals.to(anchors.device)], dim=1)
        return ForcedChain(tokens, TokenTree.chain(tokens).parents, total - 1)


def forced_options(
    drafter: PreTrainedModel, accept_length: float, answer: Sequence[int] | None = None
) -> dict[str, Any]:
    """`generate()` options that decode with [`ForcedProposals`]; a streamer goes into `token_streamer`."""
    builder = ForcedProposals(accept_length, drafter.config.block_size, answer)
    return {"custom_generate": drafter.decode, "tree_builder": builder}
