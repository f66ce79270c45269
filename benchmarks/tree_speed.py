"""Trees against chains: tokens a cycle and wall clock by kind of prompt, all ways to decode in turn on each prompt.

    OMP_NUM_THREADS=1 python benchmarks/tree_speed.py --output runs/tree_speed.json

Prompts are those of the offline set. `whole block` verifies every proposal of the chain, `chain` is the default (as
many as pay), `tree N` verifies N nodes beside the anchor in every round, `auto` as many as pay. A cycle is one verify
forward with what belongs to it; times leave the prompt's forward out. Ratios are against the method in the column's
head: above 1 is faster, from mean seconds a token over the prompts with its 95% interval, and the median over prompts.
With `--output` each prompt is written down when it is done, and a run that was stopped goes on.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from dflash_hf.eval import EvalPrompt, load_tasks
from dflash_hf.eval.decode import encode_prompt, timed_generate
from dflash_hf.eval.metrics import ratio_of_means_interval
from dflash_hf.hub_configs import shipped_drafter_folder
from dflash_hf.hub_configs.embedded_target import EMBEDDED_TARGET, load_target
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.trainer.command_line import parse_options
from dflash_hf.trainer.provenance import run_record, write_json

_WARM_UP_TOKENS = 16
_BASES = ("plain", "whole block", "chain")


@dataclass
class TreeSpeedOptions:
    """Options of the benchmark."""

    target: str = field(default=EMBEDDED_TARGET, metadata={"help": "Hub id, folder, or the embedded target."})
    drafter: str | None = field(default=None, metadata={"help": "Folder or Hub id; default: the shipped drafter."})
    dtype: str = field(default="bfloat16", metadata={"help": "Dtype of target and drafter."})
    samples: int = field(default=8, metadata={"help": "Prompts of each kind."})
    max_new_tokens: int = field(default=128, metadata={"help": "New tokens of each call."})
    temperature: float = field(default=0.0, metadata={"help": "0 decodes greedily."})
    num_tree_nodes: list[int] = field(
        default_factory=lambda: [0, 15], metadata={"help": "Fixed sizes of trees; 0 is that of a whole block."}
    )
    output: str | None = field(default=None, metadata={"help": "JSON file for prompts and figures."})


def method_options(drafter: PreTrainedModel, tree_sizes: Sequence[int]) -> dict[str, dict[str, Any]]:
    """`generate()` options of each way to decode."""
    whole_block = drafter.config.block_size - 1
    methods: dict[str, dict[str, Any]] = {
        "plain": {},
        "whole block": {"assistant_model": drafter, "num_assistant_tokens": whole_block},
        "chain": {"assistant_model": drafter},
    }
    for size in tree_sizes:
        methods[f"tree {size or whole_block}"] = {"assistant_model": drafter, "num_tree_nodes": size or whole_block}
    return methods | {"auto": {"assistant_model": drafter, "num_tree_nodes": "auto"}}


def measure(
    prompt: EvalPrompt, target: PreTrainedModel, tokenizer: Any, methods: dict[str, dict], options: TreeSpeedOptions
) -> dict[str, Any]:
    """Accepted lengths, verified proposals and seconds a token of each method on one prompt."""
    inputs = encode_prompt(tokenizer, prompt.turns[0], target.device)
    settings: dict[str, Any] = {"max_new_tokens": options.max_new_tokens, "do_sample": False}
    if options.temperature > 0:
        settings |= {"do_sample": True, "temperature": options.temperature, "top_k": 0, "top_p": 1.0}
    row: dict[str, Any] = {"task": prompt.task, "prompt_id": prompt.prompt_id}
    for method, method_settings in methods.items():
        torch.manual_seed(0)
        answer = timed_generate(target, inputs, with_clock=False, **settings, **method_settings)
        num_tokens = sum(answer.accepted_lengths)
        row[method] = {
            "accepted_lengths": answer.accepted_lengths,
            "seconds_per_token": answer.decode_seconds / num_tokens if num_tokens else None,
        }
    return row


def figures(rows: Sequence[dict[str, Any]], methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """By method: tokens a cycle, and ratios of speed against each base."""
    found = {}
    for method in methods:
        lengths = [length for row in rows for length in row[method]["accepted_lengths"]]
        seconds = [row[method]["seconds_per_token"] for row in rows]
        found[method] = {
            "tokens_per_cycle": statistics.fmean(lengths),
            "milliseconds": 1e3 * statistics.fmean(seconds),
        }
        for base in _BASES:
            others = [row[base]["seconds_per_token"] for row in rows]
            found[method][f"against {base}"] = {
                "of_means": sum(others) / sum(seconds),
                "interval": ratio_of_means_interval(others, seconds),
                "median": statistics.median(a / b for a, b in zip(others, seconds, strict=True)),
            }
    return found


def render(by_kind: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The figures as Markdown tables, one for each kind of prompt."""
    lines = []
    for kind, found in by_kind.items():
        lines += [f"{kind}:", "", "| | tokens/cycle | ms/token | " + " | ".join(f"/ {base}" for base in _BASES) + " |"]
        lines.append("|---" * (3 + len(_BASES)) + "|")
        for method, figure in found.items():
            cells = [method, f"{figure['tokens_per_cycle']:.2f}", f"{figure['milliseconds']:.1f}"]
            for base in _BASES:
                ratio = figure[f"against {base}"]
                low_high = "" if ratio["interval"] is None else " ({:.2f} to {:.2f})".format(*ratio["interval"])
                cells.append(f"{ratio['of_means']:.2f}{low_high}, median {ratio['median']:.2f}")
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    (options,) = parse_options(TreeSpeedOptions, arguments=arguments, description=__doc__)
    torch.set_num_threads(1)
    dtype = getattr(torch, options.dtype)
    target, tokenizer = load_target(options.target, dtype=dtype)
    drafter = DFlashDraftModel.from_pretrained(options.drafter or shipped_drafter_folder(), dtype=dtype).eval()
    methods = method_options(drafter, options.num_tree_nodes)
    prompts = load_tasks(["offline"], samples=options.samples)
    rows = earlier_rows(options, list(methods))
    done = {(row["task"], row["prompt_id"]) for row in rows}
    warm_up = encode_prompt(tokenizer, "Hello.", target.device)
    for settings in methods.values():
        target.generate(**warm_up, max_new_tokens=_WARM_UP_TOKENS, do_sample=False, **settings)
    for prompt in tqdm([prompt for prompt in prompts if (prompt.task, prompt.prompt_id) not in done], unit="prompt"):
        rows.append(measure(prompt, target, tokenizer, methods, options))
        if options.output is not None:
            facts = run_record(options=vars(options), methods=list(methods))
            write_json(options.output, facts | {"figures": by_kind(rows, list(methods)), "rows": rows})
    print(render(by_kind(rows, list(methods))))


def by_kind(rows: Sequence[dict[str, Any]], methods: Sequence[str]) -> dict[str, dict[str, dict[str, Any]]]:
    """[`figures`] of all prompts and of each kind; prompts with an answer of one token are left out."""
    rows = [row for row in rows if all(row[method]["seconds_per_token"] for method in methods)]
    if not rows:
        return {}
    kinds = dict.fromkeys(row["task"] for row in rows)
    found = {"all": figures(rows, methods)}
    return found | {kind: figures([row for row in rows if row["task"] == kind], methods) for kind in kinds}


def earlier_rows(options: TreeSpeedOptions, methods: list[str]) -> list[dict[str, Any]]:
    """Prompts that a stopped run with the same options has done.

    Raises:
        ValueError: If the output file is of a run with other options.
    """
    if options.output is None or not Path(options.output).exists():
        return []
    earlier = json.loads(Path(options.output).read_text(encoding="utf-8"))
    if earlier["options"] != vars(options) or earlier["methods"] != methods:
        raise ValueError(f"{options.output} has a run with other options. Move it away, or take another `--output`.")
    return earlier["rows"]


if __name__ == "__main__":
    main()
