"""Which change to a drafter that accepts little would make it accept more: the likely mistake in its config."""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import PreTrainedModel

from dflash_hf.configuration_dflash import DFlashConfig
from dflash_hf.hub_configs.check_config import target_thetas
from dflash_hf.hub_configs.check_decoding import measure
from dflash_hf.hub_configs.check_report import SMALL_TAU, Finding
from dflash_hf.target_dflash import text_config

_CLEARLY_MORE = 1.25


def check_repairs(
    target: PreTrainedModel,
    drafter: PreTrainedModel,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    tau: float,
    other_prompts: dict[str, list[list[int]]],
) -> list[Finding]:
    """A finding for the change that raises tau most, if one raises it clearly; the drafter is left as it was.

    Args:
        prompts: Token ids of each prompt.
        max_new_tokens (`int`): Longest answer.
        tau (`float`): What the drafter reaches as it is.
        other_prompts (`dict`): The same prompts in other template modes, by a name of the mode.
    """
    taus = {}
    for name, change in _changes(drafter, text_config(target)):
        with change:
            taus[name] = measure(target, drafter, prompts, max_new_tokens)[1].get("tau", 0.0)
    for name, others in other_prompts.items():
        taus[name] = measure(target, drafter, others, max_new_tokens)[1].get("tau", 0.0)
    if not taus:
        return []
    best = max(taus, key=lambda name: taus[name])
    if taus[best] < max(SMALL_TAU, _CLEARLY_MORE * tau):
        return []
    text = f"with {best} there are {taus[best]:.2f} tokens per forward of the target instead of {tau:.2f}"
    return [
        Finding(
            "likely mistake", "warning", text, "the drafter was probably trained so: use it so, or correct its config"
        )
    ]


def _changes(drafter: PreTrainedModel, target_config: Any) -> Iterator[tuple[str, AbstractContextManager[None]]]:
    """Names of changes to try, and contexts in which they hold."""
    config = drafter.config
    settings, layer_ids = config.dflash_config, config.target_layer_ids
    for step in (-1, 1):
        shifted = [layer_id + step for layer_id in layer_ids]
        if 0 <= shifted[0] and shifted[-1] < config.num_target_layers:
            yield f"`target_layer_ids` {shifted}", _setting(settings, "target_layer_ids", shifted)
    if len(layer_ids) > 1:
        yield f"`fc` read as for the layers {layer_ids[::-1]}", _reversed_features(drafter)
    for theta in target_thetas(target_config):
        if theta != config.rope_parameters["rope_theta"]:
            yield f"`rope_theta` {theta:g}", _rope_theta(drafter, theta)
    if config.input_embedding_scale is not None:
        yield "no `input_embedding_scale`", _setting(settings, "input_embedding_scale", None)
    for is_causal in (False, True):
        if any(config.layer_is_causal(i) != is_causal for i in range(config.num_hidden_layers)):
            yield f"`is_causal` {str(is_causal).lower()}", _causal(drafter, is_causal)


@contextlib.contextmanager
def _setting(place: dict[str, Any], key: str, value: Any) -> Iterator[None]:
    kept = place[key]
    place[key] = value
    try:
        yield
    finally:
        place[key] = kept


@contextlib.contextmanager
def _reversed_features(drafter: PreTrainedModel) -> Iterator[None]:
    kept = drafter.fc.weight.data
    blocks = kept.chunk(len(drafter.config.target_layer_ids), dim=1)
    drafter.fc.weight.data = torch.cat(blocks[::-1], dim=1)
    try:
        yield
    finally:
        drafter.fc.weight.data = kept


@contextlib.contextmanager
def _rope_theta(drafter: PreTrainedModel, theta: float) -> Iterator[None]:
    kept = drafter.rotary_emb
    rope = drafter.config.rope_parameters | {"rope_theta": theta}
    config = DFlashConfig(**drafter.config.to_dict() | {"rope_parameters": rope})
    drafter.rotary_emb = type(kept)(config).to(drafter.device)
    try:
        yield
    finally:
        drafter.rotary_emb = kept


@contextlib.contextmanager
def _causal(drafter: PreTrainedModel, is_causal: bool) -> Iterator[None]:
    attentions = [layer.self_attn for layer in drafter.layers]
    kept = [attention.is_causal for attention in attentions]
    for attention in attentions:
        attention.is_causal = is_causal
    try:
        yield
    finally:
        for attention, was_causal in zip(attentions, kept, strict=True):
            attention.is_causal = was_causal
