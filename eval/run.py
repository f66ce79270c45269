"""`dflash-eval`: how much faster, on which text, at what setting, and whether the output is the same."""

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from dflash_hf.eval.cost_model import cost_table, cycle_costs, random_pair
from dflash_hf.eval.evaluate import evaluate_drafter, process_state
from dflash_hf.eval.html_report import html_page
from dflash_hf.eval.methods import METHODS
from dflash_hf.eval.plots import require_matplotlib, write_plots
from dflash_hf.eval.prompt_check import refuse_unreal_prompts
from dflash_hf.eval.report import FORMAT, compare_reports, markdown_report
from dflash_hf.eval.serving import measure_server
from dflash_hf.eval.tasks import load_tasks, prompts_sha256
from dflash_hf.hub_configs import shipped_drafter_folder
from dflash_hf.hub_configs.embedded_target import EMBEDDED_TARGET, load_target
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.trainer.answer_file import check_settings, finished_ids
from dflash_hf.trainer.command_line import parse_options
from dflash_hf.trainer.data import read_json_lines
from dflash_hf.trainer.provenance import run_record, write_json, write_text

_SERVER_WARM_UP = "one short request to each server before the first level"
_SERVER_DEFINITIONS = (
    "throughput counts the whole time of a level; time per token leaves out the first token; the server counts tokens"
)


@dataclass
class EvalOptions:
    """Options of `dflash-eval`."""

    target: str = field(default=EMBEDDED_TARGET, metadata={"help": "Hub id, folder, or the embedded target."})
    target_revision: str | None = field(default=None, metadata={"help": "Hub revision of the target."})
    drafter: str | None = field(default=None, metadata={"help": "Folder or Hub id; default: the shipped drafter."})
    drafter_revision: str | None = field(default=None, metadata={"help": "Hub revision of the drafter."})
    assistant: str | None = field(
        default=None, metadata={"help": "Small causal LM with the target's tokenizer, for the method `assistant`."}
    )
    tasks: list[str] = field(
        default_factory=lambda: ["offline"],
        metadata={"help": "Tasks of docs/tasks.md, JSONL files, or `offline`: all that need no network."},
    )
    samples: int | None = field(default=None, metadata={"help": "Prompts of each task; default: as in the paper."})
    data_dir: str | None = field(default=None, metadata={"help": "Folder of local copies of the tasks' data sets."})
    methods: list[str] = field(
        default_factory=lambda: ["dflash", "prompt_lookup"],
        metadata={"help": f"Methods beside plain generate, of {', '.join(list(METHODS)[1:])}; or `all`."},
    )
    temperatures: list[float] = field(default_factory=lambda: [0.0], metadata={"help": "0 decodes greedily."})
    max_new_tokens: int = field(default=128, metadata={"help": "Longest answer, in tokens; the paper's is 2048."})
    ignore_eos: bool = field(default=False, metadata={"help": "Decode to the full length in every arm."})
    simulate_accept_len: float | None = field(
        default=None, metadata={"help": "Tokens that the method `forced` accepts in every round."}
    )
    draft_window: int | None = field(
        default=None, metadata={"help": "Newest tokens that the drafter of our loop reads; default: all."}
    )
    enable_thinking: bool | None = field(
        default=None, metadata={"help": "Argument of the chat template; must fit the drafter's training."}
    )
    dtype: str = field(default="bfloat16", metadata={"help": "Dtype of target and drafter."})
    attention: str | None = field(default=None, metadata={"help": "Attention implementation of the target."})
    num_threads: int = field(default=1, metadata={"help": "CPU threads of torch."})
    seed: int = field(default=0, metadata={"help": "Seed of the choice of prompts and of sampling."})
    output_dir: str | None = field(
        default=None, metadata={"help": "Folder of answers and reports; a run that was stopped goes on in it."}
    )
    compare: list[str] | None = field(default=None, metadata={"help": "Two report.json files to compare; no run."})
    server: str | None = field(
        default=None,
        metadata={"help": "OpenAI-compatible server to measure instead, such as http://localhost:8000/v1."},
    )
    server_model: str | None = field(default=None, metadata={"help": "Name of the served model, if it has several."})
    baseline_server: str | None = field(default=None, metadata={"help": "The same target without speculation."})
    baseline_model: str | None = field(default=None, metadata={"help": "Name of its model, if it has several."})
    concurrency: list[int] = field(
        default_factory=lambda: [1, 2, 4, 8, 16, 32], metadata={"help": "Conversations in flight at a server."}
    )
    requests_per_level: int | None = field(
        default=None, metadata={"help": "Conversations per task and level; default: every prompt once."}
    )
    request_timeout: float = field(default=600.0, metadata={"help": "Longest wait for an answer, in seconds."})
    server_extra_body: str | None = field(default=None, metadata={"help": "JSON with more fields of each request."})
    cost_model: bool = field(
        default=False, metadata={"help": "Cost of cycles for the shapes of target and drafter with random weights."}
    )
    context_lengths: list[int] = field(default_factory=lambda: [128], metadata={"help": "Prompts of the cost model."})
    num_proposals: list[int] | None = field(
        default=None, metadata={"help": "Verified lengths of the cost model; default: 1, half a block, a whole one."}
    )
    accept_lengths: list[float] = field(
        default_factory=lambda: [1.0, 4.0], metadata={"help": "Accepted lengths that the cost model forces."}
    )
    taus: list[float] = field(
        default_factory=lambda: [1.5, 2.0, 3.0, 4.0, 6.0], metadata={"help": "Tau values to predict speed-ups for."}
    )


