"""The report on a drafter: all methods answer all prompts in turn, in one run of one or more processes."""

import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from dflash_hf.eval.answering import WARM_UP_TOKENS, AnswerFiles, Answering, answer_share, work_name
from dflash_hf.eval.figures import AnswerRecord, identity_rows, result_rows
from dflash_hf.eval.methods import METHODS, Decoder, MethodUnavailable, decoder
from dflash_hf.eval.prompt_check import refuse_unreal_prompts
from dflash_hf.eval.report import FORMAT
from dflash_hf.eval.tasks import EvalPrompt, prompts_sha256
from dflash_hf.trainer.answer_file import check_settings
from dflash_hf.trainer.conversations import template_mode
from dflash_hf.trainer.provenance import run_record

logger = logging.get_logger(__name__)

_LONGEST_RUN = timedelta(days=7)
_NOT_MEASURED = (
    f"one answer of up to {WARM_UP_TOKENS} new tokens per method and process, compilation included, before the first"
)
_DEFINITIONS = (
    "speed-ups compare the time that both arms take to the same number of tokens, that of the shorter answer; "
    "decode speed-up leaves out the forward that reads the prompt and the first token, end-to-end counts both"
)


@torch.no_grad()
def evaluate_drafter(
    target: PreTrainedModel,
    drafter: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[EvalPrompt],
    *,
    methods: Sequence[str] = ("dflash", "prompt_lookup"),
    temperatures: Sequence[float] = (0.0,),
    max_new_tokens: int = 128,
    assistant: PreTrainedModel | None = None,
    simulate_accept_len: float | None = None,
    ignore_eos: bool = False,
    draft_window: int | None = None,
    enable_thinking: bool | None = None,
    seed: int = 0,
    output_dir: str | Path | None = None,
    options: Any = None,
) -> dict[str, Any]:
    """The report on a drafter: every prompt is answered by all methods in turn, in one run.

    Started by `accelerate launch` or `torchrun`, the processes share the prompts; each returns the report on all.

    Args:
        target, drafter: The pair; the drafter may be left out if no method needs it.
        prompts: See [`load_tasks`].
        methods: Methods of [`METHODS`] beside `plain`; `("all",)` for all that can run.
        temperatures: Each prompt is answered at each; 0 is greedy.
        max_new_tokens (`int`): Longest answer.
        assistant, simulate_accept_len, ignore_eos, draft_window: See [`decoder`].
        enable_thinking (`bool`, *optional*): Argument of the chat template.
        seed (`int`): Seed of sampling.
        output_dir (*optional*): Folder that keeps the answers, so that a stopped run goes on in it.
        options (*optional*): The command's options, a dataclass, for the report.
    Returns:
        `dict` as `report.json` holds it: `provenance`, `methods`, `skipped_methods`, `results`, `identity`.
    Raises:
        ValueError: If a method or prompt cannot be used, or `output_dir` holds a run with other settings.
    """
    state = process_state()
    refuse_unreal_prompts(prompts, tokenizer, target)
    mode = template_mode(tokenizer, enable_thinking)
    _warn_of_other_template(drafter, mode)
    decode_options = {
        "simulate_accept_len": simulate_accept_len,
        "ignore_eos": ignore_eos,
        "draft_window": draft_window,
    }
    decoders, skipped = _decoders(methods, target, drafter, assistant=assistant, **decode_options)
    template_options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    answering = Answering(target, tokenizer, decoders, max_new_tokens, template_options, seed)
    fitting = _fitting_prompts(answering, prompts)
    facts = _facts_of_models(target, drafter) | {
        "template_mode": mode,
        "max_new_tokens": max_new_tokens,
        "temperatures": list(temperatures),
        **decode_options,
        "seed": seed,
        "prompts_sha256": prompts_sha256(fitting),
    }
    record = run_record(
        options=None if options is None else asdict(options),
        **facts,
        world_size=state.num_processes,
        num_threads=torch.get_num_threads(),
        left_out_prompts=len(prompts) - len(fitting),
        warm_up=_NOT_MEASURED,
        excluded=_DEFINITIONS,
    )
    folder = Path(output_dir or _shared_temporary_folder(state))
    files = AnswerFiles(folder, state.process_index)
    done = _begin(state, files, facts, methods=list(decoders))
    work = [(float(temperature), prompt) for temperature in temperatures for prompt in fitting]
    if not all(work_name(*pair) in done for pair in work):
        left_out = answering.warm_up(fitting, max(temperatures), set(decoders) - {"plain", "dflash"})
        for found in gather_object([left_out]):
            skipped |= found
    answer_share(answering, work, files, done, rank=state.process_index, world_size=state.num_processes)
    state.wait_for_everyone()
    records = sorted(files.records(), key=_order_of_report(work))
    state.wait_for_everyone()
    if output_dir is None and state.is_main_process:
        shutil.rmtree(folder)
    present = list(dict.fromkeys(record.method for record in records))
    return {
        "format": FORMAT,
        "provenance": record | {"finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())},
        "methods": present,
        "skipped_methods": {method: why for method, why in skipped.items() if method not in present},
        "results": result_rows(records, facts["block_size"] or 1),
        "identity": identity_rows(records, facts["dtype"]),
        "serving": [],
    }


def _decoders(
    methods: Sequence[str], target: PreTrainedModel, drafter: PreTrainedModel | None, **options: Any
) -> tuple[dict[str, Decoder], dict[str, str]]:
    """Decoders of `plain` and the methods, and why some of `all` cannot run.

    Raises:
        ValueError: If a method is unknown, or one that was named cannot run.
    """
    unknown = set(methods) - set(METHODS) - {"all"}
    if unknown:
        raise ValueError(f"Unknown methods {sorted(unknown)}; choose from {list(METHODS)}, or `all`.")
    decoders, skipped = {}, {}
    for method in METHODS:
        if method != "plain" and method not in methods and "all" not in methods:
            continue
        try:
            decoders[method] = decoder(method, target, drafter, **options)
        except MethodUnavailable as error:
            if method in methods:
                raise
            skipped[method] = str(error)
    return decoders, skipped


def _facts_of_models(target: PreTrainedModel, drafter: PreTrainedModel | None) -> dict[str, Any]:
    return {
        "target": _public_name(target),
        "drafter": _public_name(drafter) if drafter is not None else None,
        "dtype": str(target.dtype).removeprefix("torch."),
        "quantization": _quantization(target),
        "attention": target.config._attn_implementation,
        "block_size": drafter.config.block_size if drafter is not None else None,
    }


def process_state() -> PartialState:
    """The processes of the launcher; they wait for each other at the end, however long a share takes."""
    return PartialState(cpu=not torch.cuda.is_available(), timeout=_LONGEST_RUN)


def _shared_temporary_folder(state: PartialState) -> str:
    folder = tempfile.mkdtemp(prefix="dflash-eval-") if state.is_main_process else None
    return next(name for name in gather_object([folder]) if name is not None)


def _begin(state: PartialState, files: AnswerFiles, facts: dict[str, Any], methods: list[str]) -> set[str]:
    """Names of finished work, after every process has read them; refuses a folder with other settings."""
    files.folder.mkdir(parents=True, exist_ok=True)
    done = files.finished()
    if state.is_main_process:
        check_settings(files.folder / "answers", facts | {"methods": methods}, is_begun=bool(done))
    state.wait_for_everyone()
    return done


def _fitting_prompts(answering: Answering, prompts: Sequence[EvalPrompt]) -> list[EvalPrompt]:
    """Prompts for which the target has room; the others are counted in one warning."""
    room = getattr(answering.target.config.get_text_config(), "max_position_embeddings", None)
    fitting = [prompt for prompt in prompts if room is None or answering.num_tokens(prompt) <= room]
    if not fitting:
        raise ValueError(f"None of the {len(prompts)} prompts and its answer fit into the target's {room} positions.")
    if len(fitting) < len(prompts):
        logger.warning(
            f"{len(prompts) - len(fitting)} of {len(prompts)} prompts are left out: with their answers they are "
            f"longer than the {room} positions of the target."
        )
    return fitting


def _warn_of_other_template(drafter: PreTrainedModel | None, mode: str) -> None:
    trained = drafter.config.dflash_config.get("template_mode") if drafter is not None else None
    if trained is not None and trained != mode:
        logger.warning(
            f"The drafter was trained with the chat template in mode {trained!r}, this run uses {mode!r}: it will "
            "accept less than it can. Set `--enable_thinking` to what it was trained with."
        )


def _public_name(model: PreTrainedModel) -> str:
    """A Hub id, or the last part of a local folder."""
    path = Path(model.name_or_path)
    return path.name if path.is_dir() else model.name_or_path


def _quantization(target: PreTrainedModel) -> str | None:
    config = getattr(target.config, "quantization_config", None)
    if config is None:
        return None
    return str(config.get("quant_method") if isinstance(config, dict) else config.quant_method)


def _order_of_report(work: Sequence[tuple[float, EvalPrompt]]):
    """Sort key: temperatures and tasks as they were asked for, methods as they are listed."""
    places = {(temperature, prompt.task, prompt.prompt_id): i for i, (temperature, prompt) in enumerate(work)}
    methods = list(METHODS)

    def key(record: AnswerRecord) -> tuple[int, int, int]:
        place = places[record.temperature, record.task, record.prompt_id]
        return place, record.turn, methods.index(record.method)

    return key
