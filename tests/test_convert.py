"""Checkpoints in other layouts: what reads them, and round trips bit by bit."""

import inspect
import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import make_tiny_target
from safetensors.torch import load_file, save_file
from test_modeling_dflash import RULES, SLIDING, WINDOW, make_config, make_drafter, make_inputs, run
from transformers import AutoModel
from transformers.cache_utils import DFlashCache

from dflash_hf import DFlashConfig, DFlashDraftModel
from dflash_hf.hub_configs import convert_checkpoint, hub
from dflash_hf.hub_configs.convert import muse_fields, speculators_fields

# Our tensors are z-lab's and speculators'; two prefixes are different in Transformers' Muse Glimmer assistant.
MUSE_NAMES = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
OUR_CODE = {
    "AutoConfig": "configuration_dflash.DFlashConfig",
    "AutoModel": "modeling_dflash.DFlashDraftModel",
}
# What the file does not say.
UNSAID = {"num_target_layers": 8, "vocab_size": 100}
# Keys of the files that speculators 0.9 writes, and the ones of its `transformer_layer_config` that matter here.
SPECULATORS_FIELDS = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"": "config.DFlashSpeculatorConfig"},
    "aux_hidden_state_layer_ids": [2, 4, 6],
    "block_size": 8,
    "draft_vocab_size": 100,
    "dtype": "float32",
    "mask_token_id": 97,
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
    "speculators_config": {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": None},
    },
    "speculators_model_type": "dflash",
    "speculators_version": "0.9.0",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": {
        "attention_bias": False,
        "head_dim": 8,
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 48,
        "layer_types": ["full_attention", "full_attention"],
        "max_position_embeddings": 512,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
        "vocab_size": 100,
    },
    "transformers_version": "5.19.0",
}
MUSE_RULES = {
    "full": {"layer_types": ["full_attention"] * 2},
    "sliding": {"layer_types": ["sliding_attention"] * 2, "sliding_window": WINDOW + 1, "is_causal": False},
    "mixed": SLIDING | {"sliding_window": WINDOW + 1, "is_causal": False},
}


def write_folder(folder: Path, fields: dict, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def zlab_folder(folder: Path, drafter: DFlashDraftModel) -> Path:
    """As first published: old key places, a key of the target, and remote code that the folder does not contain."""
    fields = drafter.config.to_dict()
    fields.update(fields.pop("rope_parameters"), rope_scaling=None, initial_context_length=4096, model_type="gpt_oss")
    code = {"AutoModel": "dflash.DFlashDraftModel", "AutoModelForCausalLM": "z-lab/other--dflash.DFlashDraftModel"}
    fields |= {"auto_map": code, "transformers_version": "4.57.1"}
    return write_folder(folder, {k: v for k, v in fields.items() if k != "rope_type"}, drafter.state_dict())


def muse_folder(folder: Path, drafter: DFlashDraftModel) -> Path:
    """As Transformers writes it: neither the target's depth nor its vocabulary is said."""
    fields = {key: value for key, value in muse_fields(drafter.config).items() if key not in UNSAID}
    fields["dtype"] = "float32"
    return write_folder(folder, fields, {MUSE_NAMES.get(k, k): v for k, v in drafter.state_dict().items()})


def speculators_folder(folder: Path, drafter: DFlashDraftModel, copies: bool = True, **changes) -> Path:
    layer = SPECULATORS_FIELDS["transformer_layer_config"] | {
        key: getattr(drafter.config, key) for key in ("layer_types", "sliding_window", "use_sliding_window")
    }
    fields = SPECULATORS_FIELDS | {"transformer_layer_config": layer} | changes
    target_copies = {"embed_tokens.weight": torch.randn(100, 32), "lm_head.weight": torch.randn(100, 32)}
    return write_folder(folder, fields, drafter.state_dict() | (target_copies if copies else {}))


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, tuple]:
    return {name: (tensor.dtype, tensor.tolist()) for name, tensor in tensors.items()}


