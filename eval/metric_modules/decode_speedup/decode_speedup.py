"""`evaluate` module: speed-up of decoding over a baseline. See [`metric_module`]."""

import statistics
from typing import Any

import datasets
import evaluate

from dflash_hf.eval import metrics

_DESCRIPTION = """\
Speed-up of decoding over a baseline that answered the same prompts in the same run: the ratio of the mean times per
token (the paper's speed-up), the median over answers of their own ratios, which a busy machine disturbs less, and a
95% interval over prompts. Give times without the prompt's forward for the speed-up of decoding, or with it for that of
the whole answer.
"""

_KWARGS_DESCRIPTION = """
Args:
    seconds (`list[float]`): Time of every answer.
    tokens (`list[int]`): Tokens that were decoded in that time.
    baseline_seconds (`list[float]`): Time of the baseline's answer to the same prompt.
    baseline_tokens (`list[int]`): Its tokens.
    groups (`list`, *optional*): The prompt of every answer, if prompts have several: turns are not independent.
Returns:
    `dict` with
    speedup (`float`): Mean of the baseline's times per token over the mean of the others.
    speedup_interval (`list[float]`): Its 95% interval over prompts; None with too few of them.
    speedup_median (`float`): Median of the ratios.
    tokens_per_second, baseline_tokens_per_second (`float`): Mean over answers.
Example:
    >>> import evaluate
    >>> from dflash_hf.eval.metric_folders import metric_module
    >>> metric = evaluate.load(metric_module("decode_speedup"))
    >>> arm, baseline = {"seconds": [5.0, 2.5], "tokens": [10, 10]}, {"baseline_seconds": [5.0, 25.0]}
    >>> results = metric.compute(**arm, **baseline, baseline_tokens=[10, 10])
    >>> results["speedup"], results["speedup_median"]
    (4.0, 5.5)
"""

_CITATION = """\
DFlash: block diffusion for speculative decoding, arXiv 2602.06036, section 5.
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS_DESCRIPTION)
class DecodeSpeedup(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        columns = {
            name: datasets.Value("float64" if name.endswith("seconds") else "int64")
            for name in ("seconds", "tokens", "baseline_seconds", "baseline_tokens")
        }
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS_DESCRIPTION,
            features=datasets.Features(columns),
            reference_urls=["https://arxiv.org/abs/2602.06036"],
        )

    def _compute(
        self,
        seconds: list[float],
        tokens: list[int],
        baseline_seconds: list[float],
        baseline_tokens: list[int],
        groups: list[Any] | None = None,
    ) -> dict[str, Any]:
        times = _times_per_token(seconds, tokens)
        baseline_times = _times_per_token(baseline_seconds, baseline_tokens)
        interval = metrics.ratio_of_means_interval(baseline_times, times, groups)
        return {
            "speedup": sum(baseline_times) / sum(times),
            "speedup_interval": None if interval is None else list(interval),
            "speedup_median": statistics.median(slow / fast for slow, fast in zip(baseline_times, times, strict=True)),
            "tokens_per_second": statistics.fmean(1 / time for time in times),
            "baseline_tokens_per_second": statistics.fmean(1 / time for time in baseline_times),
        }


def _times_per_token(seconds: list[float], tokens: list[int]) -> list[float]:
    for position, (duration, count) in enumerate(zip(seconds, tokens, strict=True)):
        if duration <= 0 or count <= 0:
            raise ValueError(
                f"Answer {position} has {count} tokens in {duration} seconds; both must be positive. Leave out, in "
                "both arms, answers that were over with their first token."
            )
    return [duration / count for duration, count in zip(seconds, tokens, strict=True)]
