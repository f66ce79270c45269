"""Acceptance of a speculating server over a stretch of time, as the server itself tells it (vLLM, SGLang)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from transformers.utils import logging

from dflash_hf.trainer.server_connection import AnswerServerError, ServerConnection

logger = logging.get_logger(__name__)

_LABEL = r'[a-zA-Z_]\w*\s*=\s*"(?:[^"\\]|\\.)*"'
# Name, labels in braces, value; a time may follow.
_SAMPLE = re.compile(rf"([a-zA-Z_:][\w:]*)(?:\s*\{{((?:[\s,]*{_LABEL})*[\s,]*)\}}\s*|\s+)(\S+)", re.ASCII)
_LABEL_PARTS = re.compile(r'(\w+)\s*=\s*"((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")
_UNKNOWN = {"tau": None, "acceptance_per_slot": None, "acceptance_source": None}


@dataclass(frozen=True)
class Sample:
    """One line of the Prometheus text format."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True)
class Counts:
    """Rounds (verify forwards) and what they accepted.

    Args:
        rounds (`float`): Rounds, over all requests.
        accepted (`float`): Accepted proposals; the bonus token of each round is none.
        per_slot (`tuple[float, ...]`, *optional*): Rounds that accepted slot 1, 2, ...; None if untold.
    """

    rounds: float
    accepted: float
    per_slot: tuple[float, ...] | None

    def __sub__(self, earlier: "Counts") -> "Counts":
        per_slot = None
        if self.per_slot is not None and earlier.per_slot is not None:
            # A slot that had not been counted yet counts from zero.
            pairs = zip_longest(self.per_slot, earlier.per_slot, fillvalue=0.0)
            per_slot = tuple(late - early for late, early in pairs)
        return Counts(self.rounds - earlier.rounds, self.accepted - earlier.accepted, per_slot)


@dataclass(frozen=True)
class Snapshot:
    """What a server's endpoints told at one moment; `source` names the endpoint that `counts` or `mean` is from.

    `mean` is SGLang's own average accepted length since its start, for servers that tell nothing better.
    """

    source: str | None = None
    counts: Counts | None = None
    mean: float | None = None
    is_sglang: bool = False


def read_snapshot(connection: ServerConnection) -> Snapshot:
    """The counters of `/metrics`, or what `/server_info` tells instead; an empty snapshot if there is neither."""
    vllm = sglang = None
    try:
        with connection.open("GET", connection.root_url + "/metrics") as response:
            samples = parse_prometheus(response.read().decode())
        vllm, sglang = _vllm_counts(samples), _sglang_counts(samples)
    except AnswerServerError:
        pass  # it has no such page
    except ValueError as error:
        logger.warning_once(f"{connection.root_url}/metrics is left out: {error}")
    if vllm is not None:
        return Snapshot("vllm metrics", vllm)
    is_sglang, mean = _server_info(connection)
    if sglang is not None:
        return Snapshot("sglang metrics", sglang, None, is_sglang)
    return Snapshot(None if mean is None else "sglang server average", None, mean, is_sglang)


