"""Figures over answers, as pure functions of plain numbers. Definitions follow DFlash, arXiv 2602.06036, section 5.

`accepted_lengths` is a list over answers; each entry lists the tokens that each verify forward of that answer
committed, bonus token included. The forward that reads the prompt is not among them.
"""

import math
import statistics
from collections.abc import Hashable, Sequence

# Fewer prompts say too little about their spread for an interval.
_FEWEST_FOR_INTERVAL = 4
_NORMAL_975 = 1.959963985

Interval = tuple[float, float]
AcceptedLengths = Sequence[Sequence[int]]


def tau_mean(accepted_lengths: AcceptedLengths) -> float | None:
    """Mean over answers of their own mean accepted length: the paper's tau. None if there was no verify forward."""
    means = [statistics.fmean(lengths) for lengths in accepted_lengths if lengths]
    return statistics.fmean(means) if means else None


def tau_pooled(accepted_lengths: AcceptedLengths) -> float | None:
    """Tokens per verify forward over all rounds of all answers, so that long answers count more."""
    rounds = [length for lengths in accepted_lengths for length in lengths]
    return statistics.fmean(rounds) if rounds else None


def accepted_length_counts(accepted_lengths: AcceptedLengths, block_size: int) -> list[int]:
    """Number of rounds that committed 1, 2, ..., `block_size` tokens.

    Raises:
        ValueError: If a round committed fewer than one token or more than a block has.
    """
    counts = [0] * block_size
    for lengths in accepted_lengths:
        for length in lengths:
            if not 1 <= length <= block_size:
                raise ValueError(f"A round committed {length} tokens, but a block of {block_size} gives 1 to it.")
            counts[length - 1] += 1
    return counts


def acceptance_per_slot(accepted_lengths: AcceptedLengths, block_size: int) -> list[float] | None:
    """Share of rounds whose proposals up to slot 1, 2, ..., `block_size - 1` were all accepted; None without rounds.

    1 plus their sum is the pooled tau.
    """
    counts = accepted_length_counts(accepted_lengths, block_size)
    rounds = sum(counts)
    return [sum(counts[slot:]) / rounds for slot in range(1, block_size)] if rounds else None


def full_block_rate(accepted_lengths: AcceptedLengths, block_size: int) -> float | None:
    """Share of rounds that accepted every proposal of a whole block; None without rounds."""
    counts = accepted_length_counts(accepted_lengths, block_size)
    return counts[-1] / sum(counts) if sum(counts) else None


def mean_interval(values: Sequence[float], groups: Sequence[Hashable] | None = None) -> Interval | None:
    """95% interval of a mean, see [`ratio_of_means_interval`]."""
    return ratio_of_means_interval(values, [1.0] * len(values), groups)


def ratio_of_means_interval(
    numerators: Sequence[float], denominators: Sequence[float], groups: Sequence[Hashable] | None = None
) -> Interval | None:
    """95% interval of mean(numerators) / mean(denominators): linearised, Student's t over groups.

    Args:
        numerators, denominators: One value per answer; the pairs need not be independent of each other.
        groups (*optional*): The prompt of each answer; turns of one prompt are not independent. Default: each its own.
    Returns:
        Lower and upper end, or None with fewer than four groups.
    """
    groups = list(range(len(numerators))) if groups is None else groups
    total = sum(denominators)
    num_groups = len(set(groups))
    if num_groups < _FEWEST_FOR_INTERVAL or total == 0:
        return None
    ratio = sum(numerators) / total
    residuals: dict[Hashable, float] = {}
    for group, numerator, denominator in zip(groups, numerators, denominators, strict=True):
        residuals[group] = residuals.get(group, 0.0) + numerator - ratio * denominator
    variance = num_groups / (num_groups - 1) * sum(residual**2 for residual in residuals.values()) / total**2
    half = _student_975(num_groups - 1) * math.sqrt(variance)
    return ratio - half, ratio + half


def _student_975(degrees: int) -> float:
    """97.5% point of Student's t: the usual expansion around the normal one, within 1% from three degrees on."""
    z = _NORMAL_975
    return (
        z
        + (z**3 + z) / (4 * degrees)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    )


def geometric_mean(values: Sequence[float]) -> float:
    """The average of speed-ups in the paper's Table 1 (that of tau is arithmetic)."""
    return statistics.geometric_mean(values)


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Index of the first token in which two answers differ, the shorter one's end included; None if they are equal."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return None if len(first) == len(second) else min(len(first), len(second))


def repeated_4gram_share(answers: Sequence[Sequence[int]]) -> float | None:
    """Share of 4-grams that occurred before in the same answer; repetition flatters every kind of drafting."""
    repeated = total = 0
    for ids in answers:
        grams = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
        repeated += len(grams) - len(set(grams))
        total += len(grams)
    return repeated / total if total else None
