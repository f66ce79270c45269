"""The averages of Table 1 of DFlash, arXiv 2602.06036, follow from its columns: that fixes what our averages mean."""

import statistics

import pytest

from dflash_hf.eval.metrics import geometric_mean

# Temperature, model, method; speed-up/tau on GSM8K, MATH-500, AIME25, HumanEval, MBPP, LCB and MT-Bench; their "Avg."
TABLE_1 = """
0 4B EAGLE-3(16) 1.99/3.30 1.83/3.08 1.79/3.05 1.84/3.05 1.78/2.95 1.73/2.91 1.74/3.02 1.81/3.05
0 4B EAGLE-3(60) 2.27/3.77 2.10/3.52 2.13/3.51 2.12/3.47 2.02/3.38 1.90/3.22 2.04/3.49 2.08/3.48
0 4B DFlash(16) 5.15/6.53 6.09/7.84 5.68/7.27 5.21/6.64 4.78/6.09 5.41/7.09 2.85/4.35 4.91/6.54
0 8B EAGLE-3(16) 1.94/3.23 1.81/3.02 1.79/3.00 1.89/3.17 1.69/2.82 1.57/2.65 1.63/2.83 1.76/2.96
0 8B EAGLE-3(60) 2.23/3.71 2.05/3.49 2.05/3.44 2.17/3.65 1.93/3.25 1.81/3.03 1.90/3.26 2.02/3.40
0 8B DFlash(16) 5.15/6.54 6.08/7.87 5.62/7.08 5.14/6.50 4.65/5.95 5.51/7.27 2.75/4.24 4.86/6.49
1 4B EAGLE-3(16) 1.89/3.22 1.75/2.99 1.64/2.79 1.74/3.01 1.69/2.89 1.63/2.77 1.70/2.95 1.72/2.95
1 4B EAGLE-3(60) 2.12/3.68 1.97/3.44 1.83/3.20 1.94/3.39 1.92/3.33 1.82/3.14 1.91/3.36 1.93/3.36
1 4B DFlash(16) 4.71/6.00 5.09/6.67 3.73/4.92 4.74/6.04 4.42/5.66 4.90/6.50 2.67/4.07 4.24/5.69
1 8B EAGLE-3(16) 1.87/3.12 1.73/2.91 1.63/2.74 1.75/3.05 1.64/2.74 1.56/2.57 1.58/2.70 1.68/2.83
1 8B EAGLE-3(60) 2.07/3.59 1.94/3.38 1.84/3.18 2.05/3.54 1.85/3.16 1.72/2.92 1.70/3.05 1.88/3.26
1 8B DFlash(16) 4.67/5.98 4.84/6.40 3.57/4.73 4.32/5.52 4.04/5.21 4.93/6.69 2.47/3.80 4.03/5.48
"""


def columns(line: str) -> tuple[list[float], list[float]]:
    """Speed-ups and taus of a line, averages last."""
    speedups, taus = zip(*(map(float, cell.split("/")) for cell in line.split()[3:]), strict=True)
    return list(speedups), list(taus)


@pytest.mark.parametrize("line", TABLE_1.strip().splitlines(), ids=lambda line: " ".join(line.split()[:3]))
def test_average_speedup_is_the_geometric_mean_and_average_tau_the_arithmetic_one(line):
    speedups, taus = columns(line)
    assert len(speedups) == len(taus) == 8
    assert round(geometric_mean(speedups[:-1]), 2) == speedups[-1]
    assert round(statistics.fmean(taus[:-1]), 2) == taus[-1]


@pytest.mark.parametrize("line", [line for line in TABLE_1.strip().splitlines() if "DFlash" in line])
def test_arithmetic_mean_of_speedups_is_not_what_the_paper_prints(line):
    speedups, _ = columns(line)
    assert statistics.fmean(speedups[:-1]) > speedups[-1] + 0.08
