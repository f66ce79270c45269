"""What a report says, as tables, facts and remarks of plain text; `report.py` and `html_report.py` only show them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

UNKNOWN = "–"
# Above this share of 4-grams that occurred before in the same answer, text counts as repetitive.
REPETITION_BOUND = 0.15
_FIGURES_NOTE = (
    "tau: tokens per verify forward, bonus token included, mean over answers; pooled: over all rounds. Speed-up: over "
    "plain decoding of the same prompts in the same run, up to the same token and without the prompt's forward, as "
    "the ratio of mean times per token, and as the median over answers; end to end: with the prompt's forward. Draft "
    "share: the drafter's part of the decode time. Identical: answers with the token ids of plain decoding. Brackets: "
    "95% interval over prompts."
)
_SLOT_NOTE = (
    "Slot k: share of verify forwards that accepted the k-th proposal; the share falls along the block, so it means "
    "something only beside the length."
)
_ACCEPTANCE_NOTE = (
    f"{_SLOT_NOTE} Drafts per round: accepted proposals per verify forward, without the bonus "
    "token (pooled tau - 1). Full blocks: share of verify forwards that accepted every proposal of a block."
)
_IDENTITY_NOTE = (
    "A near tie: at the first differing token, the target's two largest logits are closer than the bound. In low "
    "precision the forward over a block and the forward over one token round differently, and there the rounding "
    "decides. Margin and bound: of the first difference that comes closest to its bound, or exceeds it most. An "
    "unexplained difference is a fault: there must be none."
)
_SERVING_NOTE = (
    "Tokens per second: of all requests together. Request, first token and token times: percentiles 50 / 90 / 99 over "
    "requests. Speed-up: tokens per second over those of a server without drafter, where one was asked, too. tau and "
    "acceptance: of the server's own metrics, where it offers them."
)


@dataclass(frozen=True)
class Table:
    """A table of text.

    Args:
        title (`str`): Heading or caption.
        columns (`tuple[str, ...]`): Column names.
        rows (`Sequence[tuple[str, ...]]`): Cells, one for every column.
        note (`str`): What a reader must know to read it; may be empty.
        num_labels (`int`): Leading columns that name the row; the others hold figures.
    """

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""
    num_labels: int = 2


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """The value with its unit, or a dash if it is not known."""
    return UNKNOWN if value is None else f"{value:.{digits}f}{unit}"


def with_interval(value: float | None, interval: Sequence[float] | None, digits: int = 2, unit: str = "") -> str:
    """The value with its 95% interval in brackets, such as `2.25x [2.10, 2.41]`."""
    if value is None:
        return UNKNOWN
    bounds = UNKNOWN if interval is None else f"{interval[0]:.{digits}f}, {interval[1]:.{digits}f}"
    return f"{value:.{digits}f}{unit} [{bounds}]"


def percent(value: float | None) -> str:
    """A share as whole percent; a share that is not all never reads 100%."""
    if value is None:
        return UNKNOWN
    return f"{value:.1%}" if 0.99 < value < 1 else f"{value:.0%}"


def temperatures(report: dict[str, Any]) -> list[float]:
    """Temperatures of the results, lowest first."""
    return sorted({row["temperature"] for row in report["results"]})


def temperature_name(temperature: float) -> str:
    """`greedy`, or `temperature 0.7`."""
    return f"temperature {temperature:g}" if temperature else "greedy"


def rows_at(report: dict[str, Any], temperature: float) -> list[dict[str, Any]]:
    """Result rows of one temperature: all tasks together first, then task by task, methods in the report's order."""
    rows = [row for row in report["results"] if row["temperature"] == temperature]
    tasks = ["all", *dict.fromkeys(row["task"] for row in rows)]
    return sorted(rows, key=lambda row: (tasks.index(row["task"]), report["methods"].index(row["method"])))


def drafting_method(report: dict[str, Any]) -> str | None:
    """The method that headlines and plots of acceptance are about: `dflash`, else the first one with block slots."""
    with_slots = [row["method"] for row in report["results"] if row["acceptance_per_slot"] is not None]
    return "dflash" if "dflash" in with_slots else next(iter(with_slots), None)


def title(report: dict[str, Any]) -> str:
    """`Evaluation of DRAFTER for TARGET`, or of the target alone if the report is about no drafter."""
    drafter, target = (_model_name(report["provenance"][key]) for key in ("drafter", "target"))
    return f"Evaluation of {drafter} for {target}" if drafter else f"Evaluation of {target}"


def precision_name(provenance: dict[str, Any]) -> str:
    """Number format and quantisation of the target, such as `bfloat16, not quantised`."""
    if provenance["dtype"] is None:
        return "number format not recorded"
    quantization = provenance["quantization"]
    return f"{provenance['dtype']}, " + ("not quantised" if quantization is None else f"quantised: {quantization}")


