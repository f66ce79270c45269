"""DFlashConfig: key places, refusals, layer ids, round trips, published checkpoints and new drafters for targets."""

import copy
import json

import pytest
import torch
from transformers import (
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3Config,
    T5Config,
)

from dflash_hf import DFlashConfig, DFlashDraftModel, build_target_layer_ids, create_drafter_config

SHAPES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
}
DFLASH = {"mask_token_id": 97, "target_layer_ids": [1, 3, 5]}
FLAT = SHAPES | {"rope_theta": 1e4, "block_size": 8, "num_target_layers": 8, "dflash_config": DFLASH}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}


def make_config(without: tuple[str, ...] = (), **changes) -> DFlashConfig:
    """A valid config less the keys in `without` (top-level or in `dflash_config`), then with `changes`."""
    fields = {key: value for key, value in FLAT.items() if key not in without}
    if "dflash_config" in fields:
        fields["dflash_config"] = {key: value for key, value in DFLASH.items() if key not in without}
    return DFlashConfig(**copy.deepcopy(fields | changes))


# Key places


def test_flat_and_nested_places_give_the_same_config():
    flat = make_config(is_causal=False, **SLIDING)
    nested = make_config(
        without=("rope_theta", "block_size", "sliding_window"),
        layer_types=SLIDING["layer_types"],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        dflash_config=DFLASH | {"block_size": 8, "causal": False, "use_swa": True, "swa_window_size": 16},
    )
    assert nested.to_dict() == flat.to_dict()
    assert (nested.block_size, nested.is_causal, nested.sliding_window) == (8, False, 16)
    assert nested.rope_parameters == {"rope_type": "default", "rope_theta": 1e4}


def test_dflash_fields_at_the_top_level_move_into_dflash_config():
    settings = DFLASH | {"input_embedding_scale": 4.0, "output_multiplier": 0.5, "final_logit_softcapping": 30.0}
    config = make_config(without=("dflash_config", *DFLASH), **settings)
    assert config.dflash_config == settings
    assert config.mask_token_id == 97 and config.target_layer_ids == [1, 3, 5]
    assert (config.input_embedding_scale, config.output_multiplier, config.final_logit_softcapping) == (4.0, 0.5, 30.0)


def test_absent_scales_mean_no_scale():
    config = make_config()
    assert config.input_embedding_scale is None and config.final_logit_softcapping is None
    assert config.output_multiplier == 1.0


@pytest.mark.parametrize(
    ("top_level", "in_dflash_config"),
    [
        ({"block_size": 8}, {"block_size": 8}),
        ({"is_causal": True}, {"causal": True}),
        ({"mask_token_id": 97}, {}),
        ({"target_layer_ids": [1, 3, 5]}, {}),
        (SLIDING, {"swa_window_size": 16}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, {}),
        ({"rope_scaling": None}, {}),
    ],
)
def test_equal_values_in_both_places_are_accepted(top_level, in_dflash_config):
    both = make_config(**top_level, dflash_config=DFLASH | in_dflash_config)
    assert (
        both.to_dict()
        == make_config(
            **{k: v for k, v in top_level.items() if k in FLAT or k in SLIDING}, is_causal=top_level.get("is_causal")
        ).to_dict()
    )


@pytest.mark.parametrize(
    ("top_level", "in_dflash_config", "places"),
    [
        ({"block_size": 8}, {"block_size": 16}, ("`block_size` = 8", "`dflash_config.block_size` = 16")),
        ({"is_causal": False}, {"causal": True}, ("`is_causal` = False", "`dflash_config.causal` = True")),
        (SLIDING, {"swa_window_size": 32}, ("`sliding_window` = 16", "`dflash_config.swa_window_size` = 32")),
        ({"mask_token_id": 96}, {}, ("`mask_token_id` = 96", "`dflash_config.mask_token_id` = 97")),
        ({"target_layer_ids": [1, 3]}, {}, ("`target_layer_ids`", "`dflash_config.target_layer_ids`")),
        ({"output_multiplier": 2.0}, {"output_multiplier": 1.0}, ("`output_multiplier` = 2.0", "= 1.0")),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            {},
            ("`rope_theta` = 10000.0", "`rope_parameters.rope_theta` = 1000000.0"),
        ),
        (
            {
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
            },
            {},
            ("`rope_scaling`", "`rope_parameters`"),
        ),
    ],
)
def test_different_values_in_both_places_raise_and_name_both(top_level, in_dflash_config, places):
    with pytest.raises(ValueError) as error:
        make_config(**top_level, dflash_config=DFLASH | in_dflash_config)
    assert all(place in str(error.value) for place in places)


