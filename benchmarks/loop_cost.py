"""Cost of a decoding cycle: ours, Transformers' native DFlash path, the authors' loop and plain decoding, alternating.

    OMP_NUM_THREADS=1 python benchmarks/loop_cost.py

All run the same weights on the same prompts, greedily. `dflash` is the default, whose verified length follows from
measured cost and acceptance; `whole block` verifies every proposal, as the loops that it is compared with do. A cycle
is one verify forward with what belongs to it, without the prompt's forward. Overhead is a call's time outside the
target's forward, the drafter's forward and the head on draft rows. The authors' loop is measured if their wheel is
installed (`pip install --no-deps dflash==0.1.0`).
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel, Qwen3Config

from dflash_hf.eval.decode import encode_prompt, method_options
from dflash_hf.eval.prompts import held_out_prompts
from dflash_hf.hub_configs import shipped_drafter_folder
from dflash_hf.hub_configs.embedded_target import EMBEDDED_TARGET, load_target
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.trainer.command_line import parse_options


@dataclass
class LoopCostOptions:
    """Options of the benchmark."""

    target: str = field(default=EMBEDDED_TARGET, metadata={"help": "Hub id, folder, or the embedded target."})
    drafter: str | None = field(default=None, metadata={"help": "Folder or Hub id; default: the shipped drafter."})
    dtype: str = field(default="bfloat16", metadata={"help": "Dtype of target and drafter."})
    prompts_per_kind: int = field(default=3, metadata={"help": "Held-out prompts of each kind."})
    max_new_tokens: int = field(default=128, metadata={"help": "New tokens of each call."})


class ForwardClock:
    """Time inside chosen modules, nested calls counted once, and the number of target forwards.

    Args:
        target ([`PreTrainedModel`]): Its forwards are counted; its head outside of them belongs to drafting.
        drafters: Modules whose forward is drafting.
    """

    def __init__(self, target: PreTrainedModel, drafters: list[nn.Module]):
        self._target = target
        self._depth = 0
        for module in (target, target.get_output_embeddings(), *drafters):
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave)
        self.reset()

    def reset(self) -> None:
        self.inside_seconds = 0.0
        self.prefill_seconds = 0.0
        self.num_target_forwards = 0

    def _enter(self, module, arguments) -> None:
        if self._depth == 0:
            self._start = time.perf_counter()
        self._depth += 1

    def _leave(self, module, arguments, output) -> None:
        self._depth -= 1
        if self._depth:
            return
        seconds = time.perf_counter() - self._start
        self.inside_seconds += seconds
        if module is self._target:
            self.num_target_forwards += 1
            if self.num_target_forwards == 1:
                self.prefill_seconds = seconds


@dataclass
class Cost:
    """Figures of one call: milliseconds a cycle, share of the wall time outside forwards, tokens a cycle."""

    cycle_ms: float
    overhead: float
    tokens_per_cycle: float


def measure(clock: ForwardClock, call: Callable[[], torch.Tensor], num_prompt_tokens: int) -> Cost:
    """Cost of one decoding call that returns ids of shape (1, prompt + new tokens)."""
    clock.reset()
    start = time.perf_counter()
    new_tokens = call().shape[1] - num_prompt_tokens
    wall = time.perf_counter() - start
    cycles = clock.num_target_forwards - 1
    return Cost(
        cycle_ms=1000 * (wall - clock.prefill_seconds) / cycles,
        overhead=(wall - clock.inside_seconds) / wall,
        tokens_per_cycle=(new_tokens - 1) / cycles,
    )


def authors_drafter(drafter: DFlashDraftModel) -> nn.Module | None:
    """The authors' module with the same weights, or None if their wheel is not installed."""
    try:
        from dflash.model import DFlashDraftModel as AuthorsDraftModel
    except ImportError:
        return None
    theirs = AuthorsDraftModel(Qwen3Config(**drafter.config.to_dict())).to(drafter.dtype).eval()
    theirs.load_state_dict(drafter.state_dict())
    return theirs


@torch.inference_mode()
def main() -> None:
    (options,) = parse_options(LoopCostOptions, description=__doc__)
    torch.set_num_threads(1)
    dtype = getattr(torch, options.dtype)
    target, tokenizer = load_target(options.target, dtype=dtype)
    drafter = DFlashDraftModel.from_pretrained(options.drafter or shipped_drafter_folder(), dtype=dtype).eval()
    theirs = authors_drafter(drafter)
    clock = ForwardClock(target, [module for module in (drafter, theirs) if module is not None])
    limits = {"max_new_tokens": options.max_new_tokens, "do_sample": False}

    def run(method: str, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        if method == "whole block":
            return target.generate(
                **inputs, **limits, assistant_model=drafter, num_assistant_tokens=drafter.config.block_size - 1
            )
        if method != "authors":
            return target.generate(**inputs, **limits, **method_options(method, drafter))
        from dflash.model import dflash_generate

        return dflash_generate(
            theirs, target, inputs["input_ids"], options.max_new_tokens, [target.generation_config.eos_token_id]
        )

    methods = ["plain", "dflash", "whole block", "native", *(["authors"] if theirs is not None else [])]
    costs: dict[str, list[Cost]] = {method: [] for method in methods}
    warm_up = encode_prompt(tokenizer, "Hello.", target.device)
    for method in methods:
        run(method, warm_up)
    for row in tqdm(held_out_prompts(options.prompts_per_kind), unit="prompt"):
        inputs = encode_prompt(tokenizer, row["prompt"], target.device)
        for method in methods:
            costs[method].append(measure(clock, partial(run, method, inputs), inputs["input_ids"].shape[1]))
    print(
        f"{'method':<12} {'ms/cycle':>9} {'in plain steps':>15} {'dflash/this':>12} {'whole block/this':>17} "
        f"{'overhead':>9} {'tokens/cycle':>13}"
    )
    for method, found in costs.items():
        steps = statistics.median(a.cycle_ms / b.cycle_ms for a, b in zip(found, costs["plain"], strict=True))
        ours = statistics.median(a.cycle_ms / b.cycle_ms for a, b in zip(costs["dflash"], found, strict=True))
        whole = statistics.median(a.cycle_ms / b.cycle_ms for a, b in zip(costs["whole block"], found, strict=True))
        print(
            f"{method:<12} {statistics.median(c.cycle_ms for c in found):>9.1f} {steps:>15.2f} {ours:>12.2f} "
            f"{whole:>17.2f} {statistics.median(c.overhead for c in found):>9.1%} "
            f"{statistics.fmean(c.tokens_per_cycle for c in found):>13.2f}"
        )


if __name__ == "__main__":
    main()
