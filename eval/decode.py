"""One answer, decoded by one method and measured through its streamer, in the same way for every method."""

import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

METHODS = ("plain", "dflash", "prompt_lookup", "native")
_LOOKUP_TOKENS = 7


@dataclass
class Answer:
    """What one `generate()` call gave.

    Args:
        token_ids (`list[int]`): New tokens, the end token included.
        accepted_lengths (`list[int]`): Tokens committed by each verify forward, bonus token included. The target's
            first forward, which reads the prompt and gives one token, is not among them.
        prefill_seconds (`float`): Time to the first token.
        decode_seconds (`float`): Time from the first token to the last.
    """

    token_ids: list[int]
    accepted_lengths: list[int]
    prefill_seconds: float
    decode_seconds: float

    @property
    def tau(self) -> float:
        """Mean accepted length of this answer; 1.0 for plain decoding."""
        return sum(self.accepted_lengths) / max(1, len(self.accepted_lengths))

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens per second, the first one and the prompt's forward excluded."""
        return (len(self.token_ids) - 1) / self.decode_seconds if self.decode_seconds > 0 else 0.0


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


def method_options(method: str, drafter: PreTrainedModel | None) -> dict[str, Any]:
    """`generate()` options of `plain`, `dflash`, `prompt_lookup` or `native` (Transformers' own DFlash loop).

    Raises:
        ValueError: If the method is unknown or needs a drafter and none is given.
    """
    if method not in METHODS:
        raise ValueError(f"Unknown method {method!r}; choose from {METHODS}.")
    if method in ("dflash", "native") and drafter is None:
        raise ValueError(f"The method {method!r} needs a drafter.")
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "dflash": {"assistant_model": drafter},
        "prompt_lookup": {"prompt_lookup_num_tokens": _LOOKUP_TOKENS},
        "native": {"assistant_model": drafter, "speculation_type": "dflash"},
    }
    return options[method]


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, device: torch.device) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` of one user turn in the target's chat template, shape (1, tokens)."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    return tokenizer(text, return_tensors="pt", add_special_tokens=False).to(device)


def answer_prompt(
    target: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    method: str,
    *,
    drafter: PreTrainedModel | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    streamer: BaseStreamer | None = None,
) -> Answer:
    """The target's answer to encoded inputs by one method.

    Args:
        inputs (`dict`): `input_ids` and `attention_mask` of one prompt.
        method (`str`): See [`method_options`].
        max_new_tokens (`int`): Longest answer.
        temperature (`float`): 0 decodes greedily.
        streamer ([`BaseStreamer`], *optional*): Shows the text while it comes.
    """
    recorder = RoundRecorder(streamer)
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    start = time.perf_counter()
    sequences = target.generate(
        **inputs, max_new_tokens=max_new_tokens, streamer=recorder, **sampling, **method_options(method, drafter)
    )
    sizes, times = recorder.sizes[1:], recorder.times[1:]
    return Answer(
        token_ids=sequences[0, inputs["input_ids"].shape[1] :].tolist(),
        accepted_lengths=sizes[1:],
        prefill_seconds=times[0] - start,
        decode_seconds=times[-1] - times[0],
    )