def test_old_flat_rope_scaling_equals_new_rope_parameters():
    new = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    old = make_config(rope_scaling={"type": "linear", "factor": 2.0})
    assert old.rope_parameters == new
    assert make_config(without=("rope_theta",), rope_parameters=new).rope_parameters == new
    both = make_config(rope_scaling={"rope_type": "linear", "factor": 2.0}, rope_parameters=new)
    assert both.rope_parameters == new


@pytest.mark.parametrize(
    "place", [{"partial_rotary_factor": 0.25}, {"rope_parameters": {"partial_rotary_factor": 0.25}}]
)
def test_partial_rotation_is_refused(place):
    with pytest.raises(ValueError, match="`partial_rotary_factor` is 0.25"):
        make_config(**place)


# Missing values


@pytest.mark.parametrize("key", [*SHAPES, *DFLASH, "block_size", "num_target_layers"])
def test_missing_value_raises_and_names_the_key(key):
    with pytest.raises(ValueError, match=f"lacks .*'{key}'"):
        make_config(without=(key,))


def test_missing_rope_theta_raises_and_names_both_places():
    for rope in (
        {},
        {"rope_parameters": {"rope_type": "default"}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
    ):
        with pytest.raises(ValueError, match="`rope_theta` or `rope_parameters.rope_theta`"):
            make_config(without=("rope_theta",), **rope)


def test_plain_qwen3_config_is_not_taken_for_a_drafter():
    with pytest.raises(ValueError, match="'mask_token_id', 'target_layer_ids', 'block_size', 'num_target_layers'"):
        DFlashConfig.from_dict(Qwen3Config().to_dict())


# Values out of range


@pytest.mark.parametrize("block_size", [0, 1])
def test_block_needs_room_for_one_proposal(block_size):
    with pytest.raises(ValueError, match=f"`block_size` is {block_size}"):
        make_config(block_size=block_size)
    assert make_config(block_size=2).block_size == 2


@pytest.mark.parametrize("mask_token_id", [-1, 100])
def test_mask_id_outside_the_embedding_is_refused(mask_token_id):
    with pytest.raises(ValueError, match=f"`mask_token_id` is {mask_token_id}, outside .*0 to 99"):
        make_config(dflash_config=DFLASH | {"mask_token_id": mask_token_id})


@pytest.mark.parametrize("mask_token_id", [0, 99])
def test_mask_id_may_be_the_first_or_last_row(mask_token_id):
    assert make_config(dflash_config=DFLASH | {"mask_token_id": mask_token_id}).mask_token_id == mask_token_id


@pytest.mark.parametrize("layer_ids", [[], [3, 1], [1, 1, 3]])
def test_unsorted_repeated_or_absent_layer_ids_are_refused(layer_ids):
    with pytest.raises(ValueError, match="`target_layer_ids` must be a sorted list of different layers") as error:
        make_config(dflash_config=DFLASH | {"target_layer_ids": layer_ids})
    assert str(layer_ids) in str(error.value)


@pytest.mark.parametrize(("layer_ids", "worst"), [([1, 7], 7), ([1, 8], 8), ([-1, 3], -1)])
def test_last_and_unknown_layers_cannot_be_tapped(layer_ids, worst):
    with pytest.raises(ValueError, match=f"asks for layer {worst}, but only layers 0 to 6 of the target's 8"):
        make_config(dflash_config=DFLASH | {"target_layer_ids": layer_ids})


def test_first_and_second_to_last_layer_can_be_tapped():
    assert make_config(dflash_config=DFLASH | {"target_layer_ids": [0, 6]}).target_layer_ids == [0, 6]


def test_key_value_heads_must_divide_the_heads():
    with pytest.raises(
        ValueError, match=r"`num_attention_heads` \(4\) must be a multiple of `num_key_value_heads` \(3\)"
    ):
        make_config(num_key_value_heads=3)


# Other methods


@pytest.mark.parametrize("key", ["conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_dflash_2_keys_are_refused_wherever_they_are(key, is_nested):
    changes = {"dflash_config": DFLASH | {key: 4}} if is_nested else {key: 4}
    with pytest.raises(ValueError, match=f"DFlash 2 drafter .*{key}"):
        make_config(**changes)


def test_dflash_2_architecture_is_refused():
    with pytest.raises(ValueError, match="DFlash 2 drafter .*DFlash2DraftModel"):
        make_config(architectures=["DFlash2DraftModel"])


@pytest.mark.parametrize("is_nested", [False, True])
def test_drafters_whose_slot_0_predicts_are_refused_every_time(is_nested):
    changes = {"dflash_config": DFLASH | {"sample_from_anchor": True}} if is_nested else {"sample_from_anchor": True}
    fields = FLAT | changes
    for _ in range(2):  # a retry with the same dict must not slip through
        with pytest.raises(ValueError, match="`sample_from_anchor` is true"):
            DFlashConfig(**fields)


def test_declared_anchor_convention_of_ours_is_accepted_and_not_written_again():
    config = make_config(sample_from_anchor=False, dflash_config=DFLASH | {"sample_from_anchor": False})
    assert config.to_dict() == make_config().to_dict()


def test_callers_dict_is_left_as_it_was():
    fields = FLAT | {"dflash_config": DFLASH | {"block_size": 8, "causal": False, "sample_from_anchor": False}}
    before = copy.deepcopy(fields)
    DFlashConfig(**fields)
    assert fields == before


# Layer types


def test_layers_are_full_and_bidirectional_if_nothing_is_said():
    config = make_config(sliding_window=16)
    assert config.layer_types == ["full_attention", "full_attention"]
    assert config.sliding_window is None and config.use_sliding_window is False
    assert [config.layer_is_causal(i) for i in range(2)] == [False, False]


def test_sliding_layers_are_causal_and_full_ones_are_not_unless_stated():
    config = make_config(**SLIDING)
    assert config.sliding_window == 16 and config.use_sliding_window is True
    assert [config.layer_is_causal(i) for i in range(2)] == [True, False]
    for rule in (True, False):
        stated = make_config(is_causal=rule, **SLIDING)
        assert [stated.layer_is_causal(i) for i in range(2)] == [rule, rule]


@pytest.mark.parametrize(
    ("layer_types", "message"),
    [
        (["full_attention"], "has 1 entries, unknown ones .*needs 2"),
        (["full_attention"] * 3, "has 3 entries"),
        (["full_attention", "linear_attention"], "has 2 entries, unknown ones .'linear_attention'."),
    ],
)
def test_layer_types_must_be_known_and_one_per_layer(layer_types, message):
    with pytest.raises(ValueError, match=f"`layer_types` {message}"):
        make_config(layer_types=layer_types)


@pytest.mark.parametrize("window", [None, 0, -4])
def test_sliding_layers_need_a_window(window):
    with pytest.raises(ValueError, match=f"`sliding_window` is {window}"):
        make_config(layer_types=SLIDING["layer_types"], sliding_window=window)


def test_window_without_layer_types_is_not_guessed():
    with pytest.raises(ValueError, match="`use_sliding_window` is true but `layer_types` is missing"):
        make_config(use_sliding_window=True, sliding_window=16)


@pytest.mark.parametrize("layer_types", [None, ["full_attention", "full_attention"]])
@pytest.mark.parametrize("causal", [None, False, True])
def test_use_swa_without_sliding_layers_means_that_all_slide_and_none_is_causal_unless_stated(layer_types, causal):
    stated = {} if causal is None else {"causal": causal}
    config = make_config(
        layer_types=layer_types,
        sliding_window=16,
        dflash_config=DFLASH | {"use_swa": True, "swa_window_size": 16} | stated,
    )
    assert config.layer_types == ["sliding_attention"] * 2 and config.sliding_window == 16
    assert config.is_causal is bool(causal)
    assert config.dflash_config == DFLASH


# Round trips


@pytest.mark.parametrize(
    "changes",
    [
        {},
        SLIDING,
        SLIDING | {"is_causal": False, "attention_bias": True, "rms_norm_eps": 1e-5},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"dflash_config": DFLASH | {"input_embedding_scale": 4.0, "final_logit_softcapping": 30.0}},
    ],
)
def test_saved_config_reads_back_equal(tmp_path, changes):
    config = make_config(**changes)
    config.save_pretrained(tmp_path)
    read = DFlashConfig.from_pretrained(tmp_path)
    read_dict, saved_dict = read.to_dict(), config.to_dict()
    for dictionary in (read_dict, saved_dict):
        for bookkeeping in ("_name_or_path", "auto_map", "transformers_version"):
            dictionary.pop(bookkeeping, None)
    assert read_dict == saved_dict
    assert [read.layer_is_causal(i) for i in range(2)] == [config.layer_is_causal(i) for i in range(2)]


def test_saved_json_has_the_layout_that_engines_read(tmp_path):
    make_config(
        without=("block_size", "sliding_window", "rope_theta"),
        layer_types=SLIDING["layer_types"],
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        dflash_config=DFLASH | {"block_size": 8, "causal": False, "use_swa": True, "swa_window_size": 16},
    ).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    expected = {
        **SHAPES,
        "model_type": "qwen3",
        "architectures": ["DFlashDraftModel"],
        "block_size": 8,
        "num_target_layers": 8,
        "is_causal": False,
        "dflash_config": DFLASH | {"block_size": 8},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 16,
        "use_sliding_window": True,
        "hidden_act": "silu",
        "attention_bias": False,
    }
    assert {key: written.get(key) for key in expected} == expected
    second_places = {"rope_theta", "rope_scaling", "causal", "swa_window_size", "use_swa", *DFLASH}
    assert not second_places & written.keys()


def test_config_saved_with_the_model_points_to_its_code(tmp_path):
    DFlashDraftModel(make_config()).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["auto_map"] == {
        "AutoConfig": "configuration_dflash.DFlashConfig",
        "AutoModel": "modeling_dflash.DFlashDraftModel",
    }
    assert written["architectures"] == ["DFlashDraftModel"] and written["model_type"] == "qwen3"


def write_json(folder, **changes) -> None:
    """A config.json as published, with the old key places."""
    fields = SHAPES | {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "block_size": 8,
        "num_target_layers": 8,
        "dflash_config": DFLASH,
        "layer_types": ["full_attention", "full_attention"],
        "max_window_layers": 2,
        "sliding_window": None,
        "use_sliding_window": False,
        "rope_theta": 1e7,
        "rope_scaling": None,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(fields | changes))


@pytest.mark.parametrize("model_type", ["qwen3", "gpt_oss"])
def test_published_file_reads_and_is_written_in_our_layout(tmp_path, model_type):
    write_json(tmp_path, model_type=model_type)
    config = DFlashConfig.from_pretrained(tmp_path)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e7}
    assert (config.block_size, config.target_layer_ids, config.dtype) == (8, [1, 3, 5], torch.bfloat16)
    DFlashDraftModel(config).save_pretrained(tmp_path / "again")
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert written["model_type"] == "qwen3" and "rope_theta" not in written
    assert written["auto_map"]["AutoModel"] == "modeling_dflash.DFlashDraftModel"


# Tapped layers

PUBLISHED_LAYER_IDS = [
    (36, [1, 9, 17, 25, 33]),
    (48, [1, 12, 23, 34, 45]),
    (32, [1, 8, 15, 22, 29]),
    (24, [1, 6, 11, 16, 21]),
    (32, [1, 5, 9, 13, 17, 21, 25, 29]),
    (64, [1, 16, 31, 46, 61]),
    (64, [1, 10, 18, 27, 35, 44, 52, 61]),
    (40, [1, 10, 19, 28, 37]),
    (40, [1, 6, 11, 16, 22, 27, 32, 37]),
    (48, [1, 7, 14, 20, 26, 32, 39, 45]),
    (61, [1, 12, 24, 35, 47, 58]),
    (60, [1, 12, 23, 35, 46, 57]),
    (30, [1, 6, 11, 17, 22, 27]),
]


@pytest.mark.parametrize(("num_target_layers", "layer_ids"), PUBLISHED_LAYER_IDS)
def test_rule_gives_the_published_layer_ids(num_target_layers, layer_ids):
    assert build_target_layer_ids(num_target_layers, len(layer_ids)) == layer_ids


def test_qwen3_coder_next_was_published_with_other_layers_than_the_rules():
    published = [3, 11, 23, 35, 43]
    assert build_target_layer_ids(48, 5) == [1, 12, 23, 34, 45] != published
    assert make_config(num_target_layers=48, dflash_config=DFLASH | {"target_layer_ids": published})


def test_one_feature_taps_the_middle():
    assert build_target_layer_ids(36, 1) == [18]


def test_small_targets_give_valid_layers_or_an_error():
    given = {}
    for num_target_layers in range(1, 9):
        for num_features in range(1, 7):
            try:
                layer_ids = build_target_layer_ids(num_target_layers, num_features)
            except ValueError as error:
                assert f"{num_target_layers} layers has no {num_features} different" in str(error)
                continue
            assert layer_ids == sorted(set(layer_ids)) and len(layer_ids) == num_features
            assert 0 <= layer_ids[0] and layer_ids[-1] < num_target_layers - 1
            given[num_target_layers] = num_features
    # The most features that a target of this depth gives.
    assert given == {3: 1, 4: 1, 5: 2, 6: 3, 7: 4, 8: 5}


@pytest.mark.parametrize("num_features", [0, -1])
def test_at_least_one_layer_is_tapped(num_features):
    with pytest.raises(ValueError, match=f"`num_features` is {num_features}"):
        build_target_layer_ids(36, num_features)


# Published checkpoints


def published(layers, width, mlp, heads, key_heads, num_target_layers, layer_ids, vocab, mask, block=16, **more):
    fields = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": 128,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "block_size": block,
        "num_target_layers": num_target_layers,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": layer_ids},
    }
    return DFlashConfig(**(fields | more))


