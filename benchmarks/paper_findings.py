"""The paper's ablations at the size of one CPU core: the sign of each finding, as it comes out.

    OMP_NUM_THREADS=1 python benchmarks/paper_findings.py --train_data runs/answers.0.jsonl --output runs/findings

Every variant changes one thing of the same small run: random anchors, fading weights, target features, number of
layers and of features, block size. Live tau is that of real decoding of held-out prompts, tokens per verify forward
over all rounds. Finished runs are kept in the output folder, so a rerun goes on.
"""

import json
import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dflash_hf import create_drafter, create_drafter_config
from dflash_hf.eval.decode import encode_prompt
from dflash_hf.eval.prompts import held_out_prompts
from dflash_hf.hub_configs.embedded_target import EMBEDDED_TARGET, load_target
from dflash_hf.trainer import DFlashTrainer, DFlashTrainingArguments
from dflash_hf.trainer.batches import AnchorCollator
from dflash_hf.trainer.command_line import parse_options
from dflash_hf.trainer.data import TokenRows, read_json_lines
from dflash_hf.trainer.live_tau import decode_live, live_metrics
from dflash_hf.trainer.provenance import run_record, write_json

# name: (what it changes, the paper's table or figure, its sign of the change in tau)
VARIANTS = {
    "base": ("2 layers, 5 features, block 8, random anchors, gamma 4", "", ""),
    "fixed anchors": ("the same blocks in every epoch, one behind the other", "13", "lower"),
    "no decay": ("all slots weigh the same", "figure 5", "a little lower, early on"),
    "no features": ("context features are zero, in training and decoding", "10", "lower"),
    "1 layer": ("one draft layer", "6", "lower"),
    "3 layers": ("three draft layers", "6", "higher"),
    "3 features": ("three tapped layers", "7", "lower"),
    "block 4": ("trained and run at 4", "8", "lower"),
}


@dataclass
class FindingsOptions:
    """Options of the benchmark."""

    train_data: list[str] = field(metadata={"help": "JSONL files from dflash-regenerate."})
    output: str = field(metadata={"help": "Folder for results and features; a rerun goes on."})
    target: str = field(default=EMBEDDED_TARGET, metadata={"help": "Hub id, folder, or the embedded target."})
    mask_token_id: int = field(default=16, metadata={"help": "Unused row of the target's embedding."})
    num_rows: int = field(default=600, metadata={"help": "Training rows."})
    max_length: int = field(default=256, metadata={"help": "Longest row, in tokens."})
    steps: int = field(default=450, metadata={"help": "Steps of 4 rows."})
    num_anchors: int = field(default=24, metadata={"help": "Anchors per row."})
    sampled_negatives: int = field(default=2000, metadata={"help": "Tokens that estimate the softmax, in all runs."})
    learning_rate: float = field(default=1e-3, metadata={"help": "Peak learning rate."})
    seeds: list[int] = field(default_factory=lambda: [0, 1], metadata={"help": "One run of each variant per seed."})
    prompts_per_kind: int = field(default=6, metadata={"help": "Held-out prompts of each kind."})
    max_new_tokens: int = field(default=64, metadata={"help": "Longest answer, in tokens."})


class FixedBlocks(AnchorCollator):
    """Anchors at every `block_size`-th supervised token, the same in every epoch: the paper's standard blocks."""

    def choose_anchors(self, loss_mask: torch.Tensor, document: dict[str, Any]) -> torch.LongTensor:
        supervised = loss_mask[0].nonzero()[:, 0]
        anchors = supervised[:: self.slot_weights.shape[0]]
        keep = torch.isin(anchors + 1, supervised)
        return anchors[keep][: self.num_anchors]


