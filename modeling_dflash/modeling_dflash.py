"""The DFlash draft model (arXiv 2602.06036, section 4 and A.3): Qwen3-style layers with injected context keys."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)

from .configuration_dflash import DFlashConfig
from .custom_generate_dflash import generate as custom_generate
from .decoding_dflash import decode as decode_with_drafter
from .generation_dflash import DFlashCandidateGenerator, install_dispatch, spec_generate
from .layouts_dflash import loading_arguments


class DFlashRotaryEmbedding(Qwen3RotaryEmbedding):
    """Rotary tables whose frequencies stay float32 when the model is cast: at bf16 they are off by radians at 30K."""

    inv_freq: torch.Tensor

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        if self.inv_freq.dtype != torch.float32:
            initialise = self.compute_default_rope_parameters
            if self.rope_type != "default":
                from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

                initialise = ROPE_INIT_FUNCTIONS[self.rope_type]
            inv_freq, self.attention_scaling = initialise(self.config)
            self.inv_freq = inv_freq.to(self.inv_freq.device)
            self.original_inv_freq = self.inv_freq.clone()
        return self


class DFlashAttention(nn.Module):
    """Attention of a block's slots to the context features and to the block (KV injection, paper A.3)."""

    def __init__(self, config: DFlashConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        is_sliding = config.layer_types[layer_idx] == "sliding_attention"
        self.sliding_window = config.sliding_window if is_sliding else None
        self.is_causal = config.layer_is_causal(layer_idx)
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,  # (B, Q, D): the normed block
        context_hidden_states: torch.Tensor,  # (B, C, D): new context features, projected and normed
        position_embeddings: tuple[torch.Tensor, torch.Tensor],  # cos and sin, (B, C + Q, head_dim)
        attention_mask: torch.Tensor | None,
        cache: Any | None = None,
        **kwargs,
    ) -> torch.Tensor:
        batch, query_length, _ = hidden_states.shape
        # The layer's input norm acted on the block only: context features were normed once for all layers.
        key_value_states = torch.cat([context_hidden_states, hidden_states], dim=1)
        query = self.q_proj(hidden_states).view(batch, query_length, -1, self.head_dim)
        key = self.k_proj(key_value_states).view(batch, key_value_states.shape[1], -1, self.head_dim)
        value = self.v_proj(key_value_states).view(*key.shape).transpose(1, 2)
        cos, sin = (table.unsqueeze(1) for table in position_embeddings)
        query = _rotate(self.q_norm(query).transpose(1, 2), cos[..., -query_length:, :], sin[..., -query_length:, :])
        key = _rotate(self.k_norm(key).transpose(1, 2), cos, sin)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)

        implementation = self.config._attn_implementation
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        output, _ = attention(
            self,
            query,
            key,
            value,
            self._layer_mask(attention_mask, query, key, implementation),
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            is_causal=self.is_causal,
            **kwargs,
        )
        return self.o_proj(output.reshape(batch, query_length, -1))

    def _layer_mask(
        self, attention_mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, implementation: str
    ) -> torch.Tensor | None:
        if not isinstance(attention_mask, (torch.Tensor, type(None))):
            return attention_mask  # a flex_attention BlockMask
        padding = attention_mask if attention_mask is not None and attention_mask.dim() == 2 else None
        if "flash" in implementation:
            return attention_mask  # these kernels take the padding mask, `is_causal` and `sliding_window` themselves
        if attention_mask is None or padding is not None:
            visible = block_visibility(
                query.shape[2], key.shape[2], self.sliding_window, self.is_causal, device=query.device
            )
            if padding is not None and not padding.all():
                # A sliding cache may hold only the newest keys, so columns are counted from the right.
                columns = padding[:, None, None, -key.shape[2] :].bool()
                visible = columns if visible is None else visible & columns
        else:
            visible = attention_mask
        if visible is None or implementation == "sdpa" or visible.dtype != torch.bool:
            return visible
        visible = visible.expand(query.shape[0], 1, query.shape[2], key.shape[2])
        if implementation == "flex_attention":
            return _flex_mask(visible)
        # Eager attention adds the mask to the scores.
        additive = torch.zeros(visible.shape, dtype=query.dtype, device=query.device)
        return additive.masked_fill_(~visible, torch.finfo(query.dtype).min)


class DFlashDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: DFlashConfig, layer_idx: int):
        super().__init__()
        self.self_attn = DFlashAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, context_hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        attention_input = self.input_layernorm(hidden_states)
        hidden_states = hidden_states + self.self_attn(attention_input, context_hidden_states, **kwargs)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class DFlashPreTrainedModel(PreTrainedModel):
    config_class = DFlashConfig
    base_model_prefix = "model"
    main_input_name = "noise_embeds"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DFlashDecoderLayer"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    # Of the model card that `push_to_hub` writes, so that a drafter is found as one.
    model_tags = ["dflash", "speculative-decoding", "draft-model"]


class DFlashDraftModel(DFlashPreTrainedModel):
    """Drafter of DFlash: proposes a whole block of tokens in one forward pass.

    It owns no embedding and no head; both are the target's. Use it as `target.generate(..., assistant_model=drafter)`.

    Args:
        config ([`DFlashConfig`]): The drafter's configuration.
    Source: arXiv 2602.06036; tensor names of the published z-lab checkpoints.
    """

    # Lets generate() recognise a drafter whichever copy of this code built it (the package's or a checkpoint's).
    is_dflash_drafter = True

    def __init__(self, config: DFlashConfig, passed_over: tuple[str, ...] = ()):
        super().__init__(config)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = DFlashRotaryEmbedding(config)
        # Patterns of tensors in the checkpoint at hand that are no part of the drafter.
        self._keys_to_ignore_on_load_unexpected = set(passed_over)
        self.post_init()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, output_loading_info=False, **kwargs):
        """The drafter of a folder or Hub repository; arguments as in [`PreTrainedModel.from_pretrained`].

        Reads z-lab's layout (SpecForge and ModelOpt write it, too), speculators' and Muse Glimmer's, and only
        safetensors. Code that the repository names is not run. Pin `revision`: published drafters were replaced in
        place. A value that the config lacks can be passed, such as `num_target_layers=52`.

        Raises:
            ValueError: If the checkpoint lacks tensors of the model, has others, or a file of it is cut off.
        """
        layout_arguments = {}
        if pretrained_model_name_or_path is not None and kwargs.get("config") is None:
            layout_arguments = loading_arguments(pretrained_model_name_or_path, kwargs)
        kwargs = {"use_safetensors": True} | kwargs | layout_arguments
        kwargs["ignore_mismatched_sizes"] = True  # they raise below, with their names
        try:
            model, info = super().from_pretrained(
                pretrained_model_name_or_path, *model_args, output_loading_info=True, **kwargs
            )
        except Exception as error:
            # By its name, because files that travel import only torch and transformers.
            if type(error).__name__ != "SafetensorError":
                raise
            raise ValueError(
                f"{pretrained_model_name_or_path} has a broken safetensors file ({error}). Fetch it again; perhaps a "
                "download was cut off."
            ) from error
        problems = {
            name: sorted(map(str, info[name])) for name in ("missing_keys", "unexpected_keys", "mismatched_keys")
        }
        problems = {name: keys for name, keys in problems.items() if keys}
        if problems:
            raise ValueError(
                f"{pretrained_model_name_or_path} is not a complete checkpoint of this drafter: {problems}. "
                "A drafter with random or dropped weights would draft badly without any other sign."
            )
        if "key_mapping" in layout_arguments:
            del model._weight_conversions  # it is saved under our names
        return (model, info) if output_loading_info else model

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | dict[str, Any] | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Any | None = None,
        past_key_values: Any | None = None,
        **kwargs,
    ) -> BaseModelOutput:
        """Hidden states of the block's slots, to be read by the target's head.

        Args:
            noise_embeds (`torch.Tensor`): The target's embeddings of [anchor, mask, mask, ...], shape (batch, Q, D).
            context_hidden_states (`torch.Tensor`): Features of context tokens that `cache` does not hold yet, shape
                (batch, C, len(target_layer_ids) * D).
            attention_mask (`torch.Tensor` or `dict`, *optional*): None: every key is real. Shape (batch, keys): 0
                marks padding. Bool of shape (batch, 1, Q, keys) or a flex_attention `BlockMask`: the whole rule, as in
                training. A dict gives one of these per layer type.
            position_ids (`torch.LongTensor`, *optional*): Positions of context then block, shape (batch, C + Q);
                default: counted on from `cache`.
            cache ([`Cache`], *optional*): Keys and values of earlier context; older Transformers call it
                `past_key_values`.
        Returns:
            [`BaseModelOutput`] with `last_hidden_state` of shape (batch, Q, D).
        """
        cache = past_key_values if cache is None else cache
        context = self.hidden_norm(self.fc(context_hidden_states))
        if position_ids is None:
            start = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(start, start + context.shape[1] + noise_embeds.shape[1], device=context.device)
            position_ids = position_ids.unsqueeze(0)
        position_embeddings = self.rotary_emb(noise_embeds, position_ids)
        hidden_states = noise_embeds
        for layer, layer_type in zip(self.layers, self.config.layer_types, strict=True):
            hidden_states = layer(
                hidden_states,
                context,  # positional: re-entrant checkpointing passes gradients to positional arguments only
                position_embeddings=position_embeddings,
                attention_mask=attention_mask[layer_type] if isinstance(attention_mask, dict) else attention_mask,
                cache=cache,
                **kwargs,
            )
        return BaseModelOutput(last_hidden_state=self.norm(hidden_states))

    def get_input_embeddings(self) -> None:
        """None: embedding and head are the target's. FSDP2 asks, and the base class would raise."""
        return None

    def generate(self, *args, **kwargs):
        """Explains that a drafter does not generate by itself."""
        raise TypeError(
            "A DFlash drafter cannot generate alone: it has no embedding and no head. Load its target and call "
            "`target.generate(**inputs, assistant_model=drafter)`."
        )

    decode = decode_with_drafter

    def save_pretrained(self, save_directory, *args, **kwargs):
        """Saves as [`PreTrainedModel.save_pretrained`] does, with a `custom_generate/generate.py`."""
        super().save_pretrained(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True):
            _write_custom_generate(save_directory)

    def _upload_modified_files(self, working_dir, repo_id, files_timestamps, **kwargs):
        # `save_pretrained(push_to_hub=True)` uploads before it returns to us.
        _write_custom_generate(working_dir)
        files_timestamps.pop("custom_generate", None)
        return super()._upload_modified_files(working_dir, repo_id, files_timestamps, **kwargs)

    def candidate_generator(self, target: PreTrainedModel, **kwargs) -> DFlashCandidateGenerator:
        """Proposals of this drafter for one call of Transformers' own assisted decoding."""
        return DFlashCandidateGenerator(self, target, **kwargs)

    def spec_generate(self, target: PreTrainedModel, *args, **kwargs) -> torch.LongTensor:
        """Prompt and answer, for callers of the authors' code; see [`spec_generate`]."""
        return spec_generate(self, target, *args, **kwargs)


