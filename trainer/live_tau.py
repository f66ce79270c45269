"""Live tau: what a drafter in training gives in real decoding of held-out prompts."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from dflash_hf.trainer.data import first_supervised
from dflash_hf.trainer.target_features import input_device

_BARE_TEXT_PROMPT = 32


def live_prompts(rows: Sequence[dict[str, Any]], count: int) -> list[list[int]]:
    """Prompts of the first `count` rows: the tokens before the first supervised one.

    Rows that are supervised from their start, such as plain text, give their first 32 tokens, or half of them.

    Args:
        rows: Rows with `input_ids` and `loss_mask`, such as [`TokenRows`].
        count (`int`): Most prompts.
    """
    prompts = []
    for index in range(min(count, len(rows))):
        row = rows[index]
        input_ids, loss_mask = row["input_ids"], row["loss_mask"]
        length = first_supervised(loss_mask)
        if length in (0, len(input_ids)):
            length = max(1, min(_BARE_TEXT_PROMPT, len(input_ids) // 2))
        prompts.append(input_ids[:length])
    return prompts


@torch.no_grad()
def decode_live(
    target: PreTrainedModel,
    drafter: PreTrainedModel,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    *,
    num_proposals: int | None = None,
) -> torch.Tensor:
    """Greedy answers to `prompts`, as sums that can be added over processes.

    Args:
        target, drafter ([`PreTrainedModel`]): Both are left in the mode in which they were.
        prompts: Token ids of each prompt.
        max_new_tokens (`int`): Longest answer, in tokens.
        num_proposals (`int`, *optional*): Proposals verified in every round; default: the whole block's.
    Returns:
        `torch.Tensor` of shape (block_size + 1,), float64: rounds, committed tokens, and for each slot from 1 the
        rounds that accepted its proposal. The target's first forward, which reads the prompt, is not a round.
    """
    block_size = drafter.config.block_size
    sums = torch.zeros(block_size + 1, dtype=torch.float64)
    was_training = drafter.training
    drafter.eval()
    try:
        for prompt in prompts:
            input_ids = torch.tensor([prompt], device=input_device(target))
            output = target.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                assistant_model=drafter,
                num_assistant_tokens=num_proposals or block_size - 1,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                num_beams=1,
                return_dict_in_generate=True,
            )
            lengths = torch.tensor(output.accepted_lengths[0], dtype=torch.float64)
            reached = lengths[:, None] > torch.arange(1, block_size)
            sums += torch.cat([torch.stack([torch.tensor(float(len(lengths))), lengths.sum()]), reached.sum(dim=0)])
    finally:
        drafter.train(was_training)
    return sums


def live_metrics(sums: torch.Tensor) -> dict[str, float]:
    """`live_tau`, tokens per verify forward over all rounds, and `live_acceptance_slot_k`; empty without rounds."""
    rounds, tokens, *reached = sums.tolist()
    if rounds == 0:
        return {}
    slots = {f"live_acceptance_slot_{k}": count / rounds for k, count in enumerate(reached, start=1)}
    return {"live_tau": tokens / rounds, **slots}