def said(config: DFlashConfig) -> dict:
    """What a config says of the drafter, without bookkeeping."""
    dropped = ("_name_or_path", "architectures", "auto_map", "dtype", "transformers_version", "max_window_layers")
    return {key: value for key, value in config.to_dict().items() if key not in dropped}


# Loading


def test_old_zlab_file_with_keys_and_code_of_others_is_read(tmp_path):
    drafter = make_drafter(attention_bias=True)
    loaded = DFlashDraftModel.from_pretrained(zlab_folder(tmp_path / "d", drafter))
    assert bits(loaded.state_dict()) == bits(drafter.state_dict())
    assert said(loaded.config) == said(drafter.config)
    assert not hasattr(loaded.config, "auto_map")
    loaded.save_pretrained(tmp_path / "again")
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert written["auto_map"] == OUR_CODE and "initial_context_length" not in written


@pytest.mark.parametrize("rule", MUSE_RULES)
def test_muse_file_is_read_with_its_inclusive_window_in_both_directions(tmp_path, rule):
    drafter = make_drafter(**MUSE_RULES[rule])
    folder = muse_folder(tmp_path / "d", drafter)
    written = json.loads((folder / "config.json").read_text())
    assert written["sliding_window"] == (2048 if rule == "full" else WINDOW)
    loaded = DFlashDraftModel.from_pretrained(folder, **UNSAID)
    assert torch.equal(run(loaded, *make_inputs(13)), run(drafter, *make_inputs(13)))
    assert loaded.config.input_embedding_scale == 1.0  # the target's norm on its embedding is not for the drafter
    loaded.save_pretrained(tmp_path / "again")
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == drafter.state_dict().keys()


@pytest.mark.parametrize("rule", MUSE_RULES)
@pytest.mark.parametrize("num_context", [3, 21])
def test_muse_folder_gives_the_hidden_states_of_transformers(tmp_path, rule, num_context):
    from transformers import MuseGlimmerAssistantModel

    make_drafter(**MUSE_RULES[rule]).save_pretrained(tmp_path / "ours")
    folder = convert_checkpoint(tmp_path / "ours", tmp_path / "muse", layout="muse")
    theirs, info = MuseGlimmerAssistantModel.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    noise_embeds, features = make_inputs(num_context)
    cache = DFlashCache(config=theirs.config)
    cache.activate_past_recording()
    cache.set_previous_accepted_tokens(num_context)
    key = "cache" if "cache" in inspect.signature(theirs.forward).parameters else "past_key_values"  # its older name
    mask = torch.ones(1, num_context + noise_embeds.shape[1], dtype=torch.long)
    with torch.no_grad():
        expected = theirs(noise_embeds, features, attention_mask=mask, **{key: cache}).last_hidden_state
    ours = DFlashDraftModel.from_pretrained(folder)
    torch.testing.assert_close(run(ours, noise_embeds, features), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("rule", ["full", "sliding_causal", "sliding_bidirectional"])
@pytest.mark.parametrize("copies", [False, True])
def test_speculators_file_is_read_without_its_copies_of_the_target(tmp_path, caplog, rule, copies):
    drafter = make_drafter(**RULES[rule])
    non_causal = {"sliding_window_non_causal": rule == "sliding_bidirectional"}
    folder = speculators_folder(tmp_path / "d", drafter, copies, **non_causal)
    loaded = DFlashDraftModel.from_pretrained(folder, num_target_layers=8)
    assert loaded.config.target_layer_ids == [1, 3, 5]
    assert torch.equal(run(loaded, *make_inputs(13)), run(drafter, *make_inputs(13)))
    assert not caplog.records


def test_depth_comes_from_the_verifier_that_a_speculators_file_names(tmp_path):
    make_tiny_target().config.save_pretrained(tmp_path / "target")
    verifier = {"verifier": {"architectures": [], "name_or_path": str(tmp_path / "target")}}
    folder = speculators_folder(tmp_path / "d", make_drafter(), speculators_config=verifier)
    assert DFlashDraftModel.from_pretrained(folder).config.num_target_layers == 8
    shutil.rmtree(tmp_path / "target")
    with pytest.raises(ValueError, match=r"lacks \['num_target_layers'\].*from_pretrained\(.*num_target_layers="):
        DFlashDraftModel.from_pretrained(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_vocab_size": 50}, "`draft_vocab_size` is 50; only drafters where it is 100"),
        ({"target_hidden_size": 64}, "`target_hidden_size` is 64; only drafters where it is 32"),
        ({"sample_from_anchor": True}, "`sample_from_anchor` is true"),
        ({"speculators_model_type": "eagle3"}, "`speculators_model_type` is 'eagle3'"),
        ({"mask_token_id": None}, r"in the layout of speculators, lacks \['mask_token_id'\]"),
        ({"aux_hidden_state_layer_ids": [0, 4]}, "asks for layer -1"),
        ({"aux_hidden_state_layer_ids": [2, 8]}, "asks for layer 7"),
    ],
)
def test_speculators_file_that_works_otherwise_is_refused(tmp_path, changes, message):
    folder = speculators_folder(tmp_path / "d", make_drafter(), **changes)
    with pytest.raises(ValueError, match=message):
        DFlashDraftModel.from_pretrained(folder, num_target_layers=8)


