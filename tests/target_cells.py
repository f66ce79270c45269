"""Every kind of target with every feature of `generate`: each cell is exact or refused."""

import contextlib
import copy
import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from oracle_drafters import OracleDrafter, Pattern, always_right, expected_lengths, never_right, right_for
from target_families import FAMILIES, MASK_TOKEN_ID, Family
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import logging as transformers_logging

from dflash_hf import create_drafter_config
from dflash_hf.tree_dflash import TokenTree

NEW = 24
BLOCK = 8
TREE_DEPTH = 3
SOMETIMES = right_for(2, 0, 6, 7, 1, 5)
CACHE_NAME = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"
SAMPLING = {"do_sample": True, "temperature": 0.9, "top_k": 20}


class Refused(Exception):
    """A drafted call that was refused before the target read anything."""


class Case:
    """A family's target with its plain texts."""

    def __init__(self, family: Family, **overrides):
        self.family = family
        target = family.build(**overrides)
        self.drafter_config = make_drafter_config(family, target)
        self.head_owner = target  # its head has a plain weight, which oracles need
        if family.prepare is not None:
            target = family.prepare(family.build(**overrides))
        self.target = target
        self._texts: dict[str, torch.Tensor] = {}

    def plain(self, inputs: dict[str, Any], **kwargs) -> Any:
        """What `generate` of the target alone returns."""
        torch.manual_seed(7)
        with self.family.during_calls(self.target):
            return self.target.generate(**inputs, **({"max_new_tokens": NEW, "do_sample": False} | kwargs))

    def text(self, inputs: dict[str, Any], **kwargs) -> torch.Tensor:
        """Plain text with a block more, so that an oracle knows what follows."""
        if self.family.refusal is not None:
            following = torch.arange(NEW + BLOCK).expand(inputs["input_ids"].shape[0], -1)
            return torch.cat([inputs["input_ids"], following], dim=1)
        key = repr((inputs["input_ids"].tolist(), kwargs))
        if key not in self._texts:
            try:
                self._texts[key] = self.plain(inputs, max_new_tokens=NEW + BLOCK, **kwargs)
            except (IndexError, RuntimeError, ValueError) as error:
                raise Refused(f"plain `generate` fails, too: {type(error).__name__}: {error}") from error
        return self._texts[key]

    def oracle(self, text: torch.Tensor | list[list[int]], patterns: Pattern | list[Pattern]) -> OracleDrafter:
        return OracleDrafter(self.drafter_config, self.head_owner, text, patterns)

    def drafted(self, inputs: dict[str, Any], drafter: OracleDrafter, num_warnings: int | None = 0, **kwargs) -> Any:
        """What `generate` with the drafter returns; `num_warnings` None: however many.

        Raises:
            Refused: With the error's text, if the call was refused.
        """
        torch.manual_seed(7)
        forwards: list[None] = []
        hook = self.target.register_forward_pre_hook(lambda module, arguments: forwards.append(None))
        if "custom_generate" not in kwargs:
            kwargs["assistant_model"] = drafter
        try:
            with self.family.during_calls(self.target), caught_warnings() as warnings:
                output = self.target.generate(**inputs, **({"max_new_tokens": NEW, "do_sample": False} | kwargs))
        except ValueError as error:
            assert not forwards, f"refused only after {len(forwards)} forwards: {error}"
            raise Refused(str(error)) from error
        finally:
            hook.remove()
        is_slow = self.family.may_be_slow and max(map(max, drafter.all_accepted_lengths)) == 1
        assert num_warnings is None or len(warnings) == max(num_warnings, is_slow), warnings
        return output


def make_drafter_config(family: Family, target: Any) -> Any:
    fields = {"num_hidden_layers": 1, "target_layer_ids": [0, 2], "block_size": BLOCK, "mask_token_id": MASK_TOKEN_ID}
    config = target.config
    if config.is_encoder_decoder:
        # No drafter can be made for it, but one for a decoder of its size may be passed.
        config = transformers.LlamaConfig(vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=4)
    return create_drafter_config(config, **(fields | family.drafter_fields))