FOUR_SLIDE = {"layer_types": ["sliding_attention"] * 4 + ["full_attention"], "sliding_window": 2048}
PUBLISHED_CHECKPOINTS = {
    "Qwen3-4B-DFlash-b16": (
        (5, 2560, 9728, 32, 8, 36, [1, 9, 17, 25, 33], 151936, 151669),
        {},
        537_427_200,
    ),
    "Qwen3-8B-DFlash-b16": (
        (5, 4096, 12288, 32, 8, 36, [1, 9, 17, 25, 33], 151936, 151669),
        {},
        1_048_626_432,
    ),
    "Qwen3-Coder-30B-A3B-DFlash": (
        (8, 2048, 6144, 32, 4, 48, [1, 12, 23, 34, 45], 151936, 151669),
        {"rope_theta": 1e7},
        473_995_264,
    ),
    "Kimi-K2.5-DFlash": (
        (6, 7168, 18432, 64, 8, 61, [1, 12, 24, 35, 47, 58], 163840, 163838, 8),
        {},
        3_479_277_056,
    ),
    "gemma-4-31B-it-DFlash": (
        (5, 5376, 10752, 64, 8, 60, [1, 12, 23, 35, 46, 57], 262144, 4),
        FOUR_SLIDE | {"final_logit_softcapping": 30.0},
        1_535_967_488,
    ),
}
GPT_OSS_20B = (
    (8, 2880, 7680, 64, 8, 24, [1, 6, 11, 16, 21], 201088, 200000, 8),
    {"head_dim": 64, "attention_bias": True, "rope_theta": 150000.0},
)


