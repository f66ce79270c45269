"""Reports of `dflash-eval`: reading and checking them, as Markdown, and two of them side by side."""

import json
from pathlib import Path
from typing import Any

from dflash_hf.eval import report_tables
from dflash_hf.eval.report_tables import Table, flat, number, temperature_name, with_interval

FORMAT = "dflash-eval 1"
REPORT_NAME = "report.json"
_TOP = ("provenance", "methods", "skipped_methods", "results", "identity")
_PROVENANCE = (
    *(
        "command",
        "options",
        "versions",
        "hardware",
        "git",
        "started",
        "finished",
        "prompts_sha256",
        "target",
        "drafter",
    ),
    *(
        "dtype",
        "quantization",
        "attention",
        "block_size",
        "template_mode",
        "seed",
        "warm_up",
        "excluded",
        "world_size",
    ),
)
_INTERVALS = (
    *("tau_interval", "speedup_interval", "end_to_end_speedup_interval", "time_to_first_token_interval"),
    "tokens_per_second_interval",
)
_RESULT = (
    *("method", "task", "temperature", "prompts", "answers", "tokens", "tau", "tau_pooled", "drafts_per_round"),
    *("acceptance_per_slot", "accepted_length_counts", "full_block_rate", "speedup", "speedup_median"),
    *("end_to_end_speedup", "time_to_first_token_ms", "tokens_per_second", "draft_share", "identical"),
    *("repeated_4grams", *_INTERVALS),
)
_IDENTITY = (
    *("temperature", "method", "answers", "identical", "near_ties", "unexplained"),
    *("largest_margin", "bound", "dtype"),
)
_SERVING = (
    *("task", "concurrency", "requests", "failed", "tokens", "seconds", "tokens_per_second", "request_seconds"),
    *("time_to_first_token_ms", "time_per_token_ms", "tau", "acceptance_per_slot", "acceptance_source"),
)

# What makes figures of two reports hard to compare, and which of them suffer.
_DISTURBING = {
    "prompts_sha256": "other prompts: neither tau nor speed-up can be compared",
    "target": "another target: neither tau nor speed-up can be compared",
    "template_mode": "another chat template mode: neither tau nor speed-up can be compared",
    "max_new_tokens": "answers of another length: tau and speed-up change along an answer",
    "ignore_eos": "answers of another length: tau and speed-up change along an answer",
    "simulate_accept_len": "another forced acceptance: its tau says nothing about a drafter",
    "dtype": "another number format: it changes what is accepted and what a forward costs",
    "quantization": "another quantisation: it changes what is accepted and what a forward costs",
    "hardware": "other hardware: speed-ups and times cannot be compared, tau can",
    "attention": "another attention implementation: speed-ups and times cannot be compared, tau can",
    "num_threads": "another number of threads: speed-ups and times cannot be compared, tau can",
    "world_size": "another number of processes: on one machine they slow each other down, tau can be compared",
}


def read_report(source: dict[str, Any] | str | Path) -> dict[str, Any]:
    """The report, checked: everything that tables, plots and the model card use is there.

    Args:
        source (`dict`, `str` or `Path`): The report, its JSON file, or the folder that `dflash-eval` wrote.
    Raises:
        ValueError: If it is no report, or one of another version; the message names what is missing.
    """
    report = source if isinstance(source, dict) else _load(Path(source))
    if report.get("format") != FORMAT:
        raise ValueError(_wrong_format(report))
    problems = _missing(report, _TOP, "the report")
    if not problems:
        problems += _missing(report["provenance"], _PROVENANCE, "provenance")
        for name, keys in (("results", _RESULT), ("identity", _IDENTITY), ("serving", _SERVING)):
            for position, row in enumerate(report.get(name, [])):
                problems += _missing(row, keys, f"{name}[{position}]")
    if not problems:
        problems = _wrong_values(report)
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"This is no whole report of `dflash-eval`: {'; '.join(problems[:5])}{more}.")
    return report


