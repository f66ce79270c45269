"""Hub-ready folders: weights, config with `auto_map`, code files and a model card."""

import contextlib
import importlib.resources
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from dflash_hf.configuration_dflash import DFlashConfig
from dflash_hf.hub_configs.card import render_card
from dflash_hf.modeling_dflash import DFlashDraftModel

_SHIPPED = Path(str(importlib.resources.files("dflash_hf.hub_configs")))


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
            `limits`, each Markdown; see [`render_card`].
        dtype (`torch.dtype`, *optional*): Dtype of the saved weights; None keeps each weight's own.
    Raises:
        ValueError: If the card lacks a value.
    """
    with replaced_folder(folder) as temporary:
        save_drafter(drafter, temporary, dtype)
        (temporary / "README.md").write_text(render_card(drafter.config, card), encoding="utf-8")
    return Path(folder)


def save_drafter(drafter: DFlashDraftModel, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Writes weights, config, generation config and code files to `folder`; the drafter keeps its own dtype.

    Args:
        dtype (`torch.dtype`, *optional*): Dtype of the saved weights; None keeps each weight's own.
    """
    state = {name: tensor.to(dtype or tensor.dtype) for name, tensor in drafter.state_dict().items()}
    with torch.device("meta"):
        saved = DFlashDraftModel(DFlashConfig(**drafter.config.to_dict()))
    saved.load_state_dict(state, assign=True)
    saved.save_pretrained(folder)
    # The special tokens; nothing here changes how the target decodes.
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    GenerationConfig(**{name: getattr(saved.config, name) for name in special}).save_pretrained(folder)


@contextlib.contextmanager
def replaced_folder(folder: str | Path) -> Iterator[Path]:
    """A new folder beside `folder` that takes its place at the end of the `with` block, unless an error ends it."""
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    replaced = temporary.with_name(temporary.name + ".old")
    try:
        yield temporary
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
