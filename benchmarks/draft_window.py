"""Cost of a draft against the length of the context, with and without a `draft_window`.

    OMP_NUM_THREADS=1 python benchmarks/draft_window.py

A tiny random drafter reads random context features, so that nothing but the context's length differs. Each cycle adds
the features of a few accepted tokens and drafts one block, for all contexts in an order that is shuffled anew, because
a long context leaves a cold processor cache to whoever comes next. Times are the thread's own processor time, medians
over the cycles. `static` is the code of the fast path, not compiled. `first` is the draft that reads the prompt's
features; `held` is the memory of the drafter's keys and values. What the project promises: with a window of 1024, a
draft at a context of 8192 costs at most 1.1 times what it costs at 1024.
"""

import random
import statistics
import time
from dataclasses import dataclass, field

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dflash_hf import DFlashDraftModel, create_drafter_config
from dflash_hf.context_dflash import BlockDrafter
from dflash_hf.static_draft_dflash import StaticBlockDrafter
from dflash_hf.trainer.command_line import parse_options


@dataclass
class DraftWindowOptions:
    """Options of the benchmark."""

    contexts: list[int] = field(
        default_factory=lambda: [1024, 2048, 4096, 8192, 16384, 32768], metadata={"help": "Lengths of prompts."}
    )
    draft_window: int = field(default=1024, metadata={"help": "The window to compare with none."})
    cycles: int = field(default=60, metadata={"help": "Measured cycles of each context."})
    accepted_length: int = field(default=4, metadata={"help": "Tokens that each cycle adds."})
    hidden_size: int = field(default=128, metadata={"help": "Width of target and drafter."})
    num_hidden_layers: int = field(default=2, metadata={"help": "Layers of the drafter."})
    seed: int = field(default=0, metadata={"help": "Seed of weights and features."})


@dataclass
class Line:
    """One line of the table: a context, with or without the window, in growing or static buffers."""

    context: int
    draft_window: int | None
    block_drafter: BlockDrafter | StaticBlockDrafter
    first_seconds: float = 0.0
    cycle_seconds: list[float] = field(default_factory=list)

    def draft(self, num_tokens: int) -> float:
        """CPU seconds to add the features of `num_tokens` tokens and to draft a block."""
        config = self.block_drafter.drafter.config
        features = torch.randn(1, num_tokens, len(config.target_layer_ids) * config.hidden_size)
        anchor = torch.zeros(1, 1, dtype=torch.long)
        start = time.thread_time()
        self.block_drafter.add_features(features, [num_tokens])
        self.block_drafter.logits(anchor, config.block_size - 1)
        return time.thread_time() - start

    @property
    def kind(self) -> str:
        window = "none" if self.draft_window is None else str(self.draft_window)
        return window + ", static" * isinstance(self.block_drafter, StaticBlockDrafter)

    @property
    def cycle_ms(self) -> float:
        return 1000 * statistics.median(self.cycle_seconds)


def make_pair(options: DraftWindowOptions) -> tuple[LlamaForCausalLM, DFlashDraftModel]:
    """A random target, of which only embedding and head are used, and a random drafter for it."""
    torch.manual_seed(options.seed)
    heads = options.hidden_size // 32
    target_config = LlamaConfig(
        vocab_size=256,
        hidden_size=options.hidden_size,
        intermediate_size=2 * options.hidden_size,
        num_hidden_layers=8,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        max_position_embeddings=2 * max(options.contexts),
    )
    config = create_drafter_config(
        target_config, num_hidden_layers=options.num_hidden_layers, num_target_features=5, mask_token_id=255
    )
    return LlamaForCausalLM(target_config).eval(), DFlashDraftModel(config).eval()


def measure(options: DraftWindowOptions) -> list[Line]:
    """Times of every context with and without the window, and with it in the static buffers of the fast path."""
    target, drafter = make_pair(options)
    lines = []
    for context in options.contexts:
        for window in (None, options.draft_window):
            lines.append(Line(context, window, BlockDrafter(drafter, target, [0], window)))
        num_columns = context + options.accepted_length * options.cycles
        static = StaticBlockDrafter(
            drafter, target, [0], options.draft_window, max_context=num_columns, options={"backend": "eager"}
        )
        lines.append(Line(context, options.draft_window, static))
    Line(64, None, BlockDrafter(drafter, target, [0])).draft(64)  # warm-up
    for line in lines:
        line.first_seconds = line.draft(line.context)
    order = random.Random(options.seed)
    for _ in range(options.cycles):
        for line in order.sample(lines, len(lines)):
            line.cycle_seconds.append(line.draft(options.accepted_length))
    return lines


@torch.inference_mode()
def main() -> None:
    (options,) = parse_options(DraftWindowOptions, description=__doc__)
    torch.set_num_threads(1)
    with torch.compiler.set_stance("force_eager"):
        lines = measure(options)
    print(f"{'context':>8} {'window':>12} {'first ms':>9} {'ms/draft':>9} {'held MiB':>9}")
    for line in lines:
        print(
            f"{line.context:>8} {line.kind:>12} {1000 * line.first_seconds:>9.1f} {line.cycle_ms:>9.2f} "
            f"{line.block_drafter.num_held_bytes / 2**20:>9.2f}"
        )
    for kind in dict.fromkeys(line.kind for line in lines):
        costs = {line.context: line.cycle_ms for line in lines if line.kind == kind}
        shortest = min(costs)
        ratios = ", ".join(f"{context}: {cost / costs[shortest]:.2f}" for context, cost in costs.items())
        print(f"cost / cost at {shortest}, window {kind}: {ratios}")


if __name__ == "__main__":
    main()
