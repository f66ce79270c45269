"""Checkpoints from one layout to another: ours, z-lab's, speculators' and Transformers' Muse Glimmer assistant's."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict, snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoConfig

from dflash_hf.configuration_dflash import DFlashConfig
from dflash_hf.hub_configs.folder import replaced_folder, save_drafter
from dflash_hf.layouts_dflash import MUSE_PREFIXES, TARGET_COPIES, checkpoint_layout, verifier_depth
from dflash_hf.modeling_dflash import DFlashDraftModel

LAYOUTS = ("dflash", "z-lab", "speculators", "muse")
_DOCUMENTS = ("README.md", "LICENSE*")
# Beside the Qwen3 fields of a drafter's config.
_OUTER_FIELDS = ("architectures", "auto_map", "block_size", "dflash_config", "is_causal", "num_target_layers")
_MUSE_FIELDS = (
    "attention_dropout",
    "block_size",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_target_layers",
    "pad_token_id",
    "rms_norm_eps",
    "rope_parameters",
    "vocab_size",
)


def convert_checkpoint(
    source: str | Path,
    output: str | Path,
    *,
    layout: str = "dflash",
    revision: str | None = None,
    target: str | None = None,
    **values: Any,
) -> Path:
    """Writes the drafter in `source` to the new folder `output`, in another layout, and returns its path.

    The weights keep every bit. The folder is written under a temporary name and renamed at the end. The model card and
    licence of the source go along; the template mode of its texts has a place only in "dflash" and "z-lab".

    Args:
        source (`str` or `Path`): Folder or Hub id, in any layout that `DFlashDraftModel.from_pretrained` reads.
        output (`str` or `Path`): A folder that does not exist yet.
        layout (`str`): "dflash" (with code files, for `AutoModel.from_pretrained(..., trust_remote_code=True)` and the
            engines), "z-lab" (the same without code), "speculators" or "muse".
        revision (`str`, *optional*): Hub revision of `source`; pin it.
        target (`str`, *optional*): Hub id or folder of the target, whose config gives `num_target_layers` and
            `vocab_size` where the source has no such keys; named as verifier in "speculators".
        values: Keys of [`DFlashConfig`] that the source lacks, such as `num_target_layers=52`.
    Raises:
        ValueError: If the source is not a complete drafter, `output` exists, or the layout has no words for something
            that this drafter does.
    """
    output = Path(output)
    if layout not in LAYOUTS:
        raise ValueError(f"`layout` is {layout!r}; choose from {list(LAYOUTS)}.")
    if output.exists():
        raise ValueError(f"{output} exists already. Choose another name, or remove it first.")
    folder = _local_folder(source, revision)
    fields = _raw_fields(folder)
    if target is not None:
        text_config = AutoConfig.from_pretrained(target).get_text_config(decoder=True)
        values = {"num_target_layers": text_config.num_hidden_layers, "vocab_size": text_config.vocab_size} | values
    elif checkpoint_layout(fields) == "speculators" and "num_target_layers" not in values:
        values["num_target_layers"] = verifier_depth(fields)
    config = DFlashConfig.from_pretrained(folder, **values)
    tensors = _our_tensors(_read_tensors(folder), checkpoint_layout(fields))
    _check_tensors(config, tensors, folder)
    with replaced_folder(output) as temporary:
        _write(config, tensors, temporary, layout, target)
        for pattern in _DOCUMENTS:
            for document in folder.glob(pattern):
                shutil.copyfile(document, temporary / document.name)
    return output


def muse_fields(config: DFlashConfig) -> dict[str, Any]:
    """The content of a Muse Glimmer assistant's `config.json`, with `num_target_layers` and `vocab_size` besides.

    Raises:
        ValueError: If that network does not do what this drafter does.
    """
    _refuse(
        "muse",
        attention_bias=config.attention_bias,
        causal_layers=[i for i in range(config.num_hidden_layers) if config.layer_is_causal(i)],
        input_embedding_scale=config.input_embedding_scale not in (None, 1.0) and config.input_embedding_scale,
        output_multiplier=config.output_multiplier != 1.0 and config.output_multiplier,
        final_logit_softcapping=config.final_logit_softcapping,
    )
    values = config.to_dict()
    return {
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": "muse_glimmer_assistant",
        # Its window is `|q - k| <= window`; without sliding layers it means nothing, but must be a number.
        "sliding_window": config.sliding_window - 1 if config.sliding_window else 2048,
        **{key: values[key] for key in _MUSE_FIELDS},
        **{key: values["dflash_config"][key] for key in ("mask_token_id", "target_layer_ids")},
    }


def speculators_fields(config: DFlashConfig, target: str | None = None) -> dict[str, Any]:
    """The content of a `config.json` in speculators' layout, with `num_target_layers` besides.

    Raises:
        ValueError: If that layout has no words for something that this drafter does.
    """
    full_layers = [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
    _refuse(
        "speculators",
        causal_full_attention=config.is_causal and full_layers,
        input_embedding_scale=config.input_embedding_scale,
        output_multiplier=config.output_multiplier != 1.0 and config.output_multiplier,
        final_logit_softcapping=config.final_logit_softcapping,
    )
    values = config.to_dict()
    proposals = [{"proposal_type": "greedy", "speculative_tokens": values["block_size"] - 1}]
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": proposals,
            "verifier": {"architectures": [], "name_or_path": target},
        },
        "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in config.target_layer_ids],
        "block_size": config.block_size,
        "draft_vocab_size": config.vocab_size,
        "dtype": values["dtype"],
        "mask_token_id": config.mask_token_id,
        "num_target_layers": config.num_target_layers,
        "sample_from_anchor": False,
        "sliding_window_non_causal": config.is_causal is False,
        "tie_word_embeddings": False,
        "transformer_layer_config": {key: value for key, value in values.items() if key not in _OUTER_FIELDS},
    }


def _refuse(layout: str, **traits: Any) -> None:
    """Raises if any of `traits`, which the layout cannot say, is there."""
    found = {name: value for name, value in traits.items() if value}
    if found:
        raise ValueError(f"The layout of {layout} cannot say what this drafter does: {found}. Choose another layout.")


def _local_folder(source: str | Path, revision: str | None) -> Path:
    if Path(source).is_dir():
        return Path(source)
    patterns = ["*.json", "*.safetensors", *_DOCUMENTS]
    return Path(snapshot_download(str(source), revision=revision, allow_patterns=patterns))


def _raw_fields(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        fields = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}). Fetch the checkpoint again.") from error
    if fields.get("quantization_config") is not None:
        raise ValueError(f"{folder} is quantised. Convert the checkpoint that it was made from.")
    return fields


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        try:
            tensors.update(load_file(folder / name))
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{folder / name} cannot be read ({error}). Fetch the checkpoint again.") from error
    return tensors


def _our_tensors(tensors: dict[str, torch.Tensor], layout: str) -> dict[str, torch.Tensor]:
    if layout == "speculators":
        return {name: tensor for name, tensor in tensors.items() if name not in TARGET_COPIES}
    return _renamed(tensors, MUSE_PREFIXES) if layout == "muse" else tensors


def _renamed(tensors: dict[str, torch.Tensor], prefixes: dict[str, str]) -> dict[str, torch.Tensor]:
    renamed = {}
    for name, tensor in tensors.items():
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        renamed[prefixes.get(prefix, "") + name.removeprefix(prefix)] = tensor
    return renamed


def _check_tensors(config: DFlashConfig, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    with torch.device("meta"):
        expected = {name: tensor.shape for name, tensor in DFlashDraftModel(config).state_dict().items()}
    problems = {
        "missing": sorted(expected.keys() - tensors.keys()),
        "unknown": sorted(tensors.keys() - expected.keys()),
        "of another shape": sorted(
            name for name in expected.keys() & tensors.keys() if expected[name] != tensors[name].shape
        ),
    }
    problems = {name: names for name, names in problems.items() if names}
    if problems:
        raise ValueError(f"{folder} is not a complete drafter of its config; tensors: {problems}.")


def _write(
    config: DFlashConfig, tensors: dict[str, torch.Tensor], folder: Path, layout: str, target: str | None
) -> None:
    with torch.device("meta"):
        drafter = DFlashDraftModel(config)
    drafter.load_state_dict(tensors, assign=True)
    drafter.config.dtype = drafter.dtype
    if layout == "dflash":
        save_drafter(drafter, folder)
        return
    writers: dict[str, Callable[[], dict[str, Any]]] = {
        "muse": lambda: muse_fields(drafter.config),
        "speculators": lambda: speculators_fields(drafter.config, target),
        "z-lab": drafter.config.to_dict,
    }
    fields = {key: value for key, value in writers[layout]().items() if key not in ("auto_map", "_name_or_path")}
    (folder / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if layout == "muse":
        tensors = _renamed(tensors, {ours: theirs for theirs, ours in MUSE_PREFIXES.items()})
    save_torch_state_dict(tensors, folder)
