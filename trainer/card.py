"""What the model card of a freshly trained drafter says."""

import sys
from collections.abc import Sized
from typing import Any

import torch
import transformers

from dflash_hf.hub_configs.embedded_target import EMBEDDED_TARGET
from dflash_hf.trainer.stored_features import training_documents


def training_card(options: Any, trainer: Any, loaded: Any, results: dict[str, float]) -> dict[str, str]:
    """Values for `build_hub_folder(card=...)`.

    Args:
        options ([`TrainOptions`]): Options of the run.
        trainer ([`DFlashTrainer`]): After training.
        loaded ([`LoadedRows`]): The training data.
        results (`dict`): Of the last evaluation; empty if there was none.
    """
    args, state = trainer.args, trainer.state
    base_model = "HuggingFaceTB/SmolLM2-135M-Instruct" if options.target == EMBEDDED_TARGET else options.target
    rows_per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    rows = "a stream of rows"
    if isinstance(trainer.train_dataset, Sized):
        documents = training_documents(trainer.train_dataset)
        supervised = sum(sum(documents[i]["loss_mask"]) for i in range(len(documents)))
        rows = f"{len(documents):,} rows with {supervised:,} supervised tokens,"
    packed = " (packed)" if options.packing else ""
    start = f"`{options.drafter}`" if options.drafter else f"init `{options.init}`"
    adapter = f", LoRA of rank {options.lora_rank} merged" if options.lora_rank is not None else ""
    average = f", weights averaged with decay {args.ema_decay}" if args.ema_decay is not None else ""
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {sys.version.split()[0]}"
    target = f"`{base_model}`" + (f" with adapter `{options.target_adapter}`" if options.target_adapter else "")
    return {
        "base_model": base_model,
        "target_revision": options.target_revision or "not recorded",
        "license": "apache-2.0" if options.target == EMBEDDED_TARGET else "other",
        "description": f"A draft model for {target}, trained with `dflash-hf`.",
        "data": f"{rows} from {', '.join(f'`{source}`' for source in options.train_data)}; chat template mode: "
        f"{trainer.drafter.config.dflash_config['template_mode']}. Fingerprint `{loaded.fingerprint[:16]}`.",
        "recipe": f"`dflash-train`: {state.global_step:,} steps of {rows_per_step} rows{packed} of at most "
        f"{options.max_length} tokens, up to {args.num_anchors} anchors a document, {args.objective}, learning rate "
        f"{args.learning_rate}, seed {args.seed}, from {start}{adapter}{average}. {versions}.",
        "results": _results(args, results),
        "limits": "Acceptance falls away from the training data: other languages, tool calls, longer contexts, "
        "another template mode.",
    }


def _results(args: Any, results: dict[str, float]) -> str:
    figures = []
    if "eval_teacher_forced_tau" in results:
        figures.append(f"Teacher-forced tau on held-out rows: {results['eval_teacher_forced_tau']}.")
    if "eval_live_tau" in results:
        figures.append(
            f"Live tau, greedy, whole blocks, {args.live_prompts} held-out prompts, {args.live_max_new_tokens} "
            f"new tokens: {results['eval_live_tau']}."
        )
    return " ".join([*figures, "Run `dflash-eval` for speed and for other prompts."])
