"""`dflash-eval`: accepted length, speed and identity of a drafter on held-out prompts, with its provenance."""

import hashlib
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import transformers
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dflash_hf.eval import metrics
from dflash_hf.eval.decode import Answer, answer_prompt, encode_prompt
from dflash_hf.eval.prompts import KINDS, held_out_prompts
from dflash_hf.hub_configs import shipped_drafter_folder
from dflash_hf.hub_configs.embedded_target import EMBEDDED_TARGET, load_target
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.trainer.command_line import parse_options
from dflash_hf.trainer.provenance import command_line, hardware, versions, write_json


@dataclass
class EvalOptions:
    """Options of `dflash-eval`."""

    target: str = field(default=EMBEDDED_TARGET, metadata={"help": "Hub id, folder, or the embedded target."})
    drafter: str | None = field(default=None, metadata={"help": "Folder or Hub id; default: the shipped drafter."})
    methods: list[str] = field(
        default_factory=lambda: ["dflash", "prompt_lookup"], metadata={"help": "Methods beside plain generate."}
    )
    per_kind: int = field(default=16, metadata={"help": "Prompts of each kind, at most 16."})
    max_new_tokens: int = field(default=128, metadata={"help": "Longest answer."})
    temperature: float = field(default=0.0, metadata={"help": "0 decodes greedily."})
    dtype: str = field(default="bfloat16", metadata={"help": "Dtype of target and drafter."})
    num_threads: int = field(default=1, metadata={"help": "CPU threads of torch."})
    output: str | None = field(default=None, metadata={"help": "JSON file for the results."})


def evaluate_drafter(
    target: PreTrainedModel,
    drafter: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[dict[str, str]],
    *,
    methods: Sequence[str] = ("dflash", "prompt_lookup"),
    max_new_tokens: int = 128,
    temperature: float = 0.0,
) -> dict[str, Any]:
    """Results by method and kind of prompt; every prompt is answered by all methods in turn, in one run.

    One unmeasured answer per method comes first. Speed-ups exclude the prompt's forward.

    Args:
        prompts: Rows of `kind` and `prompt`.
        methods: Methods beside `plain`, see [`answer_prompt`].
    Returns:
        `dict` with `summary` (method -> kind or `"all"` -> figures) and `answers` (one row per prompt and method).
    """
    answers: dict[str, list[Answer]] = {method: [] for method in ("plain", *methods)}
    for method in answers:
        inputs = encode_prompt(tokenizer, "Hello.", target.device)
        answer_prompt(target, inputs, method, drafter=drafter, max_new_tokens=16)
    for row in tqdm(prompts, desc="prompts", unit="prompt"):
        inputs = encode_prompt(tokenizer, row["prompt"], target.device)
        for method, done in answers.items():
            done.append(
                answer_prompt(
                    target, inputs, method, drafter=drafter, max_new_tokens=max_new_tokens, temperature=temperature
                )
            )
    kinds = [row["kind"] for row in prompts]
    return {
        "summary": {
            method: {
                kind: _figures(method, answers, [i for i, k in enumerate(kinds) if kind in (k, "all")])
                for kind in (*sorted(set(kinds), key=KINDS.index), "all")
            }
            for method in answers
        },
        "answers": [
            {"kind": kind, "method": method, **asdict(done[i])}
            for i, kind in enumerate(kinds)
            for method, done in answers.items()
        ],
    }


def _figures(method: str, answers: dict[str, list[Answer]], indices: list[int]) -> dict[str, float]:
    chosen = [answers[method][i] for i in indices]
    plain = [answers["plain"][i] for i in indices]
    return {
        "tau": metrics.mean_tau(chosen),
        "tau_interval_95": metrics.interval_95([answer.tau for answer in chosen]),
        "tau_pooled": metrics.pooled_tau(chosen),
        "speedup": metrics.decode_speedup(chosen, plain),
        "speedup_median": metrics.median_speedup(chosen, plain),
        "tokens_per_second": statistics.fmean(answer.tokens_per_second for answer in chosen),
        "identical": metrics.identical_share(chosen, plain),
        "repeated_4grams": metrics.repeated_4gram_share(chosen),
        "prompts": len(chosen),
    }


def provenance(options: Any, prompts: Sequence[dict[str, str]]) -> dict[str, Any]:
    """What a reader needs to repeat a figure: command, versions, hardware, options and a hash of the prompts."""
    digest = hashlib.sha256(json.dumps(list(prompts), sort_keys=True).encode()).hexdigest()
    return {
        "command": command_line(),
        "options": asdict(options),
        "versions": versions(),
        "hardware": hardware(),
        "prompts_sha256": digest,
    }


def markdown_table(summary: dict[str, dict[str, dict[str, float]]]) -> str:
    """The summary as a Markdown table, one row per method and kind."""
    lines = [
        "| method | prompts | tau (mean) | tau (pooled) | speed-up | speed-up (median) | tokens/s | identical "
        "| repeated 4-grams |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for method, kinds in summary.items():
        for kind, f in kinds.items():
            lines.append(
                f"| {method} | {kind} ({f['prompts']}) | {f['tau']:.2f} ± {f['tau_interval_95']:.2f} | "
                f"{f['tau_pooled']:.2f} | {f['speedup']:.2f} | {f['speedup_median']:.2f} | "
                f"{f['tokens_per_second']:.1f} | {f['identical']:.0%} | {f['repeated_4grams']:.2f} |"
            )
    return "\n".join(lines)


def main() -> None:
    (options,) = parse_options(EvalOptions, description="Measure a drafter on held-out prompts.")
    torch.set_num_threads(options.num_threads)
    transformers.set_seed(0)
    dtype = getattr(torch, options.dtype)
    target, tokenizer = load_target(options.target, dtype=dtype)
    drafter = DFlashDraftModel.from_pretrained(options.drafter or shipped_drafter_folder(), dtype=dtype).eval()
    drafter.to(target.device)
    prompts = held_out_prompts(options.per_kind)
    results = evaluate_drafter(
        target,
        drafter,
        tokenizer,
        prompts,
        methods=options.methods,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
    )
    print(markdown_table(results["summary"]))
    if options.output is not None:
        write_json(options.output, {"provenance": provenance(options, prompts), **results})


if __name__ == "__main__":
    main()
