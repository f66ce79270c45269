import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import dflash_hf.hub_configs
from dflash_hf import DFlashDraftModel
from dflash_hf.hub_configs import build_hub_folder, load_hub_config, shipped_drafter_folder
from dflash_hf.hub_configs.folder import render_card
from dflash_hf.trainer.command_line import parse_options
from dflash_hf.trainer.train import TrainOptions
from dflash_hf.trainer.training_args import DFlashTrainingArguments

HUB_CONFIGS = Path(dflash_hf.hub_configs.__file__).parent
SHIPPED = sorted(path.stem for path in HUB_CONFIGS.glob("*.json"))
RECIPES = sorted(HUB_CONFIGS.glob("*.yaml"))
CARD = {
    "base_model": "org/target",
    "license": "apache-2.0",
    "description": "A tiny one, 5 $ a piece.",
    "data": "Eight rows.",
    "recipe": "None.",
    "results": "None.",
    "limits": "All.",
}


def travelling_files() -> set[str]:
    """Names of the files that `modeling_dflash.py` reaches by relative imports, itself included."""
    package = Path(dflash_hf.__file__).parent
    found, waiting = set(), ["modeling_dflash"]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += re.findall(r"^\s*from \.(\w+) import", (package / f"{name}.py").read_text(), re.MULTILINE)
    return {f"{name}.py" for name in found}


def file_contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_folder_holds_weights_config_card_and_the_code_that_travels(tiny_drafter, tmp_path):
    folder = build_hub_folder(tiny_drafter, tmp_path / "out" / "drafter", card=CARD)
    code = travelling_files()
    assert code >= {"configuration_dflash.py", "modeling_dflash.py", "generation_dflash.py"}
    files = {"config.json", "generation_config.json", "model.safetensors", "README.md", "custom_generate/generate.py"}
    assert set(file_contents(folder)) == files | code
    assert [path.name for path in folder.parent.iterdir()] == ["drafter"]
    package = Path(dflash_hf.__file__).parent
    assert all((folder / name).read_text() == (package / name).read_text() for name in code)


def test_config_names_the_architecture_and_where_its_code_lies(tiny_drafter, tmp_path):
    config = json.loads((build_hub_folder(tiny_drafter, tmp_path / "d", card=CARD) / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["model_type"] == "qwen3"
    assert config["auto_map"] == {
        "AutoConfig": "configuration_dflash.DFlashConfig",
        "AutoModel": "modeling_dflash.DFlashDraftModel",
    }
    assert config["block_size"] == 8 and config["num_target_layers"] == 8
    layer_ids = tiny_drafter.config.target_layer_ids
    assert config["dflash_config"] == {"mask_token_id": 97, "target_layer_ids": layer_ids, "block_size": 8}
    assert config["dtype"] == "bfloat16"


def test_weights_are_bf16_without_embedding_or_head_and_the_drafter_keeps_its_own(tiny_drafter, tmp_path):
    before = {name: tensor.clone() for name, tensor in tiny_drafter.state_dict().items()}
    folder = build_hub_folder(tiny_drafter, tmp_path / "d", card=CARD)
    weights = load_file(folder / "model.safetensors")
    assert set(weights) == set(before)
    assert not any("embed" in name or "lm_head" in name for name in weights)
    for name, tensor in weights.items():
        assert torch.equal(tensor, before[name].to(torch.bfloat16))
    assert tiny_drafter.dtype == torch.float32
    assert all(torch.equal(tensor, before[name]) for name, tensor in tiny_drafter.state_dict().items())


def test_folder_loads_back_as_the_same_drafter(tiny_drafter, tmp_path):
    folder = build_hub_folder(tiny_drafter, tmp_path / "d", card=CARD, dtype=None)
    loaded = DFlashDraftModel.from_pretrained(folder).eval()
    assert loaded.dtype == torch.float32
    inputs = {"noise_embeds": torch.randn(1, 8, 32), "context_hidden_states": torch.randn(1, 5, 96)}
    assert torch.equal(loaded(**inputs).last_hidden_state, tiny_drafter(**inputs).last_hidden_state)
    assert load_hub_config(str(folder)).dflash_config == tiny_drafter.config.dflash_config


def test_second_build_replaces_the_folder_as_a_whole(tiny_drafter, tmp_path):
    folder = build_hub_folder(tiny_drafter, tmp_path / "d", card=CARD)
    (folder / "stale.txt").write_text("old")
    with torch.no_grad():
        tiny_drafter.fc.weight.zero_()
    build_hub_folder(tiny_drafter, folder, card=CARD)
    assert not (folder / "stale.txt").exists()
    assert (load_file(folder / "model.safetensors")["fc.weight"] == 0).all()


@pytest.mark.parametrize("broken", ["card", "save"])
def test_error_while_writing_leaves_the_old_folder_and_nothing_else(tiny_drafter, tmp_path, monkeypatch, broken):
    folder = build_hub_folder(tiny_drafter, tmp_path / "d", card=CARD)
    before = file_contents(tmp_path)

    def fail(*args, **kwargs):
        raise OSError("disk full")

    if broken == "card":
        monkeypatch.setattr("dflash_hf.hub_configs.folder.render_card", fail)
    else:
        monkeypatch.setattr(DFlashDraftModel, "save_pretrained", fail)
    with pytest.raises(OSError, match="disk full"):
        build_hub_folder(tiny_drafter, folder, card=CARD)
    assert file_contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


@pytest.mark.parametrize("missing", CARD)
def test_card_without_a_value_is_refused_by_name(tiny_drafter, tmp_path, missing):
    card = {name: value for name, value in CARD.items() if name != missing}
    with pytest.raises(ValueError, match=f"model card needs a value for '{missing}'"):
        build_hub_folder(tiny_drafter, tmp_path / "d", card=card)
    assert list(tmp_path.iterdir()) == []


def test_card_states_every_fact_and_leaves_no_blank(tiny_config):
    card = render_card(tiny_config, CARD)
    assert card.startswith("---\nlicense: apache-2.0\nbase_model: org/target\n")
    for fact in ("proposes 7 tokens", "| Block size | 8 ", "| Mask token id | 97 |", "5 $ a piece", "Eight rows."):
        assert fact in card
    assert str(tiny_config.target_layer_ids) in card
    assert not re.search(r"\$\w", card)


@pytest.mark.parametrize("recipe", RECIPES, ids=[path.name for path in RECIPES])
def test_shipped_recipe_has_only_known_names_and_a_shipped_config(recipe, tmp_path):
    options, args = parse_options(
        TrainOptions,
        DFlashTrainingArguments,
        arguments=["--config", str(recipe), "--output_dir", str(tmp_path), "--use_cpu", "true"],
    )
    assert options.drafter_config in SHIPPED
    assert options.train_data
    assert args.learning_rate > 0 and isinstance(args.learning_rate, float)


def test_folder_without_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match="No drafter config"):
        load_hub_config(str(tmp_path))


def test_name_without_shipped_weights_is_refused():
    with pytest.raises(ValueError, match="No drafter ships under the name 'nothing'"):
        shipped_drafter_folder("nothing")
