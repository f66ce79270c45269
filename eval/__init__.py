"""Measures of drafters: accepted length, speed and identity of the output."""

from dflash_hf.eval.evaluate import evaluate_drafter
from dflash_hf.eval.metric_folders import metric_module
from dflash_hf.eval.tasks import EvalPrompt, load_tasks

__all__ = ["EvalPrompt", "evaluate_drafter", "load_tasks", "metric_module"]
