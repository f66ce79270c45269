"""A cycle of drafting and verifying against a step of plain decoding, eager and compiled, for big targets on one GPU.

    python benchmarks/cycle_on_gpu.py --output_dir runs/cycle_on_gpu

Targets have the shapes of Qwen3-4B and Qwen3-8B and random weights, drafters those of the shipped configs; nothing is
downloaded. Every cycle accepts the same forced number of tokens in every row, so times mean something and texts do
not. Four ways to decode are timed: plain steps, eager and compiled with a static cache, and our cycles, eager with a
dynamic cache, and compiled, drafts included, with static ones (the fast path, docs/fast-path.md). A time is the median
over steady rounds; rounds before them are the warm-up, compilation included, and are reported as such.

The floor of a cycle is the time to read, at the measured copy bandwidth, the weights of target and drafter, the head
once more for the draft, and the keys and values of the context; that of a step leaves the drafter out. Measurements
are made in order of importance and written down one by one. What does not fit into `--time_budget` is listed; run the
same command again to go on. `--tiny` runs everything on tiny shapes in seconds, to test the script.
"""

import inspect
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import CompileConfig, LogitsProcessor, PreTrainedModel, Qwen3Config, StaticCache

from dflash_hf import create_drafter_config
from dflash_hf.compilation_dflash import known_forwards
from dflash_hf.eval.cost_model import model_from_config
from dflash_hf.eval.forced_acceptance import ForcedProposals
from dflash_hf.eval.methods import sampling_options
from dflash_hf.hub_configs import load_hub_config
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.trainer.command_line import parse_options
from dflash_hf.trainer.provenance import run_record, write_json, write_text

METHODS = ("eager step", "compiled step", "eager cycle", "fast cycle")
_COMPILED = ("compiled step", "fast cycle")
_CYCLES = ("eager cycle", "fast cycle")
_QWEN3 = {
    "vocab_size": 151936,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-4b": _QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "qwen3-8b": _QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
    "smollm2-135m-instruct": {  # for CPUs
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    },
}


@dataclass
class CycleOptions:
    """Options of the benchmark."""

    models: list[str] = field(default_factory=lambda: ["qwen3-4b", "qwen3-8b"], metadata={"help": "Shapes."})
    contexts: list[int] = field(default_factory=lambda: [1024, 16384], metadata={"help": "Tokens of the prompts."})
    batch_sizes: list[int] = field(default_factory=lambda: [1, 8], metadata={"help": "Prompts."})
    accept_length: float = field(default=6.5, metadata={"help": "Tokens that every cycle gives to every row."})
    num_rounds: int = field(default=24, metadata={"help": "Measured rounds of each way to decode."})
    num_warm_up: int = field(default=5, metadata={"help": "Rounds before them."})
    dtype: str = field(default="bfloat16", metadata={"help": "Dtype of target and drafter."})
    device: str | None = field(default=None, metadata={"help": "Default: CUDA if there is one."})
    compile_backend: str = field(default="inductor", metadata={"help": "Backend of `torch.compile`."})
    time_budget: float = field(default=400.0, metadata={"help": "Seconds after which nothing new is begun."})
    output_dir: str = field(default="runs/cycle_on_gpu", metadata={"help": "Folder for JSON and Markdown."})
    tiny: bool = field(default=False, metadata={"help": "Tiny shapes, contexts and batches, in float32."})
    seed: int = field(default=0, metadata={"help": "Seed of weights and prompts."})

    def __post_init__(self):
        if self.tiny:
            self.models, self.contexts, self.batch_sizes, self.dtype = ["tiny"], [24], [1, 2], "float32"
        unknown = sorted(set(self.models) - set(SHAPES))
        if unknown:
            raise ValueError(f"`models` has {unknown}; there are shapes for {list(SHAPES)}.")
        if self.device is None:
            self.device = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Cell:
    """A target's shape with so many prompts of so many tokens."""

    model: str
    context: int
    batch_size: int

    def __str__(self) -> str:
        return f"{self.model}, context {self.context}, batch {self.batch_size}"


