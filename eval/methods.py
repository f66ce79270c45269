"""The ways to decode that `dflash-eval` compares, each as a function from encoded inputs to a measured answer."""

import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import CompileConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from dflash_hf.eval.decode import Answer, timed_generate
from dflash_hf.eval.forced_acceptance import forced_options
from dflash_hf.eval.forward_clock import ForwardClock

# In this order they are measured and shown.
METHODS = {
    "plain": "plain `generate`, eager: what all others are compared with",
    "compiled": "plain `generate` with a compiled forward and a static cache, as long as the longest call of the run",
    "prompt_lookup": "Transformers' prompt lookup: proposals are copied from the text so far",
    "assistant": "Transformers' assisted decoding with the small model given by `assistant`",
    "self_draft": "a control: the target drafts for itself; where this differs from plain, rounding is the cause",
    "native": "Transformers' own DFlash loop",
    "authors": "the loop of the authors' package `dflash`",
    "whole_block": "our loop, verifying the whole block in every round",
    "dflash": "our loop as it comes: it chooses how many proposals to verify",
    "tree": "our loop with best-first trees, as many nodes as pay in each round",
    "fast": "our loop with a static cache, drafts and verification compiled; the cache as for `compiled`",
    "forced": "our loop with `simulate_accept_len` tokens accepted in every round: speed without quality",
}
_NEED_DRAFTER = {"native", "authors", "whole_block", "dflash", "tree", "fast", "forced"}
_OUR_LOOP = {"whole_block", "dflash", "tree", "fast"}
# Their static cache is as long as the longest call so far.
COMPILED = {"compiled", "fast"}
_LOOKUP_TOKENS = 7

# (inputs, max_new_tokens, temperature) -> Answer
Decoder = Callable[..., Answer]


def sampling_options(max_new_tokens: int, temperature: float, *, ignore_eos: bool = False) -> dict[str, Any]:
    """`generate()` options for a length and a temperature; 0 decodes greedily, and nothing else changes the choice."""
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False, "num_beams": 1}
    if temperature > 0:
        # The paper samples at a temperature only, whatever the target's own generation config says.
        options |= {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    if ignore_eos:
        options["eos_token_id"] = -1
    return options


def method_options(method: str, drafter: PreTrainedModel | None, assistant: PreTrainedModel | None = None) -> dict:
    """`generate()` options of a method that is one `generate()` call of the target.

    Raises:
        ValueError: If the method is unknown or needs a drafter and none is given.
    """
    if method not in METHODS:
        raise ValueError(f"Unknown method {method!r}; choose from {list(METHODS)}.")
    if method in _NEED_DRAFTER and drafter is None:
        raise ValueError(f"The method {method!r} needs a drafter.")
    if method in COMPILED:
        compile_config = CompileConfig(fullgraph=False)
        compile_config._compile_all_devices = True  # else ignored on CPUs
        compiled = {"cache_implementation": "static", "compile_config": compile_config}
        return compiled | ({"assistant_model": drafter} if method in _NEED_DRAFTER else {})
    if method == "whole_block":
        assert drafter is not None
        return {"assistant_model": drafter, "num_assistant_tokens": drafter.config.block_size - 1}
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "self_draft": {"assistant_model": assistant},
        "prompt_lookup": {"prompt_lookup_num_tokens": _LOOKUP_TOKENS},
        "assistant": {"assistant_model": assistant},
        "native": {"assistant_model": drafter, "speculation_type": "dflash"},
        "dflash": {"assistant_model": drafter},
        "tree": {"assistant_model": drafter, "num_tree_nodes": "auto"},
    }
    return options[method]


class MethodUnavailable(ValueError):
    """A method cannot run here; the message says why and what to do."""


