"""`dflash-hub check`: whether a drafter fits a target, from its config to real decoding."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from dflash_hf.hub_configs.catalogue import list_configs
from dflash_hf.hub_configs.check_config import Pair, check_config, drafter_values
from dflash_hf.hub_configs.check_decoding import (
    check_decoding,
    check_forward,
    check_taps,
    check_weights,
    dtype_name,
)
from dflash_hf.hub_configs.check_drift import check_drift, tap_cosines
from dflash_hf.hub_configs.check_prompts import Prompt, prompts_by_mode
from dflash_hf.hub_configs.check_repairs import check_repairs
from dflash_hf.hub_configs.check_report import SMALL_TAU, CheckReport, Finding
from dflash_hf.hub_configs.embedded_target import load_target
from dflash_hf.hub_configs.match import drafter_of
from dflash_hf.layouts_dflash import read_fields
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target_dflash import check_drafter_fits, text_config
from dflash_hf.trainer.target_features import input_device

# A damaged folder raises whatever the first reader of its content raises.
_LOADING_ERRORS = (AttributeError, KeyError, OSError, RuntimeError, StrictDataclassError, TypeError, ValueError)


def check_drafter(
    target: PreTrainedModel | str,
    drafter: PreTrainedModel | str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    prompts: Sequence[Prompt] | None = None,
    max_new_tokens: int = 48,
    dtype: torch.dtype | str = torch.float32,
    target_revision: str | None = None,
    drafter_revision: str | None = None,
    reference: PreTrainedModel | str | None = None,
) -> CheckReport:
    """What is right and wrong with a pair; nothing about the drafter raises, all of it is in the report.

    Config, weights, tapped layers and one draft are looked at, then greedy answers are compared with plain ones.

    Args:
        target ([`PreTrainedModel`] or `str`): The target, or what [`load_target`] takes (on the GPU if there is one).
        drafter ([`DFlashDraftModel`], `str` or `Path`): The drafter, or its folder or Hub id.
        tokenizer ([`PreTrainedTokenizerBase`], *optional*): The target's; loaded with a target that is given by name.
            Without one, template and prompts in words cannot be checked.
        prompts: User turns, chats or token ids, best from your own use; default: four short ones.
        max_new_tokens (`int`): Longest answer.
        dtype (`torch.dtype` or `str`): Of models that are loaded here; in float32 answers must be equal.
        target_revision, drafter_revision (`str`, *optional*): Hub revisions.
        reference ([`PreTrainedModel`] or `str`, *optional*): The target that the drafter was trained for, where
            `target` is a quantised or fine-tuned copy: how far the tapped layers have moved is then measured.
    Raises:
        ValueError: If the target cannot be loaded, or prompts in words come without a tokenizer.
    """
    names = [_name(target), _name(drafter)]
    if isinstance(target, str):
        target, tokenizer = _load_target(target, dtype, target_revision)
    report = CheckReport(f"{names[0]} ({type(target).__name__}, {dtype_name(target.dtype)})", names[1])
    if isinstance(drafter, (str, Path)):
        fields, loaded, report.findings = _load_drafter(str(drafter), target, dtype, drafter_revision)
    else:
        fields, loaded = drafter.config.to_dict(), drafter.eval()
    values = drafter_values(fields)
    values["template_mode"] = values["template_mode"] or _published_template_mode(names[1])
    pair = Pair(values, target, tokenizer)
    token_ids = prompts_by_mode(prompts, pair)
    if fields:
        report.findings += check_config(pair)
    if loaded is not None:
        _check_loaded(report, target, loaded, token_ids, max_new_tokens)
    first = [ids for ids in next(iter(token_ids.values())) if ids]
    if loaded is not None and reference is not None and first:
        if isinstance(reference, str):
            reference, _ = _load_target(reference, dtype, None)
        cosines = tap_cosines(target, reference, loaded.config.target_layer_ids, first)
        report.findings.append(check_drift(cosines))
        report.metrics |= {f"tap_cosine_layer_{layer}": cosine for layer, cosine in cosines.items()}
    return report


def _name(model: PreTrainedModel | str | Path) -> str:
    return str(model) if isinstance(model, (str, Path)) else model.config.name_or_path or type(model).__name__


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _load_target(name: str, dtype: Any, revision: str | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    device_map = "auto" if torch.cuda.is_available() else None
    try:
        return load_target(name, dtype=dtype, device_map=device_map, revision=revision)
    except (ImportError, OSError, ValueError) as error:
        raise ValueError(f"The target {name} cannot be loaded: {error}") from error


def _load_drafter(
    name: str, target: PreTrainedModel, dtype: Any, revision: str | None
) -> tuple[dict[str, Any], PreTrainedModel | None, list[Finding]]:
    """The config's fields as far as they can be read, the drafter if it loads, and what went wrong."""
    again = "mend the folder, or fetch it again"
    try:
        fields, _ = PreTrainedConfig.get_config_dict(name, revision=revision)
        if not fields:
            raise ValueError("it is missing or empty")
        fields = read_fields(fields)
    except _LOADING_ERRORS as error:
        return {}, None, [Finding("loading", "error", f"config.json: {_one_line(error)}", again)]
    target_config = text_config(target)
    # Two layouts leave these to the target.
    borrowed = {"num_target_layers": target_config.num_hidden_layers, "vocab_size": target_config.vocab_size}
    borrowed = {key: value for key, value in borrowed.items() if drafter_values(fields)[key] is None}
    findings = [Finding("config", "note", f"it has no `{key}`; the target's {borrowed[key]}") for key in borrowed]
    fields |= borrowed
    try:
        drafter = DFlashDraftModel.from_pretrained(name, dtype=dtype, revision=revision, **borrowed)
    except _LOADING_ERRORS as error:
        return fields, None, [*findings, Finding("loading", "error", _one_line(error), again)]
    stored = {key: fields[key] for key in ("dtype", "torch_dtype") if key in fields}
    return drafter.config.to_dict() | {"dtype": None} | stored, drafter.eval().to(input_device(target)), findings