def markdown_report(report: dict[str, Any] | str | Path) -> str:
    """The whole report as Markdown: results by temperature, acceptance, identity, serving, how it was measured."""
    report = read_report(report)
    tables = []
    for temperature in report_tables.temperatures(report):
        tables += [
            report_tables.summary_table(report, temperature),
            report_tables.acceptance_table(report, temperature),
        ]
    tables += [
        report_tables.identity_table(report),
        report_tables.serving_table(report),
        report_tables.serving_acceptance_table(report),
        *report_tables.cost_tables(report),
    ]
    parts = [f"# {_escaped(report_tables.title(report))}"]
    parts += [f"> **Note.** {_escaped(remark)}" for remark in report_tables.remarks(report)]
    noted: set[str] = set()
    for table in tables:
        if table is not None:
            parts.append(_markdown_table(table, with_note=table.note not in noted))
            noted.add(table.note)
    facts = [f"- {name}: {_escaped(value)}" for name, value in report_tables.measurement_facts(report)]
    return "\n\n".join([*parts, "## How it was measured", "\n".join(facts)])


def compare_reports(a: dict[str, Any] | str | Path, b: dict[str, Any] | str | Path) -> str:
    """Two reports side by side as Markdown: what differs in how they were measured, then figure by figure.

    Args:
        a, b (`dict`, `str` or `Path`): See [`read_report`].
    """
    a, b = read_report(a), read_report(b)
    parts = ["# Comparison of A and B", *_differences(a["provenance"], b["provenance"])]
    for temperature in sorted({*report_tables.temperatures(a), *report_tables.temperatures(b)}):
        parts.append(_markdown_table(_compared_results(a, b, temperature)))
    parts.append(_markdown_table(_compared_serving(a, b)))
    for name, here, there in (("A", a, b), ("B", b, a)):
        only_here = [*_results(here).keys() - _results(there).keys(), *_serving(here).keys() - _serving(there).keys()]
        if only_here:
            labels = sorted(", ".join(map(str, key)) for key in only_here)
            parts.append("\n".join([f"## Only in {name}", "", *(f"- {_escaped(label)}" for label in labels)]))
    return "\n\n".join(part for part in parts if part)


def _load(path: Path) -> dict[str, Any]:
    path = path / REPORT_NAME if path.is_dir() else path
    try:
        report = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except ValueError as error:
        raise ValueError(f"{path} is no report of `dflash-eval`: {error}.") from error
    if not isinstance(report, dict):
        raise ValueError(f"{path} is no report of `dflash-eval`: it holds a {type(report).__name__}, not an object.")
    return report


def _refuse_constant(name: str) -> float:
    raise ValueError(f"it holds {name}, where unknown figures are null")


def _wrong_format(report: dict[str, Any]) -> str:
    if "summary" in report and "format" not in report:
        return (
            "This report was written before reports had a `format` and lacks intervals and acceptance by slot. Run "
            "its command again with this version of `dflash-eval`."
        )
    return (
        f"This is no report of `dflash-eval`: its `format` is {report.get('format')!r}, and this version of dflash-hf "
        f"reads {FORMAT!r}. Run `dflash-eval` again, or read it with the version that wrote it."
    )


def _missing(entry: Any, keys: tuple[str, ...], place: str) -> list[str]:
    if not isinstance(entry, dict):
        return [f"{place} is a {type(entry).__name__}, not an object"]
    missing = [key for key in keys if key not in entry]
    return [f"{place} lacks {', '.join(map(repr, missing))}"] if missing else []


def _wrong_values(report: dict[str, Any]) -> list[str]:
    problems = []
    if not (report["results"] or report.get("serving") or report.get("cost_model")):
        problems.append("it holds no results")
    for position, row in enumerate(report["results"]):
        if row["method"] not in report["methods"]:
            problems.append(f"results[{position}] is of the method {row['method']!r}, which `methods` does not name")
        for key in _INTERVALS:
            if row[key] is not None and not (len(row[key]) == 2 and row[key][0] <= row[key][1]):
                problems.append(f"results[{position}]: {key!r} is {row[key]!r}, not null or [low, high]")
    return problems