def modelopt_fields(**nested) -> dict:
    """As NVIDIA Model-Optimizer exports it, with a sliding window: every layer is called full, but `use_swa` is on."""
    fields = make_config().to_dict() | {
        "sliding_window": WINDOW,
        "torch_dtype": "float32",
        "attention_sink_bias": False,
    }
    fields["dflash_config"] |= {"causal": False, "use_swa": True, "swa_window_size": WINDOW} | nested
    return fields


def test_modelopt_export_slides_in_every_layer(tmp_path):
    drafter = make_drafter(layer_types=["sliding_attention"] * 2, sliding_window=WINDOW, is_causal=False)
    loaded = DFlashDraftModel.from_pretrained(write_folder(tmp_path / "d", modelopt_fields(), drafter.state_dict()))
    assert torch.equal(run(loaded, *make_inputs(13)), run(drafter, *make_inputs(13)))


def test_specforge_export_says_with_more_keys_that_it_is_plain(tmp_path):
    drafter = make_drafter(**SLIDING)
    fields = drafter.config.to_dict()
    fields["dflash_config"] |= {"projector_type": None, "pure_draft_prefix_len": 0, "shift_label": False}
    loaded = DFlashDraftModel.from_pretrained(write_folder(tmp_path / "d", fields, drafter.state_dict()))
    assert said(loaded.config) == said(drafter.config)


@pytest.mark.parametrize(
    ("place", "key", "value"),
    [
        ("dflash_config", "projector_type", "domino"),
        ("dflash_config", "shift_label", True),
        ("dflash_config", "attention_sink_bias", True),
        (None, "add_swa_attention_sink_bias", True),
        (None, "draft_vocab_size", 50),
        (None, "markov_rank", 256),
    ],
)
def test_exports_of_other_methods_are_refused_by_key_and_value(place, key, value):
    fields = make_config().to_dict()
    (fields[place] if place else fields)[key] = value
    with pytest.raises(ValueError, match=f"`{key}` is {value!r}; only drafters where it is"):
        DFlashConfig(**fields)


def test_other_architectures_are_refused_by_name():
    with pytest.raises(ValueError, match=r"`architectures` names \['Qwen3DSparkModel'\]"):
        make_config(architectures=["Qwen3DSparkModel"])


def test_unknown_keys_are_refused_in_dflash_config_and_left_out_elsewhere_with_a_warning(caplog):
    with pytest.raises(ValueError, match=r"`dflash_config` has keys that are unknown here: \['curvature'\]"):
        make_config(dflash_config={"mask_token_id": 97, "target_layer_ids": [1, 3, 5], "curvature": 2})
    assert not hasattr(make_config(curvature=2, quantization_config={"a": 1}, temperature=0.5), "curvature")
    (record,) = caplog.records
    assert "left out: ['curvature']" in record.getMessage()