@dataclass
class Measurement:
    """Times of one way to decode.

    Args:
        round_ms (`float`): Median of the steady rounds, in milliseconds.
        low_ms, high_ms (`float`): Their first and ninth decile.
        warm_up_seconds (`float`): Time of the rounds before them.
        tokens_per_second (`float`): Of all rows together.
        floor_ms (`float`): Time to read what a round must read.
        peak_gib (`float`): Peak memory of a GPU with these models, the prompts' forward included.
    """

    round_ms: float
    low_ms: float
    high_ms: float
    warm_up_seconds: float
    tokens_per_second: float
    floor_ms: float
    peak_gib: float


class StepClock(LogitsProcessor):
    """Writes down when it is called, which is once for each step of plain decoding."""

    def __init__(self):
        self.times: list[float] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return scores


class TimedProposals(ForcedProposals):
    """Forced acceptance that writes down when it is asked, which is once for each cycle."""

    def __init__(self, accept_length: float, block_size: int):
        super().__init__(accept_length, block_size)
        self.times: list[float] = []

    def __call__(self, logits: torch.Tensor, anchors: torch.LongTensor):
        self.times.append(time.perf_counter())
        return super().__call__(logits, anchors)


class Bench:
    """Models, made when they are needed, and measurements of them."""

    def __init__(self, options: CycleOptions):
        self.options = options
        self.device = torch.device(options.device or "cpu")
        self.bandwidth = copy_bandwidth(self.device, 2**22 if options.tiny else 2**30)
        self._pairs: dict[str, tuple[PreTrainedModel, DFlashDraftModel]] = {}

    def pair(self, model: str) -> tuple[PreTrainedModel, DFlashDraftModel]:
        """Target and drafter of this shape with random weights."""
        if model not in self._pairs:
            torch.manual_seed(self.options.seed)
            dtype = getattr(torch, self.options.dtype)
            target_config = Qwen3Config(**SHAPES[model])
            if model == "tiny":
                config = create_drafter_config(
                    target_config, num_hidden_layers=1, num_target_features=1, block_size=8, mask_token_id=63
                )
            else:
                config = load_hub_config(model)
            with torch.device(self.device):
                drafter = DFlashDraftModel(config).to(dtype).eval()
            self._pairs[model] = model_from_config(target_config, dtype, self.device), drafter
        return self._pairs[model]

    def measure(self, cell: Cell, method: str) -> Measurement:
        """Times of one `generate()` call.

        Raises:
            RuntimeError: If something else than what `method` says was measured.
        """
        options, (target, drafter) = self.options, self.pair(cell.model)
        # Without this, all static caches of `generate` are as long as the longest so far.
        vars(target).pop("_previous_max_cache_length", None)
        num_rounds = options.num_warm_up + options.num_rounds
        tokens_a_round = options.accept_length if method in _CYCLES else 1.0
        num_new = 2 + int(num_rounds * tokens_a_round)
        generator = torch.Generator().manual_seed(options.seed)
        prompts = torch.randint(target.config.vocab_size, (cell.batch_size, cell.context), generator=generator)
        prompts = prompts.to(self.device)
        arguments: dict[str, Any] = sampling_options(num_new, 0.0, ignore_eos=True)
        clock: StepClock | TimedProposals
        if method in _CYCLES:
            clock = TimedProposals(options.accept_length, drafter.config.block_size)
            arguments |= {"custom_generate": drafter.decode, "tree_builder": clock}
        else:
            clock = StepClock()
            arguments |= {"logits_processor": [clock]}
        if method in _COMPILED:
            num_columns = cell.context + num_new + drafter.config.block_size
            cache = StaticCache(config=target.config, max_cache_len=num_columns)
            arguments |= {_cache_argument(target): cache, "compile_config": self._compile_config()}
            torch.compiler.reset()  # every cell has shapes of its own, and no other's graphs
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        target.generate(prompts, attention_mask=torch.ones_like(prompts), **arguments)
        if method == "fast cycle" and not all(known_forwards(each).is_in_use for each in (target, drafter)):
            raise RuntimeError("Target or drafter was not compiled; the log says why.")
        return self._measurement(cell, method, clock.times)

    def _compile_config(self) -> CompileConfig:
        backend = self.options.compile_backend
        config = CompileConfig(backend=backend) if backend == "inductor" else CompileConfig(backend=backend, mode=None)
        config._compile_all_devices = True  # else ignored on CPUs
        return config

    def _measurement(self, cell: Cell, method: str, times: Sequence[float]) -> Measurement:
        seconds = [end - start for start, end in itertools.pairwise(times)]
        # The first cycle reads the prompt's features.
        warm_up, steady = seconds[: self.options.num_warm_up], sorted(seconds[self.options.num_warm_up :])
        median = statistics.median(steady)
        tokens = cell.batch_size * (self.options.accept_length if method in _CYCLES else 1.0)
        target, drafter = self.pair(cell.model)
        num_bytes = bytes_read(target, drafter if method in _CYCLES else None, cell.context, cell.batch_size)
        peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
        others = [pair for name, pair in self._pairs.items() if name != cell.model]
        peak -= sum(parameter.nbytes for pair in others for model in pair for parameter in model.parameters())
        return Measurement(
            round_ms=1000 * median,
            low_ms=1000 * steady[len(steady) // 10],
            high_ms=1000 * steady[-1 - len(steady) // 10],
            warm_up_seconds=sum(warm_up),
            tokens_per_second=tokens / median,
            floor_ms=1000 * num_bytes / self.bandwidth,
            peak_gib=max(0, peak) / 2**30,
        )


def copy_bandwidth(device: torch.device, num_bytes: int, num_copies: int = 10) -> float:
    """Bytes a second that copies read and write, the best of some."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    best = float("inf")
    for _ in range(num_copies + 2):
        wait()
        start = time.perf_counter()
        copy.copy_(source)
        wait()
        best = min(best, time.perf_counter() - start)
    return 2 * num_bytes / best


def bytes_read(target: PreTrainedModel, drafter: PreTrainedModel | None, context: int, batch_size: int) -> int:
    """Bytes that a step of plain decoding must read, or with a drafter a cycle; embeddings are rows only."""
    head = target.get_output_embeddings().weight
    is_tied = head is target.get_input_embeddings().weight
    embedding = 0 if is_tied else target.get_input_embeddings().weight.nbytes
    num_bytes = sum(parameter.nbytes for parameter in target.parameters()) - embedding
    if drafter is not None:
        num_bytes += sum(parameter.nbytes for parameter in drafter.parameters()) + head.nbytes
    for model in (target, drafter):
        if model is not None:
            config = model.config
            numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
            num_bytes += batch_size * context * numbers * head.element_size()
    return num_bytes


def ordered_cells(options: CycleOptions) -> list[Cell]:
    """All cells, the most important first: single prompts before batches, short contexts before long ones."""
    cells = itertools.product(options.batch_sizes, options.contexts, options.models)
    return [Cell(model, context, batch_size) for batch_size, context, model in cells]


def run(options: CycleOptions) -> dict[str, Any]:
    """Measures what is missing in the output folder, as long as there is time, and writes JSON and Markdown there."""
    start = time.perf_counter()
    path = Path(options.output_dir) / "cycle_on_gpu.json"
    bench = Bench(options)
    results: dict[str, Any] = run_record(options=asdict(options), copy_bandwidth=bench.bandwidth) | {"cells": {}}
    if path.exists():
        results["cells"] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    slowest = dict.fromkeys((True, False), 0.0)
    results["errors"], results["left_out"] = {}, []
    for cell, method in itertools.product(ordered_cells(options), METHODS):
        found = results["cells"].setdefault(str(cell), {})
        if method in found:
            continue
        name, is_compiled = f"{cell}: {method}", method in _COMPILED
        begin = time.perf_counter()
        if begin - start + slowest[is_compiled] > options.time_budget:
            results["left_out"].append(name)
            continue
        try:
            found[method] = asdict(bench.measure(cell, method))
        except RuntimeError as error:  # out of memory is one of these, and so are faults of compilers
            results["errors"][name] = f"{type(error).__name__}: {error}"[:500]
        slowest[is_compiled] = max(slowest[is_compiled], time.perf_counter() - begin)
        print(f"{name}: {found.get(method, results['errors'].get(name))}", flush=True)
        write_json(path, results)
    results["seconds"] = time.perf_counter() - start
    write_json(path, results)
    write_text(path.with_suffix(".md"), report(results, options))
    return results


def report(results: dict[str, Any], options: CycleOptions) -> str:
    """The measurements as Markdown, with the goals beside them."""
    lines = [
        f"Forced acceptance {options.accept_length:g}, {options.dtype}, copy bandwidth "
        f"{results['copy_bandwidth'] / 1e12:.3f} TB/s, {results['hardware']}, {results['versions']}.",
        "",
        "| cell | way | ms (first to ninth decile) | eager steps | compiled steps | tokens/s | floor ms "
        "| share of floor | warm-up s | peak GiB |",
        "|---" * 10 + "|",
    ]
    for cell in ordered_cells(options):
        found = {name: Measurement(**values) for name, values in results["cells"].get(str(cell), {}).items()}
        for method, row in found.items():
            units = [
                f"{row.round_ms / found[base].round_ms:.2f}" if base in found else ""
                for base in ("eager step", "compiled step")
            ]
            cells = [
                str(cell),
                method,
                f"{row.round_ms:.2f} ({row.low_ms:.2f} to {row.high_ms:.2f})",
                *units,
                f"{row.tokens_per_second:.1f}",
                f"{row.floor_ms:.3f}",
                f"{row.floor_ms / row.round_ms:.0%}",
                f"{row.warm_up_seconds:.1f}",
                f"{row.peak_gib:.1f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| cell | goal | found |", "|---|---|---|", *_goal_lines(results, options)]
    for title, names in (("Left out for lack of time", results["left_out"]), ("Failed", results["errors"])):
        if names:
            lines += ["", f"{title}:", ""]
            lines += [f"- {name}" + (f": {names[name]}" if isinstance(names, dict) else "") for name in names]
    return "\n".join(lines) + "\n"


def _goal_lines(results: dict[str, Any], options: CycleOptions) -> list[str]:
    lines = []
    for cell in ordered_cells(options):
        found = {name: Measurement(**values) for name, values in results["cells"].get(str(cell), {}).items()}
        eager, compiled = found.get("eager step"), found.get("compiled step")
        cycle, fast = found.get("eager cycle"), found.get("fast cycle")
        if cycle and eager:
            cost = cycle.round_ms / eager.round_ms
            lines.append(_goal_line(cell, "eager cycle at most 1.20 eager steps", f"{cost:.2f}", cost <= 1.2))
        if fast:
            share = fast.floor_ms / fast.round_ms
            lines.append(_goal_line(cell, "fast cycle at least 40% of the floor", f"{share:.0%}", share >= 0.4))
        if fast and compiled:
            ratio = fast.tokens_per_second / compiled.tokens_per_second
            lines.append(
                _goal_line(cell, "fast path never slower than compiled steps", f"{ratio:.2f}x tokens/s", ratio >= 1)
            )
    return lines


def _goal_line(cell: Cell, goal: str, found: str, is_met: bool) -> str:
    return f"| {cell} | {goal} | {found}: {'met' if is_met else 'missed'} |"


def _cache_argument(target: PreTrainedModel) -> str:
    # Transformers renamed the argument between 5.22 and 5.24.
    return "cache" if "cache" in inspect.signature(target.forward).parameters else "past_key_values"


def main() -> None:
    (options,) = parse_options(CycleOptions, description=__doc__)
    results = run(options)
    print((Path(options.output_dir) / "cycle_on_gpu.md").read_text(encoding="utf-8"))
    print(f"{results['seconds']:.0f} s; {len(results['left_out'])} measurements left out.")


if __name__ == "__main__":
    main()
