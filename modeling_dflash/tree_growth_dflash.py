"""Best-first trees of proposals, grown from the draft's likeliest tokens in each slot."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .tree_dflash import TokenTree

# Tokens of a slot that may become nodes. Of a tree of 127 nodes hardly any asks for more.
MAX_CANDIDATES = 8
# No tree that pays has more nodes; a bound for the time that growing takes.
MAX_NODES = 127

# From a slot, whether the nodes before it all have rank 0, and the rank of the last of them (0 for the anchor), to the
# slot's candidates there: chance and rank of each, highest chance first.
Children = Callable[[int, bool, int], list[tuple[float, int]]]


@dataclass
class SlotCandidates:
    """The likeliest tokens of each slot, most likely first, on the host.

    Args:
        tokens (`list[list[list[int]]]`): By row, slot and rank.
        chances (`list[list[list[float]]]`): Their probabilities in the draft.
    """

    tokens: list[list[list[int]]]
    chances: list[list[list[float]]]

    @classmethod
    def from_logits(cls, logits: torch.Tensor, max_candidates: int = MAX_CANDIDATES) -> "SlotCandidates":
        """The candidates of draft logits of shape (rows, slots, vocab_size), by one transfer to the host."""
        top = logits.float().softmax(dim=-1).topk(min(max_candidates, logits.shape[-1]), dim=-1)
        # Float32 holds every token id below 2**24 exactly.
        tokens, chances = torch.stack([top.indices.float(), top.values]).tolist()
        return cls([[[int(token) for token in slot] for slot in row] for row in tokens], chances)


@dataclass
class GrownPaths:
    """Nodes of one row in the order in which they were added: node 0 is the anchor, parents come first.

    Args:
        parents (`list[int]`): The parent of each node, -1 for the anchor.
        depths (`list[int]`): Distance of each node from the anchor.
        ranks (`list[int]`): Which of its slot's candidates each node is, counted from 0.
        chances (`list[float]`): How likely the target is to follow each node's whole path; never rises.
    """

    parents: list[int]
    depths: list[int]
    ranks: list[int]
    chances: list[float]

    @property
    def num_nodes(self) -> int:
        """Nodes, the anchor included."""
        return len(self.parents)

    def main_path(self, num_nodes: int) -> list[int]:
        """Of the first `num_nodes` nodes the likeliest child of the anchor, its likeliest child, and so on."""
        path = [0]
        for node in range(1, num_nodes):
            if self.parents[node] == path[-1]:  # its first child; another one has an earlier parent by then
                path.append(node)
        return path


def grow_paths(children: Children, num_slots: int, num_nodes: int, min_chance: float = 0.0) -> GrownPaths:
    """The `num_nodes` likeliest paths under an anchor, or those above `min_chance` if they are fewer.

    A path's chance is the product of its tokens' chances. As siblings come likeliest first, a path's next sibling and
    its first child are the only ones that it can bring into question, so a heap finds the best nodes one by one.

    Args:
        children (`Callable`): See `Children`.
        num_slots (`int`): Slots of the draft.
        num_nodes (`int`): Nodes beside the anchor, at least 1.
        min_chance (`float`): Nodes below it are left out, except the first.
    Source: DDTree, arXiv 2604.12989.
    """
    paths = GrownPaths([-1], [0], [0], [1.0])
    is_main = [True]
    candidates = [children(0, True, 0)]  # under each node
    # Negative chance, a counter that keeps the order of equals, parent, place among the parent's candidates.
    heap = [(-candidates[0][0][0], 0, 0, 0)]
    num_pushed = 1
    while heap and paths.num_nodes <= num_nodes:
        negative, _, parent, place = heapq.heappop(heap)
        if -negative < min_chance and paths.num_nodes > 1:
            break
        depth = paths.depths[parent] + 1
        node = paths.num_nodes
        siblings = candidates[parent]
        rank = siblings[place][1]
        paths.parents.append(parent)
        paths.depths.append(depth)
        paths.ranks.append(rank)
        paths.chances.append(-negative)
        is_main.append(is_main[parent] and rank == 0)
        candidates.append(children(depth, is_main[node], rank) if depth < num_slots else [])
        if place + 1 < len(siblings):
            heapq.heappush(heap, (-paths.chances[parent] * siblings[place + 1][0], num_pushed, parent, place + 1))
        if candidates[node]:
            heapq.heappush(heap, (negative * candidates[node][0][0], num_pushed + 1, node, 0))
        num_pushed += 2
    return paths


def build_tree(
    anchors: list[int],
    candidates: SlotCandidates,
    grown: list[GrownPaths],
    num_nodes: int,
    device: torch.device | str | None = None,
) -> TokenTree:
    """The first `num_nodes` nodes beside the anchor of each row's paths; rows that have fewer repeat their last one.

    The main path comes first: where the target follows it, accepted nodes are already in place in the cache.

    Args:
        anchors (`list[int]`): Each row's newest token.
    """
    all_tokens, all_parents = [], []
    for anchor, slots, paths in zip(anchors, candidates.tokens, grown, strict=True):
        kept = min(num_nodes + 1, paths.num_nodes)
        order = paths.main_path(kept)
        on_main = set(order)
        order += [node for node in range(kept) if node not in on_main]
        place = {node: index for index, node in enumerate(order)}
        tokens = [anchor] + [slots[paths.depths[node] - 1][paths.ranks[node]] for node in order[1:]]
        parents = [-1] + [place[paths.parents[node]] for node in order[1:]]
        num_missing = num_nodes + 1 - kept
        all_tokens.append(tokens + tokens[-1:] * num_missing)
        all_parents.append(parents + parents[-1:] * num_missing)
    return TokenTree.from_lists(all_tokens, all_parents, device)
