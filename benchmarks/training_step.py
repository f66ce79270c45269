"""Time and memory of one training step: ours against SpecForge 0.2.0 and speculators 0.9.0 on a CPU.

    OMP_NUM_THREADS=1 PYTHONPATH=peers python benchmarks/training_step.py --output runs/training_step.json

(`peer_trainers.py` says how `peers` is filled.) A step is forward and backward over given target features, with the
same rows, anchors and weights for all, the whole vocabulary and cross-entropy with the paper's slot weights. "Row by
row" is the same step with one backward per row. Time: all implementations in turn, round by round, in one process;
medians. Memory: the peak of two steps above the built process, each implementation in a process of its own (Linux).
Before that losses and gradients are compared, so that equal work is timed: SpecForge's definition is ours; speculators
takes the target's most likely tokens for labels and divides by the number of slots, so ours gets those there.
"""

import ctypes
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
from peer_trainers import (
    DrafterShape,
    GivenFeatures,
    Row,
    SpecForgeStep,
    SpeculatorsStep,
    peer_versions,
    row_with_features,
)
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel

from dflash_hf import DFlashDraftModel, create_drafter
from dflash_hf.hub_configs.embedded_target import load_target
from dflash_hf.trainer import DFlashTrainer, DFlashTrainingArguments
from dflash_hf.trainer.command_line import parse_options
from dflash_hf.trainer.provenance import run_record, write_json

# The target's dtype decides: a float32 drafter runs under autocast beside a bfloat16 target.
DTYPES = {"float32": "fp32", "bfloat16": "bf16 autocast"}
# The number is SpecForge's chunk, in blocks of every row: 0 keeps all logits and computes none twice; default 128.
IMPLEMENTATIONS = (
    "ours",
    "ours, row by row",
    "SpecForge, chunk 0",
    "SpecForge, chunk 128",
    "SpecForge, chunk 4",
    "SpecForge, chunk 16, row by row",
    "speculators, packed",
    "speculators, row by row",
)


@dataclass
class StepOptions(DrafterShape):
    """Options of the benchmark."""

    num_anchors: int = field(default=64, metadata={"help": "Anchors per row."})
    batch_size: int = field(default=4, metadata={"help": "Rows."})
    length: int = field(default=512, metadata={"help": "Tokens of a row."})
    prompt_length: int = field(default=16, metadata={"help": "Tokens at the start that are not supervised."})
    rounds: int = field(default=5, metadata={"help": "Timed steps of every implementation."})
    seed: int = field(default=0, metadata={"help": "Seed of rows and anchors."})
    output: str | None = field(default=None, metadata={"help": "JSON file for the results."})


@dataclass
class Parts:
    """What all implementations share; `batch` and `row_batches` come from our collator."""

    target: PreTrainedModel
    drafter: DFlashDraftModel
    rows: list[Row]
    trainer: DFlashTrainer
    batch: dict[str, torch.Tensor]
    row_batches: list[dict[str, torch.Tensor]]

    @property
    def anchors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions in their rows and which of them count, both (rows, N)."""
        return self.batch["anchors"], self.batch["is_valid"]

    @property
    def packed_anchors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for rows laid end to end."""
        anchors, is_valid = self.anchors
        starts = torch.arange(len(anchors))[:, None] * self.batch["input_ids"].shape[1]
        return (anchors + starts).flatten(), is_valid.flatten()


def build_parts(options: StepOptions, dtype: str, folder: Path) -> Parts:
    """Target, drafter, rows with features, our trainer and its batches; rows are made once per folder."""
    target, _ = load_target(options.target, dtype=getattr(torch, dtype))
    config = options.config_for(target)
    drafter = create_drafter(target, config, init="target").train()
    if not (folder / "rows.pt").exists():
        torch.save(make_rows(options, target, config.target_layer_ids), folder / "rows.pt")
    rows = torch.load(folder / "rows.pt")
    args = DFlashTrainingArguments(
        output_dir=str(folder), num_anchors=options.num_anchors, seed=options.seed, use_cpu=True, report_to="none"
    )
    ids = [{name: row[name].tolist() for name in ("input_ids", "loss_mask")} for row in rows]
    trainer = DFlashTrainer(model=drafter, target_model=target, args=args, train_dataset=ids)
    trainer.target_features = GivenFeatures(rows)
    items = [trainer.train_dataset[i] for i in range(len(ids))]
    row_batches = [trainer.data_collator([item]) for item in items]
    return Parts(target, drafter, rows, trainer, trainer.data_collator(items), row_batches)


