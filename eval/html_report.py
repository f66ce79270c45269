"""A report as one HTML page that loads nothing and runs nothing, for large and small screens, light or dark."""

import html
import re
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

from dflash_hf.eval import report_tables
from dflash_hf.eval.plots import FAINT, INK, PAPER, SERIES_COLOURS, Plot, serving_plots, temperature_plots
from dflash_hf.eval.report import read_report
from dflash_hf.eval.report_tables import Table, number, percent, temperature_name

_TEMPLATE = Path(__file__).parent / "report_template.html"
_COLOUR_NAMES = {INK: "ink", FAINT: "faint", PAPER: "paper"} | {
    colour: f"series-{position}" for position, colour in enumerate(SERIES_COLOURS, start=1)
}
_BOUNDS = re.compile(r" (\[[^\]]*\])$")
_DECODING_LIMITS = (
    "Speed-ups hold for this hardware, number format and attention, and for one answer at a time; on other hardware "
    "expect other speed-ups, but nearly the same tau.",
    "tau and speed-up depend on the text: compare only figures of the same prompts, template mode and answer length.",
    "Intervals cover the choice of prompts, not other loads of the machine or other runs.",
    "Greedy answers equal those of plain decoding but for near ties in low precision; sampled ones have its "
    "distribution.",
)
_SERVING_LIMITS = (
    "Throughput and latency hold for this server, its settings and hardware, these prompts and answer lengths.",
    "tau and acceptance of a server are its own counts over all requests, so they have no interval.",
)


def html_page(report: dict[str, Any] | str | Path) -> str:
    """The whole report as one self-contained page.

    Raises:
        ValueError: If it is no report, see [`read_report`].
        ImportError: If matplotlib is not installed.
    """
    report = read_report(report)
    provenance = report["provenance"]
    hardware = provenance["hardware"]
    where = hardware.get("processor") if isinstance(hardware, dict) else hardware
    subtitle = (report_tables.precision_name(provenance), where, provenance["finished"])
    remarks = "".join(f"<p>{_text(remark)}</p>" for remark in report_tables.remarks(report))
    limits = (_DECODING_LIMITS if report["results"] else ()) + (_SERVING_LIMITS if report.get("serving") else ())
    facts = report_tables.measurement_facts(report)
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=_text(report_tables.title(report)),
        subtitle=" · ".join(_text(part) for part in subtitle if part),
        headline=_headline(report),
        remarks=f'<div class="remarks" role="note">{remarks}</div>' if remarks else "",
        sections="\n".join(_sections(report)),
        facts="\n".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in facts),
        limits="\n".join(f"<li>{_text(limit)}</li>" for limit in limits),
    )


def _headline(report: dict[str, Any]) -> str:
    """The figures of the drafter on all prompts, with their intervals; of a server, its throughput."""
    boxes = []
    method = report_tables.drafting_method(report)
    for row in report["results"]:
        if row["method"] == method and row["task"] == "all":
            name = temperature_name(row["temperature"])
            boxes += [
                (f"Speed-up, {name}", number(row["speedup"], unit="x"), _spread(row["speedup_interval"])),
                (f"tau, {name}", number(row["tau"]), _spread(row["tau_interval"])),
                (f"Identical, {name}", percent(row["identical"]), f"of {row['answers']} answers"),
            ]
    boxes += _serving_boxes(report["serving"]) if report.get("serving") else []
    cells = (
        f'<div><dt>{_text(name)}</dt><dd class="figure">{_text(figure)}</dd>'
        f'<dd class="spread">{_text(spread)}</dd></div>'
        for name, figure, spread in boxes
    )
    return f'<dl class="headline">{"".join(cells)}</dl>' if boxes else ""


