"""Whether a drafter's config fits its target and tokenizer; no forward runs here."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dflash_hf.configuration_dflash import build_target_layer_ids
from dflash_hf.hub_configs.check_report import Finding
from dflash_hf.target_dflash import text_config
from dflash_hf.trainer.messages import BadRow
from dflash_hf.trainer.prompt_rows import ChatRenderer

_INTEGERS = ("hidden_size", "vocab_size", "num_target_layers", "block_size", "mask_token_id")
# Embeddings are padded to multiples of up to this many rows.
MOST_PADDING = 1024
_SCALE_ROWS = 512
_ANOTHER_TARGET = "load the drafter of this target (`dflash-hub match` looks for it), or train one"
_UNUSED_TOKEN = re.compile(r"[<\[].*(mask|unused|reserved|placeholder|extra).*[>\]]", re.IGNORECASE)
# `enable_thinking` of each template mode.
SWITCHES = {"thinking": True, "no thinking": False}


@dataclass(frozen=True)
class Pair:
    """A drafter's config values, see [`drafter_values`], with the target and tokenizer that they must fit."""

    values: dict[str, Any]
    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None

    @property
    def target_config(self) -> Any:
        return text_config(self.target)

    @property
    def num_rows(self) -> int:
        """Rows of the target's embedding."""
        return self.target.get_input_embeddings().weight.shape[0]


def drafter_values(fields: dict[str, Any]) -> dict[str, Any]:
    """The values that matter, from whichever place they lie in; None where one is missing or of another type.

    Args:
        fields (`dict`): Content of a drafter's `config.json` with z-lab's keys; it need not be a valid one.
    """
    nested, rope = (_mapping(fields.get(key)) for key in ("dflash_config", "rope_parameters"))
    rope = rope or _mapping(fields.get("rope_scaling"))

    def value(key: str, kind: Any) -> Any:
        found = next((place[key] for place in (nested, fields, rope) if place.get(key) is not None), None)
        return found if isinstance(found, kind) and not isinstance(found, bool) else None

    layer_ids = value("target_layer_ids", list)
    is_list_of_ids = layer_ids is not None and all(isinstance(layer_id, int) for layer_id in layer_ids)
    return {
        **{key: value(key, int) for key in _INTEGERS},
        **{
            key: value(key, (int, float)) for key in ("rope_theta", "input_embedding_scale", "final_logit_softcapping")
        },
        "target_layer_ids": layer_ids if is_list_of_ids else None,
        "rope_type": value("rope_type", str) or value("type", str),
        "template_mode": value("template_mode", str),
        "dtype": str(fields.get("dtype") or fields.get("torch_dtype") or "").removeprefix("torch."),
    }


def check_config(pair: Pair) -> list[Finding]:
    """All findings about the config, in a fixed order."""
    checks = (
        _required,
        _sizes,
        _vocabulary,
        _mask_token,
        _layer_ids,
        _rope,
        _embedding_scale,
        _soft_cap,
        _template_mode,
        _stored_dtype,
    )
    return [finding for check in checks for finding in check(pair)]


def target_thetas(target_config: Any) -> list[float]:
    """The rope thetas of a target's text config: none, one, or one per layer type."""
    parameters = _mapping(getattr(target_config, "rope_parameters", None))
    places = [parameters, *map(_mapping, parameters.values())]
    return sorted({place["rope_theta"] for place in places if place.get("rope_theta")})


def can_switch(tokenizer: PreTrainedTokenizerBase | None) -> bool:
    """Whether the chat template has a variable `enable_thinking`."""
    return tokenizer is not None and "enable_thinking" in str(tokenizer.chat_template)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _required(pair: Pair) -> Iterator[Finding]:
    missing = [key for key in (*_INTEGERS, "target_layer_ids", "rope_theta") if pair.values[key] is None]
    if missing:
        yield Finding(
            "config",
            "error",
            f"these values are missing or no numbers: {', '.join(missing)}",
            "copy them from the drafter's training; none of them can be guessed",
        )


def _sizes(pair: Pair) -> Iterator[Finding]:
    for subject, key, needed in (
        ("hidden size", "hidden_size", pair.target_config.hidden_size),
        ("depth", "num_target_layers", pair.target_config.num_hidden_layers),
    ):
        found = pair.values[key]
        if found == needed:
            yield Finding(subject, "ok", f"{found}")
        elif found is not None:
            yield Finding(subject, "error", f"`{key}` {found}, but the target's is {needed}", _ANOTHER_TARGET)


