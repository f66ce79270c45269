"""A proposal is a tree of tokens under the anchor; a chain is the tree with one path."""

from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass
class TokenTree:
    """Tokens that one target forward verifies, for each row of a batch.

    Args:
        tokens (`torch.LongTensor`): Shape (rows, nodes). Node 0 is the anchor.
        parents (`list[list[int]]`): For each row the parent of each node: -1 for node 0, an earlier node for others.
            A row with fewer proposals repeats one of them: a twin changes nothing.
    Raises:
        ValueError: If a row's parents do not make a tree of this size.
    """

    tokens: torch.LongTensor
    parents: list[list[int]]

    def __post_init__(self):
        rows, nodes = self.tokens.shape
        if len(self.parents) != rows or any(len(parents) != nodes for parents in self.parents):
            raise ValueError(
                f"`tokens` has {rows} rows of {nodes} nodes, so `parents` needs as many entries; "
                f"got {[len(parents) for parents in self.parents]}."
            )
        for parents in self.parents:
            if parents[0] != -1 or any(not 0 <= parent < node for node, parent in enumerate(parents) if node):
                raise ValueError(f"Parents are -1 for the anchor and an earlier node for every other; got {parents}.")

    @classmethod
    def chain(cls, tokens: torch.LongTensor) -> "TokenTree":
        """The tree whose nodes follow each other; `tokens` has shape (rows, anchor + proposals)."""
        return cls(tokens, [list(range(-1, tokens.shape[1] - 1))] * tokens.shape[0])

    @classmethod
    def from_lists(
        cls, tokens: list[list[int]], parents: list[list[int]], device: torch.device | str | None = None
    ) -> "TokenTree":
        """The tree of tokens that are known on the host, where they stay known."""
        tree = cls(torch.tensor(tokens, device=device), parents)
        tree.__dict__["token_lists"] = tokens
        return tree

    @property
    def num_nodes(self) -> int:
        return self.tokens.shape[1]

    @cached_property
    def token_lists(self) -> list[list[int]]:
        """`tokens` on the host."""
        return self.tokens.tolist()

    def to_host(self, choices: torch.LongTensor) -> list[list[int]]:
        """Choices of shape (rows, nodes) on the host, by one transfer with `tokens`, which are needed there next."""
        if "token_lists" in self.__dict__:
            return choices.tolist()
        both = torch.stack([choices, self.tokens.to(choices.device)]).tolist()
        self.__dict__["token_lists"] = both[1]
        return both[0]

    @cached_property
    def is_chain(self) -> bool:
        chain = list(range(-1, self.num_nodes - 1))
        return all(parents == chain for parents in self.parents)

    @cached_property
    def depth_lists(self) -> list[list[int]]:
        """Distance of each node from the anchor, for each row."""
        depths = []
        for parents in self.parents:
            row = [0]
            for parent in parents[1:]:
                row.append(row[parent] + 1)
            depths.append(row)
        return depths

    @cached_property
    def depths(self) -> torch.LongTensor:
        """`depth_lists` as a tensor of shape (rows, nodes)."""
        return torch.tensor(self.depth_lists, device=self.tokens.device)

    @cached_property
    def ancestors(self) -> torch.BoolTensor:
        """Whether a node's path from the anchor, itself included, holds another node; shape (rows, nodes, nodes)."""
        nodes = self.num_nodes
        if self.is_chain:
            return torch.ones(len(self.parents), nodes, nodes, dtype=torch.bool, device=self.tokens.device).tril()
        entries = []  # of the flat table, filled at once: an operation for each node would take milliseconds
        for row, parents in enumerate(self.parents):
            paths: list[list[int]] = []
            for node, parent in enumerate(parents):
                paths.append([*paths[parent], node] if node else [0])
                start = (row * nodes + node) * nodes
                entries += [start + ancestor for ancestor in paths[node]]
        visible = torch.zeros(len(self.parents) * nodes * nodes, dtype=torch.bool)
        visible[torch.tensor(entries)] = True
        return visible.view(-1, nodes, nodes).to(self.tokens.device)

    @cached_property
    def _children(self) -> list[dict[tuple[int, int], int]]:
        children: list[dict[tuple[int, int], int]] = []
        for tokens, parents in zip(self.token_lists, self.parents, strict=True):
            row: dict[tuple[int, int], int] = {}
            for node in range(1, self.num_nodes):
                row.setdefault((parents[node], tokens[node]), node)
            children.append(row)
        return children

    def child(self, row: int, node: int, token: int) -> int | None:
        """The node that proposes `token` after `node`, if there is one."""
        return self._children[row].get((node, token))

    def padded(self, num_nodes: int) -> "TokenTree":
        """The tree with so many nodes: twins of its last node, or of a chain more nodes behind it."""
        num_missing = num_nodes - self.num_nodes
        tokens = torch.cat([self.tokens, self.tokens[:, -1:].expand(-1, num_missing)], dim=1)
        if self.is_chain:
            return TokenTree.chain(tokens)
        return TokenTree(tokens, [parents + parents[-1:] * num_missing for parents in self.parents])

    def longest_chain(self, max_nodes: int | None = None) -> "TokenTree":
        """Each row's deepest path, the first of them if several are; cut to the shortest row's and to `max_nodes`."""
        depths = self.depth_lists
        paths = []
        for row, parents in enumerate(self.parents):
            node, path = depths[row].index(max(depths[row])), []
            while node != -1:
                path.append(node)
                node = parents[node]
            paths.append(path[::-1])
        nodes = min(map(len, paths)) if max_nodes is None else min(max_nodes, *map(len, paths))
        index = torch.tensor([path[:nodes] for path in paths], device=self.tokens.device)
        return TokenTree.chain(self.tokens.gather(1, index))


def tree_attention_mask(
    tree: TokenTree,
    padding_mask: torch.Tensor | None,
    num_cached: int,
    num_keys: int,
    sliding_window: int | None = None,
) -> torch.BoolTensor:
    """Which keys each node of a tree sees: the text before the anchor, and its own path.

    Args:
        padding_mask (`torch.Tensor`, *optional*): Shape (rows, num_cached): 0 marks cached columns without a token.
        num_cached (`int`): Columns of text before the anchor.
        num_keys (`int`): Columns that the layer's cache returns: the newest ones, those of the tree last; a static
            cache also returns free ones behind them.
        sliding_window (`int`, *optional*): A key is visible if it lies less than this many tokens back.
    Returns:
        `torch.BoolTensor` of shape (rows, 1, nodes, num_keys).
    """
    rows, nodes = tree.tokens.shape
    device = tree.tokens.device
    text = torch.ones(rows, num_cached, dtype=torch.bool, device=device)
    if padding_mask is not None:
        text &= padding_mask.bool()
    visible = torch.cat([text[:, None].expand(rows, nodes, num_cached), tree.ancestors], dim=-1)
    if sliding_window is not None:
        columns = torch.arange(num_cached, device=device).expand(rows, -1)
        key_positions = torch.cat([columns, num_cached + tree.depths], dim=-1)
        query_positions = num_cached + tree.depths
        visible = visible & (query_positions[:, :, None] - key_positions[:, None] < sliding_window)
    num_free = max(0, num_keys - visible.shape[-1])
    visible = torch.nn.functional.pad(visible, (0, num_free))
    return visible[:, None, :, visible.shape[-1] - num_keys :]
