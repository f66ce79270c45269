"""The target's side of one decoding call: its prompt forward, its verify forwards, and what stays of them."""

import inspect
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.generation.utils import GenerationMixin

from .target_cache_dflash import TargetCache
from .target_dflash import TargetTaps, text_config
from .tree_dflash import TokenTree, tree_attention_mask

_CACHE_NAMES = ("cache", "past_key_values")  # since Transformers 5.24, and before
# Transformers 5.17 and newer tell a given cache from their own; before, each may be one that is used again.
_MARKS_GIVEN_CACHES = (
    "_is_user_defined" in inspect.unwrap(GenerationMixin._prepare_cache_for_generation).__code__.co_names
)
_TYPE_ID_NAMES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


class Verifier:
    """Runs the target for one call, and takes rejected nodes back out of its cache.

    Args:
        target ([`PreTrainedModel`]): The target.
        layer_ids (`list[int]`): Layers whose outputs are the context features.
        generation_config ([`GenerationConfig`]): The call's settings.
        model_kwargs (`dict`): The target's inputs beside the text, its cache among them.
        num_rows (`int`): Rows of the batch.
        num_prompt (`int`): Tokens of the prompts.
        max_length (`int`): Longest text.
    Raises:
        ValueError: If the target's cache cannot be wound back.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        layer_ids: list[int],
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        *,
        num_rows: int,
        num_prompt: int,
        max_length: int,
    ):
        self.target = target
        self._config = generation_config
        self._kwargs = model_kwargs
        self._num_to_come = max_length - num_prompt
        self._cache_name = next((name for name in _CACHE_NAMES if model_kwargs.get(name) is not None), "")
        if not self._cache_name:
            self._make_cache()
        cache = self._kwargs[self._cache_name]
        self.is_cache_given = getattr(cache, "_is_user_defined", not _MARKS_GIVEN_CACHES)
        self.cache = TargetCache(cache, text_config(target).model_type, num_rows, max_length - 1)
        num_cached = int(cache.get_seq_length())
        mask = model_kwargs.get("attention_mask")
        # For each row, the text tokens in a given cache: their features are unknown.
        self.num_unseen = [num_cached] * num_rows
        if mask is not None and num_cached:
            self.num_unseen = mask[:, :num_cached].sum(dim=1).tolist()
        # Position of the newest token in the cache, shape (..., rows, 1); targets may have several axes, or none.
        self._last_positions: torch.Tensor | None = None
        self.taps = TargetTaps(target, layer_ids)

    def read_prompt(self, prompts: torch.LongTensor) -> Any:
        """The target's outputs for the prompts, or for what a given cache does not hold of them."""
        self.taps.discard()
        outputs = self.target._prefill(prompts, self._config, self._kwargs)
        self.cache.start_recording()
        mask = self._kwargs.get("attention_mask")
        if mask is not None:
            self.cache.padding_mask = mask[:, -self.cache.num_columns :].clone()
        positions = self._kwargs.pop("position_ids", None)
        if positions is not None:
            self._last_positions = positions[..., -1:].expand(*positions.shape[:-2], prompts.shape[0], 1)
            # Nodes past the length limit are never kept; they must not ask for positions that a target lacks.
            self._position_limits = self._last_positions + self._num_to_come
        return outputs

    def prompt_features(self) -> tuple[torch.Tensor, list[int]]:
        """Context features of the prompts without their padding, and how many tokens of each row are real.

        Raises:
            RuntimeError: If the target's layers could not be tapped.
        """
        features = self.taps.take()
        rows, tokens = features.shape[:2]
        mask = self._kwargs.get("attention_mask")
        if mask is None or mask[:, -tokens:].all():
            return features, [tokens] * rows
        is_text = mask[:, -tokens:].bool()
        # Real tokens to the front: a stable sort keeps their order.
        order = is_text.long().argsort(dim=1, descending=True, stable=True).to(features.device)
        return features.gather(1, order[:, :, None].expand_as(features)), is_text.sum(dim=1).tolist()

    def verify(self, tree: TokenTree) -> Any:
        """The target's outputs for every node of the tree."""
        rows, nodes = tree.tokens.shape
        kwargs = self._kwargs | {self._cache_name: self.cache.cache, "use_cache": True, "attention_mask": None}
        mask = self.cache.padding_mask
        if mask is not None:
            kwargs["attention_mask"] = torch.cat([mask, mask.new_ones(rows, nodes)], dim=1)
        if self._last_positions is not None:
            positions = self._last_positions + 1 + tree.depths.to(self._last_positions.device)
            kwargs["position_ids"] = torch.minimum(positions, self._position_limits)
        for name in _TYPE_ID_NAMES:
            if kwargs.get(name) is not None:
                last = kwargs[name][..., -1:]
                kwargs[name] = (last if name == "token_type_ids" else torch.zeros_like(last)).expand(rows, nodes)
        inputs = self.target.prepare_inputs_for_generation(tree.tokens, **kwargs)
        if not tree.is_chain:
            inputs["attention_mask"] = self._tree_mask(tree)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = nodes
        if self.cache.is_recurrent and nodes > 1:
            self.cache.remember_states()
        self.taps.discard()
        with self.target._optimize_model_for_decode():
            return self.target(**inputs, return_dict=True)

    def block_features(self, paths: list[list[int]]) -> torch.Tensor:
        """Context features of the kept nodes, shape (rows, longest path, ...), padded behind shorter paths.

        Raises:
            RuntimeError: If the target's layers could not be tapped.
        """
        features = self.taps.take()
        longest = max(map(len, paths))
        if all(path == list(range(len(path))) for path in paths):
            # A copy, or the rejected rows would stay in memory with it.
            return features[:, :longest].clone()
        index = torch.tensor([path + [0] * (longest - len(path)) for path in paths], device=features.device)
        return features.gather(1, index[:, :, None].expand(-1, -1, features.shape[2]))

    def keep_nodes(self, tree: TokenTree, paths: list[list[int]]) -> None:
        """Keeps the accepted nodes of the last verify forward in the cache, and no others."""
        num_nodes = tree.num_nodes
        if self.cache.is_recurrent and len(paths[0]) < num_nodes:
            # A recurrent state cannot be cropped: back to the state before the block, then the accepted tokens again.
            self.cache.forget_block(num_nodes)
            num_nodes = len(paths[0])
            self.verify(TokenTree.chain(tree.tokens[:, :num_nodes]))
        self.cache.keep_nodes(num_nodes, paths)
        if self._last_positions is not None:
            steps = torch.tensor([[len(path)] for path in paths], device=self._last_positions.device)
            self._last_positions = self._last_positions + steps

    def select_rows(self, kept: list[int]) -> None:
        """Keeps these rows of the forwards."""
        self.cache.select_rows(kept)
        for name in _TYPE_ID_NAMES:
            if self._kwargs.get(name) is not None:
                self._kwargs[name] = self._kwargs[name][..., kept, :]
        if self._last_positions is not None:
            self._last_positions = self._last_positions[..., kept, :]
            self._position_limits = self._position_limits[..., kept, :]

    @property
    def takes_trees(self) -> bool:
        """Whether the target can read several paths in one forward."""
        config = text_config(self.target)
        layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
        return (
            config._attn_implementation in ("eager", "sdpa")
            and layer_types <= {"full_attention", "sliding_attention"}
            and self._last_positions is not None
            and not getattr(config, "alibi", False)
            and not self.cache.is_static
        )

    def _tree_mask(self, tree: TokenTree) -> torch.Tensor | dict[str, torch.Tensor]:
        config = text_config(self.target)
        window = getattr(config, "sliding_window", None)
        layer_types = set(getattr(config, "layer_types", None) or ())
        if not layer_types:
            layer_types = {"sliding_attention" if self.cache.has_sliding else "full_attention"}
        masks: dict[str, torch.Tensor] = {}
        for layer_type in sorted(layer_types):
            visible = tree_attention_mask(
                tree,
                self.cache.padding_mask,
                self.cache.num_columns,
                self.cache.num_keys(layer_type, tree.num_nodes),
                window if layer_type == "sliding_attention" else None,
            )
            if config._attn_implementation == "eager":  # adds its mask to the scores
                additive = torch.zeros(visible.shape, dtype=self.target.dtype, device=visible.device)
                visible = additive.masked_fill_(~visible, torch.finfo(self.target.dtype).min)
            masks[layer_type] = visible
        return masks if len(masks) > 1 else masks.popitem()[1]

    def _make_cache(self) -> None:
        """A cache for calls with `use_cache=False`: the text is the same with one, and verification needs it."""
        if "cache_params" in self._kwargs or not self.target._supports_default_dynamic_cache():
            raise ValueError(f"{type(self.target).__name__} has no cache that rejected tokens can be taken out of.")
        is_new_name = "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
        self._cache_name = _CACHE_NAMES[0] if is_new_name else _CACHE_NAMES[1]
        self._kwargs |= {self._cache_name: DynamicCache(config=text_config(self.target)), "use_cache": True}
