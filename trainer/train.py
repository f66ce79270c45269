"""`dflash-train`: from a target and a file of its answers to a Hub-ready drafter folder."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.trainer_utils import get_last_checkpoint

from dflash_hf.hub_configs import build_hub_folder, load_hub_config
from dflash_hf.hub_configs.embedded_target import EMBEDDED_TARGET, load_target
from dflash_hf.initialization_dflash import create_drafter
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.trainer.command_line import parse_options
from dflash_hf.trainer.data import TokenRows, read_json_lines
from dflash_hf.trainer.dflash_trainer import DFlashTrainer
from dflash_hf.trainer.training_args import DFlashTrainingArguments


@dataclass
class TrainOptions:
    """Options of `dflash-train` beside those of [`DFlashTrainingArguments`]."""

    train_files: list[str] = field(metadata={"help": "JSONL files from dflash-regenerate."})
    target: str = field(default=EMBEDDED_TARGET, metadata={"help": "Hub id, folder, or the embedded target."})
    target_revision: str | None = field(default=None, metadata={"help": "Hub revision of the target."})
    target_dtype: str = field(default="bfloat16", metadata={"help": "Dtype of the frozen target."})
    drafter_config: str | None = field(default=None, metadata={"help": "Shipped config name, JSON file or folder."})
    drafter: str | None = field(default=None, metadata={"help": "Folder or Hub id of a drafter to go on training."})
    init: str = field(default="target", metadata={"help": "Weights of a new drafter: 'target' or 'random'."})
    max_length: int = field(default=3072, metadata={"help": "Longest row, in tokens. Paper: 3072."})
    eval_rows: int = field(default=64, metadata={"help": "Rows from the end of the data kept for evaluation."})
    num_threads: int | None = field(default=None, metadata={"help": "CPU threads of torch."})


def train(options: TrainOptions, args: DFlashTrainingArguments) -> Path:
    """Trains, or goes on from the last checkpoint in `args.output_dir`, and returns the Hub-ready folder.

    Raises:
        ValueError: If neither or both of `drafter_config` and `drafter` are given, or the data has too few rows.
    """
    if (options.drafter_config is None) == (options.drafter is None):
        raise ValueError("Give either `drafter_config` (a new drafter) or `drafter` (one to go on training).")
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    transformers.set_seed(args.seed)
    dtype = getattr(torch, options.target_dtype)
    target, tokenizer = load_target(options.target, dtype=dtype, revision=options.target_revision)
    if options.drafter_config is not None:
        drafter = create_drafter(target, load_hub_config(options.drafter_config), init=options.init)
    else:
        drafter = DFlashDraftModel.from_pretrained(options.drafter, dtype=torch.float32)
    rows = [row for file in options.train_files for row in read_json_lines(file)]
    if len(rows) <= options.eval_rows:
        raise ValueError(
            f"{options.train_files} hold {len(rows)} rows; more than `eval_rows` {options.eval_rows} needed."
        )
    split = len(rows) - options.eval_rows
    trainer = DFlashTrainer(
        model=drafter,
        target_model=target,
        args=args,
        train_dataset=TokenRows(rows[:split], options.max_length),
        eval_dataset=TokenRows(rows[split:], options.max_length) if options.eval_rows else None,
        processing_class=tokenizer,
    )
    last_checkpoint = get_last_checkpoint(args.output_dir) if Path(args.output_dir).is_dir() else None
    if last_checkpoint is not None:
        print(f"Going on from {last_checkpoint}.")
    trainer.train(resume_from_checkpoint=last_checkpoint)
    results = trainer.evaluate() if options.eval_rows else {}
    folder = Path(args.output_dir) / "drafter"
    if trainer.is_world_process_zero():
        unwrapped = trainer.accelerator.unwrap_model(trainer.model)
        build_hub_folder(unwrapped, folder, card=_card(options, args, rows[:split], trainer, results))
    return folder


def _card(
    options: TrainOptions, args: DFlashTrainingArguments, rows: list[dict], trainer: DFlashTrainer, results: dict
) -> dict[str, Any]:
    supervised = sum(len(row["input_ids"]) - row.get("prompt_length", 0) for row in rows)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {sys.version.split()[0]}"
    accepted = results.get("eval_accepted_length")
    base_model = "HuggingFaceTB/SmolLM2-135M-Instruct" if options.target == EMBEDDED_TARGET else options.target
    return {
        "base_model": base_model,
        "license": "apache-2.0",
        "description": f"A draft model for `{base_model}`, trained with `dflash-hf`.",
        "data": f"{len(rows)} answers of the target, {supervised:,} supervised tokens, from "
        f"{len(options.train_files)} file(s) of `dflash-regenerate`.",
        "recipe": f"`dflash-train`: {trainer.state.global_step} steps of {args.train_batch_size} rows with up to "
        f"{args.num_anchors} anchors, learning rate {args.learning_rate}, seed {args.seed}, init `{options.init}`. "
        f"{versions}.",
        "results": f"Teacher-forced accepted length on {options.eval_rows} held-out rows: {accepted}. "
        "Run `dflash-eval` for live figures.",
        "limits": "Acceptance falls away from the training data: other languages, tool calls, long contexts.",
    }


def main() -> None:
    options, args = parse_options(TrainOptions, DFlashTrainingArguments, description="Train a DFlash drafter.")
    print(f"Drafter in {train(options, args)}")


if __name__ == "__main__":
    main()
