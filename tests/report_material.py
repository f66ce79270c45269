"""Reports of `dflash-eval` made by hand: four methods on four tasks at two temperatures, and one of a server."""

import copy
from typing import Any

BLOCK_SIZE = 8
TASKS = ("code", "chat", "maths", "json")
METHODS = ("plain", "dflash", "prompt_lookup", "assistant")
_ACCEPTANCE = {"dflash": 0.7, "prompt_lookup": 0.45, "assistant": 0.6}
_TASK_FACTOR = {"prose": 0.5, "code": 1.1, "chat": 0.75, "maths": 1.0, "json": 1.2, "all": 1.0}
_TIME = {"dflash": 1.3, "prompt_lookup": 1.15, "assistant": 1.9}

PROVENANCE: dict[str, Any] = {
    "command": "dflash-eval --output_dir runs/eval --temperatures 0 1",
    "options": {"max_new_tokens": 128, "num_threads": 1, "temperatures": [0.0, 1.0], "output_dir": "runs/eval"},
    "versions": {"dflash_hf": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0", "python": "3.11.7"},
    "hardware": {"machine": "x86_64", "cpus": 2, "processor": "a processor"},
    "git": {"commit": "0123abc", "has_changes": False},
    "started": "2026-09-30T10:00:00Z",
    "finished": "2026-09-30T10:20:00Z",
    "prompts_sha256": "0123456789abcdef" * 4,
    "target": "org/target",
    "drafter": "org/drafter",
    "dtype": "bfloat16",
    "quantization": None,
    "attention": "sdpa",
    "block_size": BLOCK_SIZE,
    "template_mode": "thinking off",
    "seed": 0,
    "warm_up": "one answer per method, not measured",
    "excluded": "the prompt's forward, from decode times",
    "world_size": 2,
}


def result_row(method: str, task: str, temperature: float = 0.0) -> dict[str, Any]:
    """A row whose acceptance falls by the same factor from slot to slot."""
    prompts = 120 if task == "all" else 30
    row: dict[str, Any] = {
        "method": method,
        "task": task,
        "temperature": temperature,
        "prompts": prompts,
        "answers": prompts,
        "tokens": 128 * prompts,
        "repeated_4grams": 0.21 if task == "code" else 0.05,
    }
    if method == "plain":
        slots, rounds, speedup = None, [100 * prompts, *[0] * (BLOCK_SIZE - 1)], 1.0
    else:
        share = min(0.95, _ACCEPTANCE[method] * _TASK_FACTOR[task] * (0.9 if temperature else 1.0))
        slots = [share**slot for slot in range(1, BLOCK_SIZE)]
        reached = [1.0, *slots, 0.0]
        rounds = [round(1000 * (reached[k] - reached[k + 1])) for k in range(BLOCK_SIZE)]
        speedup = (1 + sum(slots)) / _TIME[method]
    tau = 1.0 if slots is None else 1 + sum(slots)
    return row | {
        "tau": tau,
        "tau_interval": [tau * 0.95, tau * 1.05] if slots else [1.0, 1.0],
        "tau_pooled": tau * 0.98 if slots else 1.0,
        "drafts_per_round": tau * 0.98 - 1 if slots else 0.0,
        "acceptance_per_slot": slots if method != "prompt_lookup" else None,
        "accepted_length_counts": rounds,
        "full_block_rate": slots[-1] if slots and method != "prompt_lookup" else None,
        "speedup": speedup,
        "speedup_interval": [speedup * 0.9, speedup * 1.1] if slots else [1.0, 1.0],
        "speedup_median": speedup * 1.02 if slots else 1.0,
        "end_to_end_speedup": speedup * 0.95 if slots else 1.0,
        "end_to_end_speedup_interval": [speedup * 0.85, speedup * 1.05] if slots else [1.0, 1.0],
        "time_to_first_token_ms": 310.0,
        "time_to_first_token_interval": [290.0, 330.0],
        "tokens_per_second": 15.5 * speedup,
        "tokens_per_second_interval": [15.0 * speedup, 16.0 * speedup],
        "draft_share": 0.12 if method in ("dflash", "assistant") else None,
        "identical": 1.0 if method == "plain" else 0.975,
    }


def make_report(**provenance: Any) -> dict[str, Any]:
    """Results of every method and task, greedy and at temperature 1; `provenance` replaces single entries."""
    return {
        "format": "dflash-eval 1",
        "provenance": copy.deepcopy(PROVENANCE) | provenance,
        "methods": list(METHODS),
        "skipped_methods": {"authors": "the package `dflash` is not installed"},
        "results": [
            result_row(method, task, temperature)
            for method in METHODS
            for temperature in (0.0, 1.0)
            for task in (*TASKS, "all")
        ],
        "identity": [
            {
                "temperature": 0.0,
                "method": method,
                "answers": 120,
                "identical": 117,
                "near_ties": 3,
                "unexplained": 0,
                "largest_margin": 0.03125,
                "bound": 0.25,
                "dtype": "bfloat16",
            }
            for method in METHODS[1:]
        ],
    }


def serving_row(task: str, concurrency: int) -> dict[str, Any]:
    """A row of a server whose throughput grows more slowly than the number of requests in flight."""
    speed = 400 * concurrency**0.8 * _TASK_FACTOR[task]
    return {
        "task": task,
        "concurrency": concurrency,
        "requests": 64,
        "failed": 0,
        "tokens": 64 * 128,
        "seconds": 64 * 128 / speed,
        "tokens_per_second": speed,
        "request_seconds": {"p50": 1.0, "p90": 1.5, "p99": 2.25},
        "time_to_first_token_ms": {"p50": 40.0, "p90": 60.0, "p99": 95.0},
        "time_per_token_ms": {"p50": 7.5, "p90": 9.25, "p99": 12.0},
        "tau": 3.5,
        "acceptance_per_slot": [0.8, 0.6, 0.4, 0.3, 0.2, 0.12, 0.08],
        "acceptance_source": "vllm metrics",
    }


def make_serving_report(**provenance: Any) -> dict[str, Any]:
    """What `dflash-eval --server` writes: a sweep over requests in flight, and nothing decoded in process."""
    server = {"attention": None, "dtype": None, "warm_up": "one request per task"}
    return {
        "format": "dflash-eval 1",
        "provenance": copy.deepcopy(PROVENANCE) | server | provenance,
        "methods": [],
        "skipped_methods": {},
        "results": [],
        "identity": [],
        "serving": [serving_row(task, concurrency) for task in TASKS for concurrency in (1, 2, 4, 8, 16, 32)],
    }
