"""Measures of drafters: accepted length, speed and identity of the output."""

from dflash_hf.eval.run import evaluate_drafter

__all__ = ["evaluate_drafter"]