@contextlib.contextmanager
def caught_warnings() -> Iterator[list[str]]:
    """Warnings of our package, also those that were given before."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    transformers_logging.warning_once.cache_clear()
    logging.getLogger("dflash_hf").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("dflash_hf").removeHandler(handler)


def assert_same_ids(output: torch.Tensor, expected: torch.Tensor) -> None:
    assert output.tolist() == expected.tolist(), f"{output.tolist()} is not {expected.tolist()}"


def assert_accelerated(case: Case, drafter: OracleDrafter, lengths: list[int]) -> None:
    if not case.family.may_be_slow:
        assert drafter.accepted_lengths == lengths, f"accepted {drafter.accepted_lengths}, not {lengths}"


# Features


def text_after_prompt(
    case: Case, pattern: Pattern = SOMETIMES, num_proposals: int | None = None, num_warnings: int = 0, **kwargs
) -> None:
    inputs = case.family.inputs()
    text = case.text(inputs, **kwargs)
    drafter = case.oracle(text, pattern)
    output = case.drafted(inputs, drafter, num_warnings, num_assistant_tokens=num_proposals, **kwargs)
    assert_same_ids(output, text[:, :-BLOCK])
    assert_accelerated(case, drafter, expected_lengths(pattern, NEW, BLOCK, num_proposals=num_proposals))


def batch(case: Case) -> None:
    """Three prompts padded on the left, whose rows accept different numbers of tokens."""
    inputs = case.family.inputs(3)
    text = case.text(inputs)
    num_pads = (1 - inputs["attention_mask"]).sum(dim=1).tolist()
    unpadded = [row[num_pad:].tolist() for row, num_pad in zip(text, num_pads, strict=True)]
    patterns = [SOMETIMES, always_right, right_for(1, 4, 0)]
    drafter = case.oracle(unpadded, patterns)
    assert_same_ids(case.drafted(inputs, drafter), text[:, :-BLOCK])
    if not case.family.may_be_slow:
        assert drafter.all_accepted_lengths == [expected_lengths(pattern, NEW, BLOCK) for pattern in patterns]


def end_token(case: Case) -> None:
    """An end token at a slot in the middle of a block."""
    inputs = case.family.inputs()
    text = case.text(inputs)
    num_prompt = inputs["input_ids"].shape[1]
    new = text[0, num_prompt:].tolist()
    end = next(token for place, token in enumerate(new) if place > BLOCK + 1 and new.index(token) == place)
    stop_at = new.index(end) + 1
    drafter = case.oracle(text, always_right)
    output = case.drafted(inputs, drafter, eos_token_id=end)
    assert_same_ids(output, case.plain(inputs, eos_token_id=end))
    assert output.shape[1] == num_prompt + stop_at
    assert_accelerated(case, drafter, expected_lengths(always_right, NEW, BLOCK, stop_at=stop_at))


def scores(case: Case) -> None:
    """`return_dict_in_generate` with processed scores and raw logits."""
    inputs = case.family.inputs()
    kwargs = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "repetition_penalty": 1.2}
    drafter = case.oracle(case.text(inputs, repetition_penalty=1.2), SOMETIMES)
    output = case.drafted(inputs, drafter, **kwargs)
    expected = case.plain(inputs, **kwargs)
    assert_same_ids(output.sequences, expected.sequences)
    torch.testing.assert_close(output.scores, expected.scores, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(output.logits, expected.logits, atol=1e-3, rtol=1e-4)


def given_cache(case: Case) -> None:
    """A second turn, whose cache holds the first."""
    inputs = case.family.inputs()
    if case.family.refusal is not None:
        case.drafted(
            inputs,
            case.oracle(case.text(inputs), SOMETIMES),
            **{CACHE_NAME: transformers.DynamicCache(config=case.target.config)},
        )
    first = case.plain(inputs, max_new_tokens=4, return_dict_in_generate=True)
    added = torch.tensor([[40, 7]])
    ids = torch.cat([first.sequences, added], dim=1)
    turn = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    caches = [copy.deepcopy(getattr(first, CACHE_NAME)) for _ in range(2)]
    text = case.plain(turn | {CACHE_NAME: caches[0]}, max_new_tokens=NEW + BLOCK)
    drafter = case.oracle(text, SOMETIMES)
    output = case.drafted(turn | {CACHE_NAME: caches[1]}, drafter)
    assert_same_ids(output, text[:, :-BLOCK])
    assert_accelerated(case, drafter, expected_lengths(SOMETIMES, NEW, BLOCK))


def tree(case: Case) -> None:
    """Trees with a wrong sibling of each right token; targets that cannot read a tree's mask get its longest path."""
    inputs = case.family.inputs()
    text = case.text(inputs)
    drafter = case.oracle(text, always_right)
    is_cut = name_of(case.family) in CUT_TREES
    output = case.drafted(
        inputs, drafter, num_warnings=is_cut, custom_generate=drafter.decode, tree_builder=two_tokens_a_slot
    )
    assert_same_ids(output, text[:, :-BLOCK])
    assert_accelerated(case, drafter, expected_lengths(always_right, NEW, BLOCK, num_proposals=TREE_DEPTH))


