"""Damaged drafter folders: one clear error each, which names the folder and what is wrong."""

import json
from pathlib import Path

import pytest
import torch
from conftest import make_tiny_target
from safetensors.torch import load_file, save_file
from test_modeling_dflash import make_drafter
from transformers import AutoModel

from dflash_hf import DFlashConfig, DFlashDraftModel
from dflash_hf.hub_configs import convert_checkpoint

PROMPT = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture
def folder(tmp_path) -> Path:
    """A whole drafter for the tiny target."""
    path = tmp_path / "drafter"
    make_drafter().save_pretrained(path)
    return path


def change_config(folder: Path, **changes) -> None:
    """Sets keys of config.json; None removes one. `nested` does so in `dflash_config`."""
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    for place, values in ((fields["dflash_config"], changes.pop("nested", {})), (fields, changes)):
        for key, value in values.items():
            place[key] = value
            if value is None:
                del place[key]
    path.write_text(json.dumps(fields))


def change_tensors(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def cut_file(path: Path, share: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


DAMAGES = {
    "missing tensor": (
        lambda folder: change_tensors(folder, lambda tensors: tensors.pop("layers.1.mlp.up_proj.weight")),
        ("missing", "layers.1.mlp.up_proj.weight"),
    ),
    "extra tensor": (
        lambda folder: change_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(4)})),
        ("un", "lm_head.weight"),  # unexpected, unknown
    ),
    "tensor of another shape": (
        lambda folder: change_tensors(folder, lambda tensors: tensors.update({"fc.weight": torch.zeros(4, 4)})),
        ("fc.weight",),
    ),
    "no theta": (
        lambda folder: change_config(folder, rope_parameters={"rope_type": "default"}),
        ("rope_parameters.rope_theta", "from_pretrained(..., rope_theta=...)"),
    ),
    "two block sizes": (
        lambda folder: change_config(folder, nested={"block_size": 16}),
        ("`block_size` = 8", "`dflash_config.block_size` = 16", "Keep the one"),
    ),
    "mask id out of range": (
        lambda folder: change_config(folder, nested={"mask_token_id": 100}),
        ("`mask_token_id` is 100", "0 to 99"),
    ),
    "no mask id": (
        lambda folder: change_config(folder, nested={"mask_token_id": None}),
        ("lacks ['mask_token_id']", "from_pretrained(..., mask_token_id=...)"),
    ),
    "layer ids too deep": (
        lambda folder: change_config(folder, nested={"target_layer_ids": [1, 3, 7]}),
        ("asks for layer 7", "only layers 0 to 6"),
    ),
    "no vocabulary": (
        lambda folder: change_config(folder, vocab_size=None),
        ("lacks ['vocab_size']", "from_pretrained(..., vocab_size=...)"),
    ),
    "unknown key of the method": (
        lambda folder: change_config(folder, nested={"num_denoising_steps": 4}),
        ("unknown here: ['num_denoising_steps']",),
    ),
    "cut weights": (lambda folder: cut_file(folder / "model.safetensors", 0.5), ("etch",)),
    "cut header": (lambda folder: cut_file(folder / "model.safetensors", 0.001), ("etch",)),
    "JSON that is none": (lambda folder: cut_file(folder / "config.json", 0.5), ("config.json",)),
    "JSON that is no object": (lambda folder: (folder / "config.json").write_text("[1]"), ("config.json",)),
    "no config": (lambda folder: (folder / "config.json").unlink(), ("config.json",)),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("read", ["load", "convert"])
def test_damage_is_named_with_the_folder(folder, damage, read):
    break_it, texts = DAMAGES[damage]
    DFlashDraftModel.from_pretrained(folder)
    break_it(folder)
    with pytest.raises((ValueError, OSError)) as error:
        if read == "load":
            DFlashDraftModel.from_pretrained(folder)
        else:
            convert_checkpoint(folder, folder.parent / "converted")
    for text in (str(folder), *texts):
        assert text in str(error.value)
    assert [path.name for path in folder.parent.iterdir()] == ["drafter"]


def test_missing_code_file_is_named_and_our_own_class_does_not_need_it(folder):
    (folder / "context_dflash.py").unlink()
    with pytest.raises(OSError, match=f"{folder}/context_dflash.py"):
        AutoModel.from_pretrained(folder, trust_remote_code=True)
    DFlashDraftModel.from_pretrained(folder)


def test_missing_weights_are_named(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match=f"model.safetensors.*{folder}"):
        DFlashDraftModel.from_pretrained(folder)
    with pytest.raises(ValueError, match=f"{folder}/model.safetensors cannot be read"):
        convert_checkpoint(folder, folder.parent / "converted")


def test_missing_shard_is_named(folder):
    index = {
        "metadata": {},
        "weight_map": dict.fromkeys(make_drafter().state_dict(), "model-00001-of-00001.safetensors"),
    }
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(OSError, match="model-00001-of-00001.safetensors"):
        DFlashDraftModel.from_pretrained(folder)
    with pytest.raises(ValueError, match="model-00001-of-00001.safetensors cannot be read"):
        convert_checkpoint(folder, folder.parent / "converted")


def test_target_with_another_vocabulary_is_refused_before_any_text(folder):
    drafter = DFlashDraftModel.from_pretrained(folder)
    with pytest.raises(ValueError, match=r"`mask_token_id` 97 has no row in the target's embedding \(64 rows\)"):
        make_tiny_target(vocab_size=64).generate(PROMPT, assistant_model=drafter, max_new_tokens=4)


def test_values_that_are_missing_can_be_given(folder):
    change_config(folder, rope_parameters=None, vocab_size=None, nested={"mask_token_id": None})
    drafter = DFlashDraftModel.from_pretrained(folder, rope_theta=1e4, vocab_size=100, mask_token_id=97)
    assert drafter.config.to_dict().items() >= {"vocab_size": 100, "block_size": 8}.items()
    assert drafter.config.mask_token_id == 97 and drafter.config.rope_parameters["rope_theta"] == 1e4


def test_config_alone_names_its_folder_too(folder):
    change_config(folder, num_attention_heads=3)
    with pytest.raises(ValueError, match=rf"^{folder}, config.json: `num_attention_heads` \(3\) must be a multiple"):
        DFlashConfig.from_pretrained(folder)
