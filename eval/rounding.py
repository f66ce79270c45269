"""Whether two answers differ by rounding or by a fault: the target's own margin where they part."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from dflash_hf.eval.metrics import first_difference

# Tokens after the prompt's that are read as one block, as a verify forward reads them.
_BLOCK = 16
_CACHE_NAMES = ("cache", "past_key_values")  # since Transformers 5.24, and before


@dataclass(frozen=True)
class Difference:
    """Where an answer left the plain one, and how much the target preferred one token to the other there.

    Args:
        position (`int`): Index in the answers of the first token that differs.
        margin (`float`, *optional*): Absolute difference of the two tokens' logits (natural logarithm units); None if
            one answer only ends earlier, which no rounding does.
        bound (`float`): What rounding can do to that difference: twice the largest change of any logit when the same
            text is read by the target's forward in other shapes, and the step between neighbours of its dtype there.
    """

    position: int
    margin: float | None
    bound: float

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.margin is not None and self.margin <= self.bound

    def doubt(self) -> float:
        """The margin in units of its bound: above 1 no rounding explains the difference."""
        if self.margin is None or not self.bound:
            return 0.0 if self.margin == 0 else math.inf
        return self.margin / self.bound


@torch.no_grad()
def explain_difference(
    target: PreTrainedModel, input_ids: torch.LongTensor, plain_ids: Sequence[int], other_ids: Sequence[int]
) -> Difference | None:
    """The first difference of two greedy answers to one prompt; None if they are equal.

    The text before it is read at once, with a block of 16 tokens at its end, and with one; the margin is the smallest
    of the three.

    Args:
        input_ids (`torch.LongTensor`): The prompt, shape (1, tokens).
        plain_ids, other_ids: The answers' token ids.
    """
    position = first_difference(plain_ids, other_ids)
    if position is None:
        return None
    if position == min(len(plain_ids), len(other_ids)):
        return Difference(position, None, 0.0)
    text = torch.cat([input_ids, input_ids.new_tensor([list(plain_ids[:position])])], dim=1)
    readings = [_last_logits(target, text, tail) for tail in sorted({0, 1, min(_BLOCK, text.shape[1] - 1)})]
    first, second = plain_ids[position], other_ids[position]
    margins = [abs(float(logits[first] - logits[second])) for logits in readings]
    noise = max(float((logits - readings[0]).abs().max()) for logits in readings)
    step = torch.finfo(target.dtype).eps * max(float(readings[0][token].abs()) for token in (first, second))
    return Difference(position, min(margins), 2 * noise + step)


def _last_logits(target: PreTrainedModel, text: torch.LongTensor, tail: int) -> torch.Tensor:
    """Logits after `text`, float32, shape (vocab_size,), when its last `tail` tokens are read behind a cache."""
    options = {}
    if tail:
        outputs = target(input_ids=text[:, :-tail], use_cache=True)
        name = next(name for name in _CACHE_NAMES if outputs.get(name) is not None)
        options, text = {name: outputs[name], "use_cache": True}, text[:, -tail:]
    return target(input_ids=text, **options).logits[0, -1].float()