def make_rows(options: StepOptions, target: PreTrainedModel, layer_ids: list[int]) -> list[Row]:
    """Rows of random tokens with the target's features.

    All is supervised but the prompt and the last block, where speculators never puts an anchor.
    """
    generator = torch.Generator().manual_seed(options.seed)
    input_ids = torch.randint(target.config.vocab_size, (options.batch_size, options.length), generator=generator)
    loss_mask = torch.zeros_like(input_ids)
    loss_mask[:, options.prompt_length : -options.block_size] = 1
    return [row_with_features(target, layer_ids, ids, mask) for ids, mask in zip(input_ids, loss_mask, strict=True)]


def our_loss(parts: Parts, batch: dict[str, torch.Tensor], divisor: torch.Tensor) -> torch.Tensor:
    return parts.trainer.block_loss(parts.drafter, batch).loss_sum / divisor


def peer_loss(step: SpecForgeStep | SpeculatorsStep, batch: dict, anchors: tuple, factor: float = 1.0) -> torch.Tensor:
    return step.loss(batch, anchors) * factor


def build(name: str, parts: Parts) -> tuple[nn.Module, list[Callable[[], torch.Tensor]]]:
    """The trained module of an implementation and the losses whose backwards make up its step."""
    num_anchors = parts.anchors[0].shape[1]
    by_row = name.endswith("row by row")
    weight_sum = parts.batch["weights"].sum()
    if name.startswith("ours"):
        batches = parts.row_batches if by_row else [parts.batch]
        return parts.drafter, [partial(our_loss, parts, batch, weight_sum) for batch in batches]
    if name.startswith("SpecForge"):
        chunk_blocks = int(name.split()[2].strip(","))
        step = SpecForgeStep(parts.drafter, parts.target, num_anchors, chunk_blocks=chunk_blocks)
        factors = [float(batch["weights"].sum() / weight_sum) for batch in parts.row_batches]
        whole_anchors, row_anchors = parts.anchors, zip(*(part.split(1) for part in parts.anchors), strict=True)
    else:
        step = SpeculatorsStep(parts.drafter, parts.target, num_anchors, slot_weights="fixed-exp-decay")
        factors = [1 / len(parts.rows)] * len(parts.rows)
        whole_anchors, row_anchors = parts.packed_anchors, zip(*parts.anchors, strict=True)
    if not by_row:
        return step.module, [partial(peer_loss, step, step.batch(parts.rows), whole_anchors)]
    pieces = zip(parts.rows, row_anchors, factors, strict=True)
    return step.module, [partial(peer_loss, step, step.batch([row]), *piece) for row, *piece in pieces]


def run_step(module: nn.Module, losses: list[Callable[[], torch.Tensor]], parts: Parts) -> float:
    """Forward and backward of a step from fresh gradients; returns the loss."""
    module.zero_grad()
    total = 0.0
    for loss in losses:
        with torch.autocast("cpu", torch.bfloat16, enabled=parts.target.dtype == torch.bfloat16):
            value = loss()
        value.backward()
        total += value.item()
    return total


