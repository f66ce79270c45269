"""Verification through `torch.compile`: two fixed widths, static shapes, and the tapped layers among the outputs."""

import time
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import StaticCache
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils import logging

from .target_cache_dflash import TargetCache
from .target_dflash import TargetTaps, text_config

logger = logging.get_logger(__name__)

# Runs of a graph in one call whose time says nothing: on a GPU the first compiles or warms up, the second records.
_WARM_UP_RUNS = 2
# Lengths of static caches between two powers of two.
_STEPS_PER_DOUBLING = 8
# Narrow forwards of a call before a graph is compiled for them: many calls have a single one, at the end of the text.
_NARROW_BEFORE_COMPILING = 4


@dataclass
class CompiledForwards:
    """What all calls of one target know of its compiled forwards.

    Args:
        functions (`dict`): By tapped layers and compile options, and width.
        shapes (`set`): Tapped layers, compile options and shapes that have been run.
        failed (`set`): Tapped layers and compile options with which it could not be compiled.
        returns_taps (`dict`): By tapped layers, whether the hidden states that the target returns are their outputs.
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


class FastPath:
    """The verify forwards of one call, compiled as plain `generate` would compile its own.

    Hooks on layers do not see into a compiled forward, so the features come from the hidden states that it returns.
    The first forward of a target is an eager one with hooks, which shows that these are the same. If compilation
    fails, there is one warning, and this target goes on eagerly.

    Args:
        target ([`PreTrainedModel`]): The target.
        taps ([`TargetTaps`]): Gets the features; its hooks are taken off the target when they are not needed any more.
        cache ([`TargetCache`]): The call's static cache.
        generation_config ([`GenerationConfig`]): The call's settings, `compile_config` among them.
        widths (`Sequence[int]`): Tokens a row that forwards may read.
        num_rows (`int`): Rows of the batch; with a static cache they stay to the end.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        taps: TargetTaps,
        cache: TargetCache,
        generation_config: GenerationConfig,
        widths: Sequence[int],
        num_rows: int,
    ):
        self._target, self._taps, self._cache = target, taps, cache
        self._num_rows = num_rows
        self._options = compile_options(target, generation_config)
        self._layer_ids = tuple(taps.layer_ids)
        self._key = repr((self._layer_ids, sorted(self._options.items(), key=lambda item: item[0])))
        self._known = known_forwards(target)
        self._widths = sorted(set(widths))
        self._num_runs = dict.fromkeys(self._widths, 0)
        self._num_narrow = 0
        self._is_stand_in = False
        self.is_warming_up = False

    def width_for(self, num_nodes: int) -> int | None:
        """Tokens a row of the forward that reads so many; None if it is to run eagerly, as long as it is.

        That is if it cannot be compiled, or if no width is large enough or fits into the cache. For a narrow forward,
        if it is a rare one, the graph of a wider one stands in, or none.
        """
        self._is_stand_in = False
        if self._key in self._known.failed or not self._known.returns_taps.get(self._layer_ids, True):
            return None
        room = self._cache.num_free_columns or 0
        fitting = [width for width in self._widths if num_nodes <= width <= room]
        if not fitting or fitting[0] == self._widths[-1]:
            return fitting[0] if fitting else None
        narrow, *wider = fitting
        self._num_narrow += 1
        if self._has_run(narrow) or self._num_narrow >= _NARROW_BEFORE_COMPILING:
            return narrow
        self._is_stand_in = True
        return next((width for width in wider if self._has_run(width)), None)

    def run(self, inputs: dict[str, Any], is_compiled: bool = True) -> Any:
        """The target's outputs with its logits, in memory of their own; the features go to the taps.

        Args:
            inputs (`dict`): What the target's forward gets.
            is_compiled (`bool`): Whether these have one of the widths.
        """
        returns_taps = self._known.returns_taps.get(self._layer_ids)
        self.is_warming_up = self._is_stand_in or returns_taps is None
        if returns_taps is None:
            return self._check(inputs)
        if not returns_taps:
            return self._target(**inputs, return_dict=True)  # hooks bring its features
        self._taps.remove()
        if not is_compiled:
            return self._run_eagerly(inputs)
        width = inputs["input_ids"].shape[1]
        is_new = not self._has_run(width)
        start = time.perf_counter()
        try:
            logits, features = self._call(inputs, width)
        except Exception as error:  # compilers fail in many ways, and the target can go on without one
            self._known.failed.add(self._key)
            logger.warning(
                f"{type(self._target).__name__} cannot be compiled with {self._options}, so it runs eagerly: {error!r}"
            )
            self._cache.take_back_forward()
            return self._run_eagerly(inputs)
        self._num_runs[width] += 1
        is_on_cpu = self._target.device.type == "cpu"
        self.is_warming_up |= is_new or (not is_on_cpu and self._num_runs[width] <= _WARM_UP_RUNS)
        if is_new:
            self._known.shapes.add(self._shape(width))
            logger.info(
                f"The first compiled forward of {self._num_rows} x {width} tokens with a cache of "
                f"{self._cache.max_columns} took {time.perf_counter() - start:.1f} s."
            )
        self._taps.put(features)
        return CausalLMOutput(logits=logits)

    def _shape(self, width: int) -> tuple:
        return self._key, self._num_rows, width, self._cache.max_columns

    def _has_run(self, width: int) -> bool:
        return self._shape(width) in self._known.shapes

    def _call(self, inputs: dict[str, Any], width: int) -> tuple[torch.Tensor, torch.Tensor]:
        function = self._known.functions.get((self._key, width))
        if function is None:
            function = torch.compile(_with_own_code(_tapped_forward, width), **self._options)
            self._known.functions[self._key, width] = function
        torch.compiler.cudagraph_mark_step_begin()
        logits, features = function(self._target, self._layer_ids, inputs)
        if self._target.device.type != "cpu":
            # The next replay of a CUDA graph overwrites its outputs.
            logits, features = logits.clone(), features.clone()
        return logits, features

    def _run_eagerly(self, inputs: dict[str, Any]) -> CausalLMOutput:
        logits, features = _tapped_forward(self._target, self._layer_ids, inputs)
        self._taps.put(features)
        return CausalLMOutput(logits=logits)

    def _check(self, inputs: dict[str, Any]) -> CausalLMOutput:
        """An eager forward that shows whether the returned hidden states are what hooks see."""
        logits, features = _tapped_forward(self._target, self._layer_ids, inputs)
        hooked = self._taps.take()
        returns_taps = torch.equal(features, hooked.to(features.device))
        self._known.returns_taps[self._layer_ids] = returns_taps
        if not returns_taps:
            logger.warning(
                f"The hidden states that {type(self._target).__name__} returns are not the outputs of its layers, so "
                "its verify forwards are not compiled."
            )
        self._taps.put(hooked)
        return CausalLMOutput(logits=logits)


