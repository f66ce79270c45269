"""The shipped drafter configs: for which target, from which published drafter, and what is not known of it."""

import importlib.resources
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from dflash_hf.configuration_dflash import DFlashConfig
from dflash_hf.layouts_dflash import read_fields
from dflash_hf.modeling_dflash import DFlashDraftModel

_SHIPPED = Path(str(importlib.resources.files("dflash_hf.hub_configs")))


@dataclass(frozen=True)
class ShippedConfig:
    """A shipped `<name>.json`: the config's own keys, and under `hub` what is known about it.

    Args:
        name (`str`): What `load_hub_config` and `dflash-train --drafter_config` take.
        config (`dict`): Keys of a [`DFlashConfig`], less those in `unknown`.
        target (`str`, *optional*): Hub id of the target.
        target_revision (`str`, *optional*): Of the target when the drafter was published.
        drafter_repo (`str`, *optional*): Hub id of the published drafter.
        revision (`str`, *optional*): Of that drafter; pin it.
        template_mode (`str`, *optional*): Chat template of its training texts: "thinking", "no thinking" or "template
            default"; None if it is not published.
        expected_parameters (`int`, *optional*): Weights of the published drafter; None if an unknown value decides.
        published_gib (`str`, *optional*): Size of its bfloat16 file in GiB, to the digits published.
        unknown (`list[str]`): Keys whose published values are not known.
        notes (`list[str]`): Sentences.
    """

    name: str
    config: dict[str, Any]
    target: str | None
    target_revision: str | None
    drafter_repo: str | None
    revision: str | None
    template_mode: str | None
    expected_parameters: int | None
    published_gib: str | None
    unknown: list[str]
    notes: list[str]


def list_configs() -> list[ShippedConfig]:
    """All shipped configs, by name."""
    return [shipped_config(path.stem) for path in sorted(_SHIPPED.glob("*.json"))]


def shipped_config(name: str) -> ShippedConfig:
    """The config shipped under `name`, with what is known about it.

    Raises:
        ValueError: If there is no such config; the message lists the shipped ones.
    """
    path = _SHIPPED / f"{name}.json"
    if not path.is_file():
        shipped = [path.stem for path in sorted(_SHIPPED.glob("*.json"))]
        raise ValueError(f"No drafter config {name!r}. Shipped: {shipped}; or give a JSON file or a drafter's folder.")
    config = json.loads(path.read_text(encoding="utf-8"))
    return ShippedConfig(name=name, **config.pop("hub"), config=config)


def load_hub_config(name: str, **values: Any) -> DFlashConfig:
    """The drafter config shipped under `name`, or that of a JSON file or folder, of any layout that can be read.

    Args:
        name (`str`): Name, JSON file or folder.
        values: Keys of [`DFlashConfig`] that the file lacks or that shall be others, such as `rope_theta`.
    Raises:
        ValueError: If there is no such config, or a value that it needs is not known; the message says how to give it.
    """
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        return DFlashConfig(**_known_values(shipped_config(name), values) | values)
    try:
        config = read_fields(json.loads(path.read_text(encoding="utf-8")))
        config.pop("hub", None)
        return DFlashConfig(**config | values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def show_config(name: str) -> str:
    """What is known about a shipped config, its JSON and its training recipe, as text.

    Raises:
        ValueError: If there is no such config.
    """
    shipped = shipped_config(name)
    facts = {field.name: getattr(shipped, field.name) for field in fields(shipped)}
    notes, config = facts.pop("notes"), facts.pop("config")
    lines = [f"{key}: {'not known' if value is None else value}" for key, value in facts.items()]
    lines += [f"note: {note}" for note in notes]
    recipe = (_SHIPPED / f"{name}.train.yaml").read_text(encoding="utf-8").rstrip()
    return "\n".join([*lines, "", json.dumps(config, indent=2), "", recipe])


def count_parameters(config: DFlashConfig) -> int:
    """Weights of a drafter, counted without memory for them."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in DFlashDraftModel(config).parameters())


def _known_values(shipped: ShippedConfig, values: dict[str, Any]) -> dict[str, Any]:
    missing = [key for key in shipped.unknown if values.get(key) is None]
    if missing:
        given = ", ".join(f"{key}=..." for key in missing)
        raise ValueError(
            f"Of the published drafter for {shipped.target} these values are not known here: {missing}. They are in "
            f"the config.json of {shipped.drafter_repo}; for a new drafter take the target's, as "
            f"`create_drafter_config` does. Give them, `load_hub_config({shipped.name!r}, {given})`, or put them into "
            "a copy of the JSON file and name that."
        )
    return shipped.config
