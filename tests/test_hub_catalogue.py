"""Shipped drafter configs and recipes: published sizes and layers, what is not known, `dflash-hub list` and `show`."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from conftest import make_tiny_target

import dflash_hf.hub_configs
from dflash_hf import DFlashConfig, DFlashDraftModel, create_drafter
from dflash_hf.hub_configs import hub, list_configs, load_hub_config, show_config
from dflash_hf.hub_configs.catalogue import ShippedConfig, count_parameters, shipped_config
from dflash_hf.hub_configs.convert import muse_fields
from dflash_hf.trainer.command_line import parse_options
from dflash_hf.trainer.train import TrainOptions
from dflash_hf.trainer.training_args import DFlashTrainingArguments

FOLDER = Path(dflash_hf.hub_configs.__file__).parent
SHIPPED = {shipped.name: shipped for shipped in list_configs()}
# Target depth and tapped layers as published, and whether layers slide.
PUBLISHED = {
    "qwen3-4b": (36, [1, 9, 17, 25, 33], None),
    "qwen3-8b": (36, [1, 9, 17, 25, 33], None),
    "qwen3-coder-30b-a3b": (48, [1, 12, 23, 34, 45], None),
    "qwen3-coder-next": (48, [3, 11, 23, 35, 43], None),
    "qwen3.5-4b": (32, [1, 5, 9, 13, 17, 21, 25, 29], 4096),
    "qwen3.5-9b": (32, [1, 5, 9, 13, 17, 21, 25, 29], 4096),
    "qwen3.5-27b": (64, [1, 10, 18, 27, 35, 44, 52, 61], 4096),
    "qwen3.5-35b-a3b": (40, [1, 6, 11, 16, 22, 27, 32, 37], 4096),
    "qwen3.5-122b-a10b": (48, [1, 7, 14, 20, 26, 32, 39, 45], 4096),
    "qwen3.6-27b": (64, [1, 16, 31, 46, 61], 2048),
    "qwen3.6-35b-a3b": (40, [1, 6, 11, 16, 22, 27, 32, 37], 4096),
    "llama-3.1-8b-instruct": (32, [1, 8, 15, 22, 29], None),
    "gpt-oss-20b": (24, [1, 6, 11, 16, 21], None),
    "gpt-oss-120b": (36, [1, 9, 17, 25, 33], None),
    "gemma-4-31b-it": (60, [1, 12, 23, 35, 46, 57], 2048),
    "gemma-4-26b-a4b-it": (30, [1, 6, 11, 17, 22, 27], 2048),
    "kimi-k2.5": (61, [1, 12, 24, 35, 47, 58], None),
    "muse-glimmer-30b": (52, [1, 13, 25, 37, 49], 2049),
}
# Values for what is not known, so that a config can be built here; they decide no shape.
STAND_INS = {
    "attention_bias": True,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 5e4,
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
    },
    "rope_theta": 1e6,
    "vocab_size": 151936,
}


def built(name: str) -> DFlashConfig:
    return load_hub_config(name, **{key: STAND_INS[key] for key in SHIPPED[name].unknown})


def test_every_published_target_has_a_config_and_a_recipe():
    assert SHIPPED.keys() == PUBLISHED.keys() | {"smollm2-135m-instruct", "tiny"}
    assert {path.name for path in FOLDER.glob("*.train.yaml")} == {f"{name}.train.yaml" for name in SHIPPED}


# Sizes and layers


@pytest.mark.parametrize("name", SHIPPED)
def test_parameters_equal_the_published_file_size(name):
    shipped, num_parameters = SHIPPED[name], count_parameters(built(name))
    if shipped.published_gib is not None:
        digits = len(shipped.published_gib.split(".")[1])
        assert f"{2 * num_parameters / 2**30:.{digits}f}" == shipped.published_gib
    # gpt-oss-120b's file is described too coarsely to tell whether it has biases.
    assert shipped.expected_parameters == (None if name == "gpt-oss-120b" else num_parameters)
    assert shipped.published_gib or name in ("muse-glimmer-30b", "smollm2-135m-instruct", "tiny")


@pytest.mark.parametrize("name", PUBLISHED)
def test_layers_are_the_published_ones(name):
    config = built(name)
    depth, layer_ids, window = PUBLISHED[name]
    assert (config.num_target_layers, config.target_layer_ids, config.sliding_window) == (depth, layer_ids, window)
    sliding = config.layer_types.count("sliding_attention")
    assert sliding == (0 if window is None else config.num_hidden_layers - (name != "muse-glimmer-30b"))
    assert config.layer_types[:sliding] == ["sliding_attention"] * sliding  # a full layer comes last


@pytest.mark.parametrize(
    ("name", "block_size"), [("llama-3.1-8b-instruct", 10), ("gpt-oss-120b", 10), ("kimi-k2.5", 8)]
)
def test_blocks_have_the_published_size(name, block_size):
    assert built(name).block_size == block_size


@pytest.mark.parametrize("name", PUBLISHED)
def test_config_reads_back_and_its_small_twin_keeps_its_outputs(tmp_path, name):
    config = built(name)
    config.save_pretrained(tmp_path / "config")
    bookkeeping = ("_name_or_path", "auto_map", "transformers_version")
    read, saved = DFlashConfig.from_pretrained(tmp_path / "config").to_dict(), config.to_dict()
    assert {k: v for k, v in read.items() if k not in bookkeeping} == {
        k: v for k, v in saved.items() if k not in bookkeeping
    }
    heads = config.num_attention_heads // config.num_key_value_heads
    small = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": heads, "num_key_value_heads": 1}
    twin = DFlashDraftModel(DFlashConfig(**saved | small | {"head_dim": 4})).eval()
    twin.save_pretrained(tmp_path / "twin")
    loaded = DFlashDraftModel.from_pretrained(tmp_path / "twin")
    inputs = torch.randn(1, config.block_size, 16), torch.randn(1, 5, 16 * len(config.target_layer_ids))
    with torch.no_grad():
        assert torch.equal(loaded(*inputs).last_hidden_state, twin(*inputs).last_hidden_state)


def test_tiny_config_drafts_for_the_tiny_target():
    target = make_tiny_target()
    drafter = create_drafter(target, load_hub_config("tiny")).eval()
    prompt = torch.tensor([[5, 6, 7, 8]])
    plain = target.generate(prompt, max_new_tokens=12, do_sample=False)
    assert (
        target.generate(prompt, max_new_tokens=12, do_sample=False, assistant_model=drafter).tolist() == plain.tolist()
    )


# What is not known


@pytest.mark.parametrize("name", [name for name, shipped in SHIPPED.items() if shipped.unknown])
def test_config_with_unknown_values_names_them_and_takes_them(name):
    shipped = SHIPPED[name]
    assert not set(shipped.unknown) & shipped.config.keys()
    assert "rope_theta" not in shipped.unknown or "rope_parameters" not in shipped.config
    with pytest.raises(ValueError) as error:
        load_hub_config(name)
    for text in (*shipped.unknown, shipped.target, shipped.drafter_repo, f"load_hub_config({name!r}, "):
        assert text in str(error.value)
    some = dict.fromkeys(shipped.unknown[:1], STAND_INS[shipped.unknown[0]])
    with pytest.raises(ValueError, match=rf"\['{shipped.unknown[1]}'"):
        load_hub_config(name, **some)
    built(name)


@pytest.mark.parametrize("name", [name for name, shipped in SHIPPED.items() if shipped.drafter_repo])
def test_every_gap_in_what_is_known_of_a_published_drafter_has_a_note(name):
    shipped = SHIPPED[name]
    notes = " ".join(shipped.notes)
    if shipped.revision is None:
        assert "replaced in place" in notes or name == "muse-glimmer-30b"
    if shipped.template_mode is None:
        assert "training texts" in notes or name == "muse-glimmer-30b"
    else:
        assert shipped.template_mode in ("no thinking", "template default")


@pytest.mark.parametrize("name", ["qwen3.5-4b", "qwen3.5-9b", "qwen3.5-27b", "qwen3.5-35b-a3b", "qwen3.6-35b-a3b"])
def test_replaced_drafters_tell_of_their_first_generation(name):
    (note,) = (note for note in SHIPPED[name].notes if "first generation (revision" in note)
    assert "mask id 248070" in note and SHIPPED[name].config["dflash_config"]["mask_token_id"] == 248077


# Loading


def test_value_given_wins_over_the_shipped_one():
    assert load_hub_config("tiny", block_size=4).block_size == 4


def test_json_file_and_folder_of_any_layout_are_read(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text((FOLDER / "tiny.json").read_text())
    assert load_hub_config(str(path)).to_dict() == load_hub_config("tiny").to_dict()
    config = load_hub_config("tiny", is_causal=False)
    (tmp_path / "config.json").write_text(json.dumps(muse_fields(config)))
    assert load_hub_config(str(tmp_path)).target_layer_ids == config.target_layer_ids


@pytest.mark.parametrize("text", ["{", json.dumps({"block_size": 8})])
def test_broken_json_is_named(tmp_path, text):
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"^{path}: "):
        load_hub_config(str(path))


def test_every_file_says_everything_about_its_drafter():
    expected = {field.name for field in fields(ShippedConfig)} - {"name", "config"}
    for path in FOLDER.glob("*.json"):
        assert json.loads(path.read_text())["hub"].keys() == expected


# Recipes


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipe_has_the_papers_values(tmp_path, name):
    arguments = ["--config", str(FOLDER / f"{name}.train.yaml"), "--output_dir", str(tmp_path), "--use_cpu", "true"]
    options, args = parse_options(TrainOptions, DFlashTrainingArguments, arguments=arguments)
    shipped, config = SHIPPED[name], built(name)
    assert (options.target, options.drafter_config) == (shipped.target, name)
    assert options.target_revision == shipped.target_revision and options.train_data
    assert options.block_size == config.block_size
    assert args.loss_decay == {16: 7.0, 10: 5.0, 8: 4.0}[config.block_size]
    assert options.max_length == (4096 if "coder" in name else 3072)
    assert (args.learning_rate, args.lr_scheduler_type, args.warmup_steps) == (6e-4, "cosine", 0.04)
    assert (args.num_train_epochs, args.num_anchors, args.max_grad_norm) == (6, 512, 1.0)
    assert options.enable_thinking is (False if shipped.template_mode == "no thinking" else None)
    assert options.init == ("target" if name in ("qwen3-4b", "qwen3-8b", "llama-3.1-8b-instruct") else "random")


# Commands


def test_list_has_a_line_per_config_with_target_drafter_and_unknown_values():
    lines = hub.run(["list"]).splitlines()
    assert len(lines) == len(SHIPPED)
    (kimi,) = (line for line in lines if line.startswith("kimi-k2.5 "))
    assert all(word in kimi for word in ("moonshotai/Kimi-K2.5", "z-lab/Kimi-K2.5-DFlash", "rope_parameters"))
    assert len(hub.run(["list", "--contains", "QWEN3.5"]).splitlines()) == 5
    assert "No shipped config has 'nothing'" in hub.run(["list", "--contains", "nothing"])


def test_show_has_facts_notes_config_and_recipe():
    text = hub.run(["show", "qwen3.5-4b"])
    assert text == show_config("qwen3.5-4b")
    shipped = shipped_config("qwen3.5-4b")
    for expected in (
        "drafter_repo: z-lab/Qwen3.5-4B-DFlash",
        "revision: not known",
        "note: Published",
        "loss_decay: 7.0",
    ):
        assert expected in text
    assert json.dumps(shipped.config, indent=2) in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Usage: dflash-hub list; dflash-hub show NAME; dflash-hub convert SOURCE OUTPUT"),
        (["shwo", "tiny"], "Usage: dflash-hub list"),
        (["show"], r"`dflash-hub show` takes NAME, got \[\]"),
        (["list", "tiny"], "`dflash-hub list` takes no words"),
        (["show", "nothing"], "No drafter config 'nothing'"),
    ],
)
def test_wrong_use_of_the_command_is_explained(arguments, message):
    with pytest.raises(ValueError, match=message):
        hub.run(arguments)


def test_command_ends_with_the_message_and_no_traceback(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["dflash-hub", "show", "nothing"])
    with pytest.raises(SystemExit, match="^dflash-hub: No drafter config 'nothing'"):
        hub.main()
    monkeypatch.setattr("sys.argv", ["dflash-hub", "show", "tiny"])
    hub.main()
    assert capsys.readouterr().out.startswith("name: tiny\n")
