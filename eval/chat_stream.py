"""One streamed chat answer of an OpenAI-compatible server, with its times."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from huggingface_hub.utils import httpx  # httpx, or httpx2 from huggingface_hub 2 on

from dflash_hf.trainer.server_connection import AnswerServerError, ServerConnection

Message = dict[str, str]

_FINISHED = {"stop", "length", "tool_calls", "function_call"}
_NO_USAGE = (
    "{url} streams no `usage`. Chunks of a speculating server hold several tokens, so nothing else tells how many "
    'there are. Use a server that heeds `"stream_options": {{"include_usage": true}}`, as vLLM and SGLang do.'
)


@dataclass(frozen=True)
class StreamedAnswer:
    """What the server wrote to one request, and when.

    Args:
        content (`str`): The answer.
        reasoning (`str`): What the server parsed as thinking; not part of the conversation's next turn.
        tokens (`int`): Written tokens, thinking included, as `usage` tells.
        seconds (`float`): From sending the request, in its last try, to the end of the stream.
        first_token_seconds (`float`): To the first chunk with text.
        last_token_seconds (`float`): To the last chunk of the answer.
        retries (`int`): Tries before the last one.
        speculation (`dict`, *optional*): SGLang's `spec_tokens_details`.
    """

    content: str
    reasoning: str
    tokens: int
    seconds: float
    first_token_seconds: float
    last_token_seconds: float
    retries: int
    speculation: dict[str, Any] | None


class FailedRequest(Exception):
    """A request without a whole answer; `reason` is the same for requests that failed alike."""

    def __init__(self, reason: str, retries: int):
        super().__init__(reason)
        self.reason = reason
        self.retries = retries


@dataclass
class ChatStream:
    """Asks one server for streamed answers; safe to use from several threads.

    Args:
        connection (`ServerConnection`): The server.
        body (`dict`): What every request holds beside its messages: model, sampling, limits.
        timeout (`float`): Longest time for one answer, in seconds.
    """

    connection: ServerConnection
    body: dict[str, Any]
    timeout: float

    def answer(self, messages: list[Message]) -> StreamedAnswer:
        """The answer to `messages`.

        Faults that may pass and come before the first byte of an answer are tried again.

        Raises:
            FailedRequest: If there is no whole answer.
        """
        num_tries = 0

        def once() -> StreamedAnswer:
            nonlocal num_tries
            num_tries += 1
            return self._answer_once(messages, retries=num_tries - 1)

        try:
            return self.connection.try_again(once)
        except AnswerServerError as error:
            raise FailedRequest(str(error), retries=num_tries - 1) from error

    def _answer_once(self, messages: list[Message], retries: int) -> StreamedAnswer:
        url = self.connection.url + "/chat/completions"
        body = self.body | {"messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        started = perf_counter()
        reading = _Reading(self.connection, started)
        try:
            with self.connection.open("POST", url, body) as response:
                self._read(response, reading)
        except AnswerServerError as error:
            if isinstance(error.__cause__, httpx.ReadTimeout):  # slow, which a second try would hide
                raise self._timed_out() from error
            raise
        return reading.answer(retries)

    def _read(self, response: "httpx.Response", reading: "_Reading") -> None:
        """Feeds `reading` with the response; none of its faults is tried again, as the answer has begun."""
        try:
            for event in read_events(self._chunks_in_time(response, reading.started)):
                reading.take(event)
        except httpx.RequestError as error:
            if reading.is_done:
                return
            if isinstance(error, httpx.TimeoutException):
                raise self._timed_out() from error
            raise AnswerServerError("the connection broke amid the answer") from error

    def _chunks_in_time(self, response: "httpx.Response", started: float) -> Iterator[bytes]:
        # A server may send comments for ever: the client's own timeout is one for silence.
        for chunk in response.iter_bytes():
            if perf_counter() - started > self.timeout:
                raise self._timed_out()
            yield chunk

    def _timed_out(self) -> AnswerServerError:
        return AnswerServerError(f"no end within {self.timeout:g} s")


@dataclass
class _Reading:
    """The answer as far as it has been read."""

    connection: ServerConnection
    started: float
    end: float = 0.0
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    first_token: float | None = None
    last_token: float | None = None
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    speculation: dict[str, Any] | None = None
    is_done: bool = False

    def take(self, data: str) -> None:
        self.end = perf_counter()
        if data == "[DONE]":  # the rest is read too, so that the connection serves the next request
            self.is_done = True
            return
        try:
            event = json.loads(data)
            if event.get("error") or event.get("object") == "error":
                raise AnswerServerError(f"error in the stream: {self._reason(event)}")
            self.usage = event.get("usage") or self.usage
            self.speculation = (event.get("sglext") or {}).get("spec_tokens_details") or self.speculation
            for choice in event.get("choices") or ():
                self._take_choice(choice)
        except (AttributeError, TypeError, ValueError) as error:
            raise AnswerServerError(f"malformed event in the stream: {self.connection.printable(data)}") from error

    def _take_choice(self, choice: dict[str, Any]) -> None:
        delta = choice.get("delta") or {}
        content = delta.get("content") or ""
        reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""  # vLLM's newer and older name
        self.content.append(content)
        self.reasoning.append(reasoning)
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        # The first chunk of a stream tells the role and holds no text.
        if content or reasoning or delta.get("tool_calls") or self.finish_reason:
            self.last_token = self.end
            if self.first_token is None:
                self.first_token = self.last_token

    def _reason(self, event: dict[str, Any]) -> str:
        error = event.get("error") or event
        return self.connection.printable(str(error.get("message", error) if isinstance(error, dict) else error))

    def answer(self, retries: int) -> StreamedAnswer:
        """The whole answer.

        Raises:
            AnswerServerError: If it is not whole.
        """
        if self.finish_reason is None or self.first_token is None or self.last_token is None:
            raise AnswerServerError("the stream ended before the answer did")
        if self.finish_reason not in _FINISHED:
            raise AnswerServerError(f"the server ended the answer with {self.finish_reason!r}")
        tokens = (self.usage or {}).get("completion_tokens")
        if not isinstance(tokens, int):
            raise AnswerServerError(_NO_USAGE.format(url=self.connection.url))
        return StreamedAnswer(
            "".join(self.content),
            "".join(self.reasoning),
            tokens,
            self.end - self.started,
            self.first_token - self.started,
            self.last_token - self.started,
            retries,
            self.speculation,
        )


def read_events(chunks: Iterable[bytes]) -> Iterator[str]:
    """The data of each server-sent event; comments and other fields are skipped.

    Lines are split by hand, because `httpx.Response.iter_lines` also splits at characters such as U+2028, which JSON
    may hold. An OpenAI-compatible server sends one `data:` line per event.
    """
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip().decode(errors="replace")
