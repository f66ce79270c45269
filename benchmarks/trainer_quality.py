"""Live accepted length of drafters from three trainers: ours, SpecForge 0.2.0 and speculators 0.9.0.

    OMP_NUM_THREADS=1 PYTHONPATH=peers python benchmarks/trainer_quality.py \\
        --train_files runs/answers.jsonl --output_dir runs/trainer_quality

(`peer_trainers.py` says how `peers` is filled.) For each seed, all trainers start from the same weights and see the
same rows in the same order, the same stored features, the same number of rows per step and of anchors per row, AdamW,
schedule, clipping and bf16 autocast. What differs is what a trainer brings along: which anchors it draws, how it
batches, masks and weighs, and its loss. Every drafter is saved in the z-lab layout and run by our decode loop on
held-out prompts, each whole block verified. Finished runs are kept in the output folder; a second call goes on with
the missing ones.
"""

import json
import os
import statistics
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from peer_trainers import (
    DrafterShape,
    GivenFeatures,
    Row,
    SpecForgeStep,
    SpeculatorsStep,
    load_peer_weights,
    peer_versions,
    row_with_features,
)
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dflash_hf import DFlashConfig, DFlashDraftModel, create_drafter
from dflash_hf.eval.decode import Answer, encode_prompt
from dflash_hf.eval.methods import decoder
from dflash_hf.eval.metrics import tau_mean, tau_pooled
from dflash_hf.eval.prompts import KINDS, held_out_prompts
from dflash_hf.hub_configs.embedded_target import load_target
from dflash_hf.trainer import DFlashTrainer, DFlashTrainingArguments
from dflash_hf.trainer.command_line import parse_options
from dflash_hf.trainer.data import TokenRows, read_json_lines
from dflash_hf.trainer.provenance import run_record, write_json

# Each trainer with its defaults, and variants that bring their losses closer: D-PACE weights are speculators' default,
# cross-entropy with the paper's fading weights is ours and SpecForge's.
OURS: dict[str, dict[str, Any]] = {"ours": {}, "ours-d-pace": {"d_pace_alpha": 0.5}}
PEERS: dict[str, Any] = {
    "specforge": SpecForgeStep,
    "speculators": SpeculatorsStep,
    "speculators-ce": partial(SpeculatorsStep, slot_weights="fixed-exp-decay"),
}
_LOGGING_STEPS = 20


@dataclass(kw_only=True)
class QualityOptions(DrafterShape):
    """Options of the benchmark."""

    train_files: list[str] = field(metadata={"help": "JSONL files from dflash-regenerate."})
    output_dir: str = field(metadata={"help": "Folder for features, drafters and results."})
    trainers: list[str] = field(default_factory=lambda: [*OURS, *PEERS], metadata={"help": "Which to run."})
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2], metadata={"help": "Row order and anchors."})
    num_steps: int = field(default=300, metadata={"help": "Optimizer steps."})
    batch_size: int = field(default=4, metadata={"help": "Rows per step."})
    num_anchors: int = field(default=16, metadata={"help": "Anchors per row."})
    max_length: int = field(default=256, metadata={"help": "Longest row, in tokens."})
    learning_rate: float = field(default=1e-3, metadata={"help": "Peak learning rate."})
    eval_rows: int = field(default=64, metadata={"help": "Rows kept out of training for the teacher-forced figure."})
    prompts_per_kind: int = field(default=6, metadata={"help": "Held-out prompts of each of four kinds."})
    max_new_tokens: int = field(default=64, metadata={"help": "New tokens per prompt."})


