"""`evaluate` module: accepted length of speculative decoding. See [`metric_module`]."""

from typing import Any

import datasets
import evaluate

from dflash_hf.eval import metrics

_DESCRIPTION = """\
Accepted length of speculative decoding: tokens that a forward of the target commits, bonus token included. The forward
that reads the prompt is not counted. `tau` averages each answer's mean (the paper's tau), `tau_pooled` averages over
all rounds, so that long answers count more. A share of accepted proposals depends on how many are drafted: it is given
by slot, beside the length, and never as one number.
"""

_KWARGS_DESCRIPTION = """
Args:
    predictions (`list[list[int]]`): For every answer, the tokens committed by each verify forward; `accepted_lengths`
        of a record of `dflash-eval`. Answers without a verify forward are empty lists.
    block_size (`int`): Tokens per block, anchor included; no round commits more.
    groups (`list`, *optional*): The prompt of every answer, if prompts have several: turns are not independent.
Returns:
    `dict` with
    tau (`float`): Mean over answers of their mean accepted length; None without rounds.
    tau_interval (`list[float]`): Its 95% interval over prompts; None with too few of them.
    tau_pooled (`float`): Mean over all rounds.
    drafts_per_round (`float`): Accepted proposals per round: `tau_pooled - 1`.
    acceptance_per_slot (`list[float]`): Share of rounds that accepted proposal 1, 2, ..., `block_size - 1`.
    full_block_rate (`float`): Share of rounds that accepted every proposal.
    accepted_length_counts (`list[int]`): Rounds that committed 1, 2, ..., `block_size` tokens.
Example:
    >>> import evaluate
    >>> from dflash_hf.eval.metric_folders import metric_module
    >>> metric = evaluate.load(metric_module("accepted_length"))
    >>> results = metric.compute(predictions=[[4, 2], [1]], block_size=4)
    >>> results["tau"], results["accepted_length_counts"]
    (2.0, [1, 1, 0, 1])
"""

_CITATION = """\
DFlash: block diffusion for speculative decoding, arXiv 2602.06036, section 5.
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS_DESCRIPTION)
class AcceptedLength(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS_DESCRIPTION,
            features=datasets.Features({"predictions": datasets.Sequence(datasets.Value("int64"))}),
            reference_urls=["https://arxiv.org/abs/2602.06036"],
        )

    def _compute(
        self, predictions: list[list[int]], block_size: int, groups: list[Any] | None = None
    ) -> dict[str, Any]:
        taus = [metrics.tau_mean([lengths]) for lengths in predictions]
        prompts = range(len(predictions)) if groups is None else groups
        known = [(tau, prompt) for tau, prompt in zip(taus, prompts, strict=True) if tau is not None]
        interval = metrics.mean_interval([tau for tau, _ in known], [prompt for _, prompt in known])
        pooled = metrics.tau_pooled(predictions)
        return {
            "tau": metrics.tau_mean(predictions),
            "tau_interval": None if interval is None else list(interval),
            "tau_pooled": pooled,
            "drafts_per_round": None if pooled is None else pooled - 1,
            "acceptance_per_slot": metrics.acceptance_per_slot(predictions, block_size),
            "full_block_rate": metrics.full_block_rate(predictions, block_size),
            "accepted_length_counts": metrics.accepted_length_counts(predictions, block_size),
        }
