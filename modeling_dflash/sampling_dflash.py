"""Which token the target chooses at each verified node: the same that plain `generate` would choose."""

from collections import defaultdict

import torch
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessorList,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    SuppressTokensLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

# These look at the scores only, so all nodes can be processed in one call.
_PREFIX_FREE = (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
# These never change which token is most likely, so greedy proposals need not apply them.
_KEEP_ARGMAX = (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitNormalization,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
# These keep a state from call to call, one call for each token of the whole batch.
_ONE_CALL_PER_TOKEN = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)


def is_prefix_free(processors: LogitsProcessorList) -> bool:
    """Whether every processor gives the same scores whatever the text before."""
    return all(type(processor) in _PREFIX_FREE for processor in processors)


def counts_its_calls(processors: LogitsProcessorList) -> bool:
    """Whether a processor of the library must be called once for each token, with the whole batch."""
    return any(isinstance(processor, _ONE_CALL_PER_TOKEN) for processor in processors)


def draft_processors(processors: LogitsProcessorList | None, *, keep_argmax: bool) -> LogitsProcessorList:
    """The processors that a draft obeys, too, so that tokens that they forbid are not proposed.

    Only Transformers' own processors that depend on nothing but their arguments: any other sees each token of the
    final text once, in order, as in plain decoding.

    Args:
        keep_argmax (`bool`): Whether processors are left out that cannot change the most likely token.
    """
    skipped = (*_ONE_CALL_PER_TOKEN, PrefixConstrainedLogitsProcessor, *(_KEEP_ARGMAX if keep_argmax else ()))
    return LogitsProcessorList(
        processor
        for processor in processors or ()
        if type(processor).__module__.startswith("transformers.") and not isinstance(processor, skipped)
    )


class StepNoise:
    """The random numbers of plain sampling, step by step, so that a seed gives the same text with any drafter.

    `torch.multinomial` draws one exponential variate for each row and token and takes the largest ratio of probability
    to variate. Drawing them per step of the text, not per verified node, makes the choice at a step independent of
    what was proposed, how much was verified, and how other rows fare.

    Args:
        num_rows (`int`): Rows of the batch.
        vocab_size (`int`): Columns of the scores.
        device (`torch.device`): Where the scores are.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device):
        self._shape = (num_rows, vocab_size)
        self._device = device
        self._steps: dict[int, dict[int, torch.Tensor]] = {}
        self._states: dict[int, torch.Tensor] = {}
        self._num_drawn = 0
        self._unfinished = dict.fromkeys(range(num_rows), 0)

    def get(self, row: int, step: int) -> torch.Tensor:
        """Variates of shape (vocab_size,) for step `step` of `row`."""
        while self._num_drawn <= step:
            self._states[self._num_drawn] = _random_state(self._device)
            drawn = torch.empty(self._shape, device=self._device).exponential_(1)
            rows = [kept for kept, first in self._unfinished.items() if first <= self._num_drawn]
            # Views would keep the variates of rows that have ended.
            self._steps[self._num_drawn] = {kept: drawn[kept].clone() for kept in rows}
            self._num_drawn += 1
        return self._steps[step][row]

    def forget_before(self, unfinished: dict[int, int]) -> None:
        """Frees what no row needs any more, and draws nothing more for other rows.

        Args:
            unfinished (`dict[int, int]`): The next step of each row that is still decoded.
        """
        self._unfinished = unfinished
        for step, rows in list(self._steps.items()):
            for row in [row for row in rows if step < unfinished.get(row, self._num_drawn)]:
                del rows[row]
            if not rows:
                del self._steps[step]
        first = min(unfinished.values(), default=0)
        self._states = {step: state for step, state in self._states.items() if step >= first}

    def rewind(self, num_steps: int) -> None:
        """Leaves the random generator as plain decoding of `num_steps` tokens leaves it."""
        if num_steps in self._states:
            _set_random_state(self._device, self._states[num_steps])


def choose_tokens(scores: torch.Tensor, noise: torch.Tensor | None) -> torch.LongTensor:
    """Greedy choices, or draws by the given variates; `scores` and `noise` are (..., vocab_size), the result (...)."""
    if noise is None:
        return scores.argmax(dim=-1)
    return scores.softmax(dim=-1).div_(noise).argmax(dim=-1)


def choose_after_drafts(
    target_scores: torch.Tensor, draft_scores: torch.Tensor, proposals: torch.LongTensor
) -> torch.LongTensor:
    """Draws of the target that keep as many sampled proposals as the rule of speculative sampling allows.

    A proposal x drawn from q is kept with probability min(1, p(x) / q(x)), otherwise the draw is from the positive
    part of p - q; the last node has no proposal and is drawn from p.

    Args:
        target_scores (`torch.Tensor`): Processed scores, shape (rows, proposals + 1, vocab_size), float32.
        draft_scores (`torch.Tensor`): Processed scores that the proposals were drawn from, (rows, proposals, ...).
        proposals (`torch.LongTensor`): Shape (rows, proposals).
    Returns:
        `torch.LongTensor` of shape (rows, proposals + 1).
    Source: arXiv 2211.17192, algorithm 1.
    """
    target, draft = target_scores.softmax(dim=-1), draft_scores.softmax(dim=-1)
    num_proposals = proposals.shape[1]
    rest = (target[:, :num_proposals] - draft).clamp_(min=0)
    is_empty = rest.sum(dim=-1, keepdim=True) == 0  # p equals q, and every proposal is kept
    law = torch.cat([torch.where(is_empty, target[:, :num_proposals], rest), target[:, num_proposals:]], dim=1)
    drawn = torch.multinomial(law.flatten(0, 1), 1).view(law.shape[:2])
    index = proposals[..., None]
    chance = torch.rand(proposals.shape, device=proposals.device) * draft.gather(-1, index).squeeze(-1)
    is_kept = chance < target[:, :num_proposals].gather(-1, index).squeeze(-1)
    drawn[:, :num_proposals] = torch.where(is_kept, proposals, drawn[:, :num_proposals])
    return drawn


def group_by_length(lengths: dict[int, int]) -> dict[int, list[int]]:
    """Keys of `lengths` by their value."""
    groups: dict[int, list[int]] = defaultdict(list)
    for key, length in lengths.items():
        groups[length].append(key)
    return groups


def _random_state(device: torch.device) -> torch.Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def _set_random_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
