"""Shipped drafter configs and recipes, and the folders that go to the Hub."""

from dflash_hf.hub_configs.folder import build_hub_folder, load_hub_config, shipped_drafter_folder

__all__ = ["build_hub_folder", "load_hub_config", "shipped_drafter_folder"]
