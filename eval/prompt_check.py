"""Refuses prompts that no one writes: repeated tokens flatter every kind of drafting, random ones slow it down."""

import random
from collections.abc import Sequence

import torch
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dflash_hf.eval.tasks import EvalPrompt

REPETITION_BOUND = 0.7
RANDOMNESS_BOUND = 0.8
_PROMPTS_SCORED = 8
_FEWEST_TOKENS = 16
_MOST_TOKENS = 256


def refuse_unreal_prompts(
    prompts: Sequence[EvalPrompt], tokenizer: PreTrainedTokenizerBase | None, target: PreTrainedModel | None = None
) -> None:
    """Returns if the prompts look like text that people write.

    Repeated tokens: the share of 4-grams that occurred before in the same prompt is bounded by 0.7. Measured with the
    tokenizer of SmolLM2: at most 0.52 in HumanEval, 0.28 in MT-Bench, and 0.48 in the offline set; 0.78 for
    `"a b "` ten times, 0.88 for a sentence ten times, 0.95 for a word 64 times.

    Random tokens, with `target`: the target's mean loss on the first 256 tokens is compared with its loss on the same
    tokens shuffled; the ratio is bounded by 0.8. Measured with SmolLM2-135M-Instruct in bfloat16: at most 0.59 in
    the offline set, 0.65 for a sentence in Finnish and 0.69 for a hash; 0.89 to 1.10 for 16 random tokens, 0.96 to
    1.01 for 256 of them. Up to 8 prompts are scored, evenly spaced among those of at least 16 tokens.

    Args:
        prompts: All turns of a prompt are looked at together.
        tokenizer: The target's; where it is not at hand, None takes words for tokens.
        target (*optional*): Without it random tokens are not recognised.
    Raises:
        ValueError: Names the first prompt out of bounds, its figure and the bound.
    """
    texts = ["\n\n".join(prompt.turns) for prompt in prompts]
    if tokenizer is None:
        token_ids: list[list] = [text.split() for text in texts]
    else:
        token_ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    for prompt, ids in zip(prompts, token_ids, strict=True):
        share = _repeated_share(ids)
        if share > REPETITION_BOUND:
            raise ValueError(
                f"Prompt {prompt.prompt_id!r} of task {prompt.task!r} repeats itself: {share:.0%} of its 4-grams of "
                f"tokens occurred before, at most {REPETITION_BOUND:.0%} are allowed. Accepted lengths on repeated "
                "tokens say nothing about real use. Leave the prompt out or measure with text that people write."
            )
    if target is None or tokenizer is None:
        return
    candidates = [index for index, ids in enumerate(token_ids) if len(ids) >= _FEWEST_TOKENS]
    step = max(1, -(-len(candidates) // _PROMPTS_SCORED))
    for index in candidates[::step]:
        ratio = _loss_against_shuffled(target, tokenizer, token_ids[index][:_MOST_TOKENS])
        if ratio > RANDOMNESS_BOUND:
            raise ValueError(
                f"Prompt {prompts[index].prompt_id!r} of task {prompts[index].task!r} looks like random tokens: the "
                f"target's loss on it is {ratio:.2f} of its loss on the same tokens shuffled, at most "
                f"{RANDOMNESS_BOUND} is allowed. Accepted lengths on random tokens say nothing about real use. Leave "
                "the prompt out or measure with text that people write."
            )


def _repeated_share(token_ids: Sequence[int]) -> float:
    grams = [tuple(token_ids[start : start + 4]) for start in range(len(token_ids) - 3)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


@torch.no_grad()
def _loss_against_shuffled(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]
) -> float:
    """Mean loss on the tokens, divided by that on the same tokens in a random but fixed order."""
    shuffled = list(token_ids)
    random.Random(0).shuffle(shuffled)
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    rows = torch.tensor([[*start, *token_ids], [*start, *shuffled]], device=target.device)  # (2, T)
    logits = target(input_ids=rows, use_cache=False).logits[:, :-1].float()  # (2, T - 1, V)
    labels = rows[:, 1:].to(logits.device)
    text, noise = functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(dim=1).tolist()
    return text / noise
