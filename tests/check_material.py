"""A target and a drafter that has learnt its answers, to plant faults in, and how they are checked."""

import functools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from test_damaged_folders import change_config, change_tensors
from tiny_material import make_tokenizer, make_trainer, save_tiny_target

from dflash_hf.hub_configs.check import check_drafter
from dflash_hf.hub_configs.check_report import CheckReport, Finding
from dflash_hf.trainer.prompt_rows import ChatRenderer

PROMPTS = ["w5 w17 w3", "w42 w8 w29 w11"]
# What a check of a healthy pair looks at, in this order.
SUBJECTS = (
    "hidden size",
    "depth",
    "vocabulary",
    "mask token",
    "layer ids",
    "rope theta",
    "embedding scale",
    "soft cap",
    "template mode",
    "dtype",
    "weights",
    "taps",
    "logits",
    "draft",
    "identity",
    "tau",
)

_healthy_folder = tempfile.TemporaryDirectory(prefix="healthy-")


@functools.cache
def healthy() -> Path:
    """Folders `target` and `drafter`, which has learnt the target's answers to `PROMPTS`; not to be changed."""
    folder = Path(_healthy_folder.name)
    target = save_tiny_target(folder / "target")
    rows = []
    for ids in prompt_ids():
        answer = target.generate(torch.tensor([ids]), max_new_tokens=32, do_sample=False)
        rows.append({"input_ids": answer[0].tolist(), "prompt_length": len(ids)})
    options = {"max_steps": 80, "learning_rate": 1e-2, "num_anchors": 16, "loss_decay": 4.0}
    trainer = make_trainer(folder / "run", rows, target=target, **options)
    trainer.train()
    trainer.drafter.config.dflash_config["template_mode"] = "template default"
    trainer.drafter.save_pretrained(folder / "drafter")
    return folder


def copy_pair(folder: Path) -> Path:
    """A copy of the healthy pair to plant faults in."""
    return Path(shutil.copytree(healthy(), folder / "pair"))


def check(folder: Path, **options) -> CheckReport:
    return check_drafter(
        str(folder / "target"), folder / "drafter", **{"prompts": PROMPTS, "max_new_tokens": 16} | options
    )


def prompt_ids() -> list[list[int]]:
    """`PROMPTS` as the target reads them."""
    renderer = ChatRenderer(make_tokenizer())
    return [renderer.encode(renderer.render([{"role": "user", "content": prompt}], None)) for prompt in PROMPTS]


def the(report: CheckReport, subject: str) -> Finding:
    (finding,) = (finding for finding in report.findings if finding.subject == subject)
    return finding


def plant_config(**changes) -> Callable[[Path], None]:
    return lambda folder: change_config(folder / "drafter", **changes)


def plant_tensors(change: Callable[[dict], None]) -> Callable[[Path], None]:
    return lambda folder: change_tensors(folder / "drafter", change)