def _published_template_mode(drafter: str) -> str | None:
    """What is known of a published or shipped drafter whose own config does not say it."""

    def place(name: str) -> str:
        return str(Path(name).resolve()) if Path(name).is_dir() else name.lower()

    return {place(str(drafter_of(shipped))): shipped.template_mode for shipped in list_configs()}.get(place(drafter))


def _check_loaded(
    report: CheckReport,
    target: PreTrainedModel,
    drafter: PreTrainedModel,
    prompts: dict[str, list[list[int]]],
    max_new_tokens: int,
) -> None:
    """Adds the findings that need weights and, if drafter and target can run together, those of runs."""
    report.findings += [*_loaded_dtypes(target, drafter), *check_weights(drafter)]
    try:
        check_drafter_fits(drafter.config, target)
    except ValueError as error:
        level = "note" if report.has_errors else "error"
        report.findings.append(Finding("decoding", level, f"cannot be tried: {error}"))
        return
    first = next(iter(prompts.values()))
    text = max(first, key=len, default=[])
    if len(text) < 2:
        text = [token % target.get_input_embeddings().weight.shape[0] for token in range(1, 9)]
    input_ids = torch.tensor([text], device=input_device(target))
    report.findings += check_taps(target, drafter.config.target_layer_ids, input_ids)
    report.findings += check_forward(target, drafter, input_ids)
    if any(finding.subject in ("weights", "taps", "draft") for finding in report.of("error")):
        report.findings.append(Finding("decoding", "note", "not tried, because weights or values are broken"))
    elif not first:
        report.findings.append(Finding("decoding", "note", "not tried, because there are no prompts"))
    else:
        _check_answers(report, target, drafter, prompts, max_new_tokens)


def _check_answers(
    report: CheckReport,
    target: PreTrainedModel,
    drafter: PreTrainedModel,
    prompts: dict[str, list[list[int]]],
    max_new_tokens: int,
) -> None:
    """Adds the findings of real decoding, and what would make it better if it gains little."""
    (_, first), *others = prompts.items()
    try:
        findings, report.metrics = check_decoding(target, drafter, first, max_new_tokens)
        report.findings += findings
        tau = report.metrics.get("tau", SMALL_TAU)
        if tau < SMALL_TAU:
            other_modes = {f"chats in the template mode {name!r}": ids for name, ids in others}
            report.findings += check_repairs(target, drafter, first, max_new_tokens, tau, other_modes)
    except ValueError as error:  # of a kind of target or call that cannot be drafted for
        report.findings.append(Finding("decoding", "error", f"`generate` refuses: {_one_line(error)}"))


def _loaded_dtypes(target: PreTrainedModel, drafter: PreTrainedModel) -> list[Finding]:
    dtypes = f"the target runs in {dtype_name(target.dtype)}, the drafter in {dtype_name(drafter.dtype)}"
    if torch.float16 in (target.dtype, drafter.dtype):
        text = f"{dtypes}; float16 ends at 65504"
        return [Finding("dtype", "warning", text, "use bfloat16 or float32: hidden states may overflow")]
    return [] if target.dtype == drafter.dtype else [Finding("dtype", "note", f"{dtypes}; features are cast")]
