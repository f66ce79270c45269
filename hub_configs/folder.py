"""Shipped configs and Hub-ready folders: weights, config with `auto_map`, code files and a model card."""

import importlib.resources
import json
import shutil
import tempfile
from pathlib import Path
from string import Template
from typing import Any

import torch

from dflash_hf.configuration_dflash import DFlashConfig
from dflash_hf.modeling_dflash import DFlashDraftModel

_SHIPPED = Path(str(importlib.resources.files("dflash_hf.hub_configs")))


def load_hub_config(name: str) -> DFlashConfig:
    """The drafter config shipped under `name`, or that of a JSON file or folder.

    Raises:
        ValueError: If there is no such config; the message lists the shipped ones.
    """
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        path = _SHIPPED / f"{name}.json"
    if not path.is_file():
        shipped = sorted(path.stem for path in _SHIPPED.glob("*.json"))
        raise ValueError(f"No drafter config {name!r}. Shipped: {shipped}; or give a JSON file or a drafter's folder.")
    return DFlashConfig(**json.loads(path.read_text()))


def shipped_drafter_folder(name: str = "smollm2-135m-instruct") -> str:
    """Folder of a drafter whose weights are part of the package.

    Raises:
        ValueError: If no weights ship under that name.
    """
    folder = _SHIPPED / "drafters" / name
    if not (folder / "config.json").is_file():
        raise ValueError(f"No drafter ships under the name {name!r} (looked in {folder}).")
    return str(folder)


def build_hub_folder(
    drafter: DFlashDraftModel, folder: str | Path, *, card: dict[str, Any], dtype: torch.dtype | None = torch.bfloat16
) -> Path:
    """Writes a folder that `AutoModel.from_pretrained(folder, trust_remote_code=True)` loads, and returns its path.

    Everything is written under a temporary name first and renamed at the end; an existing folder is replaced then.

    Args:
        drafter ([`DFlashDraftModel`]): The drafter; it keeps its own dtype.
        folder (`str` or `Path`): Where the folder goes.
        card (`dict`): Values for the model card: `base_model`, `license`, `description`, `data`, `recipe`, `results`,
            `limits`, each Markdown.
        dtype (`torch.dtype`, *optional*): Dtype of the saved weights; None keeps the drafter's.
    Raises:
        ValueError: If the card lacks a value.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    replaced = temporary.with_name(temporary.name + ".old")
    try:
        state = {name: tensor.to(dtype or tensor.dtype) for name, tensor in drafter.state_dict().items()}
        saved = DFlashDraftModel(DFlashConfig(**drafter.config.to_dict())).to(dtype or drafter.dtype)
        saved.load_state_dict(state)
        saved.save_pretrained(temporary)
        (temporary / "README.md").write_text(render_card(drafter.config, card), encoding="utf-8")
        temporary.chmod(0o755)
        if folder.exists():
            folder.rename(replaced)
        try:
            temporary.rename(folder)
        except OSError:
            if replaced.exists():
                replaced.rename(folder)
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)
    return folder


def render_card(config: Any, card: dict[str, Any]) -> str:
    """The model card as Markdown with its YAML header."""
    template = Template((_SHIPPED / "card_template.md").read_text(encoding="utf-8"))
    facts = {
        "block_size": config.block_size,
        "num_proposals": config.block_size - 1,
        "num_hidden_layers": config.num_hidden_layers,
        "target_layer_ids": config.target_layer_ids,
        "mask_token_id": config.mask_token_id,
    }
    try:
        return template.substitute(facts, **card)
    except KeyError as error:
        raise ValueError(f"The model card needs a value for {error}.") from error