def train_variant(
    name: str, seed: int, target: torch.nn.Module, rows: TokenRows, options: FindingsOptions
) -> DFlashTrainer:
    """A trained drafter of one variant."""
    block_size = 4 if name == "block 4" else 8
    config = create_drafter_config(
        target.config,
        num_hidden_layers={"1 layer": 1, "3 layers": 3}.get(name, 2),
        num_target_features=3 if name == "3 features" else 5,
        block_size=block_size,
        mask_token_id=options.mask_token_id,
        intermediate_size=768,
    )
    torch.manual_seed(seed)
    drafter = create_drafter(target, config, init="target")
    if name == "no features":
        # A zero feature has keys and values of zero in every layer: the context says nothing.
        torch.nn.init.zeros_(drafter.fc.weight)
        drafter.fc.requires_grad_(False)
    gamma = 2.0 if block_size == 4 else 4.0
    args = DFlashTrainingArguments(
        output_dir=str(Path(options.output) / "trainer"),
        max_steps=options.steps,
        per_device_train_batch_size=4,
        num_anchors=options.num_anchors,
        learning_rate=options.learning_rate,
        loss_decay=math.inf if name == "no decay" else gamma,
        sampled_negatives=options.sampled_negatives,
        cache_features=str(Path(options.output) / f"features-{len(config.target_layer_ids)}"),
        seed=seed,
        bf16=True,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_steps=max(1, options.steps // 10),
    )
    trainer = DFlashTrainer(drafter, target, args, train_dataset=rows)
    if name == "fixed anchors":
        random = trainer.data_collator
        trainer.data_collator = FixedBlocks(random.num_anchors, random.slot_weights, random.seed)
    trainer.train()
    return trainer


def main() -> None:
    (options,) = parse_options(FindingsOptions, description=__doc__)
    torch.set_num_threads(1)
    target, tokenizer = load_target(options.target, dtype=torch.bfloat16)
    found = [row for file in options.train_data for row in read_json_lines(file)]
    rows = TokenRows(found[: options.num_rows], options.max_length)
    prompts = [
        encode_prompt(tokenizer, row["prompt"], target.device)["input_ids"][0].tolist()
        for row in held_out_prompts(options.prompts_per_kind)
    ]
    results_file = Path(options.output) / "results.json"
    results_file.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Any]] = json.loads(results_file.read_text()) if results_file.exists() else {}
    runs = [(name, seed) for seed in options.seeds for name in VARIANTS]
    for name, seed in tqdm(runs, unit="run"):
        key = f"{name}, seed {seed}"
        if key in results:
            continue
        trainer = train_variant(name, seed, target, rows, options)
        drafter = trainer.drafter.to(torch.bfloat16)
        taus = {"tau": live_metrics(decode_live(target, drafter, prompts, options.max_new_tokens))["live_tau"]}
        if name == "base":
            short = decode_live(target, drafter, prompts, options.max_new_tokens, num_proposals=3)
            taus["tau at 4"] = live_metrics(short)["live_tau"]
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        results[key] = {"name": name, "seed": seed, **taus, "last_loss": losses[-1]}
        write_json(results_file, results)
    table = findings_table(list(results.values()))
    write_json(results_file.with_name("findings.json"), {**run_record(options=vars(options)), "results": results})
    results_file.with_name("findings.md").write_text(table + "\n", encoding="utf-8")
    print(table)


def findings_table(results: list[dict[str, Any]]) -> str:
    """Each variant's live tau, mean and per seed, its difference from the base, and the paper's sign, as Markdown."""
    base = {run["seed"]: run["tau"] for run in results if run["name"] == "base"}
    lines = [
        "| variant | what changes | live tau | per seed | against base | paper |",
        "|---|---|---|---|---|---|",
    ]
    entries = [(name, *facts, "tau") for name, facts in VARIANTS.items()]
    entries.append(("block 8 at 4", "the base run, 3 proposals verified", "8", "lower than at 8", "tau at 4"))
    for name, change, place, sign, key in entries:
        runs = sorted(
            (run for run in results if run["name"] == ("base" if key == "tau at 4" else name)), key=lambda r: r["seed"]
        )
        if not runs:
            continue
        taus = [run[key] for run in runs]
        difference = "" if name == "base" else f"{statistics.mean(run[key] - base[run['seed']] for run in runs):+.3f}"
        paper = f"{sign} (table {place})" if place.isdigit() else f"{sign} ({place})" if place else ""
        lines.append(
            f"| {name} | {change} | {statistics.mean(taus):.3f} | {', '.join(f'{tau:.3f}' for tau in taus)} | "
            f"{difference} | {paper} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
