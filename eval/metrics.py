"""Figures over answers: accepted length, speed-up, repetition, intervals. Definitions follow the paper, section 5."""

import math
import statistics
from collections.abc import Sequence

from dflash_hf.eval.decode import Answer


def pooled_tau(answers: Sequence[Answer]) -> float:
    """Tokens per verify forward over all rounds of all answers (long answers count more)."""
    rounds = [length for answer in answers for length in answer.accepted_lengths]
    return sum(rounds) / len(rounds) if rounds else math.nan


def mean_tau(answers: Sequence[Answer]) -> float:
    """Mean over answers of their own mean accepted length: the paper's tau."""
    values = [answer.tau for answer in answers if answer.accepted_lengths]
    return statistics.fmean(values) if values else math.nan


def decode_speedup(answers: Sequence[Answer], plain: Sequence[Answer]) -> float:
    """Mean time per decoded token of plain answers over that of `answers`, prefill excluded: the paper's speed-up."""
    return _mean_time_per_token(plain) / _mean_time_per_token(answers)


def median_speedup(answers: Sequence[Answer], plain: Sequence[Answer]) -> float:
    """Median over prompts of the ratio of time per decoded token; robust against a busy machine."""
    ratios = [
        _time_per_token(slow) / _time_per_token(fast)
        for fast, slow in zip(answers, plain, strict=True)
        if _is_timed(fast) and _is_timed(slow)
    ]
    return statistics.median(ratios) if ratios else math.nan


def identical_share(answers: Sequence[Answer], plain: Sequence[Answer]) -> float:
    """Share of answers whose token ids equal the plain ones."""
    return statistics.fmean(a.token_ids == b.token_ids for a, b in zip(answers, plain, strict=True))


def repeated_4gram_share(answers: Sequence[Answer]) -> float:
    """Share of 4-grams that occurred before in the same answer; repetition flatters every kind of drafting."""
    repeated = total = 0
    for answer in answers:
        ids = answer.token_ids
        grams = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
        repeated += len(grams) - len(set(grams))
        total += len(grams)
    return repeated / total if total else math.nan


def interval_95(values: Sequence[float]) -> float:
    """Half width of the 95% interval of a mean over prompts (normal approximation)."""
    return 1.96 * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def _is_timed(answer: Answer) -> bool:
    return len(answer.token_ids) > 1 and answer.decode_seconds > 0


def _time_per_token(answer: Answer) -> float:
    return answer.decode_seconds / (len(answer.token_ids) - 1)


def _mean_time_per_token(answers: Sequence[Answer]) -> float:
    return statistics.fmean(_time_per_token(answer) for answer in answers if _is_timed(answer))