def _vocabulary(pair: Pair) -> Iterator[Finding]:
    num_ids = None if pair.tokenizer is None else len(pair.tokenizer)
    if num_ids is not None and num_ids > pair.num_rows:
        # Gemma 3's tokenizer has one image token more than its text models have rows.
        is_alike = num_ids - pair.num_rows <= 0.01 * pair.num_rows
        text = f"it has {num_ids} tokens, but the target's embedding only {pair.num_rows} rows"
        advice = "" if is_alike else "load the tokenizer of this target"
        yield Finding("tokenizer", "note" if is_alike else "error", text, advice)
    found, needed = pair.values["vocab_size"], pair.target_config.vocab_size
    if found is None:
        return
    if found in (needed, pair.num_rows):
        yield Finding("vocabulary", "ok", f"{found}")
    elif (num_ids is None or found >= num_ids) and abs(found - needed) <= MOST_PADDING:
        text = f"{found}, the target's {needed}: "
        text += "they may differ by padding" if num_ids is None else f"padding only, {num_ids} tokens are real"
        yield Finding("vocabulary", "note" if num_ids is None else "ok", text)
    else:
        real = "" if num_ids is None else f" with {num_ids} real tokens"
        text = f"`vocab_size` {found}, but the target has {needed}{real}"
        yield Finding("vocabulary", "error", text, _ANOTHER_TARGET)


def _mask_token(pair: Pair) -> Iterator[Finding]:
    mask = pair.values["mask_token_id"]
    if mask is None:
        return
    retrain = "train a drafter with a reserved or unused row as its mask"
    if not 0 <= mask < pair.num_rows:
        text = f"id {mask} has no row in the target's embedding (0 to {pair.num_rows - 1})"
        yield Finding(
            "mask token", "error", text, "load the drafter's own target; rows added later were never trained"
        )
        return
    names = [name for name, ids in _special_ids(pair).items() if mask in ids]
    if names:
        is_harmful = names != ["unk"]
        text = f"id {mask} is the target's {' and '.join(names)} token, so text may contain it"
        yield Finding("mask token", "error" if is_harmful else "warning", text, retrain)
        return
    level, text = _mask_in_text(pair.tokenizer, mask)
    yield Finding("mask token", level, text, "" if level == "ok" else retrain)


def _special_ids(pair: Pair) -> dict[str, set[int]]:
    places = (pair.tokenizer, pair.target_config, pair.target.config, getattr(pair.target, "generation_config", None))
    found: dict[str, set[int]] = {name: set() for name in ("pad", "eos", "bos", "unk")}
    for name, ids in found.items():
        for place in places:
            value = getattr(place, f"{name}_token_id", None)
            ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return found


def _mask_in_text(tokenizer: PreTrainedTokenizerBase | None, mask: int) -> tuple[str, str]:
    """Level and text of whether a tokenizer's text may contain the id."""
    if tokenizer is None:
        return "ok", f"id {mask}"
    if mask >= len(tokenizer):
        return "ok", f"id {mask}, behind the tokenizer's {len(tokenizer)} tokens"
    piece = str(tokenizer.convert_ids_to_tokens(mask))
    added = tokenizer.added_tokens_decoder.get(mask)
    if piece in str(tokenizer.chat_template or ""):
        return "error", f"id {mask} is {piece!r}, which the chat template writes"
    if (added is not None and added.special) or _UNUSED_TOKEN.fullmatch(piece):
        return "ok", f"id {mask}, {piece!r}"
    if added is not None:
        return "warning", f"id {mask} is {piece!r}, an added token that answers may contain"
    return "error", f"id {mask} is {piece!r}, an ordinary token of text"


def _layer_ids(pair: Pair) -> Iterator[Finding]:
    layer_ids, depth = pair.values["target_layer_ids"], pair.target_config.num_hidden_layers
    if layer_ids is None:
        return
    if not layer_ids or sorted(set(layer_ids)) != layer_ids:
        yield Finding(
            "layer ids",
            "error",
            f"{layer_ids} are not different ids in rising order, in which the columns of `fc` follow each other",
            "write the ids of the training; with another order `fc` reads each layer by another one's weights",
        )
    wrong = [layer_id for layer_id in layer_ids if not 0 <= layer_id < depth - 1]
    if wrong:
        text = f"{wrong} cannot be tapped in a target of {depth} layers (only 0 to {depth - 2}, as the last is normed)"
        yield Finding("layer ids", "error", text, _ANOTHER_TARGET)
    if wrong or sorted(set(layer_ids)) != layer_ids or not layer_ids:
        return
    try:
        usual = build_target_layer_ids(depth, len(layer_ids))
    except ValueError:
        usual = layer_ids  # a target this small has no usual choice
    if [layer_id - 1 for layer_id in layer_ids] == usual:
        text = f"{layer_ids} are the usual ones plus 1, as if `hidden_states` with the embedding in front were counted"
        advice = (
            "here id i is the output of decoder layer i, `hidden_states[i + 1]`; subtract 1 if training meant that"
        )
        yield Finding("layer ids", "warning", text, advice)
    elif layer_ids != usual:
        yield Finding("layer ids", "note", f"{layer_ids} of {depth}; evenly spaced ones would be {usual}")
    else:
        yield Finding("layer ids", "ok", f"{layer_ids} of {depth}")