def main() -> None:
    (options,) = parse_options(EvalOptions, description="Measure a drafter: accepted length, speed, identity.")
    if options.compare is not None:
        if len(options.compare) != 2:
            raise ValueError(f"`--compare` takes two report.json files, got {len(options.compare)}.")
        print(compare_reports(*options.compare))
        return
    if options.output_dir is not None:
        require_matplotlib()
    torch.set_num_threads(options.num_threads)
    if options.cost_model:
        run_cost_model(options)
        return
    report = evaluate_server(options) if options.server is not None else evaluate_in_process(options)
    if process_state().is_main_process:
        print(markdown_report(report))
        if options.output_dir is not None:
            write_report(report, Path(options.output_dir))


def evaluate_in_process(options: EvalOptions) -> dict[str, Any]:
    """Loads target, drafter and prompts, and evaluates them, see [`evaluate_drafter`]."""
    dtype = getattr(torch, options.dtype)
    device = process_state().device
    target, tokenizer = load_target(options.target, dtype=dtype, revision=options.target_revision)
    if options.attention is not None:
        target.set_attn_implementation(options.attention)
    drafter = DFlashDraftModel.from_pretrained(
        options.drafter or shipped_drafter_folder(), dtype=dtype, revision=options.drafter_revision
    )
    assistant = None
    if options.assistant is not None:
        assistant = AutoModelForCausalLM.from_pretrained(options.assistant, dtype=dtype).eval().to(device)
    return evaluate_drafter(
        target.to(device),
        drafter.eval().to(device),
        tokenizer,
        load_tasks(options.tasks, samples=options.samples, seed=options.seed, data_dir=options.data_dir),
        methods=options.methods,
        temperatures=options.temperatures,
        max_new_tokens=options.max_new_tokens,
        assistant=assistant,
        simulate_accept_len=options.simulate_accept_len,
        ignore_eos=options.ignore_eos,
        draft_window=options.draft_window,
        enable_thinking=options.enable_thinking,
        seed=options.seed,
        output_dir=options.output_dir,
        options=options,
    )


