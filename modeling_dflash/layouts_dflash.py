"""Checkpoint layouts of other projects, read as ours: what their keys and tensors are called here."""

import re
from typing import Any

from transformers import AutoConfig, GenerationConfig, PreTrainedConfig
from transformers.utils import logging

logger = logging.get_logger(__name__)

# Transformers' Muse Glimmer assistant is the same network under other names.
MUSE_PREFIXES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
# Frozen copies of the target's modules that speculators stores beside the drafter. A drafter uses the target's own.
TARGET_COPIES = (
    "embed_tokens.weight",
    "lm_head.weight",
    "verifier_lm_head.weight",
    "verifier_norm.weight",
    "t2d",
    "d2t",
)
_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
_DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
# Keys that exports of other trainers carry, with the value that means plain DFlash.
_PLAIN_VALUES = {
    "add_swa_attention_sink_bias": False,
    "attention_sink_bias": False,
    "markov_rank": 0,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "projector_type": "dflash",
    "pure_draft_prefix_len": 0,
    "shift_label": False,
    "use_aux_hidden_state": True,
    "use_qk_norm": True,
}
# What Transformers reads beside the fields of its configs.
_LIBRARY_KEYS = ("attn_implementation", "auto_map", "name_or_path", "quantization_config", "torch_dtype")
# Bookkeeping, and settings of the target or of the training, which mean nothing for the drafter.
_DROPPED_KEYS = (
    "initial_context_length",
    "max_anchors",
    "model_type",
    "num_anchors",
    "speculators_version",
    "tokenizer_class",
)
_OUR_CODE = ("configuration_dflash.DFlashConfig", "modeling_dflash.DFlashDraftModel")


def checkpoint_layout(fields: dict[str, Any]) -> str:
    """Which layout a `config.json` is in: `"speculators"`, `"muse"`, or `"dflash"` (z-lab's, and what is written)."""
    if "speculators_model_type" in fields:
        return "speculators"
    return "muse" if fields.get("model_type") == "muse_glimmer_assistant" else "dflash"


def read_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """The content of a `config.json` of any layout, with z-lab's keys.

    Muse Glimmer: slots see each other in both directions, and a key is visible if `|q - k| <= sliding_window`, so the
    window is one more here. speculators: `aux_hidden_state_layer_ids` counts the embedding as layer 0. Its sliding
    layers are read as vLLM runs them, `q - k < sliding_window`; its own training lets all slots of a block see
    `sliding_window` tokens before the anchor.

    Raises:
        ValueError: If a key that this layout needs is missing, or asks for something that a drafter here has not.
    """
    layout = checkpoint_layout(fields)
    if layout == "dflash":
        return dict(fields)
    required = ("block_size", "mask_token_id", "target_layer_ids", "rope_parameters")
    if layout == "speculators":
        required = ("block_size", "mask_token_id", "aux_hidden_state_layer_ids", "transformer_layer_config")
        if fields["speculators_model_type"] != "dflash":
            raise ValueError(
                f"`speculators_model_type` is {fields['speculators_model_type']!r}, another kind of drafter. Only "
                "'dflash' can be read."
            )
    missing = [key for key in required if fields.get(key) is None]
    if missing:
        raise ValueError(f"The config, in the layout of {layout}, lacks {missing}. Copy them from the training.")
    return _read_muse(dict(fields)) if layout == "muse" else _read_speculators(dict(fields))


def loading_arguments(name_or_path: Any, given: dict[str, Any]) -> dict[str, Any]:
    """What `from_pretrained` needs besides its `given` arguments to load a checkpoint of another layout.

    `key_mapping` renames tensors, `passed_over` are patterns of tensors that are no part of the drafter.
    """
    hub_arguments = {key: given[key] for key in _HUB_ARGUMENTS if key in given}
    try:
        fields, _ = PreTrainedConfig.get_config_dict(name_or_path, **hub_arguments)
    except (OSError, TypeError):  # what is wrong, or that this is an adapter, comes out when the config is read
        return {}
    layout = checkpoint_layout(fields) if isinstance(fields, dict) else "dflash"
    if layout == "muse":
        return {"key_mapping": {f"^{re.escape(theirs)}": ours for theirs, ours in MUSE_PREFIXES.items()}}
    if layout == "dflash":
        return {}
    arguments: dict[str, Any] = {"passed_over": tuple(f"^{re.escape(name)}$" for name in TARGET_COPIES)}
    if given.get("num_target_layers") is None and fields.get("num_target_layers") is None:
        local_only = given.get("local_files_only", False)
        arguments["num_target_layers"] = verifier_depth(fields, local_files_only=local_only)
    return arguments