@dataclass
class Material:
    """What all runs share."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    config: DFlashConfig
    rows: list[Row]
    eval_rows: TokenRows


class OrderedTrainer(DFlashTrainer):
    """Our trainer with a given row order, so that the other trainers can have the same."""

    order: list[int]

    def _get_train_sampler(self, train_dataset=None):
        return self.order


def load_material(options: QualityOptions) -> Material:
    """Target and rows; the training rows' features are kept in the output folder, mapped into memory."""
    target, tokenizer = load_target(options.target, dtype=torch.bfloat16)
    config = options.config_for(target)
    train_rows, eval_rows = choose_rows(options)
    file = Path(options.output_dir) / "rows.pt"
    if not file.exists():
        rows = []
        for i in tqdm(range(len(train_rows)), desc="features", unit="row"):
            row = train_rows[i]
            ids, mask = torch.tensor(row["input_ids"]), torch.tensor(row["loss_mask"])
            rows.append(row_with_features(target, config.target_layer_ids, ids, mask))
        torch.save(rows, file.with_suffix(".tmp"))
        os.replace(file.with_suffix(".tmp"), file)
    return Material(target, tokenizer, config, torch.load(file, mmap=True), eval_rows)


def choose_rows(options: QualityOptions) -> tuple[TokenRows, TokenRows]:
    """One training row per slot of the run, no row twice, and the evaluation rows.

    Rows whose answer, cut at `max_length`, has fewer tokens than twice the anchors are left out.
    """
    rows = [row for file in options.train_files for row in read_json_lines(file)]
    kept = [
        row
        for row in rows
        if min(len(row["input_ids"]), options.max_length) - row["prompt_length"] >= 2 * options.num_anchors
    ]
    num_train = options.num_steps * options.batch_size
    needed = num_train + options.eval_rows
    if len(kept) < needed:
        raise ValueError(
            f"{options.train_files} have {len(kept)} rows with long enough answers, the run needs {needed}. Give more "
            "files or a smaller `num_steps`."
        )
    order = torch.randperm(len(kept), generator=torch.Generator().manual_seed(0)).tolist()
    train, held_out = order[:num_train], order[num_train:needed]
    return tuple(TokenRows([kept[i] for i in part], options.max_length) for part in (train, held_out))


def training_arguments(options: QualityOptions, seed: int, **ours: Any) -> DFlashTrainingArguments:
    """Our trainer's defaults, but for what is common to all trainers and for `ours`."""
    return DFlashTrainingArguments(
        output_dir=str(Path(options.output_dir) / "trainer"),
        max_steps=options.num_steps,
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=options.batch_size,
        num_anchors=options.num_anchors,
        learning_rate=options.learning_rate,
        seed=seed,
        bf16=True,
        use_cpu=True,
        logging_steps=_LOGGING_STEPS,
        save_strategy="no",
        report_to="none",
        **ours,
    )


def train_ours(
    drafter: DFlashDraftModel, material: Material, order: list[int], args: DFlashTrainingArguments
) -> list[float]:
    """Trains `drafter` with `DFlashTrainer` and returns the logged losses."""
    ids = [{name: row[name].tolist() for name in ("input_ids", "loss_mask")} for row in material.rows]
    trainer = OrderedTrainer(model=drafter, target_model=material.target, args=args, train_dataset=ids)
    trainer.target_features = GivenFeatures(material.rows)
    trainer.order = order
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train_peer(
    name: str, drafter: DFlashDraftModel, material: Material, order: list[int], args: DFlashTrainingArguments
) -> list[float]:
    """Trains `drafter` with a peer's loss and the optimizer that `args` describe; returns losses as ours logs them."""
    torch.manual_seed(args.seed)  # the peers draw anchors from the global generator
    step = PEERS[name](drafter, material.target, args.num_anchors)
    weights = [weight for weight in step.module.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=args.learning_rate, weight_decay=args.weight_decay)
    schedule = transformers.get_scheduler(
        args.lr_scheduler_type, optimizer, args.get_warmup_steps(args.max_steps), args.max_steps
    )
    size = args.per_device_train_batch_size
    losses = []
    for start in tqdm(range(0, len(order), size), desc=name, unit="step"):
        batch = step.batch([material.rows[i] for i in order[start : start + size]])
        with torch.autocast("cpu", torch.bfloat16):
            loss = step.loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, args.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    load_peer_weights(drafter, step.module)
    return [statistics.fmean(losses[i : i + _LOGGING_STEPS]) for i in range(0, len(losses), _LOGGING_STEPS)]