@pytest.mark.parametrize("layout", ["z-lab", "muse"])
def test_shards_are_read_in_every_layout(tmp_path, layout):
    drafter = make_drafter(**MUSE_RULES["mixed"])
    folder = {"z-lab": zlab_folder, "muse": muse_folder}[layout](tmp_path / "d", drafter)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for shard, part in shards.items():
        save_file({name: tensors[name] for name in part}, folder / shard, metadata={"format": "pt"})
    weight_map = {name: shard for shard, part in shards.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    loaded = DFlashDraftModel.from_pretrained(folder, **UNSAID)
    assert bits(loaded.state_dict()) == bits(drafter.state_dict())
    convert_checkpoint(folder, tmp_path / "ours", **UNSAID)
    assert bits(load_file(tmp_path / "ours" / "model.safetensors")) == bits(drafter.state_dict())


def test_hub_repository_is_read_at_the_revision_asked_for(tmp_path):
    repository = tmp_path / "models--org--drafter"
    drafters = {"a" * 40: make_drafter(**MUSE_RULES["full"]), "b" * 40: make_drafter(**MUSE_RULES["mixed"])}
    for commit, drafter in drafters.items():
        muse_folder(repository / "snapshots" / commit, drafter)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    for revision, commit in (("main", "a" * 40), ("b" * 40, "b" * 40)):
        loaded = DFlashDraftModel.from_pretrained(
            "org/drafter", revision=revision, cache_dir=tmp_path, local_files_only=True, **UNSAID
        )
        assert torch.equal(run(loaded, *make_inputs(13)), run(drafters[commit], *make_inputs(13)))


def test_only_safetensors_are_read(tmp_path):
    drafter = make_drafter()
    drafter.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(drafter.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        DFlashDraftModel.from_pretrained(tmp_path)


def test_values_that_the_file_says_cannot_be_passed_otherwise(tmp_path):
    make_drafter().save_pretrained(tmp_path)
    assert DFlashDraftModel.from_pretrained(tmp_path, num_target_layers=8).config.num_target_layers == 8
    with pytest.raises(ValueError, match=r"`num_target_layers of the file` = 8 and `num_target_layers=...` = 9"):
        DFlashDraftModel.from_pretrained(tmp_path, num_target_layers=9)


# Converting


@pytest.mark.parametrize("rule", ["full", "sliding_bidirectional"])
@pytest.mark.parametrize("layout", ["z-lab", "speculators", "muse"])
def test_ours_to_another_layout_and_back_keeps_every_bit(tmp_path, layout, rule):
    drafter = make_drafter(**RULES[rule])
    with torch.no_grad():  # dtypes may differ in one file
        drafter.layers[0].mlp.to(torch.bfloat16)
    drafter.save_pretrained(tmp_path / "ours")
    convert_checkpoint(tmp_path / "ours", tmp_path / "theirs", layout=layout)
    convert_checkpoint(tmp_path / "theirs", tmp_path / "back")
    theirs, back = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "back"))
    assert theirs.keys() == {MUSE_NAMES.get(k, k) if layout == "muse" else k for k in drafter.state_dict()}
    assert bits(back) == bits(drafter.state_dict())
    read, expected = (said(DFlashConfig.from_pretrained(tmp_path / name)) for name in ("back", "ours"))
    if layout == "muse":
        expected["is_causal"] = False
        expected["dflash_config"]["input_embedding_scale"] = 1.0
        expected["initializer_range"] = 0.02  # has no key there, and no meaning for trained weights
    assert read == expected
    files = {path.name for path in (tmp_path / "theirs").iterdir()}
    assert files == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("write", [zlab_folder, speculators_folder, muse_folder])
