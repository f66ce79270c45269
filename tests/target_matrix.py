"""Writes the table of targets and features.

python tests/target_matrix.py --output docs/target-matrix.md
"""

import argparse
import platform
from pathlib import Path

import torch
import transformers
from target_cells import CELLS, FEATURES, run_cell
from target_families import FAMILIES
from transformers.utils import logging as transformers_logging


def count_line(num_cells: int, num_refused: int) -> str:
    return f"{num_cells} cells: {num_cells - num_refused} exact, {num_refused} refused."


def render(results: dict[tuple[str, str], str]) -> str:
    """The document; `results` has the outcome of every cell."""
    reasons = list(dict.fromkeys(result for result in results.values() if result != "exact"))
    rows = []
    for family in FAMILIES:
        cells = []
        for feature in FEATURES:
            result = results.get((family, feature), "")
            cells.append(f"refused ({reasons.index(result) + 1})" if result in reasons else result)
        rows.append([family, *cells])
    table = [["target", *FEATURES], ["---"] * (len(FEATURES) + 1), *rows]
    lines = [
        "# Targets and features",
        "",
        count_line(len(results), sum(result != "exact" for result in results.values())),
        "",
        "Each cell compares `target.generate(..., assistant_model=drafter)` with plain `generate` of a tiny random",
        "float32 target. *exact*: the same token ids, and the drafter's right proposals were accepted (by a compiled",
        "target, too, or there is a warning). *refused*: a `ValueError` before the target read anything, or plain",
        "`generate` fails, too; the reason is below. An empty cell: the target has no window.",
        "",
        "Written by `python tests/target_matrix.py --output docs/target-matrix.md`, not by hand, on a CPU with",
        f"Transformers {transformers.__version__}, torch {torch.__version__} and Python {platform.python_version()}.",
        "`tests/test_target_matrix.py` runs every cell.",
        "",
        *(f"| {' | '.join(row)} |" for row in table),
        "",
        *(f"- *{name}*: {feature.description}." for name, feature in FEATURES.items()),
        "",
        *(f"({number}) {reason.removeprefix('refused: ')}\n" for number, reason in enumerate(reasons, start=1)),
    ]
    return "\n".join(lines).rstrip() + "\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="Markdown file to write.")
    output = parser.parse_args(arguments).output
    missing = sorted({reason for family in FAMILIES.values() if (reason := family.missing()) is not None})
    if missing:
        raise SystemExit(f"The table needs every family: {', '.join(missing)}.")
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    output.write_text(render({cell: run_cell(*cell) for cell in CELLS}), encoding="utf-8")


if __name__ == "__main__":
    main()
