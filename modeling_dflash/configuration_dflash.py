"""Configuration of DFlash drafters (arXiv 2602.06036), in the layout of the published z-lab checkpoints."""

from typing import Any

from transformers import PreTrainedConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from .layouts_dflash import read_fields, refuse_other_methods, remove_plain_values, remove_unknown_keys

_SHAPE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
)
# These lie in `dflash_config` in some releases and at the top level in others; we write them into `dflash_config`.
_DFLASH_FIELDS = (
    "mask_token_id",
    "target_layer_ids",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
)
# May be passed to `from_pretrained` if the file does not say them, beside shapes and the fields above.
_OTHER_SUPPLIED_FIELDS = ("block_size", "num_target_layers", "rope_theta", "rope_parameters")
_LAYER_TYPES = ("full_attention", "sliding_attention")


class DFlashConfig(Qwen3Config):
    """Configuration of a [`DFlashDraftModel`].

    The file format is z-lab's, which vLLM, SGLang and llama.cpp read: Qwen3 fields and `model_type: "qwen3"`, plus the
    fields below. Both generations of key places are read (`block_size` at the top level or in `dflash_config`;
    `rope_theta` and `rope_scaling` flat or in `rope_parameters`), one is written; [`read_fields`] reads other layouts.
    Values that change the maths have no defaults: a missing one raises. `from_pretrained(..., rope_theta=...)`
    supplies one that the file lacks.

    Args:
        block_size (`int`): Tokens per block, anchor included; at least 2. A block gives `block_size - 1` proposals.
        num_target_layers (`int`): Decoder layers of the target.
        dflash_config (`dict`): `mask_token_id` (`int`, a row of the target's embedding that means "unknown") and
            `target_layer_ids` (`list[int]`, 0-based decoder layers whose outputs are the context features: id `i` is
            `hidden_states[i + 1]`); optional `input_embedding_scale` (factor on the raw embedding rows),
            `output_multiplier` and `final_logit_softcapping` (applied to the head's logits, in this order).
        is_causal (`bool`, *optional*): Attention inside the block. None: sliding layers are causal and full layers
            bidirectional, which is how the published checkpoints were trained. A bool sets all layers.
        layer_types (`list[str]`, *optional*): `"full_attention"` or `"sliding_attention"` per draft layer; all full
            if absent. Sliding layers need `sliding_window`: a key is visible if `query - key < sliding_window`.
        kwargs: Fields of [`Qwen3Config`]. Shapes, `rms_norm_eps` and the rope theta are required.
    Raises:
        ValueError: If a value is missing, out of range, given twice with different values, or belongs to DFlash 2.
    Source: arXiv 2602.06036; `z-lab/Qwen3-8B-DFlash-b16` and its successors.
    """

    model_type = "qwen3"
    # There is no meaningful default drafter; this keeps every value in the saved file.
    has_no_defaults_at_init = True

    # 0 stands for "missing": the parent's type check refuses None before we could name the key.
    vocab_size: int = 0
    hidden_size: int = 0
    intermediate_size: int = 0
    num_hidden_layers: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    rms_norm_eps: float = 0.0
    max_position_embeddings: int = 0
    sliding_window: int | None = None
    block_size: int | None = None
    num_target_layers: int | None = None
    dflash_config: dict[str, Any] | None = None
    is_causal: bool | None = None

    def __post_init__(self, **kwargs):
        refuse_other_methods(self.architectures, kwargs, self.dflash_config or {})
        self._gather_dflash_fields(kwargs)
        self._require_shapes()
        self._resolve_layer_types()
        self._require_rope_theta(kwargs)
        remove_unknown_keys(kwargs)
        self.architectures = ["DFlashDraftModel"]
        super().__post_init__(**kwargs)
        self._check_values()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, **kwargs):
        """As [`PreTrainedConfig.from_pretrained`]; what is wrong with a file is said with its name."""
        try:
            return super().from_pretrained(pretrained_model_name_or_path, **kwargs)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{pretrained_model_name_or_path}, config.json: {error}") from error

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        """As [`PreTrainedConfig.get_config_dict`], with z-lab's keys and those of `kwargs` that the file lacks."""
        fields, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        if not isinstance(fields, dict) or not fields:
            raise ValueError("the file is missing, or not the JSON object that a config is.")
        fields = read_fields(fields) | {"model_type": cls.model_type}
        for key in (*_SHAPE_FIELDS, *_DFLASH_FIELDS, *_OTHER_SUPPLIED_FIELDS):
            if key in kwargs:
                fields[key] = _agreed_value(f"{key} of the file", fields.get(key), f"{key}=...", kwargs.pop(key))
        return fields, kwargs

    def to_diff_dict(self) -> dict[str, Any]:
        """What goes into the file, with the block size at both places where programs look for it."""
        fields = super().to_diff_dict()
        # llama.cpp's converter takes 16 for a block size that `dflash_config` lacks; others read the top level.
        fields["dflash_config"] = {**fields["dflash_config"], "block_size": fields["block_size"]}
        return fields

    @property
    def mask_token_id(self) -> int:
        return self.dflash_config["mask_token_id"]

    @property
    def target_layer_ids(self) -> list[int]:
        return self.dflash_config["target_layer_ids"]

    @property
    def input_embedding_scale(self) -> float | None:
        return self.dflash_config.get("input_embedding_scale")

    @property
    def output_multiplier(self) -> float:
        return self.dflash_config.get("output_multiplier", 1.0)

    @property
    def final_logit_softcapping(self) -> float | None:
        return self.dflash_config.get("final_logit_softcapping")

    def layer_is_causal(self, layer_idx: int) -> bool:
        """Whether slots of a block see only earlier slots in draft layer `layer_idx`."""
        return self.layer_types[layer_idx] == "sliding_attention" if self.is_causal is None else self.is_causal

    def _gather_dflash_fields(self, kwargs: dict[str, Any]) -> None:
        nested = dict(self.dflash_config or {})
        for place in (kwargs, nested):
            place.pop("sample_from_anchor", None)
            remove_plain_values(place, self.vocab_size, self.hidden_size)
        for key in _DFLASH_FIELDS:
            value = _agreed_value(key, kwargs.pop(key, None), f"dflash_config.{key}", nested.pop(key, None))
            if value is not None:
                nested[key] = value
        for key, other_place in (
            ("block_size", "block_size"),
            ("is_causal", "causal"),
            ("sliding_window", "swa_window_size"),
        ):
            value = nested.pop(other_place, None)
            setattr(self, key, _agreed_value(key, getattr(self, key), f"dflash_config.{other_place}", value))
        if nested.pop("use_swa", False) and "sliding_attention" not in (self.layer_types or []):
            # As ModelOpt writes it and vLLM reads it: every layer slides, and no slot is hidden from another.
            self.layer_types = ["sliding_attention"] * self.num_hidden_layers
            self.is_causal = False if self.is_causal is None else self.is_causal
        self.dflash_config = nested
        self._check_dflash_keys()

    def _check_dflash_keys(self) -> None:
        unknown = sorted(set(self.dflash_config) - {*_DFLASH_FIELDS, "template_mode"})
        if unknown:
            raise ValueError(
                f"`dflash_config` has keys that are unknown here: {unknown}. The drafter may work otherwise than this "
                "code. Remove them if they change nothing."
            )
        missing = [key for key in ("mask_token_id", "target_layer_ids") if key not in self.dflash_config]
        missing += [key for key in ("block_size", "num_target_layers") if getattr(self, key) is None]
        if missing:
            raise ValueError(
                f"The drafter config lacks {missing} (looked at the top level and in `dflash_config`). They cannot be "
                f"guessed: take them from the drafter's training and pass them (`from_pretrained(..., {missing[0]}="
                "...)`), or use `create_drafter_config` for a new drafter."
            )

    def _require_shapes(self) -> None:
        missing = [key for key in _SHAPE_FIELDS if not getattr(self, key)]
        if missing:
            raise ValueError(
                f"The drafter config lacks {missing}. Copy them from the checkpoint, or pass them "
                f"(`from_pretrained(..., {missing[0]}=...)`); nothing is assumed."
            )

    def _resolve_layer_types(self) -> None:
        if self.layer_types is None:
            if self.use_sliding_window:
                raise ValueError(
                    "`use_sliding_window` is true but `layer_types` is missing. List 'sliding_attention' or "
                    "'full_attention' for each draft layer."
                )
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        unknown = sorted(set(self.layer_types) - set(_LAYER_TYPES))
        if unknown or len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"`layer_types` has {len(self.layer_types)} entries, unknown ones {unknown}; it needs "
                f"{self.num_hidden_layers} (`num_hidden_layers`), each one of {list(_LAYER_TYPES)}."
            )
        self.use_sliding_window = "sliding_attention" in self.layer_types
        if not self.use_sliding_window:
            self.sliding_window = None
        elif not self.sliding_window or self.sliding_window < 1:
            raise ValueError(
                f"`layer_types` has sliding layers but `sliding_window` is {self.sliding_window}. Give the window "
                "that the drafter was trained with, in tokens."
            )

    def _require_rope_theta(self, kwargs: dict[str, Any]) -> None:
        nested = dict(self.rope_parameters or {})
        flat_theta = kwargs.pop("rope_theta", None)
        theta = _agreed_value("rope_theta", flat_theta, "rope_parameters.rope_theta", nested.pop("rope_theta", None))
        flat_scaling = kwargs.pop("rope_scaling", None)
        parameters = dict(_agreed_value("rope_scaling", flat_scaling or None, "rope_parameters", nested or None) or {})
        if theta is None:
            raise ValueError(
                "The drafter config has no rope theta (`rope_theta` or `rope_parameters.rope_theta`). Copy the value "
                "that the drafter was trained with, or pass it (`from_pretrained(..., rope_theta=...)`); a wrong one "
                "drafts badly without any other sign."
            )
        partial = _agreed_value(
            "partial_rotary_factor",
            kwargs.pop("partial_rotary_factor", None),
            "rope_parameters.partial_rotary_factor",
            parameters.pop("partial_rotary_factor", None),
        )
        if partial not in (None, 1, 1.0):
            raise ValueError(f"`partial_rotary_factor` is {partial}; DFlash drafters rotate whole heads. Remove it.")
        parameters["rope_theta"] = theta
        parameters.setdefault("rope_type", parameters.pop("type", "default"))
        self.rope_parameters = parameters

    def _check_values(self) -> None:
        if self.block_size < 2:
            raise ValueError(f"`block_size` is {self.block_size}; it counts the anchor, so at least 2 is needed.")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"`mask_token_id` is {self.mask_token_id}, outside the target's embedding (0 to "
                f"{self.vocab_size - 1}). Choose an unused row of the target's table."
            )
        _check_layer_ids(self.target_layer_ids, self.num_target_layers)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_attention_heads` ({self.num_attention_heads}) must be a multiple of `num_key_value_heads` "
                f"({self.num_key_value_heads})."
            )


def build_target_layer_ids(num_target_layers: int, num_features: int) -> list[int]:
    """Decoder layers to tap: evenly spaced from the second to the third-to-last layer.

    Args:
        num_target_layers (`int`): Decoder layers of the target.
        num_features (`int`): How many layers to tap, at least 1.
    Returns:
        `list[int]`: Sorted, unique 0-based layer ids; one feature taps the middle layer.
    Raises:
        ValueError: If the target has too few layers for `num_features` different ones.
    Source: arXiv 2602.06036, section 5; the authors' code, whose rounding (half to even) is kept.
    """
    if num_features < 1:
        raise ValueError(f"`num_features` is {num_features}; at least 1 layer must be tapped.")
    if num_features == 1:
        layer_ids = [num_target_layers // 2]
    else:
        first, last = 1, num_target_layers - 3
        layer_ids = [round(first + i * (last - first) / (num_features - 1)) for i in range(num_features)]
    is_increasing = all(low < high for low, high in zip(layer_ids, layer_ids[1:], strict=False))
    if not is_increasing or not 0 <= layer_ids[0] <= layer_ids[-1] < num_target_layers - 1:
        raise ValueError(
            f"A target with {num_target_layers} layers has no {num_features} different layers to tap between its "
            f"second and its third-to-last (the rule gives {layer_ids}). Ask for fewer features or set "
            "`target_layer_ids`."
        )
    return layer_ids


def create_drafter_config(
    target_config: PreTrainedConfig,
    *,
    num_hidden_layers: int = 5,
    num_target_features: int = 5,
    block_size: int = 16,
    mask_token_id: int,
    **overrides: Any,
) -> DFlashConfig:
    """Configuration of a new drafter for a target.

    Widths, heads and the plain rope theta come from the target's text config. Its quantisation, rope scaling, sliding
    window and multi-axis rope do not: the drafter counts positions 0, 1, 2, ... and is its own model.

    Args:
        target_config ([`PreTrainedConfig`]): The target's config; the text part of a multi-modal one is used.
        num_hidden_layers (`int`): Draft layers. Paper: 5; 8 for Qwen3-Coder.
        num_target_features (`int`): Tapped target layers, see [`build_target_layer_ids`]. Paper: 5.
        block_size (`int`): Tokens per block, anchor included. Paper: 16; 10 for LLaMA-3.1.
        mask_token_id (`int`): A row of the target's embedding that no text uses (a reserved or padding row).
        overrides: Any field of [`DFlashConfig`], `rope_theta` and `target_layer_ids` among them.
    Raises:
        ValueError: If the target is an encoder-decoder, the mask id is a special token of it, or its config lacks a
            value that is needed; the message names the override to pass.
    """
    if target_config.is_encoder_decoder:
        raise ValueError(
            f"A {target_config.model_type!r} target is an encoder-decoder; DFlash needs a decoder-only one."
        )
    text_config = target_config.get_text_config(decoder=True)
    _check_mask_token(mask_token_id, text_config, target_config)
    num_target_layers = text_config.num_hidden_layers
    target_layer_ids = overrides.pop("target_layer_ids", None)
    if target_layer_ids is None:
        target_layer_ids = build_target_layer_ids(num_target_layers, num_target_features)
    num_attention_heads = text_config.num_attention_heads
    fields = {
        "vocab_size": text_config.vocab_size,
        "hidden_size": text_config.hidden_size,
        "intermediate_size": _of_all_layers(text_config, "intermediate_size", None),
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": _of_all_layers(text_config, "num_key_value_heads", num_attention_heads),
        "head_dim": _of_all_layers(text_config, "head_dim", text_config.hidden_size // num_attention_heads),
        "rms_norm_eps": getattr(text_config, "rms_norm_eps", None) or 1e-6,
        "max_position_embeddings": text_config.max_position_embeddings,
        "rope_theta": None if "rope_parameters" in overrides else _plain_rope_theta(text_config),
        "num_hidden_layers": num_hidden_layers,
        "num_target_layers": num_target_layers,
        "block_size": block_size,
        "mask_token_id": mask_token_id,
        "target_layer_ids": list(target_layer_ids),
        "final_logit_softcapping": getattr(text_config, "final_logit_softcapping", None),
        **{key: getattr(text_config, key, None) for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }
    if text_config.model_type.startswith("gemma"):
        fields["input_embedding_scale"] = text_config.hidden_size**0.5
    fields.update(overrides)
    for key in ("intermediate_size", "num_key_value_heads", "head_dim", "rope_theta"):
        if fields[key] is None and not (key == "rope_theta" and fields.get("rope_parameters")):
            raise ValueError(
                f"The target's config ({text_config.model_type}) gives no single `{key}` for a drafter. "
                f"Pass `{key}=...`."
            )
    return DFlashConfig(**{key: value for key, value in fields.items() if value is not None})


def _agreed_value(first_place: str, first: Any, second_place: str, second: Any) -> Any:
    if first is not None and second is not None and first != second:
        raise ValueError(
            f"The drafter config says `{first_place}` = {first!r} and `{second_place}` = {second!r}. "
            "Keep the one that the drafter was trained with."
        )
    return first if first is not None else second


def _check_layer_ids(layer_ids: list[int], num_target_layers: int) -> None:
    if not layer_ids or sorted(set(layer_ids)) != list(layer_ids):
        raise ValueError(f"`target_layer_ids` must be a sorted list of different layers, got {layer_ids}.")
    for layer_id in layer_ids:
        if not 0 <= layer_id < num_target_layers - 1:
            raise ValueError(
                f"`target_layer_ids` asks for layer {layer_id}, but only layers 0 to {num_target_layers - 2} of the "
                f"target's {num_target_layers} can be tapped (the last one is normed in some code paths and not in "
                "others). Choose layers for this target or load the matching drafter."
            )


def _check_mask_token(mask_token_id: int, text_config: PreTrainedConfig, target_config: PreTrainedConfig) -> None:
    for config in (text_config, target_config):
        for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
            special = getattr(config, name, None)
            if mask_token_id in (special if isinstance(special, list) else [special]):
                raise ValueError(
                    f"`mask_token_id` {mask_token_id} is the target's `{name}`. Text contains it, so it cannot mean "
                    "'unknown'. Choose a reserved or unused row of the embedding."
                )


def _of_all_layers(text_config: PreTrainedConfig, key: str, absent: int | None) -> int | None:
    """The value of `key` in every layer, `absent` if the target has no such key; None if its layers differ."""
    try:
        return getattr(text_config, key, None) or absent
    except RuntimeError:  # Transformers refuses to name one value for Gemma 4 and other mixed models
        return None


def _plain_rope_theta(text_config: PreTrainedConfig) -> float | None:
    """The target's rope theta if it has exactly one; None if it has several (one per layer type) or no rope."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    return parameters.get("rope_theta")
