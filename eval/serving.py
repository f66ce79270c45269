"""Speed of a served target under load: streamed chat requests at several levels of concurrency."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import cycle, islice
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers.utils import logging

from dflash_hf.eval.chat_stream import ChatStream, FailedRequest, Message, StreamedAnswer
from dflash_hf.eval.server_metrics import acceptance, read_snapshot
from dflash_hf.trainer.answers import in_flight
from dflash_hf.trainer.server_connection import AnswerServerError, ServerConnection

if TYPE_CHECKING:
    from dflash_hf.eval.tasks import EvalPrompt

logger = logging.get_logger(__name__)

Row = dict[str, Any]

_MAX_TRIES = 5  # with waits that double from 0.5 s: a server that is gone is noticed within 10 s
_WARM_UP_TOKENS = 16
_NOT_ASKED = "an earlier turn failed"
_RESERVED = {"model", "messages", "stream", "stream_options", "max_tokens", "temperature"}


@dataclass
class _Talk:
    """What came back for one prompt; `failures` has one reason per turn without an answer."""

    answers: list[StreamedAnswer] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    retries: int = 0


def measure_server(
    url: str,
    prompts: Sequence["EvalPrompt"],
    *,
    max_new_tokens: int,
    temperature: float,
    concurrency: Sequence[int] = (1, 2, 4, 8, 16, 32),
    model: str | None = None,
    baseline_url: str | None = None,
    baseline_model: str | None = None,
    requests_per_level: int | None = None,
    ignore_eos: bool = False,
    timeout: float = 600.0,
    extra_body: Mapping[str, Any] | None = None,
    done: Sequence[Row] = (),
    record: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Figures of an OpenAI-compatible server, one row per task and level of concurrency.

    Every level asks all its prompts anew and keeps `concurrency` requests in flight until none is left. With a
    baseline, both servers are asked level by level, and who comes first alternates. Each server gets one short request
    before the first level, which is not measured and shows wrong addresses, names and keys. The API key is read from
    `OPENAI_API_KEY`.

    Args:
        url (`str`): Base of the OpenAI-compatible endpoints, such as `http://localhost:8000/v1`.
        prompts (`Sequence[EvalPrompt]`): Turns are sent one by one, each with the server's answers to those before.
        max_new_tokens (`int`): Longest answer, in tokens.
        temperature (`float`): 0 decodes greedily.
        concurrency (`Sequence[int]`): Levels: conversations in flight.
        model (`str`, *optional*): Name of the served model; needed if the server lists several.
        baseline_url (`str`, *optional*): Server of the same target without speculation.
        baseline_model (`str`, *optional*): Name of its model; needed if it lists several.
        requests_per_level (`int`, *optional*): Conversations per level and task: the first of the prompts, or all of
            them and then the first again. By default every prompt once.
        ignore_eos (`bool`): Whether answers go on to `max_new_tokens`, so that both servers write as many tokens.
        timeout (`float`): Longest time for one answer, in seconds; a request that takes longer has failed.
        extra_body (`Mapping`, *optional*): More fields of every request, such as `chat_template_kwargs`.
        done (`Sequence[dict]`): Rows of an earlier run with the same settings; their levels are not measured again.
        record (`Callable`, *optional*): Called with every new row as soon as its level is finished.
    Returns:
        `list[dict]`: Rows in the order of tasks and levels, those of `done` included; docs/serving-eval.md explains
        their fields.
    Raises:
        ValueError: If an option is out of range, or a server has not the one model that is needed.
        AnswerServerError: If a server cannot be reached, refuses the first request, streams no `usage`, or fails on
            every request of a level.
    """
    _check(prompts, concurrency, max_new_tokens, temperature, requests_per_level, timeout, extra_body or {})
    body = {"max_tokens": max_new_tokens, "temperature": temperature, **(extra_body or {})}
    if ignore_eos:
        body["ignore_eos"] = True
    by_task: dict[str, list[EvalPrompt]] = {}
    for prompt in prompts:
        by_task.setdefault(prompt.task, []).append(prompt)
    finished = {
        (row["task"], row["concurrency"]): row
        for row in done
        if row["temperature"] == temperature and ("speedup" in row) == (baseline_url is not None)
    }
    cells = [(task, level) for task in by_task for level in dict.fromkeys(concurrency)]
    missing = [cell for cell in cells if cell not in finished]
    with ExitStack() as stack:
        servers = []
        if missing:
            servers = [_Server(stack, url, model, body, timeout, "--server_model")]
        if missing and baseline_url is not None:
            servers.append(_Server(stack, baseline_url, baseline_model, body, timeout, "--baseline_model"))
        for server in servers:
            server.warm_up()
        for number, (task, level) in enumerate(missing):
            asked = _prompts_of_level(by_task[task], requests_per_level, level, task)
            figures = _level_figures(servers, asked, level, is_reversed=number % 2 == 1, is_greedy=temperature == 0)
            row = {"task": task, "temperature": temperature, "concurrency": level, **figures}
            if row["failed"]:
                logger.warning(f"{task}, concurrency {level}: {row['failed']} requests failed: {row['failures']}.")
            finished[task, level] = row
            if record is not None:
                record(row)
    return [finished[cell] for cell in cells]