def two_tokens_a_slot(logits: torch.Tensor, anchors: torch.LongTensor) -> TokenTree:
    """Below each right token (nodes 0, 1, 3, 5) the next right one and a wrong one."""
    right = logits[:, :TREE_DEPTH].argmax(dim=-1)
    pairs = torch.stack([right, (right + 1) % logits.shape[-1]], dim=-1).flatten(1)
    parents = [-1, *(parent for slot in range(TREE_DEPTH) for parent in 2 * [max(2 * slot - 1, 0)])]
    return TokenTree(torch.cat([anchors, pairs], dim=1), [parents] * len(anchors))


def small_window(case: Case) -> None:
    """A sliding window shorter than the block; the other features' texts outgrow their window, too."""
    text_after_prompt(make_case(name_of(case.family), sliding_window=4))


@dataclass(frozen=True)
class Feature:
    """A way to call `generate`.

    Args:
        description (`str`): What it is.
        check (`Callable`): Compares the drafted call with the plain one, and the accepted lengths with the pattern's.
    """

    description: str
    check: Callable[[Case], None]


FEATURES = {
    "always right": Feature("greedy, every proposal right", lambda case: text_after_prompt(case, always_right)),
    "never right": Feature(
        "greedy, every proposal wrong; the drafter says so once",
        lambda case: text_after_prompt(case, never_right, num_warnings=1),
    ),
    "sometimes right": Feature("greedy, 2, 0, 6, 7, 1, 5 right proposals in turn", text_after_prompt),
    "3 proposals": Feature("`num_assistant_tokens=3`", lambda case: text_after_prompt(case, num_proposals=3)),
    "sampling": Feature(
        "`do_sample=True` with temperature and top-k, same seed", lambda case: text_after_prompt(case, **SAMPLING)
    ),
    "penalty": Feature(
        "`repetition_penalty`, which depends on the text so far",
        lambda case: text_after_prompt(case, repetition_penalty=1.3),
    ),
    "end token": Feature("an end token inside an accepted block", end_token),
    "scores": Feature("`return_dict_in_generate` with processed scores and raw logits", scores),
    "batch": Feature("three prompts padded on the left, each with its own accepted lengths", batch),
    "tree": Feature("trees of proposals; where a target cannot read them, their longest path and a warning", tree),
    "given cache": Feature("a second turn with the cache of the first", given_cache),
    "static cache": Feature(
        "`cache_implementation='static'`", lambda case: text_after_prompt(case, cache_implementation="static")
    ),
    "small window": Feature("a sliding window of 4 tokens, shorter than the block", small_window),
}
CUT_TREES = {"Falcon, alibi", "Qwen3-Next", "Qwen3.5"}
CELLS = [
    (family, feature)
    for family in FAMILIES
    for feature in FEATURES
    if feature != "small window" or FAMILIES[family].has_window
]
REFUSALS = {
    **{
        (family, "static cache"): "sliding-window layer forgets tokens"
        for family in FAMILIES
        if FAMILIES[family].has_window
    },
    ("Falcon, alibi", "static cache"): "plain `generate` fails, too",
    ("Qwen3-Next", "batch"): "decodes one prompt at a time",
    ("Qwen3.5", "batch"): "decodes one prompt at a time",
    **{(family, feature): FAMILIES[family].refusal for family, feature in CELLS if FAMILIES[family].refusal},
}


def name_of(family: Family) -> str:
    return next(name for name, other in FAMILIES.items() if other is family)


@functools.lru_cache
def make_case(name: str, **overrides) -> Case:
    return Case(FAMILIES[name], **overrides)


def run_cell(family: str, feature: str) -> str:
    """`exact`, or `refused: ` and the error's text.

    Raises:
        AssertionError: If the drafted call differs from the plain one.
    """
    try:
        FEATURES[feature].check(make_case(family))
    except Refused as error:
        return f"refused: {error}"
    return "exact"
