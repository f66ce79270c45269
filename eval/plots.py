"""Plots of a report as SVG: acceptance by slot, accepted lengths, speed-up with intervals, throughput of a server."""

import io
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_hf.eval.report import read_report
from dflash_hf.eval.report_tables import drafting_method, rows_at, serving_task, temperature_name, temperatures

# Okabe and Ito's hues, which colour-blind readers tell apart, dark enough for small text on white.
SERIES_COLOURS = ("#0072b2", "#c95500", "#00855f", "#b4568c", "#966a00", "#5f6b7a")
INK, FAINT, PAPER = "#1f2329", "#d0d4da", "#ffffff"
_LINE_STYLES = ("-", "--", ":")
_WIDTH = 5.0  # inches; with text of 10 points it stays readable at the width of a phone
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "dflash-hf",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "text.parse_math": False,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.facecolor": "none",
    "figure.facecolor": PAPER,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "grid.color": FAINT,
    "lines.linewidth": 1.8,
}


@dataclass(frozen=True)
class Plot:
    """One plot.

    Args:
        name (`str`): File name without ending.
        caption (`str`): What is shown, for everybody.
        alternative (`str`): What the plot tells, with its figures, for readers who do not see it.
        svg (`str`): The drawing, the same bytes for the same report.
    """

    name: str
    caption: str
    alternative: str
    svg: str


def write_plots(report: dict[str, Any] | str | Path, folder: str | Path) -> list[Path]:
    """Writes every plot of the report as `folder/NAME.svg` and returns the paths.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    folder = Path(folder)
    drawn = plots(report)
    folder.mkdir(parents=True, exist_ok=True)
    for plot in drawn:
        (folder / f"{plot.name}.svg").write_text(plot.svg, encoding="utf-8")
    return [folder / f"{plot.name}.svg" for plot in drawn]


def plots(report: dict[str, Any] | str | Path) -> list[Plot]:
    """Every plot that the report has figures for: by temperature, then those of a server.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    report = read_report(report)
    drawn = [plot for temperature in temperatures(report) for plot in temperature_plots(report, temperature)]
    return drawn + serving_plots(report)


def temperature_plots(report: dict[str, Any], temperature: float) -> list[Plot]:
    """Speed-up by task, acceptance by slot and accepted lengths at one temperature, as far as there are figures."""
    rows = rows_at(report, temperature)
    timed = [row for row in rows if row["method"] != "plain" and row["speedup"] is not None]
    drafted = [row for row in rows if row["method"] == drafting_method(report)]
    with_slots = [row for row in drafted if row["acceptance_per_slot"] is not None]
    counted = [row for row in drafted if row["task"] == "all" and sum(row["accepted_length_counts"])]
    with _style():
        return [
            *([_speedup(timed, temperature)] if timed else []),
            *([_acceptance(with_slots, temperature)] if with_slots else []),
            *(_accepted_lengths(row, temperature) for row in counted),
        ]


def serving_plots(report: dict[str, Any]) -> list[Plot]:
    """Throughput against requests in flight; empty if no server was measured."""
    with _style():
        return [_throughput(report["serving"])] if report.get("serving") else []