def _differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    entries_a, entries_b = flat(a), flat(b)
    differing = [key for key in {**entries_a, **entries_b} if entries_a.get(key) != entries_b.get(key)]
    if not differing:
        return ["Both were measured in the same way, down to the command and the time: they are one report."]
    rows = [
        (key, *(report_tables.plain_text(entries.get(key)) for entries in (entries_a, entries_b))) for key in differing
    ]
    reasons = [
        f"- `{name}`: {reason}." for name, reason in _DISTURBING.items() if _setting(a, name) != _setting(b, name)
    ]
    verdict = (
        "Prompts, target, precision, length, template mode and hardware are the same: the figures can be compared."
    )
    if reasons:
        verdict = "\n".join(["**The figures are not comparable as they stand:**", "", *reasons])
    title = "What differs in how they were measured"
    return [verdict, _markdown_table(Table(title, ("entry", "A", "B"), rows, num_labels=3))]


def _setting(provenance: dict[str, Any], name: str) -> Any:
    """What a run used, or what it was asked for where the report does not say what it used."""
    return provenance.get(name, (provenance["options"] or {}).get(name))


def _results(report: dict[str, Any]) -> dict[tuple[str, ...], dict[str, Any]]:
    return {
        (temperature_name(temperature), row["task"], row["method"]): row
        for temperature in report_tables.temperatures(report)
        for row in report_tables.rows_at(report, temperature)
        if row["method"] != "plain"
    }


def _serving(report: dict[str, Any]) -> dict[tuple[str, ...], dict[str, Any]]:
    rows = report.get("serving", [])
    return {(report_tables.serving_task(row), f"concurrency {row['concurrency']}"): row for row in rows}


def _compared_results(a: dict[str, Any], b: dict[str, Any], temperature: float) -> Table:
    of_a, of_b = _results(a), _results(b)
    rows = [
        (*key[1:], *_compared(row, of_b[key], "tau"), *_compared(row, of_b[key], "speedup"))
        for key, row in of_a.items()
        if key in of_b and row["temperature"] == temperature
    ]
    names = [(f"{name} A", f"{name} B", f"{name}, B - A", f"{name} intervals overlap") for name in ("tau", "speed-up")]
    columns = ("task", "method", *names[0], *names[1])
    return Table(f"Results, {temperature_name(temperature)}", columns, rows, "Brackets: 95% interval over prompts.")


def _compared(row_a: dict[str, Any], row_b: dict[str, Any], name: str) -> tuple[str, str, str, str]:
    interval_a, interval_b = row_a[f"{name}_interval"], row_b[f"{name}_interval"]
    overlap = report_tables.UNKNOWN
    if interval_a is not None and interval_b is not None:
        overlap = "yes" if interval_a[0] <= interval_b[1] and interval_b[0] <= interval_a[1] else "no"
    return (
        with_interval(row_a[name], interval_a),
        with_interval(row_b[name], interval_b),
        _difference(row_a[name], row_b[name]),
        overlap,
    )


def _compared_serving(a: dict[str, Any], b: dict[str, Any]) -> Table:
    of_a, of_b = _serving(a), _serving(b)
    rows = []
    for key, row_a in of_a.items():
        if key in of_b:
            row_b = of_b[key]
            speed_a, speed_b = row_a["tokens_per_second"], row_b["tokens_per_second"]
            ratio = speed_b / speed_a if speed_a and speed_b is not None else None
            speeds = (number(speed_a, 1), number(speed_b, 1), number(ratio, unit="x"))
            taus = (number(row_a["tau"]), number(row_b["tau"]), _difference(row_a["tau"], row_b["tau"]))
            rows.append((*key, *speeds, *taus))
    columns = ("task", "in flight", "tokens/s A", "tokens/s B", "B / A", "tau A", "tau B", "tau, B - A")
    return Table("Serving", columns, rows)


def _difference(a: float | None, b: float | None) -> str:
    return report_tables.UNKNOWN if a is None or b is None else f"{b - a:+.2f}"


def _markdown_table(table: Table, with_note: bool = True) -> str:
    """The table under its heading; nothing if it has no rows."""
    if not table.rows:
        return ""
    rules = ["---"] * table.num_labels + ["---:"] * (len(table.columns) - table.num_labels)
    lines = [table.columns, rules, *table.rows]
    parts = [f"## {table.title}", "\n".join(f"| {' | '.join(map(_escaped, line))} |" for line in lines)]
    return "\n\n".join(parts + [table.note] * bool(table.note and with_note))


def _escaped(text: str) -> str:
    """Text that stays one cell or line of Markdown."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