def block_visibility(
    query_length: int,
    key_length: int,
    sliding_window: int | None,
    is_causal: bool,
    device: torch.device | str | None = None,
) -> torch.Tensor | None:
    """Which keys each slot of a block sees; None when it is all of them.

    The last `query_length` keys are the block's own slots, the others its context.

    Args:
        query_length (`int`): Slots of the block.
        key_length (`int`): Context tokens plus slots.
        sliding_window (`int`, *optional*): A key is visible if `query - key < sliding_window`.
        is_causal (`bool`): Slots see no later slots; otherwise the window, if any, holds in both directions.
    Returns:
        `torch.Tensor` of shape `(1, 1, query_length, key_length)`, bool, or None.
    """
    if sliding_window is None and not is_causal:
        return None
    distance = torch.arange(key_length - query_length, key_length, device=device)[:, None]
    distance = distance - torch.arange(key_length, device=device)[None, :]
    visible = torch.ones_like(distance, dtype=torch.bool)
    if is_causal:
        visible &= distance >= 0
    if sliding_window is not None:
        visible &= distance.abs() < sliding_window
    return visible[None, None]


def _flex_mask(visible: torch.Tensor) -> BlockMask:
    """`visible` of shape (batch, 1, queries, keys) for flex_attention.

    An additive mask as `score_mod` is not used: compiled for CPU it corrupts memory (torch 2.13, short blocks).
    """
    return create_block_mask(
        lambda batch, head, query, key: visible[batch, 0, query, key],
        visible.shape[0],
        None,
        *visible.shape[-2:],
        device=visible.device,
    )


def _write_custom_generate(folder) -> None:
    path = Path(folder) / "custom_generate" / "generate.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(Path(custom_generate.__code__.co_filename).read_text(encoding="utf-8"), encoding="utf-8")


def _rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return states * cos + rotate_half(states) * sin


DFlashConfig.register_for_auto_class()
DFlashDraftModel.register_for_auto_class("AutoModel")
install_dispatch()