def known_forwards(target: PreTrainedModel) -> CompiledForwards:
    """What calls of this target have found out, to be filled by later ones."""
    return _KNOWN.setdefault(target, CompiledForwards())


def is_fast(
    target: PreTrainedModel, cache: TargetCache, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
) -> bool:
    """Whether plain `generate` would compile its forwards in this call, and ours can be compiled, too."""
    return (
        target._valid_auto_compile_criteria(model_kwargs, generation_config)
        and cache.is_compilable
        and not generation_config.output_hidden_states
        and not generation_config.output_attentions
        # Transformers does not compile these, and compiles the chunks of prompts itself, hooks and all.
        and "llama4" not in target.config.model_type
        and generation_config.prefill_chunk_size is None
    )


def compile_options(target: PreTrainedModel, generation_config: GenerationConfig) -> dict[str, Any]:
    """Options for `torch.compile`: those of the call, but with static shapes unless it asks for dynamic ones."""
    compile_config = generation_config.compile_config or target._default_compile_config()
    options = compile_config.to_dict()
    return options | {"dynamic": bool(options.get("dynamic"))}


def roomy_cache(target: PreTrainedModel, cache: Any, num_slack: int) -> StaticCache:
    """A static cache for blocks that reach over the end of the text, of one of a few lengths.

    Each length is compiled for anew, so there are `_STEPS_PER_DOUBLING` of them between two powers of two.

    Args:
        cache ([`StaticCache`]): An empty one that is long enough for the text.
        num_slack (`int`): Columns behind the text.
    """
    needed = max(layer.max_cache_len for layer in cache.layers) + num_slack
    step = max(1, 2 ** (needed - 1).bit_length() // (2 * _STEPS_PER_DOUBLING))
    return StaticCache(config=text_config(target), max_cache_len=-(-needed // step) * step)


def _tapped_forward(
    target: PreTrainedModel, layer_ids: tuple[int, ...], inputs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of shape (rows, tokens, vocab_size), and outputs of the tapped layers side by side."""
    outputs = target(**inputs | {"output_hidden_states": True, "return_dict": True})
    tapped = [outputs.hidden_states[layer_id + 1] for layer_id in layer_ids]
    return outputs.logits, torch.cat([states.to(tapped[0].device) for states in tapped], dim=-1)


def _with_own_code(function: Callable, width: int) -> Callable:
    """A copy of a function: `torch.compile` keeps a few graphs for each code object, whichever models they are of."""
    name = f"{function.__name__}_{width}"
    return types.FunctionType(function.__code__.replace(co_name=name), function.__globals__, name)
