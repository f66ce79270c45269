"""Teacher-forced measures of a drafter: what its blocks would have given on the target's own text."""

import torch


class BlockMetrics:
    """Sums over blocks of per-slot hits and accepted lengths.

    A block counts only if all its proposals are supervised, so that blocks cut short by the end of an answer do not
    pull the figures down. The accepted length is the leading run of right proposals plus the bonus token: the meaning
    of tau, measured on the target's text instead of live.

    Args:
        block_size (`int`): Tokens per block, anchor included.
    """

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.reset()

    def reset(self) -> None:
        # blocks, sum of accepted lengths, then hits per slot 1 .. block_size - 1
        self._sums = torch.zeros(self.block_size + 1, dtype=torch.float64)

    def add(self, is_correct: torch.BoolTensor, weights: torch.Tensor) -> None:
        """Adds blocks; both arguments have shape (batch, num_anchors, block_size)."""
        is_whole = (weights[..., 1:] > 0).all(dim=-1)
        hits = (is_correct[..., 1:] & is_whole[..., None]).flatten(0, -2)
        run = hits.long().cumprod(dim=-1).sum()
        count = is_whole.sum()
        sums = torch.cat([torch.stack([count, run + count]), hits.sum(dim=0)]).double()
        self._sums = self._sums.to(sums.device) + sums

    def sums(self) -> torch.Tensor:
        """The sums, to be added over processes before [`BlockMetrics.compute`]."""
        return self._sums

    def compute(self, sums: torch.Tensor | None = None) -> dict[str, float]:
        """`accepted_length` and `accuracy_slot_k` for k = 1 .. block_size - 1; empty if no block counted."""
        count, accepted, *hits = (self._sums if sums is None else sums).tolist()
        if count == 0:
            return {}
        slots = {f"accuracy_slot_{k}": hit / count for k, hit in enumerate(hits, start=1)}
        return {"accepted_length": accepted / count, **slots}
