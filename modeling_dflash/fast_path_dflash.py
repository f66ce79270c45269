"""Verification through `torch.compile`: a few fixed widths, static shapes, the tapped layers among the outputs."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import StaticCache
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils import logging

from .compilation_dflash import CompiledRuns, compile_options, known_forwards
from .target_cache_dflash import TargetCache
from .target_dflash import TargetTaps, text_config
from .tree_growth_dflash import MAX_NODES

logger = logging.get_logger(__name__)

# Lengths of static caches between two powers of two.
_STEPS_PER_DOUBLING = 8
# Narrow forwards of a call before a graph is compiled for them: many calls have a single one, at the end of the text.
_NARROW_BEFORE_COMPILING = 4


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
    Attributes:
        is_warming_up (`bool`): Whether the last forward took longer than later ones will.
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
        self._layer_ids = tuple(taps.layer_ids)
        self._runs = CompiledRuns(
            target,
            _tapped_forward,
            compile_options(target, generation_config),
            key=f"layers {self._layer_ids}",
            shape=(num_rows, cache.max_columns or 0),
        )
        self._returns_taps = known_forwards(target).returns_taps
        self.widths = sorted(set(widths))
        self._num_narrow = 0
        self._is_stand_in = False
        self.is_warming_up = False

    def width_for(self, num_nodes: int) -> int | None:
        """Tokens a row of the forward that reads so many; None if it is to run eagerly, as long as it is.

        That is if it cannot be compiled, or if no width is large enough or fits into the cache. For a narrow forward,
        if it is a rare one, the graph of a wider one stands in, or none.
        """
        self._is_stand_in = False
        if self._runs.has_failed or not self._returns_taps.get(self._layer_ids, True):
            return None
        room = self._cache.num_free_columns or 0
        fitting = [width for width in self.widths if num_nodes <= width <= room]
        if not fitting or num_nodes > 1 or len(fitting) == 1:
            return fitting[0] if fitting else None
        narrow, *wider = fitting
        self._num_narrow += 1
        if self._runs.has_run(narrow) or self._num_narrow >= _NARROW_BEFORE_COMPILING:
            return narrow
        self._is_stand_in = True
        return next((width for width in wider if self._runs.has_run(width)), None)

    def run(self, inputs: dict[str, Any], is_compiled: bool = True) -> Any:
        """The target's outputs with its logits, in memory of their own; the features go to the taps.

        Args:
            inputs (`dict`): What the target's forward gets.
            is_compiled (`bool`): Whether these have one of the widths.
        """
        returns_taps = self._returns_taps.get(self._layer_ids)
        self.is_warming_up = self._is_stand_in or returns_taps is None
        if returns_taps is None:
            return self._check(inputs)
        if not returns_taps:
            return self._target(**inputs, return_dict=True)  # hooks bring its features
        self._taps.remove()
        arguments = self._target, self._layer_ids, inputs
        outputs = None
        if is_compiled:
            outputs = self._runs.run(inputs["input_ids"].shape[1], *arguments)
            self.is_warming_up |= self._runs.is_warming_up
            if outputs is None:
                self._cache.take_back_forward()
        logits, features = _tapped_forward(*arguments) if outputs is None else outputs
        self._taps.put(features)
        return CausalLMOutput(logits=logits)

    def _check(self, inputs: dict[str, Any]) -> CausalLMOutput:
        """An eager forward that shows whether the returned hidden states are what hooks see."""
        logits, features = _tapped_forward(self._target, self._layer_ids, inputs)
        hooked = self._taps.take()
        returns_taps = torch.equal(features, hooked.to(features.device))
        self._returns_taps[self._layer_ids] = returns_taps
        if not returns_taps:
            logger.warning(
                f"The hidden states that {type(self._target).__name__} returns are not the outputs of its layers, so "
                "its verify forwards are not compiled."
            )
        self._taps.put(hooked)
        return CausalLMOutput(logits=logits)


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


def tree_widths(block_size: int, num_tree_nodes: int | str | None) -> list[int]:
    """Tokens a row of the forwards that read trees of this size: one graph each; empty for chains.

    Args:
        num_tree_nodes (`int` or `"auto"`, *optional*): Of the call; "auto" has a menu of doubling widths.
    """
    if not num_tree_nodes:
        return []
    if isinstance(num_tree_nodes, int):
        return [1, 1 + num_tree_nodes]
    widths = [1, block_size]
    while 2 * widths[-1] <= MAX_NODES + 1:
        widths.append(2 * widths[-1])
    return widths


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