def _rope(pair: Pair) -> Iterator[Finding]:
    theta, rope_type = pair.values["rope_theta"], pair.values["rope_type"]
    if theta is None:
        return
    thetas = target_thetas(pair.target_config)
    known = " and ".join(f"{known:g}" for known in thetas)
    if theta in thetas:
        yield Finding("rope theta", "ok", f"{theta:g}, as the target's")
    elif not thetas:
        yield Finding("rope theta", "note", f"{theta:g}; the target has none to compare with")
    else:
        yield Finding(
            "rope theta",
            "warning",
            f"{theta:g}, but the target's is {known}, and published drafters have their target's",
            "make sure that the drafter was trained with this theta; a wrong one drafts badly without any other sign",
        )
    if rope_type not in (None, "default"):
        yield Finding("rope type", "note", f"{rope_type!r}: the drafter's own, whatever the target's is")


def _embedding_scale(pair: Pair) -> Iterator[Finding]:
    stated = pair.values["input_embedding_scale"]
    module = pair.target.get_input_embeddings()
    if not module.weight.is_floating_point() or module.weight.device.type == "meta":
        return
    rows = module.weight.detach()[:_SCALE_ROWS].float()
    ids = rows.norm(dim=-1).argmax().reshape(1, 1)  # a row that is not zero
    actual = (module(ids).detach().float().norm() / rows[ids[0, 0]].norm()).item()
    if stated is None or abs(stated - actual) <= 1e-2 * actual:
        yield Finding("embedding scale", "ok", f"{actual:.4g}, the target's own")
    else:
        yield Finding(
            "embedding scale",
            "warning",
            f"`input_embedding_scale` {stated:g}, but the target multiplies by {actual:.4g}",
            "keep it only if the drafter was trained so, as Muse Glimmer's; else remove the key",
        )


def _soft_cap(pair: Pair) -> Iterator[Finding]:
    stated, actual = pair.values["final_logit_softcapping"], _target_cap(pair)
    if stated == actual:
        yield Finding("soft cap", "ok", "none" if actual is None else f"{actual:g}")
        return
    yield Finding(
        "soft cap",
        "warning",
        f"`final_logit_softcapping` is {stated}, the target's {actual}",
        "greedy proposals stay the same, probabilities do not; set the value of the training, usually the target's",
    )


def _target_cap(pair: Pair) -> float | None:
    return getattr(pair.target_config, "final_logit_softcapping", None) or None


def _template_mode(pair: Pair) -> Iterator[Finding]:
    mode = pair.values["template_mode"]
    if pair.tokenizer is None or not pair.tokenizer.chat_template:
        reason = "no tokenizer was given" if pair.tokenizer is None else "the tokenizer has no chat template"
        yield Finding("template mode", "note", f"{mode or 'not recorded'}; {reason}")
        return
    default = _default_mode(pair.tokenizer)
    if mode is None:
        known = (
            f"the chat template's default is {default!r}"
            if can_switch(pair.tokenizer)
            else "the chat template cannot switch"
        )
        yield Finding("template mode", "note", f"not recorded; {known}")
    elif mode in ("template default", default):
        yield Finding("template mode", "ok", f"{mode}" + (f" ({default})" if default != mode else ""))
    elif not can_switch(pair.tokenizer):
        yield Finding("template mode", "note", f"trained on {mode!r} texts; this chat template has no such switch")
    else:
        yield Finding(
            "template mode",
            "warning",
            f"trained on {mode!r} texts, but the chat template's default is {default!r}",
            f"pass `enable_thinking={SWITCHES.get(mode)}` to `apply_chat_template`, or fewer proposals are accepted",
        )


def _default_mode(tokenizer: PreTrainedTokenizerBase) -> str:
    """What the chat template does if nothing is said."""
    if not can_switch(tokenizer):
        return "template default"
    turns = [{"role": "user", "content": "Hello."}]
    try:
        plain, on, off = (ChatRenderer(tokenizer, switch).render(turns, None) for switch in (None, True, False))
    except BadRow:
        return "template default"
    return "thinking" if plain == on else "no thinking" if plain == off else "template default"


def _stored_dtype(pair: Pair) -> Iterator[Finding]:
    dtype = pair.values["dtype"]
    if dtype == "float16":
        text, advice = "the drafter is stored in float16, whose values end at 65504", "use bfloat16 or float32"
        yield Finding("dtype", "warning", text, advice)
    else:
        yield Finding("dtype", "ok", f"stored in {dtype}" if dtype else "not recorded")