def acceptance(before: Snapshot, after: Snapshot, details: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Acceptance between two snapshots, from the most exact source there is.

    Args:
        before (`Snapshot`): Taken before the requests.
        after (`Snapshot`): Taken after them.
        details (`Sequence[dict]`): SGLang's `spec_tokens_details` of the requests between, if it told them.
    Returns:
        `dict` with `tau`, `acceptance_per_slot` (share of rounds that accepted slot k) and `acceptance_source`: None
        where the server does not tell. The source is one of
        - `"sglang requests"`: told with each answer, so of exactly these requests;
        - `"vllm metrics"`, `"sglang metrics"`: difference of counters, of everything the server did meanwhile;
        - `"sglang server average"`: the server's own mean since its start.
    """
    if (counts := _counts_of_requests(details)) is not None:
        return _figures("sglang requests", counts)
    if before.counts is not None and after.counts is not None and before.source == after.source:
        return _figures(after.source, after.counts - before.counts)
    if after.mean is not None:
        return _UNKNOWN | {"tau": after.mean, "acceptance_source": after.source}
    return dict(_UNKNOWN)


def parse_prometheus(text: str) -> list[Sample]:
    """The samples of a page in the Prometheus text format.

    Raises:
        ValueError: If a line is none; it is named.
    """
    lines = (line.strip() for line in text.split("\n"))
    return [_sample(line) for line in lines if line and not line.startswith("#")]


def _sample(line: str) -> Sample:
    found = _SAMPLE.match(line)
    if found is None:
        raise ValueError(f"{line[:100]!r} is no line of the Prometheus text format.")
    name, labels, value = found.groups(default="")
    return Sample(name, {key: _unescaped(text) for key, text in _LABEL_PARTS.findall(labels)}, float(value))


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(lambda found: "\n" if found[1] == "n" else found[1], text)


def _vllm_counts(samples: Sequence[Sample]) -> Counts | None:
    """Counters of vLLM's `v1/spec_decode/metrics.py`, summed over engines."""
    rounds = _total(samples, "vllm:spec_decode_num_drafts")
    accepted = _total(samples, "vllm:spec_decode_num_accepted_tokens")
    if rounds is None or accepted is None:
        return None
    slots: dict[int, float] = {}
    for sample in _series(samples, "vllm:spec_decode_num_accepted_tokens_per_pos"):
        slot = int(sample.labels.get("position", "none"))
        slots[slot] = slots.get(slot, 0.0) + sample.value
    per_slot = tuple(slots.get(slot, 0.0) for slot in range(max(slots) + 1)) if slots else None
    return Counts(rounds, accepted, per_slot)


def _sglang_counts(samples: Sequence[Sample]) -> Counts | None:
    """Counters of SGLang's `observability/metrics_collector.py`, which count finished requests.

    Of the generated tokens one per request comes from the prompt's forward and one per round is the bonus token.
    """
    rounds = _total(samples, "sglang:spec_verify_calls")
    generated = _total(samples, "sglang:generation_tokens")
    requests = _total(samples, "sglang:num_requests")
    if rounds is None or generated is None or requests is None:
        return None
    return Counts(rounds, generated - requests - rounds, None)


def _counts_of_requests(details: Sequence[dict[str, Any]]) -> Counts | None:
    if not details:
        return None
    rounds = sum(detail["spec_verify_ct"] for detail in details)
    accepted = sum(detail["spec_num_correct_drafts"] for detail in details)
    histograms = [detail["spec_correct_drafts_histogram"] for detail in details]
    # Entry k: rounds that accepted k proposals, and so the slots 1 to k. It ends with the last that is not 0.
    totals = [sum(column) for column in zip_longest(*histograms, fillvalue=0)]
    num_slots = round(sum(detail["spec_num_proposed_drafts"] for detail in details) / rounds) if rounds else 0
    per_slot = tuple(float(sum(totals[slot:])) for slot in range(1, max(num_slots + 1, len(totals))))
    return Counts(rounds, accepted, per_slot if totals else None)


def _figures(source: str | None, counts: Counts) -> dict[str, Any]:
    if counts.rounds <= 0:  # no speculation meanwhile, or the server began anew
        return dict(_UNKNOWN)
    per_slot = None if counts.per_slot is None else [number / counts.rounds for number in counts.per_slot]
    return {
        "tau": 1 + counts.accepted / counts.rounds,
        "acceptance_per_slot": per_slot,
        "acceptance_source": source,
    }


def _series(samples: Sequence[Sample], name: str) -> list[Sample]:
    """The samples of a counter, under its name with `_total` or, from old clients, without."""
    return [sample for sample in samples if sample.name == f"{name}_total"] or [
        sample for sample in samples if sample.name == name
    ]


def _total(samples: Sequence[Sample], name: str) -> float | None:
    series = _series(samples, name)
    return sum(sample.value for sample in series) if series else None


def _server_info(connection: ServerConnection) -> tuple[bool, float | None]:
    """Whether this is SGLang, and its mean accepted length, over data-parallel ranks, if it tells one."""
    for path in ("/server_info", "/get_server_info"):  # the newer name first
        try:
            info = connection.request_once("GET", connection.root_url + path)
        except AnswerServerError:
            continue
        states = info.get("internal_states") if isinstance(info, dict) else None
        if isinstance(states, list):
            told = [state.get("avg_spec_accept_length") for state in states if isinstance(state, dict)]
            means = [mean for mean in told if mean is not None]
            return True, sum(means) / len(means) if means else None
    return False, None