def verifier_depth(fields: dict[str, Any], **hub_arguments: Any) -> int | None:
    """Decoder layers of the target that a speculators config names, from the target's config; None if out of reach."""
    name = ((fields.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    if name is None:
        return None
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False, **hub_arguments)
        return config.get_text_config(decoder=True).num_hidden_layers
    except (OSError, ValueError):
        return None


def refuse_other_methods(architectures: list[str] | None, *places: dict[str, Any]) -> None:
    """Raises a `ValueError` if a config is that of another model, or of a drafter that predicts in another way.

    Args:
        architectures (`list[str]`, *optional*): As the config names them.
        places (`dict`): Top-level keys, and those of `dflash_config`.
    """
    selector_keys = [key for key in _DFLASH2_KEYS if any(key in place for place in places)]
    if selector_keys or "DFlash2DraftModel" in (architectures or []):
        raise ValueError(
            f"This is a DFlash 2 drafter (`architectures`: {architectures}, keys {selector_keys}), which has "
            "a convolution and a candidate selector. It is not supported; load a version 1 checkpoint."
        )
    # A module that is split over devices is called FSDP...
    others = [name for name in architectures or [] if name.removeprefix("FSDP") != "DFlashDraftModel"]
    if others:
        raise ValueError(f"`architectures` names {others}, another kind of model. A drafter's is DFlashDraftModel.")
    if any(place.get("sample_from_anchor") for place in places):
        raise ValueError(
            "`sample_from_anchor` is true: slot 0 of this drafter already predicts. Here slot 0 is the anchor "
            "and slot k predicts token anchor + k. Convert or retrain the drafter."
        )


def remove_plain_values(place: dict[str, Any], vocab_size: int, hidden_size: int) -> None:
    """Removes keys that say "plain DFlash" in other trainers' exports.

    Raises:
        ValueError: If one of them says something else, such as a `draft_vocab_size` below the target's vocabulary.
    """
    plain_values = _PLAIN_VALUES | {"draft_vocab_size": vocab_size, "target_hidden_size": hidden_size}
    for key, plain in plain_values.items():
        value = place.pop(key, None)
        if value is not None and value != plain:
            raise ValueError(
                f"`{key}` is {value!r}; only drafters where it is {plain!r} can be read. Train one without this."
            )


def remove_unknown_keys(fields: dict[str, Any]) -> None:
    """Removes keys that neither a drafter nor Transformers knows, with a warning that names them, and others' code."""
    for key in _DROPPED_KEYS:
        fields.pop(key, None)
    auto_map = fields.pop("auto_map", None) or {}
    auto_map = {key: code for key, code in auto_map.items() if str(code).split("--")[-1] in _OUR_CODE}
    if auto_map:
        fields["auto_map"] = auto_map
    library_keys = {*vars(PreTrainedConfig()), *vars(GenerationConfig()), *_LIBRARY_KEYS}
    unknown = sorted(key for key in fields if key not in library_keys and not key.startswith("_"))
    for key in unknown:
        del fields[key]
    if unknown:
        logger.warning(
            f"The drafter config has keys without a meaning here, so they are left out: {unknown}. If the drafter was "
            "trained with them, it drafts badly."
        )


def _read_muse(fields: dict[str, Any]) -> dict[str, Any]:
    if fields.get("layer_types") is None:
        fields["layer_types"] = ["sliding_attention"] * (fields.get("num_hidden_layers") or 0)
    if "sliding_attention" in fields["layer_types"] and fields.get("sliding_window"):
        fields["sliding_window"] += 1
    fields["dflash_config"] = {
        # The raw rows of the target's embedding, without the norm that Muse Glimmer's puts on them.
        "input_embedding_scale": 1.0,
        "mask_token_id": fields.pop("mask_token_id"),
        "target_layer_ids": fields.pop("target_layer_ids"),
    }
    return fields | {"architectures": ["DFlashDraftModel"], "is_causal": False}


def _read_speculators(fields: dict[str, Any]) -> dict[str, Any]:
    layer_fields = dict(fields.pop("transformer_layer_config"))
    layer_ids = [layer_id - 1 for layer_id in fields.pop("aux_hidden_state_layer_ids")]
    dflash_config = {"mask_token_id": fields.pop("mask_token_id"), "target_layer_ids": layer_ids}
    is_causal = False if fields.pop("sliding_window_non_causal", False) else None
    for key in ("speculators_model_type", "speculators_config", "transformers_version"):
        fields.pop(key, None)
    # What is said of the whole drafter (dtype, old places of the window) goes before what is said of its layers.
    read = layer_fields | fields | {"dflash_config": dflash_config, "is_causal": is_causal}
    return read | {"architectures": ["DFlashDraftModel"]}