def test_another_layout_to_ours_and_back_keeps_every_bit(tmp_path, write):
    rule = RULES["full"] if write is zlab_folder else RULES["sliding_bidirectional"]
    drafter = make_drafter(**rule)
    changes = {"copies": False, "sliding_window_non_causal": True} if write is speculators_folder else {}
    source = write(tmp_path / "source", drafter, **changes)
    values = {} if write is zlab_folder else UNSAID
    convert_checkpoint(source, tmp_path / "ours", **values)
    layout = {zlab_folder: "z-lab", speculators_folder: "speculators", muse_folder: "muse"}[write]
    convert_checkpoint(tmp_path / "ours", tmp_path / "back", layout=layout)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "back"))
    assert bits(after) == bits(before)
    loaded = [DFlashDraftModel.from_pretrained(tmp_path / n, **values) for n in ("source", "ours", "back")]
    outputs = [run(drafter, *make_inputs(21)) for drafter in loaded]
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(outputs[2], outputs[0], atol=1e-6, rtol=0)
    if write is not zlab_folder:  # whose key places are others now
        old, new = (json.loads((tmp_path / n / "config.json").read_text()) for n in ("source", "back"))
        layers = [fields.pop("transformer_layer_config", {}) for fields in (old, new)]
        bookkeeping = {"auto_map", "mlp_bias", "model_type", "speculators_config", "speculators_version"}
        bookkeeping |= {"target_hidden_size", "transformers_version"}
        for before, after in ((old, new), (layers[0], layers[1])):
            kept = before.keys() - bookkeeping
            assert {key: after.get(key) for key in kept} == {key: before[key] for key in kept}


def test_converted_folder_carries_our_code_and_the_sources_card(tmp_path):
    source = zlab_folder(tmp_path / "source", make_drafter())
    (source / "README.md").write_text("A card.")
    (source / "LICENSE").write_text("MIT")
    (source / "dflash.py").write_text("raise SystemExit")
    ours = convert_checkpoint(source, tmp_path / "ours")
    names = {path.name for path in ours.iterdir()}
    assert names >= {"modeling_dflash.py", "layouts_dflash.py", "custom_generate", "generation_config.json"}
    assert "dflash.py" not in names
    assert json.loads((ours / "config.json").read_text())["auto_map"] == OUR_CODE
    assert (ours / "README.md").read_text() == "A card." and (ours / "LICENSE").read_text() == "MIT"
    loaded = AutoModel.from_pretrained(ours, trust_remote_code=True)
    assert torch.equal(run(loaded, *make_inputs(5)), run(make_drafter(), *make_inputs(5)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "source"]


def test_target_says_what_the_file_does_not(tmp_path):
    make_tiny_target().config.save_pretrained(tmp_path / "target")
    source = muse_folder(tmp_path / "source", make_drafter(**MUSE_RULES["mixed"]))
    ours = convert_checkpoint(source, tmp_path / "ours", target=str(tmp_path / "target"))
    assert DFlashConfig.from_pretrained(ours).num_target_layers == 8
    theirs = convert_checkpoint(source, tmp_path / "s", layout="muse", target=str(tmp_path / "target"))
    assert DFlashDraftModel.from_pretrained(theirs).config.vocab_size == 100


def test_target_is_named_as_verifier(tmp_path):
    make_tiny_target().config.save_pretrained(tmp_path / "target")
    make_drafter().save_pretrained(tmp_path / "source")
    target = str(tmp_path / "target")
    convert_checkpoint(tmp_path / "source", tmp_path / "out", layout="speculators", target=target)
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert fields["speculators_config"]["verifier"]["name_or_path"] == target
    assert fields["aux_hidden_state_layer_ids"] == [2, 4, 6]
    assert fields["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7


@pytest.mark.parametrize(
    ("layout", "changes", "trait"),
    [
        ("muse", SLIDING, r"'causal_layers': \[0\]"),
        ("muse", {"attention_bias": True}, "attention_bias"),
        ("muse", {"input_embedding_scale": 4.0}, "'input_embedding_scale': 4.0"),
        ("muse", {"final_logit_softcapping": 30.0}, "'final_logit_softcapping': 30.0"),
        ("speculators", {"is_causal": True}, "causal_full_attention"),
        ("speculators", {"input_embedding_scale": 4.0}, "'input_embedding_scale': 4.0"),
        ("speculators", {"output_multiplier": 0.5}, "'output_multiplier': 0.5"),
    ],
)
def test_what_a_layout_cannot_say_is_refused_and_nothing_is_written(tmp_path, layout, changes, trait):
    make_drafter(**changes).save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match=f"layout of {layout} cannot say.*{trait}"):
        convert_checkpoint(tmp_path / "source", tmp_path / "out", layout=layout)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_wrong_requests_are_refused(tmp_path):
    make_drafter().save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match="`layout` is 'gguf'; choose from"):
        convert_checkpoint(tmp_path / "source", tmp_path / "out", layout="gguf")
    with pytest.raises(ValueError, match="source exists already"):
        convert_checkpoint(tmp_path / "source", tmp_path / "source")
    fields = json.loads((tmp_path / "source" / "config.json").read_text())
    (tmp_path / "source" / "config.json").write_text(json.dumps(fields | {"quantization_config": {"bits": 4}}))
    with pytest.raises(ValueError, match="is quantised"):
        convert_checkpoint(tmp_path / "source", tmp_path / "out")


