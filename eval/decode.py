"""One answer, decoded by one `generate()` call and measured through its streamer, in the same way for every method."""

import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from dflash_hf.eval.forward_clock import ForwardClock


@dataclass
class Answer:
    """What one decoding call gave.

    Args:
        token_ids (`list[int]`): New tokens, the end token included.
        accepted_lengths (`list[int]`): Tokens committed by each verify forward, bonus token included. The target's
            first forward, which reads the prompt and gives one token, is not among them.
        prefill_seconds (`float`): Time to the first token.
        round_seconds (`list[float]`): Time of each round, drafting and verification.
        draft_seconds (`float`, *optional*): Part of that spent in the drafter and the head on its outputs.
        verify_seconds (`float`, *optional*): Part of that spent in the target's forwards.
        num_proposals (`list[int]`): Proposals verified in each round, where the method tells.
        num_first (`int`): Tokens that the prompt's forward gave: one, or more where a method drafts for it, too.
    Raises:
        ValueError: If the tokens are not one from the prompt's forward and those of the rounds: a wrong measurement.
    """

    token_ids: list[int]
    accepted_lengths: list[int]
    prefill_seconds: float
    round_seconds: list[float]
    draft_seconds: float | None = None
    verify_seconds: float | None = None
    num_proposals: list[int] = field(default_factory=list)
    num_first: int = 1

    def __post_init__(self):
        lengths, seconds = self.accepted_lengths, self.round_seconds
        if len(self.token_ids) != self.num_first + sum(lengths) or len(lengths) != len(seconds):
            raise ValueError(
                f"{len(self.token_ids)} tokens are not {self.num_first} + {sum(lengths)} of {len(lengths)} rounds "
                f"with {len(seconds)} times."
            )

    @property
    def tau(self) -> float:
        """Mean accepted length of this answer, 1.0 for plain decoding, 0.0 without a round."""
        return sum(self.accepted_lengths) / max(1, len(self.accepted_lengths))

    @property
    def decode_seconds(self) -> float:
        """Time from the first token to the last."""
        return sum(self.round_seconds)

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens per second, the first one and the prompt's forward excluded."""
        return sum(self.accepted_lengths) / self.decode_seconds if self.decode_seconds > 0 else 0.0

    def seconds_to(self, num_tokens: int) -> float:
        """Time from the prompt's forward until `num_tokens` were there; a round cut by this counts in part."""
        seconds, missing = 0.0, max(0, num_tokens - self.num_first)
        for length, time_of_round in zip(self.accepted_lengths, self.round_seconds, strict=True):
            if missing <= length:
                return seconds + time_of_round * missing / length
            seconds += time_of_round
            missing -= length
        return seconds


class RoundRecorder(BaseStreamer):
    """Notes size and time of every `put`: the prompt, the first token, then one `put` per verify forward.

    Args:
        inner ([`BaseStreamer`], *optional*): Gets everything passed on, such as a [`TextStreamer`].
    """

    def __init__(self, inner: BaseStreamer | None = None):
        self.inner = inner
        self.sizes: list[int] = []
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.sizes.append(value.numel())
        self.times.append(time.perf_counter())
        if self.inner is not None:
            # Transformers' text streamers take one row or a flat list of tokens.
            self.inner.put(value if value.dim() < 2 else value[0])

    def end(self) -> None:
        if self.inner is not None:
            self.inner.end()


def encode_chat(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], device: torch.device, **template_options: Any
) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` of a chat in the target's template, ready for an answer; shape (1, tokens)."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **template_options)
    return tokenizer(text, return_tensors="pt", add_special_tokens=False).to(device)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, device: torch.device) -> dict[str, torch.Tensor]:
    """[`encode_chat`] of one user turn."""
    return encode_chat(tokenizer, [{"role": "user", "content": prompt}], device)


def timed_generate(
    target: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    *,
    drafter: PreTrainedModel | None = None,
    streamer: BaseStreamer | None = None,
    streamer_name: str = "streamer",
    with_clock: bool = True,
    **options: Any,
) -> Answer:
    """The answer of one `target.generate(**inputs, **options)` call, with the times of its rounds.

    Args:
        inputs (`dict`): `input_ids` and `attention_mask` of one prompt.
        drafter ([`PreTrainedModel`], *optional*): Whose forwards are drafting.
        streamer ([`BaseStreamer`], *optional*): Shows the text while it comes.
        streamer_name (`str`): The argument that takes a streamer.
        with_clock (`bool`): Time forwards by hooks; not for targets that get compiled, hooks and all.
    """
    recorder = RoundRecorder(streamer)
    clock = ForwardClock(target, drafter)
    with clock if with_clock else nullcontext():
        start = time.perf_counter()
        sequences = target.generate(**inputs, **{streamer_name: recorder}, **options)
    sizes, times = recorder.sizes[1:], recorder.times[1:]
    # A draft by the target itself looks like verification.
    is_told = len(clock.widths) == len(sizes)
    return Answer(
        token_ids=sequences[0, inputs["input_ids"].shape[1] :].tolist(),
        accepted_lengths=sizes[1:],
        prefill_seconds=times[0] - start,
        round_seconds=[end - begin for begin, end in zip(times, times[1:], strict=False)],
        draft_seconds=clock.draft_seconds if is_told and drafter is not None else None,
        verify_seconds=sum(clock.target_seconds[1:]) if is_told else None,
        num_proposals=[width - 1 for width in clock.widths[1:]] if is_told else [],
        num_first=sizes[0],
    )
