"""What a slot is taught: losses of draft logits with their gradients, and weights that follow the drafter."""

from typing import NamedTuple

import torch

OBJECTIVES = ("cross_entropy", "kl", "tv")
LABEL_SOURCES = ("data", "target")


class SlotLosses(NamedTuple):
    """What is known of some slots; every entry has shape (slots,).

    Args:
        losses (`torch.Tensor`): Nats; a probability for "tv".
        is_correct (`torch.BoolTensor`): Whether the drafter's most likely token is the label.
        label_probability (`torch.Tensor`): The drafter's probability of the label.
        acceptance (`torch.Tensor`): Probability that speculative sampling keeps a token drawn from the drafter; 0
            without a teacher.
    """

    losses: torch.Tensor
    is_correct: torch.Tensor
    label_probability: torch.Tensor
    acceptance: torch.Tensor


def slot_losses(
    objective: str,
    logits: torch.Tensor,
    labels: torch.LongTensor,
    teacher_logits: torch.Tensor | None = None,
    logit_offset: torch.Tensor | None = None,
) -> tuple[SlotLosses, torch.Tensor]:
    """Loss of every slot and its gradient in the logits, with p the target's law and q the drafter's.

    - "cross_entropy": -log q(label). The paper's (arXiv 2602.06036, section 4.2).
    - "kl": KL(p || q), the distillation of arXiv 2310.08461.
    - "tv": total variation, half of sum |p - q|. One minus it is the probability that speculative sampling keeps a
      token drawn from q (arXiv 2211.17192, section 3), which arXiv 2602.23881 maximises. Its gradient vanishes where p
      and q hardly overlap, so it suits a drafter that is trained already.

    The gradients are written out, because autograd would keep twice as many copies of the logits.

    Args:
        objective (`str`): One of `OBJECTIVES`.
        logits (`torch.Tensor`): The drafter's, float32 of shape (slots, vocab).
        labels (`torch.LongTensor`): Shape (slots,).
        teacher_logits (`torch.Tensor`, *optional*): The target's, float32 of the same shape; "kl" and "tv" need them.
        logit_offset (`torch.Tensor`, *optional*): Added to `logits` for everything but `is_correct`, shape (vocab,).
    """
    is_correct = logits.argmax(dim=1) == labels
    if logit_offset is not None:
        logits = logits + logit_offset
    draft, log_normaliser = _softmax(logits)
    losses = (log_normaliser - logits.gather(1, labels[:, None]))[:, 0]
    label_probability = (-losses).exp()
    acceptance = torch.zeros_like(losses)
    if teacher_logits is not None:
        target, target_log_normaliser = _softmax(teacher_logits)
        acceptance = torch.minimum(draft, target).sum(dim=1)
    if objective == "cross_entropy":
        gradient = draft.scatter_add_(1, labels[:, None], draft.new_full((draft.shape[0], 1), -1.0))
    elif objective == "kl":
        log_ratio = (teacher_logits - logits).sub_(target_log_normaliser - log_normaliser)
        losses = log_ratio.mul_(target).sum(dim=1)
        gradient = draft.sub_(target)
    else:
        losses = 1.0 - acceptance
        # In q the gradient is half the sign of q - p; the softmax takes off its mean under q.
        slope = torch.sign(draft - target).mul_(0.5)
        gradient = slope.sub_((draft * slope).sum(dim=1, keepdim=True)).mul_(draft)
    return SlotLosses(losses, is_correct, label_probability, acceptance), gradient


def d_pace_weights(label_probability: torch.Tensor, is_supervised: torch.BoolTensor, alpha: float) -> torch.Tensor:
    """Weights that follow the drafter: slot k gets its share of the block's expected accepted length.

    With s_i = (1 - alpha) q_i + alpha the smoothed probability of slot i's label, the weight of slot k is the sum over
    j >= k of s_1 ... s_j. Slots that are not supervised neither shorten the products nor enter the sums.

    The mean must not be taken over these weights: they would cancel (their author in SpecForge's issue 828).

    Args:
        label_probability (`torch.Tensor`): Shape (..., block_size), detached.
        is_supervised (`torch.BoolTensor`): Same shape.
        alpha (`float`): Smoothing, above 0 and at most 1; the paper's is 0.5.
    Returns:
        `torch.Tensor` of the same shape; 0 where not supervised.
    Source: D-PACE, arXiv 2605.18810, equations 7 to 9.
    """
    smoothed = (1.0 - alpha) * label_probability + alpha
    reached = smoothed.masked_fill(~is_supervised, 1.0).cumprod(dim=-1) * is_supervised
    return reached.flip(-1).cumsum(dim=-1).flip(-1) * is_supervised


def check_objective(
    objective: str, label_source: str, d_pace_alpha: float | None, *, has_teacher: bool, is_sampled: bool
) -> None:
    """Raises a `ValueError` that names the first option, or pair of options, which makes no sense.

    Args:
        has_teacher (`bool`): Whether the target's logits are at hand.
        is_sampled (`bool`): Whether the softmax runs over sampled candidates instead of the whole vocabulary.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"`objective` is {objective!r}; choose one of {OBJECTIVES}.")
    if label_source not in LABEL_SOURCES:
        raise ValueError(f"`label_source` is {label_source!r}; choose one of {LABEL_SOURCES}.")
    if d_pace_alpha is not None and not 0 < d_pace_alpha <= 1:
        raise ValueError(f"`d_pace_alpha` is {d_pace_alpha}; it must be above 0 and at most 1 (paper: 0.5).")
    wish = None
    if objective != "cross_entropy":
        wish = f"`objective` {objective!r}"
    elif label_source == "target":
        wish = "`label_source` 'target'"
    if is_sampled and (has_teacher or wish is not None):
        raise ValueError(
            f"{wish or '`teacher`'} needs the whole vocabulary, but `logit_offset` says that the head is cut to "
            "sampled candidates. Leave one of them out."
        )
    if wish is not None and not has_teacher:
        raise ValueError(f"{wish} needs the target's logits: pass `teacher`.")


def _softmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities of shape (slots, vocab) and log-normalisers of shape (slots, 1)."""
    peak = logits.amax(dim=1, keepdim=True)
    probabilities = (logits - peak).exp_()
    total = probabilities.sum(dim=1, keepdim=True)
    return probabilities.div_(total), peak + total.log()
