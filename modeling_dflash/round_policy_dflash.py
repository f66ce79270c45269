"""How much each round of a call verifies: a chain or a tree, of which size, or the anchor alone."""

import threading
import weakref
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from .tree_budget_dflash import ChanceCalibration, TreeBudget
from .tree_dflash import TokenTree
from .tree_growth_dflash import SlotCandidates, build_tree
from .verify_length_dflash import VerifyLength, fixed_proposals


class KeptChances:
    """What draft probabilities were worth in earlier calls, in memory only: it goes away with target or drafter.

    Each call works on a copy and hands it in at its end, so calls side by side do not disturb each other. Times are
    not kept: they follow the length of the text, and those of a long one would pass for those of later, shorter ones.
    """

    def __init__(self):
        self._by_target: Any = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def get(self, target: PreTrainedModel, drafter: PreTrainedModel, is_sampled: bool) -> ChanceCalibration | None:
        """A copy of what was handed in last, of calls that draw tokens or of greedy ones."""
        with self._lock:
            kept = self._of_pair(target, drafter).get(is_sampled)
            return None if kept is None else kept.copy()

    def put(
        self, target: PreTrainedModel, drafter: PreTrainedModel, is_sampled: bool, calibration: ChanceCalibration
    ) -> None:
        """Keeps a copy for later calls."""
        with self._lock:
            self._of_pair(target, drafter)[is_sampled] = calibration.copy()

    def _of_pair(self, target: PreTrainedModel, drafter: PreTrainedModel) -> dict[bool, ChanceCalibration]:
        return self._by_target.setdefault(target, weakref.WeakKeyDictionary()).setdefault(drafter, {})


_KEPT = KeptChances()


class RoundPolicy:
    """[`VerifyLength`] or [`TreeBudget`] of one call, with what earlier calls of the same models have learned.

    Args:
        target ([`PreTrainedModel`]), drafter ([`DFlashDraftModel`]): The models of the call.
        config ([`GenerationConfig`]): The call's settings; `num_assistant_tokens` fixes the length of chains and
            bounds the depth of trees.
        num_rows (`int`): Rows of the batch.
        num_tree_nodes (`int` or `"auto"`, *optional*): See [`CallOptions`].
        verifies_whole_block (`bool`): Chains are never shortened, unless `num_assistant_tokens` says so.
        sizes (`list[int]`, *optional*): Numbers of proposals for which forwards are compiled, ascending: those between
            them cost as much as the next one. Default: every number has a cost of its own.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: PreTrainedModel,
        config: GenerationConfig,
        num_rows: int,
        *,
        num_tree_nodes: int | str | None = None,
        verifies_whole_block: bool = False,
        sizes: list[int] | None = None,
    ):
        self._models = target, drafter
        self._num_rows = num_rows
        # How probable a choice is depends on whether it is drawn, not on the hardware or the rows.
        self._is_sampled = bool(config.do_sample)
        whole_block = drafter.config.block_size - 1
        asked = fixed_proposals(config, drafter.config.block_size)
        self.tree_budget: TreeBudget | None = None
        if num_tree_nodes:
            size = None if isinstance(num_tree_nodes, str) else num_tree_nodes
            self.tree_budget = TreeBudget(
                asked or whole_block,
                size,
                calibration=_KEPT.get(*self._models, self._is_sampled),
                sizes=sizes,
            )
        num_fixed = whole_block if asked is None and verifies_whole_block else asked
        self.verify_length = VerifyLength(whole_block, num_fixed, only_whole=sizes is not None)

    def refuse_trees(self) -> None:
        """Makes all proposals chains, because the target takes no trees."""
        self.tree_budget = None

    def pick(self) -> int:
        """Slots to draft for the next round, 0 for a round without a draft."""
        return (self.tree_budget or self.verify_length).pick()

    def grow(
        self, logits: torch.Tensor, anchors: list[int], is_over: list[bool], most_nodes: int | None = None
    ) -> TokenTree:
        """The tree to verify.

        Args:
            logits (`torch.Tensor`): Of the draft, shape (rows, slots, vocab_size).
            anchors (`list[int]`): Each row's newest token.
            is_over (`list[bool]`): Rows that need no more tokens.
            most_nodes (`int`, *optional*): Nodes beside the anchor that there is room for.
        """
        assert self.tree_budget is not None
        candidates = SlotCandidates.from_logits(logits, self.tree_budget.max_candidates)
        grown, num_nodes = self.tree_budget.grow(candidates, is_over, most_nodes)
        return build_tree(anchors, candidates, grown, num_nodes, logits.device)

    def record(self, num_proposals: int, choices: list[list[int]], seconds: float | None, num_rows: int) -> None:
        """Takes in a round.

        Args:
            num_proposals (`int`): Nodes beside the anchor.
            choices (`list[list[int]]`): The target's choices at the visited nodes of each row; none if it was over.
            seconds (`float`, *optional*): The round's wall time, if it can be compared with that of other rounds.
            num_rows (`int`): Rows that stay for the next round; if they are fewer, the time says nothing.
        """
        is_comparable = num_rows == self._num_rows
        if self.tree_budget is not None:
            self.tree_budget.record(num_proposals, choices, seconds if is_comparable else None)
        elif is_comparable:
            num_accepted = [len(chosen) - 1 for chosen in choices if chosen]
            self.verify_length.record(num_proposals, num_accepted, seconds)
        if not is_comparable:
            self._change_rows(num_rows)

    def keep(self) -> None:
        """Hands on to later calls what this one has learned."""
        if self.tree_budget is not None:
            _KEPT.put(*self._models, self._is_sampled, self.tree_budget.calibration)

    def _change_rows(self, num_rows: int) -> None:
        self._num_rows = num_rows
        (self.tree_budget or self.verify_length).rows_have_left()
