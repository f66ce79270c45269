"""Teacher-forced measures of a drafter: what its blocks would have given on the target's own text."""

import torch


class BlockMetrics:
    """Sums over blocks of hits and of unbroken runs of hits, per slot.

    A block counts only if all its proposals are supervised, so that blocks cut short by the end of an answer do not
    pull the figures down.

    Args:
        block_size (`int`): Tokens per block, anchor included.
    """

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.reset()

    def reset(self) -> None:
        # (3, slots 1 .. block_size - 1): blocks (the same in every column), hits, runs that reach the slot
        self._sums = torch.zeros(3, self.block_size - 1, dtype=torch.float64)

    def add(self, is_correct: torch.BoolTensor, weights: torch.Tensor) -> None:
        """Adds blocks; both arguments have shape (batch, num_anchors, block_size)."""
        is_whole = (weights[..., 1:] > 0).all(dim=-1)
        hits = (is_correct[..., 1:] & is_whole[..., None]).flatten(0, -2).long()
        count = is_whole.sum().expand(self.block_size - 1)
        sums = torch.stack([count, hits.sum(dim=0), hits.cumprod(dim=-1).sum(dim=0)]).double()
        self._sums = self._sums.to(sums.device) + sums

    def sums(self) -> torch.Tensor:
        """The sums, to be added over processes before [`BlockMetrics.compute`]."""
        return self._sums

    def compute(self, sums: torch.Tensor | None = None) -> dict[str, float]:
        """The means over blocks; empty if no block counted.

        Returns:
            `teacher_forced_tau`: leading run of right proposals plus the bonus token, the meaning of tau, but on the
            target's text instead of live. For each slot k from 1: `accuracy_slot_k`, how often its token is right, and
            `acceptance_slot_k`, how often it and all before it are.
        """
        counts, hits, runs = (self._sums if sums is None else sums).tolist()
        if counts[0] == 0:
            return {}
        slots = range(1, self.block_size)
        return {
            "teacher_forced_tau": 1.0 + sum(runs) / counts[0],
            **{f"accuracy_slot_{k}": hits[k - 1] / counts[0] for k in slots},
            **{f"acceptance_slot_{k}": runs[k - 1] / counts[0] for k in slots},
        }
