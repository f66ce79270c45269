"""Cost of a decoding cycle: ours, Transformers' native DFlash path, the authors' loop and plain decoding, alternating.

    OMP_NUM_THREADS=1 python benchmarks/loop_cost.py

All run the same weights on the same prompts, greedily. `dflash` is the default, whose verified length follows from
measured cost and acceptance; `whole_block` verifies every proposal, as the loops that it is compared with do. A cycle
is one verify forward with what belongs to it, without the prompt's forward. Overhead is a call's time outside the
target's forward, the drafter's forward and the head on draft rows. The authors' loop is measured if their wheel is
installed (`pip install --no-deps dflash==0.1.0`).
"""

import statistics
from dataclasses import dataclass, field

import torch
from tqdm import tqdm

from dflash_hf.eval.decode import Answer, encode_prompt
from dflash_hf.eval.methods import MethodUnavailable, decoder
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


@dataclass
class Cost:
    """Figures of one call: milliseconds a cycle, share of the wall time outside forwards, tokens a cycle."""

    cycle_ms: float
    overhead: float
    tokens_per_cycle: float


def cost_of(answer: Answer) -> Cost:
    """Cost of a cycle in one answer, without the prompt's forward."""
    inside = (answer.draft_seconds or 0.0) + (answer.verify_seconds or 0.0)
    return Cost(
        cycle_ms=1000 * answer.decode_seconds / len(answer.round_seconds),
        overhead=1 - inside / answer.decode_seconds,
        tokens_per_cycle=answer.tau,
    )


@torch.inference_mode()
def main() -> None:
    (options,) = parse_options(LoopCostOptions, description=__doc__)
    torch.set_num_threads(1)
    dtype = getattr(torch, options.dtype)
    target, tokenizer = load_target(options.target, dtype=dtype)
    drafter = DFlashDraftModel.from_pretrained(options.drafter or shipped_drafter_folder(), dtype=dtype).eval()
    decoders = {}
    for method in ("plain", "dflash", "whole_block", "native", "authors"):
        try:
            decoders[method] = decoder(method, target, drafter)
        except MethodUnavailable as error:
            print(f"{method}: {error}")
    costs: dict[str, list[Cost]] = {method: [] for method in decoders}
    for decode in decoders.values():
        decode(encode_prompt(tokenizer, "Hello.", target.device), 16, 0.0)
    for row in tqdm(held_out_prompts(options.prompts_per_kind), unit="prompt"):
        inputs = encode_prompt(tokenizer, row["prompt"], target.device)
        for method, decode in decoders.items():
            costs[method].append(cost_of(decode(inputs, options.max_new_tokens, 0.0)))
    print(
        f"{'method':<12} {'ms/cycle':>9} {'in plain steps':>15} {'dflash/this':>12} {'whole block/this':>17} "
        f"{'overhead':>9} {'tokens/cycle':>13}"
    )
    for method, found in costs.items():
        steps = statistics.median(a.cycle_ms / b.cycle_ms for a, b in zip(found, costs["plain"], strict=True))
        ours = statistics.median(a.cycle_ms / b.cycle_ms for a, b in zip(costs["dflash"], found, strict=True))
        whole = statistics.median(a.cycle_ms / b.cycle_ms for a, b in zip(costs["whole_block"], found, strict=True))
        print(
            f"{method:<12} {statistics.median(c.cycle_ms for c in found):>9.1f} {steps:>15.2f} {ours:>12.2f} "
            f"{whole:>17.2f} {statistics.median(c.overhead for c in found):>9.1%} "
            f"{statistics.fmean(c.tokens_per_cycle for c in found):>13.2f}"
        )


if __name__ == "__main__":
    main()
