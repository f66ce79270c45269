"""The training objective: cross-entropy that fades along the block, with the head in chunks."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dflash_hf.trainer.objectives import SlotLosses, check_objective, d_pace_weights, slot_losses

# Paper, appendix A.1.
_PAPER_DECAY = {16: 7.0, 10: 5.0, 8: 4.0}


@dataclass
class DFlashLossOutput:
    """Sums, so that several batches can be added before dividing.

    Args:
        loss_sum (`torch.Tensor`): Weighted losses summed over slots; carries the gradient.
        weight_sum (`torch.Tensor`): Sum of the weights.
        is_correct (`torch.BoolTensor`): Whether the drafter's most likely token is the label in force, in the shape of
            `labels`; False where the weight is 0.
        acceptance (`torch.Tensor`, *optional*): Probability that speculative sampling keeps a token drawn from the
            drafter, in the shape of `labels`; 0 where the weight is 0, None without a teacher.
    """

    loss_sum: torch.Tensor
    weight_sum: torch.Tensor
    is_correct: torch.BoolTensor
    acceptance: torch.Tensor | None = None


def decay_for_block_size(block_size: int) -> float:
    """The paper's decay constant (gamma) for a block size: 7 for 16, 5 for 10, 4 for 8.

    Raises:
        ValueError: For other block sizes; choose one near half the block.
    """
    if block_size not in _PAPER_DECAY:
        raise ValueError(
            f"The paper gives no loss decay for `block_size` {block_size}, only {_PAPER_DECAY}. Pass `loss_decay`, "
            "for instance half the block size."
        )
    return _PAPER_DECAY[block_size]


def decay_weights(block_size: int, gamma: float) -> torch.Tensor:
    """Loss weights that fade with the distance from the anchor: exp(-(k - 1) / gamma) for slot k.

    Args:
        block_size (`int`): Tokens per block, anchor included; at least 2.
        gamma (`float`): Distance, in tokens, over which the weight falls to 1/e; `math.inf` for equal weights.
    Returns:
        `torch.Tensor` of shape (block_size,), float32; entry 0 (the anchor) is 0, entry 1 is 1.
    Raises:
        ValueError: If `gamma` is not positive or `block_size` is below 2.
    Source: arXiv 2602.06036, equation 4.
    """
    if gamma <= 0 or block_size < 2:
        raise ValueError(f"`gamma` ({gamma}) must be positive and `block_size` ({block_size}) at least 2.")
    rate = 0.0 if math.isinf(gamma) else 1.0 / gamma
    weights = torch.exp(-rate * (torch.arange(block_size, dtype=torch.float32) - 1))
    weights[0] = 0.0
    return weights


def dflash_loss(
    hidden_states: torch.Tensor,
    labels: torch.LongTensor,
    weights: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    *,
    chunk_size: int = 256,
    logit_offset: torch.Tensor | None = None,
    objective: str = "cross_entropy",
    label_source: str = "data",
    teacher: Callable[[torch.LongTensor], torch.Tensor] | None = None,
    d_pace_alpha: float | None = None,
    active: torch.LongTensor | None = None,
) -> DFlashLossOutput:
    """Weighted loss of draft hidden states through the target's frozen head; by default the paper's.

    Only slots with weight are sent through the head, in chunks whose gradient is computed at once, so the logits of
    more than one chunk never exist and no chunk is computed twice.

    The mean to train on is `loss_sum` over `weight_sum`, both summed over the whole optimizer step. `weight_sum` knows
    the given `weights` only, so with D-PACE, too, it does not depend on the drafter or on how a step is split.

    Args:
        hidden_states (`torch.Tensor`): Shape (..., block_size, D).
        labels (`torch.LongTensor`): Shape (..., block_size).
        weights (`torch.Tensor`): Same shape; 0 leaves a slot out.
        head: Maps (slots, D) to logits (slots, vocab); differentiable, its own parameters get no gradient.
        chunk_size (`int`): Slots per chunk.
        logit_offset (`torch.Tensor`, *optional*): Added to the logits in the loss but not in `is_correct`, shape
            (vocab,), see [`sample_candidates`].
        objective (`str`): "cross_entropy", "kl" or "tv", see [`slot_losses`].
        label_source (`str`): "data" for `labels`, "target" for the target's most likely tokens.
        teacher (*optional*): Maps indices into the flattened labels, shape (slots,), to the target's logits for these
            slots, shape (slots, vocab). Called once per chunk.
        d_pace_alpha (`float`, *optional*): Multiplies the weights by [`d_pace_weights`] of this smoothing. These stand
            in for the decay along the block, so give equal `weights`.
        active (`torch.LongTensor`, *optional*): Indices of the slots with weight in the flattened labels, rising. With
            it nothing here waits for a GPU; without it they are looked up.
    Raises:
        ValueError: If options contradict each other.
    Source: arXiv 2602.06036, section 4.2; the other objectives' in `objectives.py`.
    """
    check_objective(
        objective, label_source, d_pace_alpha, has_teacher=teacher is not None, is_sampled=logit_offset is not None
    )
    if active is None:
        active = weights.flatten().nonzero(as_tuple=True)[0]
    chosen, chosen_labels = hidden_states.flatten(0, -2)[active], labels.flatten()[active]
    if active.shape[0] == 0:  # not every head, quantised ones say, takes an empty batch
        nothing = torch.zeros_like(weights)
        loss_sum = chosen.sum().float()  # 0, and it still reaches the graph
        return DFlashLossOutput(loss_sum, weights.sum(), nothing.bool(), None if teacher is None else nothing)
    chunk_loss = _ChunkLoss(head, logit_offset, objective, label_source, teacher)
    slots, gradient = _in_chunks(chunk_loss, chosen, chosen_labels, active, chunk_size)

    def in_blocks(values: torch.Tensor) -> torch.Tensor:
        every = values.new_zeros(labels.numel())
        every[active] = values
        return every.view(labels.shape)

    chosen_weights = weights.flatten()[active]
    if d_pace_alpha is not None:
        factors = d_pace_weights(in_blocks(slots.label_probability), weights > 0, d_pace_alpha)
        chosen_weights = chosen_weights * factors.flatten()[active]
    loss_sum = (slots.losses * chosen_weights).sum()
    if gradient is not None:
        loss_sum = _KnownGradient.apply(chosen, loss_sum, gradient.mul_(chosen_weights[:, None]))
    acceptance = None if teacher is None else in_blocks(slots.acceptance)
    return DFlashLossOutput(loss_sum, weights.sum(), in_blocks(slots.is_correct), acceptance)


def sample_candidates(
    labels: torch.LongTensor, vocab_size: int, num_negatives: int, *, generator: torch.Generator
) -> tuple[torch.LongTensor, torch.LongTensor, torch.Tensor]:
    """A small vocabulary that stands for the whole one in a sampled softmax.

    It holds all labels, which are the frequent tokens, and a uniform sample of the others. The sample's logits are
    raised by log(others / sampled), so the softmax's denominator is estimated without bias.

    Args:
        labels (`torch.LongTensor`): Labels of the batch, any shape.
        vocab_size (`int`): Rows of the head.
        num_negatives (`int`): Tokens to sample; those that are labels drop out.
        generator (`torch.Generator`): Source of the draw, on the CPU.
    Returns:
        `(candidates, new_labels, logit_offset)`: token ids of shape (C,), `labels` as indices into them, and the
        offset of each candidate's logit, float32 of shape (C,).
    Source: Jean et al., arXiv 1412.2007.
    """
    label_ids, new_labels = labels.unique(return_inverse=True)
    drawn = torch.randperm(vocab_size, generator=generator)[:num_negatives].to(labels.device)
    negatives = drawn[~torch.isin(drawn, label_ids)]
    offset = torch.zeros(label_ids.shape[0] + negatives.shape[0], device=labels.device)
    if negatives.shape[0]:
        offset[label_ids.shape[0] :] = math.log((vocab_size - label_ids.shape[0]) / negatives.shape[0])
    return torch.cat([label_ids, negatives]), new_labels, offset


@dataclass(frozen=True)
class _ChunkLoss:
    head: Callable[[torch.Tensor], torch.Tensor]
    logit_offset: torch.Tensor | None
    objective: str
    label_source: str
    teacher: Callable[[torch.LongTensor], torch.Tensor] | None

    def __call__(
        self, states: torch.Tensor, labels: torch.LongTensor, index: torch.LongTensor
    ) -> tuple[SlotLosses, torch.Tensor | None]:
        """Losses of a chunk and, if anything wants it, their gradient in the states, shape (slots, D).

        The head is frozen, so no other gradient is needed, and this one is known in the forward.
        """
        needs_gradient = torch.is_grad_enabled() and states.requires_grad
        states = states.detach().requires_grad_(needs_gradient)
        logits = self.head(states)
        with torch.no_grad():
            teacher_logits = None if self.teacher is None else self.teacher(index).float()
            if self.label_source == "target" and teacher_logits is not None:
                labels = teacher_logits.argmax(dim=1)
            slots, logit_gradient = slot_losses(
                self.objective, logits.detach().float(), labels, teacher_logits, self.logit_offset
            )
        if not needs_gradient:
            return slots, None
        return slots, torch.autograd.grad(logits, states, logit_gradient.to(logits.dtype))[0]


def _in_chunks(
    chunk_loss: _ChunkLoss,
    states: torch.Tensor,
    labels: torch.LongTensor,
    active: torch.LongTensor,
    chunk_size: int,
) -> tuple[SlotLosses, torch.Tensor | None]:
    """Losses of all slots and their gradient in the states, computed chunk by chunk.

    Chunks write into tensors made beforehand: what they left behind would lie between the logits of later chunks, and
    on a CPU memory with such gaps grows with every chunk.
    """
    slots = SlotLosses(
        *(
            states.new_empty(active.shape[0], dtype=torch.bool if name == "is_correct" else torch.float32)
            for name in SlotLosses._fields
        )
    )
    gradient = torch.empty_like(states) if torch.is_grad_enabled() and states.requires_grad else None
    for start in range(0, active.shape[0], chunk_size):
        rows = slice(start, start + chunk_size)
        chunk_slots, chunk_gradient = chunk_loss(states[rows], labels[rows], active[rows])
        for values, chunk_values in zip(slots, chunk_slots, strict=True):
            values[rows] = chunk_values
        if gradient is not None:
            gradient[rows] = chunk_gradient
    return slots, gradient


class _KnownGradient(torch.autograd.Function):
    """A value whose gradient is at hand."""

    @staticmethod
    def forward(ctx, states, value, gradient):
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    def backward(ctx, value_gradient):
        (gradient,) = ctx.saved_tensors
        return value_gradient * gradient, None, None