def compare_losses(parts: Parts) -> dict[str, float]:
    """Loss and gradient of each peer against ours with its definition.

    Raises:
        RuntimeError: If they differ by more than rounding.
    """
    slots = parts.anchors[0][:, :, None] + torch.arange(parts.batch["labels"].shape[2])
    head, norm = parts.target.get_output_embeddings(), parts.target.get_decoder().norm
    with torch.no_grad():
        likely = torch.stack([head(norm(row["last_hidden"])).argmax(dim=-1) for row in parts.rows])
    # The token at a slot is predicted at the position before it.
    labels = likely.gather(1, (slots - 1).clamp(0, likely.shape[1] - 1).flatten(1)).view_as(slots)
    weights = parts.batch["weights"]
    ours = {
        "SpecForge, chunk 128": partial(our_loss, parts, parts.batch, weights.sum()),
        "speculators, packed": partial(our_loss, parts, {**parts.batch, "labels": labels}, (weights > 0).sum()),
    }
    found = {}
    for name, our_definition in ours.items():
        our_value = run_step(parts.drafter, [our_definition], parts)
        module, losses = build(name, parts)
        their_value = run_step(module, losses, parts)
        theirs = dict(module.named_parameters())
        gap = sum((weight.grad - theirs[key].grad).pow(2).sum() for key, weight in parts.drafter.named_parameters())
        difference = float((gap / sum(weight.grad.pow(2).sum() for weight in parts.drafter.parameters())).sqrt())
        found[name] = {"theirs": their_value, "ours": our_value, "relative difference of gradients": difference}
        if abs(our_value / their_value - 1) > 1e-5 or difference > 1e-4:
            raise RuntimeError(f"{name} computes something else than we do, so times would not compare: {found}.")
    return found


def time_steps(parts: Parts, rounds: int) -> dict[str, list[float]]:
    """Seconds of every step, implementations in turn; a first round is not counted.

    It is the process's own time, which with one thread is the wall time on an idle machine.
    """
    built = {name: build(name, parts) for name in IMPLEMENTATIONS}
    seconds: dict[str, list[float]] = {name: [] for name in built}
    for _ in tqdm(range(rounds + 1), unit="round"):
        for name, (module, losses) in built.items():
            start = time.process_time()
            run_step(module, losses, parts)
            seconds[name].append(time.process_time() - start)
    return {name: times[1:] for name, times in seconds.items()}


def peak_mib(name: str, options: StepOptions, dtype: str, folder: Path) -> float:
    """Peak resident memory of two steps above that of the built process, in MiB; gradients are part of it."""
    torch.set_num_threads(1)
    parts = build_parts(options, dtype, folder)
    module, losses = build(name, parts)
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    start = _status_mib("VmRSS")
    for _ in range(2):
        run_step(module, losses, parts)
    return _status_mib("VmHWM") - start


def _status_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name + ":"))


def in_new_process(function: Callable, *arguments):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def table(figures: dict[str, dict[str, dict]]) -> str:
    """Markdown: one row per dtype and implementation; ratios are ours over this."""
    lines = ["| | implementation | s/step | ours/this | peak MiB | ours/this |", "|---|---|---|---|---|---|"]
    for dtype, found in figures.items():
        for name, row in found.items():
            ratios = [found["ours"][key] / row[key] for key in ("seconds", "peak_mib")]
            lines.append(
                f"| {DTYPES[dtype]} | {name} | {row['seconds']:.2f} | {ratios[0]:.2f} | {row['peak_mib']:.0f} "
                f"| {ratios[1]:.2f} |"
            )
    return "\n".join(lines)


def main() -> None:
    (options,) = parse_options(StepOptions, description=__doc__)
    torch.set_num_threads(1)
    figures: dict[str, dict[str, dict]] = {}
    checks: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for dtype in DTYPES:
            folder = Path(temporary) / dtype
            folder.mkdir()
            parts = build_parts(options, dtype, folder)
            if dtype == "float32":
                checks = compare_losses(parts)
                print(json.dumps(checks, indent=1))
            times = time_steps(parts, options.rounds)
            figures[dtype] = {}
            for name, seconds in tqdm(times.items(), desc="memory", unit="process"):
                peak = in_new_process(peak_mib, name, options, dtype, folder)
                figures[dtype][name] = {
                    "seconds": statistics.median(seconds),
                    "peak_mib": peak,
                    "all_seconds": seconds,
                }
    print(table(figures))
    if options.output is not None:
        origin = run_record(options=asdict(options))
        origin["versions"].update(peer_versions())
        write_json(options.output, {"provenance": origin, "checks": checks, "results": figures})


if __name__ == "__main__":
    main()
