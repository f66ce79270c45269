"""The README's Python block and commands are what it says they are."""

import re
from pathlib import Path

import pytest

from dflash_hf.hub_configs.embedded_target import embedded_target_folder

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_first_python_block_prints_text(capsys):
    try:
        embedded_target_folder()
    except ImportError as error:
        pytest.skip(str(error))
    block = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)[0]
    assert len(block.strip().splitlines()) <= 14
    exec(compile(block, "README.md", "exec"), {})
    assert len(capsys.readouterr().out.split()) > 20


def test_readme_names_only_make_targets_that_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)`", README)) <= targets


def test_readme_names_only_commands_that_are_installed():
    commands = set(re.findall(r"^    (dflash-[a-z]+) =", (ROOT / "setup.cfg").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"\b(dflash-(?:generate|train|eval|regenerate|push|hub))\b", README)) <= commands
