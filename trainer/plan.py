"""`dflash-train --plan`: what a run will take, before it begins."""

import time
from collections.abc import Sized

import torch

from dflash_hf.target_dflash import text_config
from dflash_hf.trainer.dflash_trainer import DFlashTrainer
from dflash_hf.trainer.stored_features import training_documents

_PROBED_BATCHES = 3
# Value, gradient and optimizer states (two moments of AdamW, one of Muon) of a trained weight, all float32.
_BYTES_PER_WEIGHT = {"adamw": 16, "muon": 12}


def training_plan(trainer: DFlashTrainer) -> str:
    """Parameters, tokens, memory, disk and time of a run as text; nothing is trained or written.

    Time is measured: the target's forward, the drafter's forward and its backward on real batches after a first one,
    times the number of steps. With several processes every one does the same at once.

    Args:
        trainer ([`DFlashTrainer`]): Ready to train.
    """
    args, target = trainer.args, trainer.target_model
    weights = list(trainer.model.parameters())
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    target_weights = list(target.parameters())
    seconds, batch = _measure_batches(trainer)
    steps, rows = _steps(trainer)
    token_bytes = (
        (len(trainer.target_features.layer_ids) + trainer.target_features.with_final_hidden)
        * text_config(target).hidden_size
        * target.dtype.itemsize
    )
    tokens = int(batch["document_lengths"].sum())
    vocab_size = target.get_output_embeddings().weight.shape[0]
    lines = {
        "drafter": f"{_millions(weights)} M parameters, {trained / 1e6:.1f} M of them trained",
        "target": f"{_millions(target_weights)} M parameters in {target.dtype}, frozen",
        "data": rows,
        "steps": f"{steps:,} of {args.train_batch_size} rows x {args.gradient_accumulation_steps} accumulated x "
        f"{args.world_size} processes",
        "a batch": f"{tokens:,} tokens ({1 - tokens / batch['input_ids'].numel():.0%} padding added), "
        f"{int(batch['is_valid'].sum()):,} anchors, {len(batch['active']):,} supervised slots",
        "memory, weights": f"{_size(trained * _BYTES_PER_WEIGHT[args.matrix_optimizer])} for trained weights, "
        f"gradients and optimizer states; {_size(sum(w.nbytes for w in target_weights))} for the target",
        "memory, batch": f"{_size(batch['input_ids'].numel() * token_bytes)} of features, "
        f"{_size(args.head_chunk_size * vocab_size * 4 * 3)} of logits, plus activations",
        "disk": _disk(trainer, token_bytes),
        "time": f"{seconds:.2f} s a batch with the target's forward, "
        f"{_duration(seconds * args.gradient_accumulation_steps * steps)} in all, without evaluation",
    }
    if torch.cuda.is_available():
        lines["memory, measured"] = f"{_size(torch.cuda.max_memory_allocated())} at the peak of the measured batches"
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())


def _measure_batches(trainer: DFlashTrainer) -> tuple[float, dict[str, torch.Tensor]]:
    """Median seconds of a batch, without the first one, and the last batch."""
    model = trainer.model.to(trainer.args.device).train()
    times = []
    batch: dict[str, torch.Tensor] = {}
    for _, found in zip(range(_PROBED_BATCHES), trainer.get_train_dataloader(), strict=False):
        batch = trainer._prepare_inputs(found)
        start = time.perf_counter()
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(model, batch)
        loss.backward()
        loss.item()  # waits for the device
        times.append(time.perf_counter() - start)
        model.zero_grad(set_to_none=True)
    trainer.train_metrics.reset()
    return float(torch.tensor(times[1:] or times).median()), batch


def _steps(trainer: DFlashTrainer) -> tuple[int, str]:
    args, dataset = trainer.args, trainer.train_dataset
    if not isinstance(dataset, Sized):
        return args.max_steps, "a stream of unknown length"
    per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    an_epoch = -(-len(dataset) // per_step)
    documents = training_documents(dataset)
    lengths = [(len(row["input_ids"]), sum(row["loss_mask"])) for row in (documents[i] for i in range(len(documents)))]
    described = (
        f"{len(dataset):,} rows with {len(documents):,} documents: {sum(n for n, _ in lengths):,} tokens, "
        f"{sum(n for _, n in lengths):,} supervised"
    )
    return (args.max_steps if args.max_steps > 0 else int(args.num_train_epochs * an_epoch)), described


def _disk(trainer: DFlashTrainer, token_bytes: int) -> str:
    checkpoint = 4 * sum(weight.numel() for weight in trainer.model.parameters())
    kept = f"{_size(3 * checkpoint)} a checkpoint"
    if trainer.args.cache_features is not None:
        return f"{_size(trainer.feature_store().missing_bytes)} of features to write, {kept}"
    if not isinstance(trainer.train_dataset, Sized):
        return kept
    documents = training_documents(trainer.train_dataset)
    tokens = sum(len(documents[i]["input_ids"]) for i in range(len(documents)))
    return f"{kept}; `cache_features` would take {_size(tokens * token_bytes)}"


def _millions(weights: list[torch.nn.Parameter]) -> str:
    return f"{sum(weight.numel() for weight in weights) / 1e6:.1f}"


def _size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _duration(seconds: float) -> str:
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
