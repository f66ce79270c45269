import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import dflash_hf

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    folder, source = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("source")
    # A build writes beside its source, and another suite may run in this checkout.
    kept_out = shutil.ignore_patterns(".*", "build", "runs", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=kept_out, dirs_exist_ok=True)
    # It needs no network: setuptools is in the environment.
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_has_one_top_level_package(wheel):
    top_level = {name.split("/")[0] for name in wheel.namelist()}
    assert top_level == {"dflash_hf", f"dflash_hf-{dflash_hf.__version__}.dist-info"}


def test_wheel_holds_every_module_config_and_the_shipped_drafter(wheel):
    names = set(wheel.namelist())
    folders = {"modeling_dflash": "dflash_hf", "trainer": "dflash_hf/trainer", "eval": "dflash_hf/eval"}
    folders["hub_configs"] = "dflash_hf/hub_configs"
    for folder, package in folders.items():
        for path in (ROOT / folder).glob("*.py"):
            assert f"{package}/{path.name}" in names
    for path in (ROOT / "hub_configs").rglob("*"):
        if path.suffix in (".json", ".yaml", ".md", ".safetensors"):
            assert f"dflash_hf/hub_configs/{path.relative_to(ROOT / 'hub_configs')}" in names


def test_wheel_installs_the_four_commands(wheel):
    (entry_points,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    text = wheel.read(entry_points).decode()
    for command in ("dflash-generate", "dflash-eval", "dflash-regenerate", "dflash-train"):
        assert f"{command} = dflash_hf." in text


def test_requirements_are_ranges_not_pins(wheel):
    (metadata,) = (name for name in wheel.namelist() if name.endswith("METADATA"))
    requirements = [line for line in wheel.read(metadata).decode().splitlines() if line.startswith("Requires-Dist")]
    assert requirements and not any("==" in line.split(";")[0] for line in requirements)
