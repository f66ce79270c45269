"""The training objective: cross-entropy that fades along the block, with the head in chunks."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

# Paper, appendix A.1.
_PAPER_DECAY = {16: 7.0, 10: 5.0, 8: 4.0}


@dataclass
class DFlashLossOutput:
    """Sums, so that several batches can be added before dividing.

    Args:
        loss_sum (`torch.Tensor`): Weighted cross-entropy summed over slots, nats; carries the gradient.
        weight_sum (`torch.Tensor`): Sum of the weights.
        is_correct (`torch.BoolTensor`): Whether the most likely token is the label, in the shape of `labels`; False
            where the weight is 0.
    """

    loss_sum: torch.Tensor
    weight_sum: torch.Tensor
    is_correct: torch.BoolTensor


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
    chunk_size: int = 512,
    logit_offset: torch.Tensor | None = None,
) -> DFlashLossOutput:
    """Weighted cross-entropy of draft hidden states through the target's frozen head.

    Only slots with weight are sent through the head, in chunks whose gradient is computed at once, so the logits of
    more than one chunk never exist and no chunk is computed twice.

    Args:
        hidden_states (`torch.Tensor`): Shape (..., D).
        labels (`torch.LongTensor`): Shape (...).
        weights (`torch.Tensor`): Shape (...); 0 leaves a slot out.
        head: Maps (slots, D) to logits (slots, vocab); differentiable, its own parameters get no gradient.
        chunk_size (`int`): Slots per chunk.
        logit_offset (`torch.Tensor`, *optional*): Added to the logits in the loss but not in `is_correct`, shape
            (vocab,), see [`sample_candidates`].
    Source: arXiv 2602.06036, section 4.2; compare `reference_dflash.weighted_cross_entropy` in the tests.
    """
    index = weights.flatten().nonzero(as_tuple=True)[0]
    chosen = hidden_states.flatten(0, -2)[index]
    loss_sum, is_correct = _ChunkedCrossEntropy.apply(
        chosen, labels.flatten()[index], weights.flatten()[index], head, chunk_size, logit_offset
    )
    all_correct = torch.zeros(weights.numel(), dtype=torch.bool, device=weights.device)
    all_correct[index] = is_correct
    return DFlashLossOutput(loss_sum, weights.sum(), all_correct.view(weights.shape))


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


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The head is frozen, so the gradient of the hidden states is all that is needed, and is known in the forward."""

    @staticmethod
    def forward(ctx, hidden_states, labels, weights, head, chunk_size, logit_offset):
        needs_gradient = ctx.needs_input_grad[0]
        gradient = torch.zeros_like(hidden_states)
        is_correct = torch.zeros(labels.shape, dtype=torch.bool, device=labels.device)
        loss_sum = torch.zeros((), dtype=torch.float32, device=hidden_states.device)
        for start in range(0, labels.shape[0], chunk_size):
            rows = slice(start, start + chunk_size)
            with torch.set_grad_enabled(needs_gradient):
                chunk = hidden_states[rows].detach().requires_grad_(needs_gradient)
                logits = head(chunk)
                shifted = logits.float() if logit_offset is None else logits.float() + logit_offset
                losses = F.cross_entropy(shifted, labels[rows], reduction="none")
                chunk_loss = (losses * weights[rows]).sum()
            if needs_gradient:
                gradient[rows] = torch.autograd.grad(chunk_loss, chunk)[0]
            loss_sum += chunk_loss.detach()
            is_correct[rows] = logits.detach().argmax(dim=-1) == labels[rows]
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(is_correct)
        return loss_sum, is_correct

    @staticmethod
    def backward(ctx, loss_gradient, _):
        (gradient,) = ctx.saved_tensors
        return loss_gradient * gradient, None, None, None, None, None