def _serving_boxes(rows: Sequence[dict[str, Any]]) -> list[tuple[str, str, str]]:
    best = max(rows, key=lambda row: row["tokens_per_second"])
    lowest = min(rows, key=lambda row: row["concurrency"])
    failed, answered = (sum(row[key] for row in rows) for key in ("failed", "requests"))
    return [
        *(
            (
                name,
                f"{row['tokens_per_second']:,.0f} tok/s",
                f"{report_tables.serving_task(row)}, {row['concurrency']} in flight",
            )
            for name, row in (("Highest throughput", best), ("Lowest concurrency", lowest))
        ),
        ("Failed requests", str(failed), f"{answered:,} were answered"),
    ]


def _spread(interval: Sequence[float] | None) -> str:
    return (
        "no interval: too few prompts" if interval is None else f"95% interval {interval[0]:.2f} to {interval[1]:.2f}"
    )


def _sections(report: dict[str, Any]) -> list[str]:
    sections = []
    for temperature in report_tables.temperatures(report):
        sections += [
            _table(report_tables.summary_table(report, temperature)),
            _figures(temperature_plots(report, temperature)),
            _table(report_tables.acceptance_table(report, temperature), is_folded=True),
        ]
    sections += [
        _table(report_tables.serving_table(report)),
        _figures(serving_plots(report)),
        _table(report_tables.serving_acceptance_table(report), is_folded=True),
        _table(report_tables.identity_table(report)),
        *map(_table, report_tables.cost_tables(report)),
    ]
    return [section for section in sections if section]


def _table(table: Table | None, is_folded: bool = False) -> str:
    """The table under its heading, or folded behind it; nothing for None."""
    if table is None:
        return ""
    # Rows of one task (or one temperature) come under its name, so that one column of labels is enough on a phone.
    is_grouped = table.num_labels > 1
    columns = range(is_grouped, len(table.columns))
    head = "".join(f'<th scope="col"{_label(k, table)}>{_head(table.columns[k])}</th>' for k in columns)
    body, group = [], None
    for row in table.rows:
        if is_grouped and row[0] != group:
            group = row[0]
            body.append(f'<tr class="group"><th colspan="{len(row) - 1}"><span>{_text(group)}</span></th></tr>')
        body.append(f"<tr>{''.join(_cell(k, row[k], table) for k in columns)}</tr>")
    name = _text(table.title)
    content = (
        f'<div class="table" role="region" aria-label="{name}" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f'<tbody>{"".join(body)}</tbody></table></div>\n<p class="note">{_text(table.note)}</p>'
    )
    if is_folded:
        return f"<details><summary>{name}</summary>\n{content}\n</details>"
    return f"<h2>{name}</h2>\n{content}"


def _head(name: str) -> str:
    return _text(name).replace("-", "\N{NON-BREAKING HYPHEN}")


def _label(position: int, table: Table) -> str:
    return ' class="label"' if position < table.num_labels else ""


def _cell(position: int, text: str, table: Table) -> str:
    if position < table.num_labels:
        return f'<th scope="row" class="label">{_text(text)}</th>'
    cell = _BOUNDS.sub(r' <span class="bounds">\1</span>', _text(text))
    return f"<td>{cell}</td>"


def _figures(plots: list[Plot]) -> str:
    figures = (
        f"<figure>{inline_svg(plot)}\n<figcaption>{_text(plot.caption)}</figcaption></figure>" for plot in plots
    )
    return f'<div class="plots">\n{"".join(figures)}\n</div>' if plots else ""


def inline_svg(plot: Plot) -> str:
    """The drawing as an element of a page: ids of its own, the page's colours, and its alternative text."""
    svg = re.sub(r"<!--.*?-->", "", plot.svg[plot.svg.index("<svg") :], flags=re.DOTALL)
    for colour, name in _COLOUR_NAMES.items():
        svg = svg.replace(colour, f"var(--{name}, {colour})")
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{plot.name}-", svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{_text(plot.alternative)}"', 1)


def _text(text: Any) -> str:
    return html.escape(str(text))