class _Server:
    """One server during a sweep."""

    def __init__(
        self, stack: ExitStack, url: str, model: str | None, body: dict[str, Any], timeout: float, model_option: str
    ):
        self.connection = ServerConnection(url, timeout=timeout, max_tries=_MAX_TRIES)
        stack.callback(self.connection.close)
        body = body | {"model": self.connection.served_model(model, option=model_option)["id"]}
        # Only SGLang knows this field; strict servers refuse what they do not know.
        if read_snapshot(self.connection).is_sglang:
            body["return_spec_tokens_details"] = True
        self.stream = ChatStream(self.connection, body, timeout)

    def warm_up(self) -> None:
        """One short request that is not measured.

        Raises:
            AnswerServerError: If it fails: the other requests would, too.
        """
        tokens = min(_WARM_UP_TOKENS, self.stream.body["max_tokens"])
        short = ChatStream(self.connection, self.stream.body | {"max_tokens": tokens}, self.stream.timeout)
        try:
            short.answer([{"role": "user", "content": "Hello."}])
        except FailedRequest as error:
            raise AnswerServerError(f"{self.connection.url}, first request: {error}") from error

    def level(self, prompts: Sequence["EvalPrompt"], concurrency: int) -> tuple[Row, list[_Talk]]:
        """Asks `prompts` with `concurrency` of them in flight; the figures, and the talks in their order."""
        before = read_snapshot(self.connection)
        items = iter(enumerate(prompts))
        talks: dict[int, _Talk] = {}
        started = perf_counter()
        for (index, _), talk in in_flight(lambda item: self._talk(item[1]), lambda: next(items, None), concurrency):
            talks[index] = talk
        seconds = perf_counter() - started
        in_order = [talks[index] for index in range(len(prompts))]
        row = _figures(in_order, seconds)
        if row["requests"] == 0:
            reason = max(row["failures"], key=row["failures"].get)
            raise AnswerServerError(
                f"{self.connection.url}: all {row['failed']} requests at concurrency {concurrency} failed, "
                f"{row['failures'][reason]} of them with: {reason}"
            )
        details = [answer.speculation for talk in in_order for answer in talk.answers if answer.speculation]
        return row | acceptance(before, read_snapshot(self.connection), details), in_order

    def _talk(self, prompt: "EvalPrompt") -> _Talk:
        talk = _Talk()
        messages: list[Message] = []
        for turn, text in enumerate(prompt.turns):
            messages.append({"role": "user", "content": text})
            try:
                answer = self.stream.answer(messages)
            except FailedRequest as error:
                talk.retries += error.retries
                talk.failures = [error.reason] + [_NOT_ASKED] * (len(prompt.turns) - turn - 1)
                break
            talk.retries += answer.retries
            talk.answers.append(answer)
            messages.append({"role": "assistant", "content": answer.content})
        return talk


