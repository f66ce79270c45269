"""From answers to figures: one row per method, temperature and task, as `report.json` holds them."""

import statistics
from collections.abc import Hashable, Sequence
from typing import Any

from dflash_hf.eval import metrics
from dflash_hf.eval.decode import Answer
from dflash_hf.eval.rounding import Difference

ALL_TASKS = "all"


class AnswerRecord:
    """One answer to one turn of a prompt, as a run stores it.

    Args:
        fields (`dict`): `task`, `prompt_id`, `turn`, `temperature`, `method`, `prompt_tokens`, the fields of
            [`Answer`], and `difference` from the plain answer: those of [`Difference`], or None.
    """

    def __init__(self, fields: dict[str, Any]):
        self.task: str = fields["task"]
        self.prompt_id: str = fields["prompt_id"]
        self.turn: int = fields["turn"]
        self.temperature: float = fields["temperature"]
        self.method: str = fields["method"]
        self.answer = Answer(**{name: fields[name] for name in Answer.__dataclass_fields__})
        self.difference = Difference(**fields["difference"]) if fields["difference"] else None

    @property
    def key(self) -> tuple:
        """What the answers of all methods to one turn have in common."""
        return self.temperature, self.task, self.prompt_id, self.turn


def result_rows(records: Sequence[AnswerRecord], block_size: int) -> list[dict[str, Any]]:
    """A row of figures per temperature, method and task, `"all"` last; the order is that of first appearance.

    Args:
        block_size (`int`): Tokens of a whole block; methods that commit more get as many slots as they need.
    """
    plain = {record.key: record.answer for record in records if record.method == "plain"}
    groups: dict[tuple[float, str], list[AnswerRecord]] = {}
    for record in records:
        groups.setdefault((record.temperature, record.method), []).append(record)
    rows = []
    for (temperature, method), members in groups.items():
        for task in (*dict.fromkeys(record.task for record in members), ALL_TASKS):
            chosen = [record for record in members if task in (record.task, ALL_TASKS)]
            names = {"method": method, "temperature": temperature, "task": task}
            rows.append(names | _figures(chosen, [plain[record.key] for record in chosen], block_size))
    return rows


def _figures(records: Sequence[AnswerRecord], plain: Sequence[Answer], block_size: int) -> dict[str, Any]:
    answers = [record.answer for record in records]
    prompts = [(record.task, record.prompt_id) for record in records]
    lengths = [answer.accepted_lengths for answer in answers]
    slots = max([block_size, *(length for answer in lengths for length in answer)])
    drafting = records[0].method != "plain" and slots > 1
    tau_pooled = metrics.tau_pooled(lengths)
    taus = [(answer.tau, prompt) for answer, prompt in zip(answers, prompts, strict=True) if answer.accepted_lengths]
    return {
        "prompts": len(set(prompts)),
        "answers": len(answers),
        "tokens": sum(len(answer.token_ids) for answer in answers),
        "tau": metrics.tau_mean(lengths),
        "tau_interval": metrics.mean_interval([tau for tau, _ in taus], [prompt for _, prompt in taus]),
        "tau_pooled": tau_pooled,
        "drafts_per_round": None if tau_pooled is None else tau_pooled - 1,
        "acceptance_per_slot": metrics.acceptance_per_slot(lengths, slots) if drafting else None,
        "accepted_length_counts": metrics.accepted_length_counts(lengths, slots),
        "full_block_rate": metrics.full_block_rate(lengths, block_size) if drafting and slots == block_size else None,
        **speed_figures(answers, plain, prompts),
        "draft_share": _share(answers, [answer.draft_seconds for answer in answers]),
        "verify_share": _share(answers, [answer.verify_seconds for answer in answers]),
        "identical": statistics.fmean(a.token_ids == b.token_ids for a, b in zip(answers, plain, strict=True)),
        "repeated_4grams": metrics.repeated_4gram_share([answer.token_ids for answer in answers]),
    }


def speed_figures(answers: Sequence[Answer], plain: Sequence[Answer], prompts: Sequence[Hashable]) -> dict[str, Any]:
    """Speed figures over the same number of tokens in both arms: those of the shorter answer.

    Args:
        answers, plain: Answers of a method and of plain decoding, pairwise to the same turn.
        prompts: The prompt of each pair; turns of one prompt count as one draw.
    """
    timed = []
    for fast, slow, prompt in zip(answers, plain, prompts, strict=True):
        num_tokens = min(len(fast.token_ids), len(slow.token_ids))
        if num_tokens > max(fast.num_first, slow.num_first):
            timed.append((fast, slow, num_tokens, prompt))
    groups = [prompt for *_, prompt in timed]
    slow_decode = [slow.seconds_to(n) / (n - slow.num_first) for _, slow, n, _ in timed]
    fast_decode = [fast.seconds_to(n) / (n - fast.num_first) for fast, _, n, _ in timed]
    slow_whole = [(slow.prefill_seconds + slow.seconds_to(n)) / n for _, slow, n, _ in timed]
    fast_whole = [(fast.prefill_seconds + fast.seconds_to(n)) / n for fast, _, n, _ in timed]
    first_token_ms = [1000 * answer.prefill_seconds for answer in answers]
    rates = [fast.tokens_per_second for fast, *_ in timed]
    ratios = [slow / fast for slow, fast in zip(slow_decode, fast_decode, strict=True)]
    return {
        "speedup": sum(slow_decode) / sum(fast_decode) if timed else None,
        "speedup_interval": metrics.ratio_of_means_interval(slow_decode, fast_decode, groups),
        "speedup_median": statistics.median(ratios) if timed else None,
        "end_to_end_speedup": sum(slow_whole) / sum(fast_whole) if timed else None,
        "end_to_end_speedup_interval": metrics.ratio_of_means_interval(slow_whole, fast_whole, groups),
        "time_to_first_token_ms": statistics.fmean(first_token_ms),
        "time_to_first_token_interval": metrics.mean_interval(first_token_ms, prompts),
        "tokens_per_second": statistics.fmean(rates) if timed else None,
        "tokens_per_second_interval": metrics.mean_interval(rates, groups),
    }


def _share(answers: Sequence[Answer], parts: Sequence[float | None]) -> float | None:
    """Share of the decode time that a part of it took; None where a method does not tell."""
    told = [(part, answer.decode_seconds) for part, answer in zip(parts, answers, strict=True) if part is not None]
    total = sum(seconds for _, seconds in told)
    return sum(part for part, _ in told) / total if total > 0 else None


def identity_rows(records: Sequence[AnswerRecord], dtype: str) -> list[dict[str, Any]]:
    """How many greedy answers equal the plain ones, and whether rounding explains the others, per method.

    Args:
        dtype (`str`): The target's.
    """
    plain = {record.key: record.answer.token_ids for record in records if record.method == "plain"}
    rows = []
    for method in dict.fromkeys(record.method for record in records if record.method != "plain"):
        members = [record for record in records if record.method == method and record.temperature == 0]
        differences = [record.difference for record in members if record.difference is not None]
        worst = max(differences, key=Difference.doubt, default=None)
        if members:
            rows.append(
                {
                    "temperature": 0.0,
                    "method": method,
                    "answers": len(members),
                    "identical": sum(record.answer.token_ids == plain[record.key] for record in members),
                    "near_ties": sum(difference.is_near_tie for difference in differences),
                    "unexplained": sum(not difference.is_near_tie for difference in differences),
                    "largest_margin": worst.margin if worst else None,
                    "bound": worst.bound if worst else None,
                    "dtype": dtype,
                }
            )
    return rows