def _speedup(rows: Sequence[dict[str, Any]], temperature: float) -> Plot:
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    axes = _axes(height=0.9 + len(tasks) * (0.14 + 0.2 * len(methods)))
    step = 0.8 / len(methods)
    for row in rows:
        index = methods.index(row["method"])
        height = tasks.index(row["task"]) + (index - (len(methods) - 1) / 2) * step
        colour = _colour(index)
        low, high = row["speedup_interval"] or (row["speedup"], row["speedup"])
        axes.plot([low, high], [height, height], color=colour, linewidth=2.4, alpha=0.55, solid_capstyle="butt")
        axes.plot([row["speedup"]], [height], "o", color=colour, markersize=5.5)
        if row["task"] == tasks[0]:
            axes.annotate(
                row["method"], (high, height), (6, 0), textcoords="offset points", va="center", color=colour, size=9
            )
    axes.axvline(1.0, color=INK, linewidth=0.9)
    axes.text(1.0, 1.0, "plain", transform=axes.get_xaxis_transform(), ha="center", va="bottom", size=9)
    axes.set_yticks(range(len(tasks)), tasks)
    axes.set_ylim(len(tasks) - 0.5, -0.5)
    axes.set_xlim(left=0.0)
    axes.grid(axis="x", linewidth=0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("decode speed-up over plain decoding")
    figures = (f"{row['method']} on {row['task']} {row['speedup']:.2f}" for row in rows)
    caption = (
        f"Speed-up of decoding by task, {temperature_name(temperature)}: mean and 95% interval over prompts. Left of "
        "the line drafting costs more than it saves."
    )
    alternative = f"Decode speed-up over plain decoding: {', '.join(figures)}."
    return Plot(f"speedup-{_suffix(temperature)}", caption, alternative, _svg(axes))


def _acceptance(rows: Sequence[dict[str, Any]], temperature: float) -> Plot:
    axes = _axes(height=3.2)
    lines: dict[str, list[tuple[float, float]]] = {
        f"{row['task']}, tau {row['tau']:.2f}": [(k + 1, share) for k, share in enumerate(row["acceptance_per_slot"])]
        for row in rows
    }
    _labelled_lines(axes, lines, upper=1.0)
    axes.set_xticks(range(1, max(map(len, lines.values())) + 1))
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25%", "50%", "75%", "100%"])
    axes.set_xlabel("slot of the block")
    axes.set_ylabel("verify forwards that accept it")
    caption = f"Acceptance by slot and task: {rows[0]['method']}, {temperature_name(temperature)}."
    ends = (
        f"{name}: {line[0][1]:.0%} at slot 1, {line[-1][1]:.0%} at slot {line[-1][0]}" for name, line in lines.items()
    )
    return Plot(f"acceptance-{_suffix(temperature)}", caption, f"{caption} {'; '.join(ends)}.", _svg(axes))


def _accepted_lengths(row: dict[str, Any], temperature: float) -> Plot:
    counts = row["accepted_length_counts"]
    rounds = sum(counts)
    lengths = range(1, len(counts) + 1)
    axes = _axes(height=2.5)
    bars = axes.bar(lengths, [count / rounds for count in counts], color=SERIES_COLOURS[0], width=0.72)
    if len(counts) <= 16:
        axes.bar_label(
            bars, [f"{count / rounds:.0%}" for count in counts], padding=2, size=9 if len(counts) < 12 else 7
        )
    axes.set_xticks(lengths)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel("tokens committed by a verify forward")
    mean = row["tau_pooled"]
    caption = (
        f"Accepted lengths of {row['method']} on all tasks, {temperature_name(temperature)}: share of {rounds:,} "
        f"verify forwards. Their mean is the pooled tau, {mean:.2f}; {len(counts)} is a full block."
    )
    shares = (f"{length}: {count / rounds:.0%}" for length, count in zip(lengths, counts, strict=True))
    alternative = f"Share of verify forwards by committed tokens: {', '.join(shares)}."
    return Plot(f"accepted-lengths-{_suffix(temperature)}", caption, alternative, _svg(axes))


def _throughput(rows: Sequence[dict[str, Any]]) -> Plot:
    axes = _axes(height=3.2)
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in sorted(rows, key=lambda row: row["concurrency"]):
        for arm, name in ((row, serving_task(row)), (row.get("baseline"), f"{serving_task(row)}, no drafter")):
            if arm is not None:
                lines.setdefault(name, []).append((row["concurrency"], arm["tokens_per_second"]))
    ticks = sorted({row["concurrency"] for row in rows})
    axes.set_xscale("log", base=2)
    _labelled_lines(axes, lines)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("requests in flight")
    axes.set_ylabel("tokens per second")
    caption = "Throughput of the server by number of requests in flight, all requests together."
    ends = (f"{task} from {line[0][1]:.0f} to {line[-1][1]:.0f}" for task, line in lines.items())
    alternative = f"Tokens per second from {ticks[0]} to {ticks[-1]} requests in flight: {', '.join(ends)}."
    return Plot("throughput", caption, alternative, _svg(axes))


def _labelled_lines(axes: Any, lines: dict[str, list[tuple[float, float]]], upper: float | None = None) -> None:
    """Draws lines on a scale from 0 and writes each name beside its right end, moved apart where ends lie close."""
    for index, line in enumerate(lines.values()):
        style = _LINE_STYLES[index // len(SERIES_COLOURS) % len(_LINE_STYLES)]
        axes.plot(*zip(*line, strict=True), color=_colour(index), linestyle=style, marker="o", markersize=3.5)
    axes.set_ylim(0.0, upper)
    axes.margins(x=0.02)
    axes.grid(axis="y", linewidth=0.6)
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)
    heights = moved_apart([line[-1][1] for line in lines.values()], gap=0.065 * axes.get_ylim()[1])
    for index, (name, line) in enumerate(lines.items()):
        axes.annotate(
            name,
            line[-1],
            (1.04, heights[index]),
            textcoords=axes.get_yaxis_transform(),  # x as a share of the width, y as data
            va="center",
            size=9,
            color=_colour(index),
            arrowprops={"arrowstyle": "-", "color": _colour(index), "linewidth": 0.7, "shrinkA": 1, "shrinkB": 3},
        )


def moved_apart(values: Sequence[float], gap: float) -> list[float]:
    """The values, moved as little as possible (in squares) until neighbours are at least `gap` apart, order kept."""
    order = sorted(range(len(values)), key=values.__getitem__)
    # Less `rank * gap` the values only have to be in order: neighbours that are not are replaced by their mean.
    pools: list[list[float]] = []
    for rank, index in enumerate(order):
        pools.append([values[index] - rank * gap])
        while len(pools) > 1 and statistics.fmean(pools[-2]) > statistics.fmean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    in_order = [statistics.fmean(pool) for pool in pools for _ in pool]
    ranks = {index: rank for rank, index in enumerate(order)}
    return [in_order[ranks[index]] + ranks[index] * gap for index in range(len(values))]


def _colour(index: int) -> str:
    return SERIES_COLOURS[index % len(SERIES_COLOURS)]


def _suffix(temperature: float) -> str:
    return temperature_name(temperature).replace(" ", "-")


def require_matplotlib() -> None:
    """Raises ImportError, with what to install, if plots cannot be drawn."""
    _style()


def _style() -> Any:
    """A context in which matplotlib draws in our style, whatever the user's settings are."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("Plots need matplotlib: install `dflash-hf[eval]` or `matplotlib`.") from error
    return matplotlib.rc_context(_STYLE)


def _axes(height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(_WIDTH, height), layout="constrained").subplots()


def _svg(axes: Any) -> str:
    drawing = io.StringIO()
    # Without date and version the same report gives the same file.
    axes.figure.savefig(drawing, format="svg", metadata={"Date": None, "Creator": None})
    return drawing.getvalue()
