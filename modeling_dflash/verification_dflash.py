"""The target's side of one decoding call: its prompt forward, its verify forwards, and what stays of them."""

import inspect
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.generation.utils import GenerationMixin

from .fast_path_dflash import FastPath, is_fast, roomy_cache, tree_widths
from .target_cache_dflash import TargetCache
from .target_dflash import TargetTaps, text_config
from .tree_dflash import TokenTree, tree_attention_mask
from .verify_length_dflash import fixed_proposals

_CACHE_NAMES = ("cache", "past_key_values")  # since Transformers 5.24, and before
# Transformers 5.17 and newer tell a given cache from their own; before, each may be one that is used again.
_MARKS_GIVEN_CACHES = (
    "_is_user_defined" in inspect.unwrap(GenerationMixin._prepare_cache_for_generation).__code__.co_names
)
# More room behind the text in static caches of batches, in blocks: less means that gaps are closed more often.
_SLACK_OF_BATCHES = 3
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
        block_size (`int`, *optional*): The drafter's; needed for the fast path, see [`FastPath`].
        num_tree_nodes (`int` or `"auto"`, *optional*): Of the call, see [`CallOptions`].
    Attributes:
        fast_path ([`FastPath`], *optional*): Compiled forwards, from `read_prompt` on, if `is_fast`.
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
        block_size: int | None = None,
        num_tree_nodes: int | str | None = None,
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
        self._num_read = 0
        self.fast_path: FastPath | None = None
        self._num_rows = num_rows
        self._chain_widths: list[int] = []
        self._tree_widths: list[int] = []
        if block_size is not None and is_fast(target, self.cache, generation_config, model_kwargs):
            self._chain_widths = [1, 1 + (fixed_proposals(generation_config, block_size) or block_size - 1)]
            self._tree_widths = tree_widths(block_size, num_tree_nodes)
            self._make_room()

    @property
    def is_fast(self) -> bool:
        """Whether forwards are to be compiled."""
        return bool(self._chain_widths)

    @property
    def sizes(self) -> list[int] | None:
        """Numbers of proposals for which forwards are to be compiled, ascending; None if none are."""
        if not self.is_fast:
            return None
        return [width - 1 for width in self._tree_widths or self._chain_widths if width > 1]

    def read_prompt(self, prompts: torch.LongTensor, num_features: int | None = None) -> Any:
        """The target's outputs for the prompts, or for what a given cache does not hold of them.

        Args:
            num_features (`int`, *optional*): Keep the features of this many of the newest tokens; None: of all.
        """
        self.taps.discard()
        self.taps.max_tokens = num_features
        num_cached = self.cache.num_columns
        outputs = self.target._prefill(prompts, self._config, self._kwargs)
        self.cache.start_recording()
        self._num_read = self.cache.num_columns - num_cached
        mask = self._kwargs.get("attention_mask")
        if mask is not None:
            self.cache.padding_mask = mask[:, -self.cache.num_columns :].clone()
        positions = self._kwargs.pop("position_ids", None)
        if positions is not None:
            self._last_positions = positions[..., -1:].expand(*positions.shape[:-2], prompts.shape[0], 1)
            # Nodes past the length limit are never kept; they must not ask for positions that a target lacks.
            self._position_limits = self._last_positions + self._num_to_come
        if self.is_fast:
            widths = self._tree_widths if self._tree_widths and self.takes_trees else self._chain_widths
            self.fast_path = FastPath(self.target, self.taps, self.cache, self._config, widths, self._num_rows)
        return outputs

    def prompt_features(self) -> tuple[torch.Tensor, list[int], list[int]]:
        """Context features of the prompts without their padding, how many tokens of each row are real, and how many
        text tokens before them were left out.

        Raises:
            RuntimeError: If the target's layers could not be tapped.
        """
        features = self.taps.take()
        self.taps.max_tokens = None
        rows, tokens = features.shape[:2]
        mask = self._kwargs.get("attention_mask")
        num_hidden = self._num_read - tokens
        if mask is None:
            return features, [tokens] * rows, [num_hidden] * rows
        hidden, is_text = mask[:, -self._num_read :].bool().split([num_hidden, tokens], dim=1)
        num_left_out = hidden.sum(dim=1).tolist()
        if is_text.all():
            return features, [tokens] * rows, num_left_out
        # Real tokens to the front: a stable sort keeps their order.
        order = is_text.long().argsort(dim=1, descending=True, stable=True).to(features.device)
        features = features.gather(1, order[:, :, None].expand_as(features))
        return features, is_text.sum(dim=1).tolist(), num_left_out

    @property
    def is_warming_up(self) -> bool:
        """Whether the last verify forward took longer than later ones will, because it was compiled."""
        return self.fast_path is not None and self.fast_path.is_warming_up

    def verify(self, tree: TokenTree) -> Any:
        """The target's outputs for every node of the tree; on the fast path its logits only."""
        fast_path = self.fast_path
        width = None if fast_path is None else fast_path.width_for(tree.num_nodes)
        num_nodes = width or tree.num_nodes
        inputs = self._inputs(tree.padded(num_nodes))
        self._num_read = num_nodes
        self.taps.discard()
        with self.target._optimize_model_for_decode():
            if fast_path is None:
                return self.target(**inputs, return_dict=True)
            outputs = fast_path.run(inputs, is_compiled=width is not None)
        outputs.logits = outputs.logits[:, : tree.num_nodes]
        return outputs

    def _inputs(self, tree: TokenTree) -> dict[str, Any]:
        rows, nodes = tree.tokens.shape
        # Transformers makes a mask of chains for a static cache, too, but asks the device for its length.
        own_mask = self._tree_mask(tree) if not tree.is_chain or self.makes_masks else None
        kwargs = self._kwargs | {self._cache_name: self.cache.cache, "use_cache": True, "attention_mask": None}
        mask = self.cache.padding_mask
        if mask is not None:
            kwargs["attention_mask"] = torch.cat([mask, mask.new_ones(rows, nodes)], dim=1)
        if self.makes_masks:
            kwargs["attention_mask"] = own_mask
        if self._last_positions is not None:
            positions = self._last_positions + 1 + tree.depths.to(self._last_positions.device)
            kwargs["position_ids"] = torch.minimum(positions, self._position_limits)
        for name in _TYPE_ID_NAMES:
            if kwargs.get(name) is not None:
                last = kwargs[name][..., -1:]
                kwargs[name] = (last if name == "token_type_ids" else torch.zeros_like(last)).expand(rows, nodes)
        inputs = self.target.prepare_inputs_for_generation(tree.tokens, **kwargs)
        if own_mask is not None:
            inputs["attention_mask"] = own_mask
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = nodes
        if self.cache.is_recurrent and nodes > 1:
            self.cache.remember_states()
        return inputs

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
        num_nodes = self._num_read  # the tree's, and padding behind them
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
            and (self.cache.is_compilable or not self.cache.is_static)
        )

    @property
    def makes_masks(self) -> bool:
        """Whether every verify forward gets a mask that was made here: a static cache of full layers."""
        return self.cache.is_compilable and self.takes_trees

    def _make_room(self) -> None:
        block, widths = self._chain_widths[-1], self._tree_widths or self._chain_widths
        if self._config.cache_implementation == "static":  # then `generate` has just made the cache
            # Rows of a batch leave gaps.
            num_slack = widths[-1] + (0 if self._num_rows == 1 else _SLACK_OF_BATCHES * block)
            roomy = roomy_cache(self.target, self.cache.cache, num_slack)
            self._kwargs[self._cache_name] = self.cache.cache = roomy
        self.cache.num_reserved = widths[1]

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