def count_parameters(config: DFlashConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in DFlashDraftModel(config).parameters())


@pytest.mark.parametrize("name", PUBLISHED_CHECKPOINTS)
def test_published_configs_build_with_the_published_number_of_parameters(name):
    values, more, num_parameters = PUBLISHED_CHECKPOINTS[name]
    assert count_parameters(published(*values, **more)) == num_parameters


def test_gpt_oss_config_builds_with_the_published_file_size():
    # Only the size of the file, 1.46 GiB in bfloat16, is published.
    num_parameters = count_parameters(published(*GPT_OSS_20B[0], **GPT_OSS_20B[1]))
    assert round(2 * num_parameters / 2**30, 2) == 1.46
    without_bias = count_parameters(published(*GPT_OSS_20B[0], **(GPT_OSS_20B[1] | {"attention_bias": False})))
    assert num_parameters - without_bias == 8 * (64 * 64 + 2 * 8 * 64 + 2880)


# New drafters for targets


def llama_config(**overrides) -> LlamaConfig:
    fields = SHAPES | {"num_hidden_layers": 12, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    return LlamaConfig(**(fields | {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1} | overrides))


def test_llama_drafter_takes_widths_heads_and_theta():
    config = create_drafter_config(llama_config(rms_norm_eps=1e-5), mask_token_id=97)
    for key in set(SHAPES) - {"num_hidden_layers", "rms_norm_eps"}:
        assert getattr(config, key) == SHAPES[key]
    assert config.rms_norm_eps == 1e-5
    assert (config.num_hidden_layers, config.block_size, config.num_target_layers) == (5, 16, 12)
    assert config.target_layer_ids == [1, 3, 5, 7, 9]
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (0, 2, 1)
    assert config.dflash_config == {"mask_token_id": 97, "target_layer_ids": [1, 3, 5, 7, 9]}


def test_qwen3_drafter_equals_the_published_one():
    target = Qwen3Config(
        vocab_size=151936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    ours = create_drafter_config(target, mask_token_id=151669)
    values, more, _ = PUBLISHED_CHECKPOINTS["Qwen3-4B-DFlash-b16"]
    assert ours.to_dict() == published(*values, **more).to_dict()


def test_drafter_inherits_neither_rope_scaling_nor_window_nor_quantisation():
    target = Qwen3Config(
        **SHAPES | {"num_hidden_layers": 12},
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        use_sliding_window=True,
        sliding_window=64,
        max_window_layers=6,
        quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True},
    )
    config = create_drafter_config(target, mask_token_id=97)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    assert config.layer_types == ["full_attention"] * 5 and config.sliding_window is None
    assert getattr(config, "quantization_config", None) is None
    assert "quantization_config" not in config.to_dict()


def gemma_config() -> Gemma3TextConfig:
    rope = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    shapes = SHAPES | {"num_hidden_layers": 12, "hidden_size": 64, "head_dim": 16}
    return Gemma3TextConfig(**shapes, rope_parameters=rope, sliding_window=8, final_logit_softcapping=30.0)


def test_target_with_several_thetas_asks_for_one():
    with pytest.raises(ValueError, match=r"gemma3_text\) gives no single `rope_theta` .*Pass `rope_theta=...`"):
        create_drafter_config(gemma_config(), mask_token_id=97)


def test_gemma_drafter_states_embedding_scale_and_soft_cap():
    config = create_drafter_config(gemma_config(), mask_token_id=97, rope_theta=1e6)
    assert config.input_embedding_scale == 8.0 and config.final_logit_softcapping == 30.0
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    assert config.layer_types == ["full_attention"] * 5 and config.sliding_window is None


def test_gpt2_drafter_asks_for_what_gpt2_has_not():
    target = GPT2Config(vocab_size=100, n_embd=32, n_head=4, n_layer=12, bos_token_id=0, eos_token_id=0)
    with pytest.raises(ValueError, match="Pass `intermediate_size=...`"):
        create_drafter_config(target, mask_token_id=97)
    with pytest.raises(ValueError, match="Pass `rope_theta=...`"):
        create_drafter_config(target, mask_token_id=97, intermediate_size=64)
    config = create_drafter_config(target, mask_token_id=97, intermediate_size=64, rope_theta=1e4)
    assert (config.hidden_size, config.num_key_value_heads, config.head_dim) == (32, 4, 8)
    assert config.max_position_embeddings == 1024


def test_target_whose_layers_differ_asks_for_one_value():
    class MixedConfig(LlamaConfig):
        def __getattribute__(self, name):
            if name == "head_dim" and super().__getattribute__("__dict__").get("is_mixed"):
                raise RuntimeError("'head_dim' may vary across layers")  # as Transformers says it of Gemma 4
            return super().__getattribute__(name)

    target = MixedConfig(**llama_config().to_dict())
    assert create_drafter_config(target, mask_token_id=97).head_dim == 8
    target.is_mixed = True
    with pytest.raises(ValueError, match="gives no single `head_dim` for a drafter. Pass `head_dim=...`"):
        create_drafter_config(target, mask_token_id=97)
    assert create_drafter_config(target, mask_token_id=97, head_dim=16).head_dim == 16


def test_drafter_of_a_vision_language_target_uses_the_text_part_without_mrope():
    text = SHAPES | {"num_hidden_layers": 12, "num_attention_heads": 4}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}
    target = Qwen2_5_VLConfig(
        text_config=text | {"rope_parameters": rope},
        vision_config={"depth": 3, "hidden_size": 48, "num_heads": 2, "out_hidden_size": 32},
    )
    config = create_drafter_config(target, mask_token_id=97)
    assert (config.vocab_size, config.hidden_size, config.num_target_layers) == (100, 32, 12)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    assert "mrope" not in json.dumps(config.to_dict()) and "vision_config" not in config.to_dict()


