"""Forwards through `torch.compile`: what is compiled once is known to all calls, and what fails runs eagerly."""

import time
import types
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging

logger = logging.get_logger(__name__)

# Runs of a graph in one call whose time says nothing: on a GPU the first compiles or warms up, the second records.
_WARM_UP_RUNS = 2


@dataclass
class CompiledForwards:
    """What all calls of one model know of its compiled forwards.

    Args:
        functions (`dict`): By key (what is compiled, and how) and width.
        shapes (`set`): Keys and shapes that have been run.
        failed (`set`): Keys with which it could not be compiled.
        returns_taps (`dict`): Of a target, by tapped layers: whether the hidden states that it returns are their
            outputs.
    """

    functions: dict[tuple[str, int], Callable] = field(default_factory=dict)
    shapes: set[tuple] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    returns_taps: dict[tuple[int, ...], bool] = field(default_factory=dict)

    @property
    def is_in_use(self) -> bool:
        """Whether forwards were compiled and run, without a failure."""
        return bool(self.shapes) and not self.failed


_KNOWN: "weakref.WeakKeyDictionary[PreTrainedModel, CompiledForwards]" = weakref.WeakKeyDictionary()


class CompiledRuns:
    """Runs a function of a model for one call, compiled once for each width.

    Args:
        model ([`PreTrainedModel`]): The model, whose forward the function runs.
        function (`Callable`): Returns a tuple of tensors.
        options (`dict`): For `torch.compile`.
        key (`str`): What else of the function's arguments is fixed in its graphs.
        shape (`tuple`): The sizes of its arguments that stay the same in this call.
    Attributes:
        is_warming_up (`bool`): Whether the last run took longer than later ones will, because it was compiled.
    """

    def __init__(
        self, model: PreTrainedModel, function: Callable, options: dict[str, Any], *, key: str, shape: tuple[int, ...]
    ):
        self._model, self._function, self._options = model, function, options
        self._key = f"{key} {sorted(options.items(), key=lambda item: item[0])}"
        self._fixed_shape = shape
        self._known = known_forwards(model)
        self._num_runs: Counter[int] = Counter()
        self.is_warming_up = False

    @property
    def has_failed(self) -> bool:
        """Whether the function could not be compiled, in this call or an earlier one."""
        return self._key in self._known.failed

    def has_run(self, width: int) -> bool:
        """Whether there is a graph of this width."""
        return (self._key, *self._fixed_shape, width) in self._known.shapes

    def run(self, width: int, *arguments: Any) -> tuple[torch.Tensor, ...] | None:
        """What the function returns, in memory of its own; None after a warning if it cannot be compiled.

        Args:
            width (`int`): Tokens of each row that it reads.
        """
        is_new = not self.has_run(width)
        start = time.perf_counter()
        try:
            outputs = self._call(width, arguments)
        except Exception as error:  # compilers fail in many ways, and the model can go on without one
            self._known.failed.add(self._key)
            self.is_warming_up = True
            logger.warning(
                f"{type(self._model).__name__} cannot be compiled with {self._options}, so it runs eagerly: {error!r}"
            )
            return None
        self._num_runs[width] += 1
        is_on_cpu = self._model.device.type == "cpu"
        self.is_warming_up = is_new or (not is_on_cpu and self._num_runs[width] <= _WARM_UP_RUNS)
        if is_new:
            self._known.shapes.add((self._key, *self._fixed_shape, width))
            logger.info(
                f"The first compiled forward of {type(self._model).__name__} for {width} tokens a row took "
                f"{time.perf_counter() - start:.1f} s (rows and columns of the cache: {self._fixed_shape})."
            )
        return outputs

    def _call(self, width: int, arguments: tuple) -> tuple[torch.Tensor, ...]:
        function = self._known.functions.get((self._key, width))
        if function is None:
            function = torch.compile(_with_own_code(self._function, width), **self._options)
            self._known.functions[self._key, width] = function
        torch.compiler.cudagraph_mark_step_begin()
        outputs = function(*arguments)
        if self._model.device.type != "cpu":
            # The next replay of a CUDA graph overwrites its outputs.
            outputs = tuple(output.clone() for output in outputs)
        return outputs


def known_forwards(model: PreTrainedModel) -> CompiledForwards:
    """What calls of this model have found out, to be filled by later ones."""
    return _KNOWN.setdefault(model, CompiledForwards())


def compile_options(target: PreTrainedModel, generation_config: GenerationConfig) -> dict[str, Any]:
    """Options for `torch.compile`: those of the call, but with static shapes unless it asks for dynamic ones."""
    compile_config = generation_config.compile_config or target._default_compile_config()
    options = compile_config.to_dict()
    return options | {"dynamic": bool(options.get("dynamic"))}


def _with_own_code(function: Callable, width: int) -> Callable:
    """A copy of a function: `torch.compile` keeps a few graphs for each code object, whichever models they are of."""
    name = f"{function.__name__}_{width}"
    return types.FunctionType(function.__code__.replace(co_name=name), function.__globals__, name)
