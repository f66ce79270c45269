"""What a cycle costs in steps of plain decoding, for a target's shape with random weights, and what a tau then brings.

Speed-up = tau / (cost of a cycle in plain steps): equation 1 of DFlash, arXiv 2602.06036, with measured times.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from dflash_hf.eval.decode import Answer, timed_generate
from dflash_hf.eval.forced_acceptance import forced_options
from dflash_hf.eval.methods import sampling_options
from dflash_hf.hub_configs import load_hub_config, shipped_drafter_folder
from dflash_hf.hub_configs.embedded_target import EMBEDDED_TARGET, embedded_target_folder
from dflash_hf.modeling_dflash import DFlashDraftModel


@dataclass
class CostRow:
    """Cost of a round of one kind after a context of one length.

    Args:
        context_length (`int`): Tokens of the prompt.
        num_proposals (`int`): Proposals verified in each round.
        accept_length (`float`, *optional*): Tokens accepted in each round, where that was forced.
        plain_ms, cycle_ms (`float`): Median times of a plain step and of a cycle, in milliseconds.
        cost (`float`): Median over repetitions of a cycle's time in plain steps: the tau above which drafting pays.
        cost_range (`tuple[float, float]`): Its lowest and highest repetition.
        draft_share, verify_share (`float`): Parts of a cycle.
    """

    context_length: int
    num_proposals: int
    accept_length: float | None
    plain_ms: float
    cycle_ms: float
    cost: float
    cost_range: tuple[float, float]
    draft_share: float
    verify_share: float

    def speedup(self, tau: float) -> float:
        """The decode speed-up that a drafter with this tau brings."""
        return tau / self.cost


def model_from_config(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A model of this shape with random weights, in eval mode; nothing is downloaded."""
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@torch.no_grad()
def cycle_costs(
    target: PreTrainedModel,
    drafter: DFlashDraftModel,
    *,
    context_lengths: Sequence[int] = (128,),
    num_proposals: Sequence[int] | None = None,
    accept_lengths: Sequence[float] = (),
    num_rounds: int = 16,
    repetitions: int = 5,
    seed: int = 0,
) -> list[CostRow]:
    """Costs of cycles, each kind alternating with plain decoding; weights may be random, prompts are.

    Args:
        context_lengths: Tokens of the prompt.
        num_proposals: Proposals verified in each round; default: 1, half a block and a whole one.
        accept_lengths: Tokens that whole blocks are made to give; the rest of a cycle depends on it a little.
        num_rounds (`int`): Rounds of one measurement.
        repetitions (`int`): Measurements of each kind, after one that is not counted.
        seed (`int`): Seed of the prompts.
    """
    whole = drafter.config.block_size - 1
    widths = sorted({1, (whole + 1) // 2, whole}) if num_proposals is None else num_proposals
    generator = torch.Generator().manual_seed(seed)
    forced = [(whole, length) for length in accept_lengths]
    kinds: list[tuple[int, float | None]] = [*((width, None) for width in widths), *forced]
    rows = []
    with tqdm(total=len(context_lengths) * (repetitions + 1), unit="repetition") as progress:
        for context_length in context_lengths:
            vocab_size = target.get_input_embeddings().weight.shape[0]
            prompt = torch.randint(vocab_size, (1, context_length), generator=generator).to(target.device)
            found: dict[tuple[int, float | None], list[tuple[Answer, Answer]]] = {kind: [] for kind in kinds}
            for repetition in range(repetitions + 1):
                for width, accept_length in kinds:
                    pair = (
                        _rounds(target, prompt, num_rounds),
                        _rounds(target, prompt, num_rounds, drafter, width, accept_length),
                    )
                    if repetition:
                        found[width, accept_length].append(pair)
                progress.update()
            rows += [_cost_row(context_length, *kind, pairs) for kind, pairs in found.items()]
    return rows


def _rounds(
    target: PreTrainedModel,
    prompt: torch.LongTensor,
    num_rounds: int,
    drafter: DFlashDraftModel | None = None,
    width: int = 0,
    accept_length: float | None = None,
) -> Answer:
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    options = sampling_options(1 + int(num_rounds * (accept_length or 1)), 0.0, ignore_eos=True)
    name = "streamer"
    if drafter is not None and accept_length is not None:
        options |= forced_options(drafter, accept_length)
        name = "token_streamer"
    elif drafter is not None:
        options |= {"assistant_model": drafter, "num_assistant_tokens": width}
    return timed_generate(target, inputs, drafter=drafter, streamer_name=name, **options)


def _cost_row(
    context_length: int, width: int, accept_length: float | None, pairs: Sequence[tuple[Answer, Answer]]
) -> CostRow:
    # The first draft reads the whole context; each round after it only what is new.
    plain = [statistics.fmean(answer.round_seconds[1:]) for answer, _ in pairs]
    cycle = [statistics.fmean(answer.round_seconds[1:]) for _, answer in pairs]
    costs = [slow / fast for slow, fast in zip(cycle, plain, strict=True)]
    drafted = [answer for _, answer in pairs]
    seconds = sum(answer.decode_seconds for answer in drafted)
    return CostRow(
        context_length=context_length,
        num_proposals=width,
        accept_length=accept_length,
        plain_ms=1000 * statistics.median(plain),
        cycle_ms=1000 * statistics.median(cycle),
        cost=statistics.median(costs),
        cost_range=(min(costs), max(costs)),
        draft_share=sum(answer.draft_seconds or 0.0 for answer in drafted) / seconds,
        verify_share=sum(answer.verify_seconds or 0.0 for answer in drafted) / seconds,
    )


def cost_table(rows: Sequence[CostRow], taus: Sequence[float]) -> str:
    """The costs as Markdown, with the speed-up that each tau brings where the width can give it."""
    titles = ["context", "proposals", "accepted", "plain step ms", "cycle ms", "cost (range)", "draft", "verify"]
    lines = ["| " + " | ".join([*titles, *(f"tau {tau:g}" for tau in taus)]) + " |", "|---" * (8 + len(taus)) + "|"]
    for row in rows:
        speedups = [f"{row.speedup(tau):.2f}x" if tau <= row.num_proposals + 1 else "" for tau in taus]
        accepted = "as it comes" if row.accept_length is None else f"{row.accept_length:g}"
        low, high = row.cost_range
        cells = [
            str(row.context_length),
            str(row.num_proposals),
            accepted,
            f"{row.plain_ms:.1f}",
            f"{row.cycle_ms:.1f}",
            f"{row.cost:.2f} ({low:.2f} to {high:.2f})",
            f"{row.draft_share:.0%}",
            f"{row.verify_share:.0%}",
        ]
        lines.append("| " + " | ".join([*cells, *speedups]) + " |")
    return "\n".join(lines)


def target_config(name_or_path: str) -> PreTrainedConfig:
    """Config of the embedded target, a Hub id or a folder; weights are not read."""
    return AutoConfig.from_pretrained(embedded_target_folder() if name_or_path == EMBEDDED_TARGET else name_or_path)


def random_pair(
    target: str, drafter: str | None, dtype: torch.dtype, device: torch.device
) -> tuple[PreTrainedModel, DFlashDraftModel]:
    """Target and drafter of these shapes with random weights, in eval mode.

    Args:
        target (`str`): See [`target_config`].
        drafter (`str`, *optional*): See [`load_hub_config`]; default: the shipped drafter's shape.
    """
    config = load_hub_config(drafter or shipped_drafter_folder())
    model = model_from_config(target_config(target), dtype, device)
    with torch.device(device):
        return model, DFlashDraftModel(config).to(dtype).eval()