@torch.inference_mode()
def live_answers(material: Material, folder: Path, options: QualityOptions) -> dict[str, list[Answer]]:
    """Answers to the held-out prompts by kind, greedy, with the drafter of `folder`; every proposal is verified."""
    target = material.target
    drafter = DFlashDraftModel.from_pretrained(folder, dtype=target.dtype).eval()
    decode = decoder("whole_block", target, drafter)
    answers: dict[str, list[Answer]] = {kind: [] for kind in KINDS}
    for prompt in tqdm(held_out_prompts(options.prompts_per_kind), desc="prompts", unit="prompt"):
        inputs = encode_prompt(material.tokenizer, prompt["prompt"], target.device)
        answers[prompt["kind"]].append(decode(inputs, options.max_new_tokens, 0.0))
    return answers


def run_one(name: str, seed: int, folder: Path, material: Material, options: QualityOptions) -> dict[str, Any]:
    """Trains and evaluates one drafter; its folder gets the weights and `result.json`."""
    args = training_arguments(options, seed, **OURS.get(name, {}))
    drafter = create_drafter(material.target, material.config, init="target")
    order = torch.randperm(len(material.rows), generator=torch.Generator().manual_seed(seed)).tolist()
    start = time.perf_counter()
    train = train_ours if name in OURS else partial(train_peer, name)
    losses = train(drafter, material, order, args)
    seconds = time.perf_counter() - start
    drafter.to(torch.bfloat16).save_pretrained(folder)
    answers = live_answers(material, folder, options)
    every = [answer for kind in KINDS for answer in answers[kind]]
    judge = DFlashTrainer(
        model=drafter.float(), target_model=material.target, args=args, eval_dataset=material.eval_rows
    )
    result = {
        "tau_pooled": tau_pooled(_lengths(every)),
        "tau_mean": tau_mean(_lengths(every)),
        **{f"tau_{kind}": tau_pooled(_lengths(answers[kind])) for kind in KINDS},
        "teacher_forced": judge.evaluate()["eval_teacher_forced_tau"],
        "new_tokens": sum(len(answer.token_ids) for answer in every),
        "seconds_per_step": seconds / options.num_steps,
        "losses": losses,
    }
    write_json(folder / "result.json", result)
    return result


def _lengths(answers: list[Answer]) -> list[list[int]]:
    return [answer.accepted_lengths for answer in answers]


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown: one row per trainer, means and standard deviations over seeds."""
    columns = ["tau_pooled", "tau_mean", *(f"tau_{kind}" for kind in KINDS), "teacher_forced"]
    titles = ["trainer", "tau by seed", "tau, pooled", "tau, mean over prompts", *KINDS, "teacher-forced"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name, runs in results.items():
        seeds = ", ".join(f"{run['tau_pooled']:.3f}" for run in runs)
        cells = [_mean_and_spread([run[column] for run in runs]) for column in columns]
        lines.append(f"| {' | '.join([name, seeds, *cells])} |")
    return "\n".join(lines)


def _mean_and_spread(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{spread}"


def main() -> None:
    (options,) = parse_options(QualityOptions, description=__doc__)
    torch.set_num_threads(1)
    folder = Path(options.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {key: value for key, value in asdict(options).items() if key not in ("trainers", "seeds")}
    settings_file = folder / "settings.json"
    if settings_file.exists() and json.loads(settings_file.read_text()) != settings:
        raise ValueError(f"{folder} holds runs of other settings; choose another `output_dir` or delete it.")
    write_json(settings_file, settings)
    material = load_material(options)
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in options.trainers}
    for seed in options.seeds:
        for name in options.trainers:
            run_folder = folder / f"{name}-seed{seed}"
            done = run_folder / "result.json"
            is_done = done.exists()
            result = json.loads(done.read_text()) if is_done else run_one(name, seed, run_folder, material, options)
            results[name].append(result)
            print(f"{name}, seed {seed}: tau {result['tau_pooled']:.3f}", flush=True)
    print(table(results))
    origin = run_record(options=asdict(options))
    origin["versions"].update(peer_versions())
    write_json(folder / "results.json", {"provenance": origin, "results": results})


if __name__ == "__main__":
    main()