def _level_figures(
    servers: list[_Server], prompts: Sequence["EvalPrompt"], level: int, *, is_reversed: bool, is_greedy: bool
) -> Row:
    """Figures of the first server at one level, and of the second, the baseline, if there is one."""
    order = reversed(range(len(servers))) if is_reversed else range(len(servers))
    results = {index: servers[index].level(prompts, level) for index in order}
    figures, talks = results[0]
    if len(servers) == 1:
        return figures
    baseline, plain_talks = results[1]
    return figures | {
        "speedup": figures["tokens_per_second"] / baseline["tokens_per_second"],
        "identical": _identical_share(talks, plain_talks) if is_greedy else None,
        "baseline": baseline,
    }


def _figures(talks: Sequence[_Talk], seconds: float) -> Row:
    answers = [answer for talk in talks for answer in talk.answers]
    tokens = sum(answer.tokens for answer in answers)
    later = [
        (answer.last_token_seconds - answer.first_token_seconds) / (answer.tokens - 1)
        for answer in answers
        if answer.tokens > 1
    ]
    failures = Counter(reason for talk in talks for reason in talk.failures)
    return {
        "requests": len(answers),
        "failed": failures.total(),
        "failures": dict(failures),
        "retries": sum(talk.retries for talk in talks),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "request_seconds": _percentiles([answer.seconds for answer in answers]),
        "time_to_first_token_ms": _percentiles([1000 * answer.first_token_seconds for answer in answers]),
        "time_per_token_ms": _percentiles([1000 * value for value in later]),
    }


def _percentiles(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {"p50": None, "p90": None, "p99": None}
    return {f"p{rank}": float(np.percentile(values, rank)) for rank in (50, 90, 99)}


def _identical_share(talks: Sequence[_Talk], plain_talks: Sequence[_Talk]) -> float | None:
    """Share of the prompts that both servers answered whole whose answers are the same text in every turn."""
    pairs = [(a, b) for a, b in zip(talks, plain_talks, strict=True) if not a.failures and not b.failures]
    if not pairs:
        return None
    texts = [[[(answer.reasoning, answer.content) for answer in talk.answers] for talk in pair] for pair in pairs]
    return sum(own == plain for own, plain in texts) / len(pairs)


def _prompts_of_level(
    prompts: Sequence["EvalPrompt"], number: int | None, level: int, task: str
) -> list["EvalPrompt"]:
    asked = list(islice(cycle(prompts), len(prompts) if number is None else number))
    if len(asked) < level:
        logger.warning(
            f"{task} has {len(asked)} prompts for concurrency {level}, which is therefore never reached. "
            "Raise `requests_per_level`, or take more prompts."
        )
    return asked


def _check(
    prompts: Sequence["EvalPrompt"],
    concurrency: Sequence[int],
    max_new_tokens: int,
    temperature: float,
    requests_per_level: int | None,
    timeout: float,
    extra_body: Mapping[str, Any],
) -> None:
    if not prompts:
        raise ValueError("`prompts` is empty. Choose at least one task or prompt.")
    if not concurrency or min(concurrency) < 1:
        raise ValueError(f"`concurrency` must be levels of at least 1, got {list(concurrency)}.")
    if max_new_tokens < 1 or (requests_per_level is not None and requests_per_level < 1):
        raise ValueError(
            f"`max_new_tokens` {max_new_tokens} and `requests_per_level` {requests_per_level} must be at least 1."
        )
    if temperature < 0 or timeout <= 0:
        raise ValueError(f"`temperature` {temperature} must be at least 0, and `timeout` {timeout} above 0.")
    if clash := sorted(_RESERVED & set(extra_body)):
        raise ValueError(f"`extra_body` must not hold {clash}: the other options set them.")