def test_command_converts_and_lists_what_it_wrote(tmp_path):
    source = muse_folder(tmp_path / "source", make_drafter(**MUSE_RULES["mixed"]))
    words = ["convert", str(source), str(tmp_path / "out"), "--num_target_layers", "8", "--vocab_size", "100"]
    said_files = hub.run(words)
    assert said_files.startswith(f"{tmp_path / 'out'}: ") and "layouts_dflash.py, model.safetensors," in said_files
    assert hub.run(["convert", str(tmp_path / "out"), str(tmp_path / "z"), "--layout", "z-lab"]).endswith(
        ": config.json, model.safetensors"
    )


# Oracles


@pytest.mark.parametrize("rule", ["full", "sliding_causal", "sliding_bidirectional"])
def test_folder_for_the_authors_code_gives_their_hidden_states(tmp_path, rule):
    authors = pytest.importorskip(
        "dflash.model", reason="needs the authors' wheel: pip install --no-deps dflash==0.1.0"
    )
    drafter = make_drafter(**RULES[rule])
    drafter.save_pretrained(tmp_path / "ours")
    folder = convert_checkpoint(tmp_path / "ours", tmp_path / "z", layout="z-lab")
    theirs = authors.DFlashDraftModel.from_pretrained(folder)
    noise_embeds, features = make_inputs(21)
    positions = torch.arange(21 + noise_embeds.shape[1])[None]
    with torch.no_grad():
        expected = theirs(position_ids=positions, noise_embedding=noise_embeds, target_hidden=features)
    torch.testing.assert_close(run(drafter, noise_embeds, features), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("rule", ["full", "sliding_causal", "sliding_bidirectional"])
def test_folder_for_speculators_is_whole_for_speculators(tmp_path, rule):
    theirs = pytest.importorskip(
        "speculators.models.dflash", reason="needs speculators: pip install --no-deps speculators==0.9.0"
    )
    drafter = make_drafter(**RULES[rule])
    drafter.save_pretrained(tmp_path / "ours")
    folder = convert_checkpoint(tmp_path / "ours", tmp_path / "s", layout="speculators")
    loaded, info = theirs.DFlashDraftModel.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    config = loaded.config
    assert config.sliding_window_non_causal is (rule == "sliding_bidirectional")
    assert loaded.sliding_window_indices == ([] if rule == "full" else [0])
    state = loaded.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in drafter.state_dict().items())
    assert speculators_fields(drafter.config)["draft_vocab_size"] == config.draft_vocab_size
    loaded.save_pretrained(tmp_path / "saved")
    again = DFlashDraftModel.from_pretrained(tmp_path / "saved", num_target_layers=8)
    assert torch.equal(run(again, *make_inputs(13)), run(drafter, *make_inputs(13)))