def evaluate_server(options: EvalOptions) -> dict[str, Any]:
    """The report on a served target; with `output_dir` a run that was stopped goes on with the missing levels."""
    prompts = load_tasks(options.tasks, samples=options.samples, seed=options.seed, data_dir=options.data_dir)
    refuse_unreal_prompts(prompts, None)
    extra_body = json.loads(options.server_extra_body) if options.server_extra_body else {}
    if options.enable_thinking is not None:
        extra_body["chat_template_kwargs"] = {"enable_thinking": options.enable_thinking}
    facts = {
        "target": options.server_model or options.server,
        "max_new_tokens": options.max_new_tokens,
        "requests_per_level": options.requests_per_level,
        "ignore_eos": options.ignore_eos,
        "seed": options.seed,
        "prompts_sha256": prompts_sha256(prompts),
    }
    unknown = ("drafter", "dtype", "quantization", "attention", "block_size")
    record = run_record(
        options=asdict(options),
        **facts,
        **dict.fromkeys(unknown),
        template_mode={None: "server default", True: "thinking", False: "no thinking"}[options.enable_thinking],
        world_size=1,
        warm_up=_SERVER_WARM_UP,
        excluded=_SERVER_DEFINITIONS,
    )
    rows: list[dict[str, Any]] = []
    levels = None if options.output_dir is None else Path(options.output_dir) / "levels.jsonl"
    if levels is not None:
        levels.parent.mkdir(parents=True, exist_ok=True)
        is_begun = bool(finished_ids(levels))
        settings = facts | {"server": options.server, "baseline_server": options.baseline_server, "body": extra_body}
        check_settings(levels, settings, is_begun=is_begun)
        rows = [line["row"] for line in read_json_lines(levels)] if is_begun else []

    def keep(row: dict[str, Any]) -> None:
        if levels is not None:
            name = f"{row['temperature']}/{row['task']}/{row['concurrency']}"
            with open(levels, "a", encoding="utf-8") as file:
                file.write(json.dumps({"id": name, "row": row}) + "\n")

    serving = []
    for temperature in options.temperatures:
        serving += measure_server(
            options.server or "",
            prompts,
            max_new_tokens=options.max_new_tokens,
            temperature=temperature,
            concurrency=options.concurrency,
            model=options.server_model,
            baseline_url=options.baseline_server,
            baseline_model=options.baseline_model,
            requests_per_level=options.requests_per_level,
            ignore_eos=options.ignore_eos,
            timeout=options.request_timeout,
            extra_body=extra_body,
            done=rows,
            record=keep,
        )
    record["finished"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    empty: dict[str, Any] = {"methods": [], "skipped_methods": {}, "results": [], "identity": []}
    return {"format": FORMAT, "provenance": record, **empty, "serving": serving}


def run_cost_model(options: EvalOptions) -> None:
    """Prints the cost of cycles and the speed-ups that follow; writes `cost.json` and `cost.md` into `output_dir`."""
    device = process_state().device
    target, drafter = random_pair(options.target, options.drafter, getattr(torch, options.dtype), device)
    rows = cycle_costs(
        target,
        drafter,
        context_lengths=options.context_lengths,
        num_proposals=options.num_proposals,
        accept_lengths=options.accept_lengths,
        seed=options.seed,
    )
    table = cost_table(rows, options.taus)
    print(table)
    if options.output_dir is not None:
        record = run_record(options=asdict(options))
        costs = {"provenance": record, "rows": [asdict(row) for row in rows]}
        write_json(Path(options.output_dir) / "cost.json", costs)
        write_text(Path(options.output_dir) / "cost.md", f"{table}\n\n`{record['command']}`\n")


def write_report(report: dict[str, Any], folder: Path) -> None:
    """`report.json`, `report.md`, `report.html` and the plots as SVG files in `folder`."""
    write_json(folder / "report.json", report)
    write_text(folder / "report.md", markdown_report(report) + "\n")
    write_text(folder / "report.html", html_page(report))
    write_plots(report, folder / "plots")


if __name__ == "__main__":
    main()
