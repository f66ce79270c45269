"""Our folders have the keys and tensors that vLLM, SGLang and llama.cpp's converter read (docs/engines.md)."""

import json
from pathlib import Path

import pytest
import torch
from conftest import make_tiny_target
from safetensors import safe_open
from test_card import CARD
from transformers import AutoConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from dflash_hf import DFlashDraftModel, create_drafter_config
from dflash_hf.hub_configs.folder import build_hub_folder, shipped_drafter_folder

KINDS = {
    "full": {},
    "sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16},
    "bias": {"attention_bias": True},
    "scaled": {"input_embedding_scale": 5.5, "output_multiplier": 2.0, "final_logit_softcapping": 30.0},
    "not square": {"head_dim": 16, "intermediate_size": 48, "num_key_value_heads": 1},
}
DOCUMENTATION = (Path(__file__).parents[1] / "docs" / "engines.md").read_text()


@pytest.fixture(scope="module", params=[*KINDS, "shipped"])
def folder(request, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("engines") / "drafter"
    if request.param == "shipped":
        drafter = DFlashDraftModel.from_pretrained(shipped_drafter_folder())
    else:
        fields = {"num_hidden_layers": 2, "num_target_features": 3, "block_size": 8, "mask_token_id": 97}
        config = create_drafter_config(make_tiny_target().config, **(fields | KINDS[request.param]))
        config.dflash_config["template_mode"] = "default"
        drafter = DFlashDraftModel(config)
    return build_hub_folder(drafter, path, card=CARD)


@pytest.fixture
def config(folder) -> dict:
    return json.loads((folder / "config.json").read_text())


def tensors(folder: Path) -> dict[str, tuple[list[int], str]]:
    """Shape and dtype of each tensor, as the engines' loaders see them."""
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}
        return {name: (part.get_shape(), part.get_dtype()) for name, part in slices.items()}


def expected_shapes(config: dict) -> dict[str, list[int]]:
    hidden, width = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "fc.weight": [hidden, len(config["dflash_config"]["target_layer_ids"]) * hidden],
        "hidden_norm.weight": [hidden],
        "norm.weight": [hidden],
    }
    for layer in (f"layers.{i}" for i in range(config["num_hidden_layers"])):
        for name, size in (("q_proj", query), ("k_proj", key), ("v_proj", key)):
            shapes[f"{layer}.self_attn.{name}.weight"] = [size, hidden]
        shapes[f"{layer}.self_attn.o_proj.weight"] = [hidden, query]
        if config["attention_bias"]:
            sizes = {"q_proj": query, "k_proj": key, "v_proj": key, "o_proj": hidden}
            shapes |= {f"{layer}.self_attn.{name}.bias": [size] for name, size in sizes.items()}
        shapes |= {f"{layer}.self_attn.{name}.weight": [config["head_dim"]] for name in ("q_norm", "k_norm")}
        shapes |= {f"{layer}.mlp.{name}.weight": [width, hidden] for name in ("gate_proj", "up_proj")}
        shapes[f"{layer}.mlp.down_proj.weight"] = [hidden, width]
        shapes |= {f"{layer}.{name}.weight": [hidden] for name in ("input_layernorm", "post_attention_layernorm")}
    return shapes


def test_tensors_have_the_engines_names_shapes_and_dtype_and_there_are_no_others(folder, config):
    found = tensors(folder)
    assert {name: shape for name, (shape, _) in found.items()} == expected_shapes(config)
    assert {dtype for _, dtype in found.values()} == {"BF16"} and config["dtype"] == "bfloat16"


def test_engines_recognise_the_drafter(config):
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["model_type"] == "qwen3"
    assert config["hidden_act"] == "silu"


def test_block_size_is_where_each_engine_looks(config):
    # SGLang prefers `dflash_config`, llama.cpp's converter the top level: neither may find another value there.
    assert config["block_size"] == config["dflash_config"].get("block_size", config["block_size"]) == 8


def test_what_belongs_to_the_method_lies_in_dflash_config(config):
    nested = config["dflash_config"]
    assert type(nested["mask_token_id"]) is int and 0 <= nested["mask_token_id"] < config["vocab_size"]
    layer_ids = nested["target_layer_ids"]
    assert all(type(layer_id) is int for layer_id in layer_ids)
    assert 0 <= layer_ids[0] <= layer_ids[-1] < config["num_target_layers"]
    scales = {"input_embedding_scale", "output_multiplier", "final_logit_softcapping"}
    others = {"mask_token_id", "target_layer_ids", "template_mode", "block_size"}
    assert set(nested) <= scales | others
    # At the top level vLLM would read these with another meaning, or llama.cpp another value.
    assert not (scales | others - {"block_size"}) & set(config)


def test_nothing_in_the_file_makes_an_engine_take_another_method(config):
    foreign = {
        "eagle_config",
        "eagle_aux_hidden_state_layer_ids",
        "n_predict",
        "quantization_config",
        "draft_vocab_size",
    }
    selector = {
        "conv_kernel_size",
        "selector_rank",
        "sample_from_anchor",
        "projector_type",
        "use_swa",
        "swa_window_size",
    }
    assert not foreign & set(config) and not selector & set(config["dflash_config"])
    assert "logit_scale" not in config and "is_neox_style" not in config


def test_rope_is_plain_and_complete(config):
    assert set(config["rope_parameters"]) == {"rope_theta", "rope_type"}
    assert config["rope_parameters"]["rope_theta"] > 0
    assert not {"rope_theta", "rope_scaling", "mrope_section"} & set(config)


def test_layer_types_and_window_agree(config):
    assert len(config["layer_types"]) == config["num_hidden_layers"]
    is_sliding = "sliding_attention" in config["layer_types"]
    assert (config["sliding_window"] is not None) == is_sliding == config["use_sliding_window"]
    assert config["is_causal"] is None  # the engines' rule by layer type, the only one that SGLang has


def test_engines_parse_the_file_without_our_code_and_keep_every_key(folder, config):
    parsed = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    assert type(parsed) is Qwen3Config
    for key, value in config.items():
        if key not in ("auto_map", "dtype", "transformers_version"):
            assert getattr(parsed, key) == value, key
    assert parsed.dtype == torch.bfloat16
    assert parsed.dflash_config["target_layer_ids"] == config["dflash_config"]["target_layer_ids"]


def test_every_key_that_an_engine_reads_is_in_the_file(config):
    rows = [line.split("|")[1] for line in DOCUMENTATION.splitlines() if line.startswith("| `")]
    optional = {"final_logit_softcapping", "input_embedding_scale", "template_mode"}
    for key in ("block_size", "num_target_layers", "rope_parameters", "layer_types", "attention_bias", "is_causal"):
        assert any(f"`{key}" in row for row in rows) and key in config, key
    for key in ("mask_token_id", "target_layer_ids", *optional):
        assert any(f"`dflash_config.{key}`" in row or f"`.{key}`" in row for row in rows), key
        assert key in optional or key in config["dflash_config"]
    written = set(config) - {"auto_map", "dflash_config"}
    ignored = {
        "attention_dropout",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "initializer_range",
        "max_window_layers",
        "tie_word_embeddings",
        "transformers_version",
        "use_cache",
        "use_sliding_window",
    }
    undocumented = {key for key in written - ignored if f"`{key}" not in DOCUMENTATION}
    assert not undocumented