def summary_table(report: dict[str, Any], temperature: float) -> Table:
    """Length, speed and identity of every method on every task."""
    return Table(
        f"Results, {temperature_name(temperature)} ({precision_name(report['provenance'])})",
        (
            *("task", "method", "tau", "tau, pooled", "speed-up", "speed-up, median", "end to end"),
            *("first token, ms", "tokens/s", "draft share", "identical"),
        ),
        [
            (
                f"{row['task']}, {row['prompts']} prompts",
                row["method"],
                with_interval(row["tau"], row["tau_interval"]),
                number(row["tau_pooled"]),
                with_interval(row["speedup"], row["speedup_interval"], unit="x"),
                number(row["speedup_median"], unit="x"),
                with_interval(row["end_to_end_speedup"], row["end_to_end_speedup_interval"], unit="x"),
                with_interval(row["time_to_first_token_ms"], row["time_to_first_token_interval"], digits=0),
                with_interval(row["tokens_per_second"], row["tokens_per_second_interval"], digits=1),
                percent(row["draft_share"]),
                percent(row["identical"]),
            )
            for row in rows_at(report, temperature)
        ],
        _FIGURES_NOTE,
    )


def acceptance_table(report: dict[str, Any], temperature: float) -> Table | None:
    """Acceptance by slot, always beside the length; None if no method drafts blocks."""
    rows = [row for row in rows_at(report, temperature) if row["acceptance_per_slot"] is not None]
    if not rows:
        return None
    return _slot_table(
        f"Acceptance by slot, {temperature_name(temperature)}",
        ("task", "method", "tau", "drafts per round", "full blocks"),
        [
            (
                row["task"],
                row["method"],
                with_interval(row["tau"], row["tau_interval"]),
                number(row["drafts_per_round"]),
                percent(row["full_block_rate"]),
            )
            for row in rows
        ],
        [row["acceptance_per_slot"] for row in rows],
        _ACCEPTANCE_NOTE,
    )


def identity_table(report: dict[str, Any]) -> Table | None:
    """Whether answers equal those of plain decoding, and why some differ; None if it was not looked at."""
    rows = [
        (
            temperature_name(row["temperature"]),
            row["method"],
            row["dtype"],
            str(row["answers"]),
            str(row["identical"]),
            str(row["near_ties"]),
            str(row["unexplained"]),
            *(UNKNOWN if row[name] is None else f"{row[name]:.3g}" for name in ("largest_margin", "bound")),
        )
        for row in report["identity"]
    ]
    columns = (
        *("sampling", "method", "number format", "answers", "identical", "near ties", "unexplained"),
        *("margin", "bound"),
    )
    return Table("Identity with plain decoding", columns, rows, _IDENTITY_NOTE, num_labels=3) if rows else None


def serving_task(row: dict[str, Any]) -> str:
    """Task of a server's row, with the temperature if the row has one."""
    return f"{row['task']}, {temperature_name(row['temperature'])}" if "temperature" in row else row["task"]


def serving_table(report: dict[str, Any]) -> Table | None:
    """Throughput and latency of a server by number of requests in flight; None if no server was measured."""
    columns = (
        *("task", "concurrency", "tokens/s", "speed-up", "request, s", "first token, ms", "per token, ms", "tau"),
        *("acceptance from", "requests", "failed", "tokens"),
    )
    rows = [
        (
            serving_task(row),
            str(row["concurrency"]),
            number(row["tokens_per_second"], digits=1),
            number(row.get("speedup"), unit="x"),
            _percentiles(row["request_seconds"], digits=2),
            _percentiles(row["time_to_first_token_ms"], digits=0),
            _percentiles(row["time_per_token_ms"], digits=1),
            number(row["tau"]),
            row["acceptance_source"] or UNKNOWN,
            str(row["requests"]),
            str(row["failed"]),
            str(row["tokens"]),
        )
        for row in report.get("serving", [])
    ]
    return Table("Serving", columns, rows, _SERVING_NOTE) if rows else None


def serving_acceptance_table(report: dict[str, Any]) -> Table | None:
    """Acceptance by slot as the server counts it; None if it does not."""
    rows = [row for row in report.get("serving", []) if row["acceptance_per_slot"] is not None]
    if not rows:
        return None
    return _slot_table(
        "Acceptance by slot, from the server's metrics",
        ("task", "concurrency", "tau"),
        [(serving_task(row), str(row["concurrency"]), number(row["tau"])) for row in rows],
        [row["acceptance_per_slot"] for row in rows],
        _SLOT_NOTE,
    )


