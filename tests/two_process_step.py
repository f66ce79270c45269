"""Trains the tiny drafter on four rows and writes what came out; run by `torchrun` or called in one process.

torchrun --nproc_per_node 2 two_process_step.py OUTPUT_FOLDER ROWS_PER_PROCESS STEPS
"""

import json
import sys
from pathlib import Path

import torch
from tiny_material import losses, make_random_rows, make_trainer, record_batches


def train_steps(folder: str, rows_per_process: int, steps: int, **options) -> None:
    """Writes `parameters.pt`, `losses.json` and, for every rank, `batches.RANK.json` to `folder`."""
    torch.set_num_threads(1)
    # The rows weigh very differently, and one of them nothing at all: a process can draw it alone.
    rows = make_random_rows([9, 30, 18, 50])
    rows[0]["loss_mask"] = [0] * 9
    trainer = make_trainer(
        folder,
        rows,
        per_device_train_batch_size=rows_per_process,
        max_steps=steps,
        optim="sgd",
        learning_rate=0.5,
        lr_scheduler_type="constant",
        warmup_steps=0,
        max_grad_norm=0.0,
        num_anchors=12,
        **options,
    )
    batches = record_batches(trainer)
    trainer.train()
    output = Path(folder)
    output.mkdir(parents=True, exist_ok=True)
    (output / f"batches.{trainer.args.process_index}.json").write_text(json.dumps(batches))
    if trainer.is_world_process_zero():
        drafter = trainer.accelerator.unwrap_model(trainer.model)
        torch.save(drafter.state_dict(), output / "parameters.pt")
        (output / "losses.json").write_text(json.dumps(losses(trainer)))


if __name__ == "__main__":
    train_steps(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), cache_features=f"{sys.argv[1]}/features")