@pytest.mark.parametrize(("mask_token_id", "name"), [(0, "bos_token_id"), (1, "pad_token_id"), (2, "eos_token_id")])
def test_tokens_that_text_contains_cannot_be_the_mask(mask_token_id, name):
    with pytest.raises(ValueError, match=f"`mask_token_id` {mask_token_id} is the target's `{name}`"):
        create_drafter_config(llama_config(), mask_token_id=mask_token_id)


def test_every_end_token_is_refused_as_mask_also_of_the_outer_config():
    with pytest.raises(ValueError, match="is the target's `eos_token_id`"):
        create_drafter_config(llama_config(eos_token_id=[2, 97]), mask_token_id=97)
    outer = Qwen2_5_VLConfig(
        text_config=SHAPES | {"num_hidden_layers": 12, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        vision_config={"depth": 3, "hidden_size": 48, "num_heads": 2, "out_hidden_size": 32},
    )
    outer.eos_token_id = 97
    with pytest.raises(ValueError, match="is the target's `eos_token_id`"):
        create_drafter_config(outer, mask_token_id=97)


def test_mask_outside_the_targets_table_is_refused():
    with pytest.raises(ValueError, match="`mask_token_id` is 100, outside the target's embedding"):
        create_drafter_config(llama_config(), mask_token_id=100)


def test_overrides_win_over_the_target():
    config = create_drafter_config(
        llama_config(),
        num_hidden_layers=2,
        block_size=4,
        mask_token_id=97,
        target_layer_ids=[0, 4],
        intermediate_size=48,
        rope_theta=7.0,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=16,
        is_causal=False,
    )
    assert config.target_layer_ids == [0, 4] and config.intermediate_size == 48
    assert config.rope_parameters["rope_theta"] == 7.0 and config.block_size == 4
    assert config.layer_types == ["sliding_attention", "full_attention"] and config.is_causal is False
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 9.0}
    assert create_drafter_config(llama_config(), mask_token_id=97, rope_parameters=scaled).rope_parameters == scaled


def test_target_too_shallow_for_the_features_is_refused():
    with pytest.raises(ValueError, match="6 layers has no 5 different layers to tap"):
        create_drafter_config(llama_config(num_hidden_layers=6), mask_token_id=97)


def test_target_config_is_left_as_it_was():
    target: PreTrainedConfig = llama_config()
    before = copy.deepcopy(target.to_dict())
    create_drafter_config(target, mask_token_id=97, target_layer_ids=[0, 4])
    assert target.to_dict() == before


def test_encoder_decoder_target_gets_no_config():
    with pytest.raises(ValueError, match="'t5' target is an encoder-decoder"):
        create_drafter_config(T5Config(), mask_token_id=5)