def cost_tables(report: dict[str, Any]) -> list[Table]:
    """The cost model: its single entries under dotted names, and a table for each of its lists of rows."""
    entries = flat(report.get("cost_model") or {})
    lists = {name: value for name, value in entries.items() if _is_list_of_rows(value)}
    single = [(name, plain_text(value)) for name, value in entries.items() if name not in lists]
    tables = [Table("Cost model", ("quantity", "value"), single, num_labels=1)] if single else []
    for name, rows in lists.items():
        columns = tuple(dict.fromkeys(key for row in rows for key in row))
        cells = [tuple(UNKNOWN if row.get(key) is None else _short(row[key]) for key in columns) for row in rows]
        tables.append(Table(f"Cost model: {name}", columns, cells, num_labels=1))
    return tables


def measurement_facts(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Everything a reader needs to judge or repeat the figures, as names and values."""
    provenance = report["provenance"]
    names = {
        "Command": "command",
        "Target": "target",
        "Drafter": "drafter",
        "Number format": "dtype",
        "Quantisation": "quantization",
        "Attention": "attention",
        "Block size": "block_size",
        "Chat template mode": "template_mode",
        "Seed": "seed",
        "Prompts (SHA-256)": "prompts_sha256",
        "Warm-up": "warm_up",
        "Left out of the times": "excluded",
        "Processes": "world_size",
        "Hardware": "hardware",
        "Versions": "versions",
        "Code": "git",
        "Started": "started",
        "Finished": "finished",
        "Options": "options",
    }
    # A target in this process whose quantisation is null has none; of a server's nothing is known.
    quantization = provenance["quantization"] or ("none" if provenance["dtype"] else None)
    more = {key.replace("_", " ").capitalize(): key for key in provenance if key not in names.values()}
    return [
        (name, plain_text(quantization if key == "quantization" else provenance[key]))
        for name, key in (names | more).items()
    ]


def remarks(report: dict[str, Any]) -> list[str]:
    """What must not be overlooked: differing output, repetitive text, failed requests, methods that did not run."""
    found = [
        f"{row['method']}, {temperature_name(row['temperature'])}: {row['unexplained']} of {row['answers']} answers "
        "differ from plain decoding without a near tie. This is a fault, and the speed-up does not count."
        for row in report["identity"]
        if row["unexplained"]
    ]
    for temperature in temperatures(report):
        worst = _most_repetitive(rows_at(report, temperature))
        if worst:
            found.append(
                f"Repeated 4-grams exceed {REPETITION_BOUND} ({temperature_name(temperature)}): {'; '.join(worst)}. "
                "Text that repeats itself is easy to draft: expect less on other text."
            )
    found += [
        f"{serving_task(row)}, concurrency {row['concurrency']}: {row['failed']} requests failed, "
        f"{row['requests']} were answered."
        for row in report.get("serving", [])
        if row["failed"]
    ]
    if report["provenance"].get("left_out_prompts"):
        found.append(f"{report['provenance']['left_out_prompts']} prompts were left out, too long for the target.")
    return found + [f"{method} was not measured: {why}" for method, why in report["skipped_methods"].items()]


def flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The entries of nested dictionaries under dotted names, such as `versions.torch`."""
    entries: dict[str, Any] = {}
    for key, entry in value.items():
        is_nested = isinstance(entry, dict) and entry
        entries |= flat(entry, f"{prefix}{key}.") if is_nested else {f"{prefix}{key}": entry}
    return entries


def plain_text(value: Any) -> str:
    """A value of the report as one line for readers."""
    if value is None:
        return "not recorded"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_short(entry)}" for key, entry in value.items())
    return _short(value)


def _model_name(name: str | None) -> str | None:
    """A Hub id as it is, a local folder by its last part."""
    return Path(name).name if name and Path(name).is_absolute() else name


def _short(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(_short, value)) or "none"
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value)


def _slot_table(
    title: str, labels: tuple[str, ...], rows: list[tuple[str, ...]], slots: Sequence[Sequence[float]], note: str
) -> Table:
    num_slots = max(map(len, slots))
    cells = [row + tuple(map(percent, _padded(shares, num_slots))) for row, shares in zip(rows, slots, strict=True)]
    return Table(title, labels + tuple(f"slot {k}" for k in range(1, num_slots + 1)), cells, note)


def _padded(shares: Sequence[float], length: int) -> list[float | None]:
    return [*shares, *[None] * (length - len(shares))]


def _is_list_of_rows(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(row, dict) for row in value)


def _percentiles(values: dict[str, float | None], digits: int) -> str:
    return " / ".join(number(values[name], digits) for name in ("p50", "p90", "p99"))


def _most_repetitive(rows: list[dict[str, Any]]) -> list[str]:
    repetitive = [row for row in rows if (row["repeated_4grams"] or 0) > REPETITION_BOUND]
    worst = [
        max((row for row in repetitive if row["task"] == task), key=lambda row: row["repeated_4grams"])
        for task in dict.fromkeys(row["task"] for row in repetitive)
    ]
    return [f"{row['task']} {row['repeated_4grams']:.2f} ({row['method']})" for row in worst]
