"""Where a checkpoint or a figure came from: command, code, versions, hardware; and how JSON files are written."""

import contextlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import dflash_hf

_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft", "safetensors")
_SECRETS = ("token", "password", "api_key")


def run_record(**facts: Any) -> dict[str, Any]:
    """What is known about this run: `facts` plus command, git state of the working folder, versions and hardware."""
    return {
        **facts,
        "command": command_line(),
        "git": _git_state(),
        "versions": versions(),
        "hardware": hardware(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def command_line() -> str:
    """This process's command; values of flags that look like secrets, such as `--hub_token`, are hidden."""
    return " ".join([os.path.basename(sys.argv[0]), *_without_secrets(sys.argv[1:])])


def versions() -> dict[str, str]:
    """Python and the packages that matter, as far as they are installed; `dflash_hf` is this one."""
    found = {"dflash_hf": dflash_hf.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def hardware() -> dict[str, Any]:
    """`machine`, `cpus` and `processor`: the GPU if there is one."""
    return {"machine": platform.machine(), "cpus": os.cpu_count(), "processor": _processor_name()}


def write_json(path: str | Path, value: Any) -> None:
    """Writes `value` as JSON by [`write_text`]."""
    write_text(path, json.dumps(value, indent=2, default=str) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Writes `text` under a temporary name and renames it to `path`, whose folder is made if needed."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _without_secrets(arguments: Sequence[str]) -> list[str]:
    shown: list[str] = []
    for position, argument in enumerate(arguments):
        name, separator, _ = argument.partition("=")
        previous = arguments[position - 1] if position else ""
        if separator and name.startswith("--") and name.endswith(_SECRETS):
            shown.append(f"{name}=<hidden>")
        elif previous.startswith("--") and "=" not in previous and previous.endswith(_SECRETS):
            shown.append("<hidden>")
        else:
            shown.append(argument)
    return shown


def _git_state() -> dict[str, Any] | None:
    """Commit and whether files differ from it; None outside of a repository or without git."""
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True)
        status = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit.stdout.strip(), "has_changes": bool(status.stdout.strip())}


def _processor_name() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
