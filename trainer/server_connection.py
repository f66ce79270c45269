"""Requests to one inference server: its address, its key, and which faults are tried again."""

import json
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from time import time
from typing import Any, TypeVar

from huggingface_hub.utils import httpx  # httpx, or httpx2 from huggingface_hub 2 on
from transformers.utils import logging

logger = logging.get_logger(__name__)

Result = TypeVar("Result")

_MAX_TRIES = 10
_FIRST_WAIT = 0.5  # seconds; doubles with every try
_LONGEST_WAIT = 60.0
_LONGEST_RETRY_AFTER = 600.0
_TRANSIENT_STATUS = {408, 425, 429}  # and every 5xx
_KEY_HINT = ". Put the server's key into the environment variable OPENAI_API_KEY."
_HINTS = {
    401: _KEY_HINT,
    403: _KEY_HINT,
    404: ". `--server` must be the address of the OpenAI-compatible endpoints, which ends with /v1.",
}


class AnswerServerError(RuntimeError):
    """The server cannot be reached, refuses a request, or answers in a way that cannot be right.

    `is_transient` tells faults that may pass from the others, `problem` is the text without details that differ from
    request to request, and `retry_after` the wait, in seconds, that the server asks for.
    """

    def __init__(
        self, message: str, *, is_transient: bool = False, problem: str | None = None, retry_after: float = 0.0
    ):
        super().__init__(message)
        self.is_transient = is_transient
        self.problem = message if problem is None else problem
        self.retry_after = retry_after


class ServerConnection:
    """HTTP requests to one server. The API key is read from `OPENAI_API_KEY` and appears nowhere else.

    Args:
        url (`str`): Base of the OpenAI-compatible endpoints, such as `http://localhost:8000/v1`.
        timeout (`float`): Longest wait for the next bytes of a response, in seconds.
        max_tries (`int`, *optional*): Most tries of a request.
    Raises:
        ValueError: If `url` is no HTTP address or holds a password.
    """

    def __init__(self, url: str, *, timeout: float, max_tries: int | None = None):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"`server` must begin with http:// or https://, got {url!r}.")
        if httpx.URL(url).userinfo:
            raise ValueError(
                "`server` must not hold a password. Put the key into the environment variable OPENAI_API_KEY."
            )
        self.url = url.rstrip("/")
        self._max_tries = _MAX_TRIES if max_tries is None else max_tries
        self._key = os.environ.get("OPENAI_API_KEY", "").strip()
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=httpx.Timeout(timeout, connect=10.0),
            limits=httpx.Limits(max_connections=None),  # the caller limits the requests in flight
        )
        self._closed = threading.Event()

    @property
    def root_url(self) -> str:
        """The address without `/v1`, where the endpoints are that OpenAI does not have."""
        return self.url.removesuffix("/v1")

    def close(self) -> None:
        """Ends the waits between tries and closes all connections."""
        self._closed.set()
        self._client.close()

    def request(self, method: str, url: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON of the server's response; passing faults are tried again."""
        return self.try_again(lambda: self.request_once(method, url, body))

    def request_once(self, method: str, url: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON of the server's response to one try."""
        with self.open(method, url, body) as response:
            text = response.read().decode(errors="replace")
        try:
            return json.loads(text)
        except ValueError as error:
            raise self.unknown_form(text, error) from error

    def served_model(self, model: str | None, *, option: str = "--server_model") -> dict[str, Any]:
        """What the server tells about the served model of that name, or about its only one (`id` is the name).

        Raises:
            ValueError: If `model` is not served, or is None and several are; `option` chooses one.
            AnswerServerError: If the server cannot be reached or refuses the request.
        """
        response = self.request("GET", self.url + "/models")
        try:
            served = {facts["id"]: facts for facts in response["data"]}
        except (KeyError, TypeError) as error:
            raise self.unknown_form(response, error) from error
        if model is None and len(served) == 1:
            model = next(iter(served))
        if model not in served:
            wish = "" if model is None else f"not {model!r}, "
            raise ValueError(f"{self.url} serves {wish}{sorted(served)}. Choose one with `{option}`.")
        return served[model]

    @contextmanager
    def open(self, method: str, url: str, body: dict[str, Any] | None = None) -> Iterator["httpx.Response"]:
        """The response to one try, of which status and headers have been read.

        Raises:
            AnswerServerError: If there is no response, its status is not a success, or it breaks off.
        """
        try:
            with self._client.stream(method, url, json=body) as response:
                if not response.is_success:
                    response.read()
                    raise self._refusal(url, response)
                yield response
        except httpx.TransportError as error:
            problem = f"{url} gives no answer"
            details = self.printable(str(error) or type(error).__name__)
            raise AnswerServerError(f"{problem}: {details}", is_transient=True, problem=problem) from error

    def try_again(self, once: Callable[[], Result]) -> Result:
        """`once()`, repeated with growing waits, or after `Retry-After`, while its error is transient."""
        wait = _FIRST_WAIT
        for num_tries in range(1, self._max_tries + 1):
            try:
                return once()
            except AnswerServerError as error:
                if not error.is_transient:
                    raise
                fault = error
            logger.warning_once(f"{fault.problem}. Trying again, up to {self._max_tries} times a request.")
            # The random part keeps requests that failed together from coming back together.
            pause = max(wait * random.uniform(0.5, 1.0), min(fault.retry_after, _LONGEST_RETRY_AFTER))
            if num_tries == self._max_tries or self._closed.wait(pause):
                break
            wait = min(2 * wait, _LONGEST_WAIT)
        message = f"{fault}. Given up after {num_tries} tries."
        raise AnswerServerError(message, is_transient=True, problem=fault.problem) from fault

    def unknown_form(self, response: Any, error: Exception) -> AnswerServerError:
        """The error for a response that is not what the endpoint is known to send."""
        return AnswerServerError(
            f"{self.url} answered in an unknown form ({error!r}): {self.printable(str(response))}"
        )

    def printable(self, text: str) -> str:
        """The beginning of `text`, without the key."""
        return (text.replace(self._key, "***") if self._key else text)[:500]

    def _refusal(self, url: str, response: "httpx.Response") -> AnswerServerError:
        status = response.status_code
        problem = f"{url} answers with status {status}"
        is_transient = status in _TRANSIENT_STATUS or status >= 500
        hint = "" if is_transient else _HINTS.get(status, "")
        return AnswerServerError(
            f"{problem}: {self.printable(response.text)}{hint}",
            is_transient=is_transient,
            problem=problem,
            retry_after=_retry_after(response.headers.get("Retry-After")),
        )


def _retry_after(value: str | None) -> float:
    """Seconds to wait by a `Retry-After` header, which holds seconds or a date."""
    if value is None:
        return 0.0
    try:
        return float(value)
    except ValueError:
        pass
    try:
        return parsedate_to_datetime(value).timestamp() - time()
    except ValueError:
        return 0.0
