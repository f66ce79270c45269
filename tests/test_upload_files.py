import json
import shutil
from pathlib import Path

import pytest
import torch
from test_card import CARD

from dflash_hf import DFlashDraftModel
from dflash_hf.hub_configs.folder import build_hub_folder, shipped_drafter_folder
from dflash_hf.hub_configs.upload_files import check_code_files, files_to_upload

LEFTOVERS = ["optimizer.pt", "scheduler.pt", "rng_state_0.pth", "training_args.bin", "trainer_state.json", "run.json"]


@pytest.fixture
def folder(tiny_drafter, tmp_path) -> Path:
    return build_hub_folder(tiny_drafter, tmp_path / "drafter", card=CARD)


def change_config(folder: Path, **fields) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_whole_folder_goes_and_its_code_stands_alone(folder):
    files, left_out = files_to_upload(folder)
    assert files == {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    assert {"config.json", "generation_config.json", "README.md", "custom_generate/generate.py"} <= set(files)
    assert left_out == []
    check_code_files(folder)


def test_leftovers_of_training_and_hidden_files_stay_and_are_listed(folder):
    before, _ = files_to_upload(folder)
    for name in [*LEFTOVERS, ".env", "average.safetensors", "model.safetensors.tmp"]:
        (folder / name).write_bytes(b"\x80\x04")
    for name in ("checkpoint-10/model.safetensors", "average/config.json", "__pycache__/a.pyc", "runs/events"):
        (folder / name).parent.mkdir()
        (folder / name).write_bytes(b"x")
    files, left_out = files_to_upload(folder)
    assert files == before
    assert set(left_out) == {
        *LEFTOVERS,
        ".env",
        "average.safetensors",
        "model.safetensors.tmp",
        "checkpoint-10/",
        "average/",
        "__pycache__/",
        "runs/",
    }


def test_other_files_of_the_author_go_along(folder):
    (folder / "images").mkdir()
    (folder / "images" / "tau.png").write_bytes(b"\x89PNG")
    (folder / "LICENSE").write_text("Apache")
    assert {"images/tau.png", "LICENSE"} <= set(files_to_upload(folder)[0])


def test_pickles_are_refused_whatever_they_are_called(folder):
    torch.save({"a": torch.ones(1)}, folder / "mask_embedding.data")
    (folder / "old.dat").write_bytes(b"\x80\x04}.")
    (folder / "weights.BIN").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"pickles.*\['mask_embedding.data', 'old.dat', 'weights.BIN'\]"):
        files_to_upload(folder)


def test_safetensors_whose_length_looks_like_a_pickle_are_none(folder):
    # A header of 0x0480 bytes begins like pickle protocol 4.
    (folder / "model.safetensors").write_bytes(b"\x80\x04" + bytes(6))
    assert "model.safetensors" in files_to_upload(folder)[0]


@pytest.mark.parametrize("name", ["config.json", "README.md", "custom_generate/generate.py", "model.safetensors"])
def test_incomplete_folder_is_refused(folder, name):
    (folder / name).unlink()
    missing = "weights in safetensors" if name == "model.safetensors" else name
    with pytest.raises(ValueError, match=f"lacks .*{missing}"):
        files_to_upload(folder)


def test_trainers_output_folder_with_a_drafter_inside_is_refused(folder):
    shutil.copytree(folder, folder / "drafter")
    with pytest.raises(ValueError, match=r"second model: \['drafter/config.json'.*drafter/model.safetensors'\]"):
        files_to_upload(folder)


def test_code_of_another_repository_is_refused(folder):
    change_config(
        folder,
        auto_map={
            "AutoConfig": "configuration_dflash.DFlashConfig",
            "AutoModel": "someone/else--modeling_dflash.DFlashDraftModel",
        },
    )
    with pytest.raises(ValueError, match="`auto_map.AutoModel` is 'someone/else--modeling.*come from 'someone/else'"):
        check_code_files(folder)


@pytest.mark.parametrize("auto_map", [None, {"AutoModel": "modeling_dflash.DFlashDraftModel"}])
def test_config_without_code_is_refused(folder, auto_map):
    change_config(folder, auto_map=auto_map)
    with pytest.raises(ValueError, match="lacks .*'AutoConfig'"):
        check_code_files(folder)


@pytest.mark.parametrize("name", ["modeling_dflash.py", "verification_dflash.py"])
def test_missing_code_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"lacks the code file '{name}'"):
        check_code_files(folder)


def test_missing_class_is_named(folder):
    (folder / "configuration_dflash.py").write_text("class Other:\n    pass\n")
    with pytest.raises(ValueError, match="'DFlashConfig', which is not in .*configuration_dflash.py"):
        check_code_files(folder)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("import dflash_hf.trainer", r"line 1 imports \['dflash_hf'\]"),
        ("from flash_attn import flash_attn_func", r"imports \['flash_attn'\]"),
        ("from . import tree_dflash", "only `from .sibling import Name`"),
        ("from ..package import Name", "only `from .sibling import Name`"),
        ("from .folder.file import Name", "only `from .sibling import Name`"),
    ],
)
def test_imports_that_fail_on_the_hub_are_refused(folder, line, message):
    path = folder / "tree_dflash.py"
    path.write_text(f"{line}\n{path.read_text()}")
    with pytest.raises(ValueError, match=message):
        check_code_files(folder)


def test_optional_packages_may_be_imported_inside_try(folder):
    path = folder / "tree_dflash.py"
    path.write_text(f"try:\n    import flash_attn\nexcept ImportError:\n    flash_attn = None\n{path.read_text()}")
    check_code_files(folder)


def test_shipped_drafter_becomes_fit_for_the_hub_by_saving_it_again(tmp_path):
    with pytest.raises(ValueError, match="custom_generate/generate.py"):
        files_to_upload(Path(shipped_drafter_folder()))
    drafter = DFlashDraftModel.from_pretrained(shipped_drafter_folder())
    folder = build_hub_folder(drafter, tmp_path / "drafter", card=CARD)
    files_to_upload(folder)
    check_code_files(folder)
