"""Where a checkpoint came from: command, code, versions, data and seed."""

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

_PACKAGES = ("dflash-hf", "torch", "transformers", "accelerate", "datasets", "peft", "safetensors")
_SECRETS = ("token", "password", "api_key")


def run_record(**facts: Any) -> dict[str, Any]:
    """What is known about this run: `facts` plus command, git state of the working folder, versions and machine.

    Values of flags that look like secrets, such as `--hub_token`, are left out.
    """
    return {
        **facts,
        "command": _without_secrets(sys.argv),
        "git": _git_state(),
        "versions": {"python": platform.python_version(), **_versions()},
        "machine": {"platform": platform.platform(), "processors": os.cpu_count(), "devices": _devices()},
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def write_json(path: str | Path, value: Any) -> None:
    """Writes `value` under a temporary name and renames it to `path`."""
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8")
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


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


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


def _devices() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
