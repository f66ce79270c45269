"""Shipped drafter configs and recipes, and the folders that go to the Hub."""

from dflash_hf.hub_configs.catalogue import list_configs, load_hub_config, show_config
from dflash_hf.hub_configs.convert import convert_checkpoint
from dflash_hf.hub_configs.folder import build_hub_folder, shipped_drafter_folder

__all__ = [
    "build_hub_folder",
    "convert_checkpoint",
    "list_configs",
    "load_hub_config",
    "shipped_drafter_folder",
    "show_config",
]
