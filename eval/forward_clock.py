"""Where the time of a decoding call goes: target forwards, draft forwards, the head on drafts, the rest."""

import time

import torch
from torch import nn
from transformers import PreTrainedModel


class ForwardClock:
    """Times target forwards and drafting while its `with` block is open, by hooks; nested calls count once.

    On a GPU the times lie between events on its stream, read when a figure is asked for, so that nothing waits.

    Args:
        target ([`PreTrainedModel`]): Its forwards are counted. Its head, called outside of them, is drafting.
        drafters: Modules whose forward is drafting.
    """

    def __init__(self, target: PreTrainedModel, *drafters: nn.Module | None):
        self._target = target
        self._modules = [target, target.get_output_embeddings(), *(drafter for drafter in drafters if drafter)]
        self._handles: list = []
        self.reset()

    def __enter__(self) -> "ForwardClock":
        for module in self._modules:
            self._handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave))
        return self

    def __exit__(self, *exception) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def reset(self) -> None:
        """Forgets all times."""
        self._depth = 0
        self._spans: list[tuple[bool, int, object, object]] = []

    @property
    def widths(self) -> list[int]:
        """Tokens a row that each target forward read, that of the prompt first."""
        return [width for is_target, width, _, _ in self._spans if is_target]

    @property
    def target_seconds(self) -> list[float]:
        """Seconds of each target forward."""
        return [_between(start, end) for is_target, _, start, end in self._spans if is_target]

    @property
    def draft_seconds(self) -> float:
        """Seconds of all drafter forwards and of the head on their outputs."""
        return sum(_between(start, end) for is_target, _, start, end in self._spans if not is_target)

    def _enter(self, module, arguments, options) -> None:
        if self._depth == 0:
            ids = options.get("input_ids", arguments[0] if arguments else None)
            self._width = ids.shape[1] if module is self._target and isinstance(ids, torch.Tensor) else 0
            self._start = self._now()
        self._depth += 1

    def _leave(self, module, arguments, output) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._spans.append((module is self._target, self._width, self._start, self._now()))

    def _now(self) -> object:
        if self._target.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(start, end) -> float:
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1000