def decoder(
    method: str,
    target: PreTrainedModel,
    drafter: PreTrainedModel | None = None,
    *,
    assistant: PreTrainedModel | None = None,
    simulate_accept_len: float | None = None,
    ignore_eos: bool = False,
    draft_window: int | None = None,
) -> Decoder:
    """A function `(inputs, max_new_tokens, temperature, plain_ids=None, streamer=None) -> Answer`.

    `inputs` are `input_ids` and `attention_mask` of one prompt; `plain_ids` the tokens of plain decoding, which only
    `forced` uses. `draft_window` limits what the drafter of our loop reads.

    Raises:
        MethodUnavailable: If something that the method needs is missing.
        ValueError: If there is no such method.
    """
    if method == "assistant" and assistant is None:
        raise MethodUnavailable("no small model was given; name one of the same tokenizer with `--assistant`")
    if method == "forced" and simulate_accept_len is None:
        raise MethodUnavailable("`--simulate_accept_len` says how many tokens each round accepts")
    if method == "authors":
        return _authors_decoder(target, drafter, ignore_eos=ignore_eos)

    def decode(
        inputs: dict[str, torch.Tensor],
        max_new_tokens: int,
        temperature: float,
        plain_ids: Sequence[int] | None = None,
        streamer: BaseStreamer | None = None,
    ) -> Answer:
        options = sampling_options(max_new_tokens, temperature, ignore_eos=ignore_eos)
        name = "streamer"
        if method == "forced":
            assert drafter is not None and simulate_accept_len is not None
            options |= forced_options(drafter, simulate_accept_len, plain_ids)
            name = "token_streamer"
        else:
            options |= method_options(method, drafter, target if method == "self_draft" else assistant)
            if method in _OUR_LOOP and draft_window is not None:
                options["draft_window"] = draft_window
        proposer = drafter if method in _NEED_DRAFTER else assistant if method == "assistant" else None
        return timed_generate(
            target,
            inputs,
            drafter=proposer,
            streamer=streamer,
            streamer_name=name,
            with_clock=method not in COMPILED,
            **options,
        )

    return decode


def _authors_decoder(target: PreTrainedModel, drafter: PreTrainedModel | None, *, ignore_eos: bool) -> Decoder:
    try:
        from dflash import model as authors
    except ImportError as error:
        raise MethodUnavailable(
            f"the authors' package cannot be imported ({error}); `pip install --no-deps dflash==0.1.0`"
        ) from error
    if drafter is None:
        raise ValueError("The method 'authors' needs a drafter.")
    theirs = authors_drafter(drafter)
    end_ids = target.generation_config.eos_token_id
    stop_ids = None if ignore_eos or end_ids is None else end_ids if isinstance(end_ids, list) else [end_ids]

    def decode(
        inputs: dict[str, torch.Tensor], max_new_tokens: int, temperature: float, plain_ids=None, streamer=None
    ) -> Answer:
        now = time.perf_counter
        clock = ForwardClock(target, theirs)
        # Their clock insists on CUDA.
        with clock, mock.patch.object(authors, "_cuda_time", authors._cuda_time if _is_cuda(target) else now):
            result = authors.dflash_generate(
                theirs, target, inputs["input_ids"], max_new_tokens, stop_ids, temperature, return_stats=True
            )
        lengths = list(result.acceptance_lengths)
        seconds = result.time_per_output_token * result.num_output_tokens
        return Answer(
            token_ids=result.output_ids[0, result.num_input_tokens :].tolist(),
            accepted_lengths=lengths,
            prefill_seconds=result.time_to_first_token,
            round_seconds=[seconds / len(lengths)] * len(lengths),  # they give the sum only
            draft_seconds=clock.draft_seconds,
            verify_seconds=sum(clock.target_seconds[1:]),
            num_proposals=[width - 1 for width in clock.widths[1:]],
        )

    return decode


def authors_drafter(drafter: PreTrainedModel) -> nn.Module:
    """The authors' module with the weights of `drafter`.

    Raises:
        ImportError: If their package is not installed.
    """
    from dflash.model import DFlashDraftModel as AuthorsDraftModel

    theirs = AuthorsDraftModel(Qwen3Config(**drafter.config.to_dict())).to(drafter.device, drafter.dtype).eval()
    theirs.load_state_dict(drafter.state_dict())
    return theirs


def _is_cuda(target: PreTrainedModel) -> bool:
    return target.device.type == "cuda"
