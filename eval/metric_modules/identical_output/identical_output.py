"""`evaluate` module: whether answers are those of plain decoding. See [`metric_module`]."""

from typing import Any

import datasets
import evaluate

from dflash_hf.eval import metrics

_DESCRIPTION = """\
Whether greedy answers of speculative decoding have the token ids of plain decoding, and where they first differ. In
float32 all of them must. In low precision the forward over a block rounds differently from one over a single token, so
an answer may leave the plain one at a near tie; look at the target's two largest logits at the first difference.
"""

_KWARGS_DESCRIPTION = """
Args:
    predictions (`list[list[int]]`): Token ids of every answer, without the prompt.
    references (`list[list[int]]`): Token ids of plain decoding's answers to the same prompts.
Returns:
    `dict` with
    identical (`float`): Share of answers with equal token ids.
    num_identical (`int`): Their number.
    first_differences (`list[int | None]`): For every answer, the index of the first token that differs, the shorter
        answer's end included; None if they are equal.
Example:
    >>> import evaluate
    >>> from dflash_hf.eval.metric_folders import metric_module
    >>> metric = evaluate.load(metric_module("identical_output"))
    >>> metric.compute(predictions=[[5, 6], [7, 8]], references=[[5, 6], [7, 9]])
    {'identical': 0.5, 'num_identical': 1, 'first_differences': [None, 1]}
"""

_CITATION = """\
DFlash: block diffusion for speculative decoding, arXiv 2602.06036.
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS_DESCRIPTION)
class IdenticalOutput(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        token_ids = datasets.Sequence(datasets.Value("int64"))
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS_DESCRIPTION,
            features=datasets.Features({"predictions": token_ids, "references": token_ids}),
            reference_urls=["https://arxiv.org/abs/2602.06036"],
        )

    def _compute(self, predictions: list[list[int]], references: list[list[int]]) -> dict[str, Any]:
        differences = [metrics.first_difference(a, b) for a, b in zip(predictions, references, strict=True)]
        identical = differences.count(None)
        return {
            "identical": identical / len(differences),
            "num_identical": identical,
            "first_differences": differences,
        }
