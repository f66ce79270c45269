"""Answers from an inference server (vLLM, SGLang) as the token ids that it wrote, with many requests in flight."""

from dataclasses import dataclass
from typing import Any, Literal

from transformers.utils import logging

from dflash_hf.trainer.server_connection import AnswerServerError, ServerConnection

logger = logging.get_logger(__name__)

Api = Literal["auto", "openai", "sglang"]


@dataclass(frozen=True)
class ServerAnswer:
    """What the server wrote for one prompt.

    `token_ids` is None where the server gave only text. `finish_reason` is the server's own (`"stop"`, `"length"`,
    `"abort"`, ...). `stop_token_id` is the token that the server says it stopped at; None for most.
    """

    token_ids: list[int] | None
    text: str
    finish_reason: str
    stop_token_id: int | None = None


class AnswerServer:
    """A client of one inference server; prompts go in as token ids.

    Token ids come back by `return_token_ids` of `/v1/completions` (vLLM since 0.10.2, SGLang since July 2026) or by
    SGLang's own `/generate`. Connection errors, timeouts and the statuses 408, 425, 429 and 5xx are tried again with
    growing waits, or after `Retry-After`. The API key is read from `OPENAI_API_KEY` and appears nowhere else.

    Args:
        url (`str`): Base of the OpenAI-compatible endpoints, such as `http://localhost:8000/v1`.
        model (`str`, *optional*): Name of the served model; needed if the server lists several.
        api (`str`): `"openai"`, `"sglang"` (`/generate`), or `"auto"` to take the first that gives token ids.
        sampling (`dict`): Sampling parameters by the names that vLLM and SGLang share, `temperature` among them.
        max_new_tokens (`int`): Longest answer, in tokens.
        timeout (`float`): Longest wait for one answer, in seconds.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api: Api = "auto",
        sampling: dict[str, Any],
        max_new_tokens: int,
        timeout: float = 1800.0,
    ):
        self.model = model
        self.api = api
        self.sampling = sampling
        self.max_new_tokens = max_new_tokens
        self._connection = ServerConnection(url, timeout=timeout)
        self._num_answered = 0

    @property
    def url(self) -> str:
        """Base of the OpenAI-compatible endpoints."""
        return self._connection.url

    def __enter__(self) -> "AnswerServer":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def prepare(self, prompt_ids: list[int], *, target: str, longest: int, needs_token_ids: bool) -> None:
        """Chooses `model` and `api`, with one short request for each API that is tried.

        Args:
            prompt_ids (`list[int]`): A prompt to try.
            target (`str`): Hub id or folder of the target; a server of another name is warned about.
            longest (`int`): Longest prompt and answer together, in tokens.
            needs_token_ids (`bool`): Whether text without token ids will not do.
        Raises:
            ValueError: If the server has not the one model, the room or the token ids that are needed.
            AnswerServerError: If the server cannot be reached or refuses the requests.
        """
        facts = self._connection.served_model(self.model)
        self.model = facts["id"]
        # vLLM and SGLang give `root`, the folder or Hub id of the weights, and `max_model_len`, in tokens.
        names = {str(facts[key]).rstrip("/").split("/")[-1] for key in ("id", "root") if facts.get(key)}
        if target.rstrip("/").split("/")[-1] not in names:
            logger.warning(f"{self.url} serves {sorted(names)}. Make sure that this is the target, {target}.")
        room = facts.get("max_model_len")
        if room is not None and longest > room:
            raise ValueError(
                f"`max_prompt_length` and `max_new_tokens` are {longest} tokens together, {self.url} takes {room}. "
                "Lower one of them, or start the server with more room."
            )
        if not self._choose_api(prompt_ids) and needs_token_ids:
            raise ValueError(
                f"{self.url} gives text without token ids, and text that is tokenised again can differ from what the "
                "target wrote. Use vLLM 0.10.2 or newer or SGLang, or take such rows by `--retokenize true`."
            )

    def _choose_api(self, prompt_ids: list[int]) -> bool:
        """Sets `api` to the first that gives token ids; whether there is one."""
        choices: tuple[Api, ...] = ("openai", "sglang") if self.api == "auto" else (self.api,)
        for api in choices:
            try:
                answer = self._ask(api, prompt_ids, max_new_tokens=1, seed=0)
            except AnswerServerError as error:
                if api == choices[0] or error.is_transient:
                    raise
                continue  # it has no /generate, or one of another kind
            if answer.token_ids is not None:
                self.api = api
                return True
        self.api = choices[0]
        return False

    def answer(self, prompt_ids: list[int], *, seed: int) -> ServerAnswer:
        """The target's answer to `prompt_ids`; safe to call from several threads.

        A request that keeps failing while others are answered comes back with `"failed request"` as finish reason.

        Raises:
            AnswerServerError: If the server refuses the request, or answers nothing at all any more.
        """
        num_answered = self._num_answered
        try:
            answer = self._ask(self.api, prompt_ids, max_new_tokens=self.max_new_tokens, seed=seed)
        except AnswerServerError as error:
            if not error.is_transient or self._num_answered == num_answered:
                raise
            return ServerAnswer(None, "", "failed request")
        self._num_answered += 1
        return answer

    def _ask(self, api: str, prompt_ids: list[int], *, max_new_tokens: int, seed: int) -> ServerAnswer:
        # These two matter where text is tokenised again, which must hold the special tokens.
        sampling = {**self.sampling, "skip_special_tokens": False, "spaces_between_special_tokens": False}
        is_seeded = sampling["temperature"] > 0
        body: dict[str, Any]
        if api == "openai":
            seeding = {"seed": seed} if is_seeded else {}
            body = {"model": self.model, "prompt": prompt_ids, "max_tokens": max_new_tokens, "return_token_ids": True}
            response = self._connection.request("POST", self.url + "/completions", body | sampling | seeding)
            read = _read_openai
        else:
            seeding = {"sampling_seed": seed} if is_seeded else {}
            body = {
                "input_ids": prompt_ids,
                "sampling_params": {"max_new_tokens": max_new_tokens, **sampling, **seeding},
            }
            response = self._connection.request("POST", self._connection.root_url + "/generate", body)
            read = _read_sglang
        try:
            return read(response, prompt_ids)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise self._connection.unknown_form(response, error) from error


def _read_openai(response: dict[str, Any], prompt_ids: list[int]) -> ServerAnswer:
    choice = response["choices"][0]
    read_ids = choice.get("prompt_token_ids")
    if read_ids is not None and read_ids != prompt_ids:
        raise AnswerServerError(
            f"The server read {len(read_ids)} other token ids than the {len(prompt_ids)} that were sent. "
            "It must not change or cut prompts."
        )
    token_ids = choice.get("token_ids")
    if token_ids is not None:
        token_ids = _own_ids(token_ids, (response.get("usage") or {}).get("completion_tokens"), prompt_ids)
    # vLLM and SGLang name the stop token differently; vLLM gives none for the main end token.
    stops = (choice.get("stop_reason"), choice.get("matched_stop"))
    stop_token_id = next((stop for stop in stops if isinstance(stop, int)), None)
    return ServerAnswer(token_ids, choice["text"], choice["finish_reason"], stop_token_id)


def _read_sglang(response: dict[str, Any], prompt_ids: list[int]) -> ServerAnswer:
    facts = response["meta_info"]
    token_ids = response.get("output_ids")
    if token_ids is not None:
        token_ids = _own_ids(token_ids, facts["completion_tokens"], prompt_ids)
    finish = facts["finish_reason"]
    stop = finish.get("matched")
    return ServerAnswer(token_ids, response["text"], finish["type"], stop if isinstance(stop, int) else None)


def _own_ids(token_ids: list[int], num_written: int | None, prompt_ids: list[int]) -> list[int]:
    """`token_ids` without the tail of the prompt that some SGLang releases put before them (sglang issue 17240)."""
    if num_written is None or num_written == len(token_ids):
        return token_ids
    num_extra = len(token_ids) - num_written
    if num_extra < 0 or token_ids[:num_extra] != prompt_ids[-num_extra:]:
        raise AnswerServerError(f"The server counts {num_written} tokens but returned {len(token_ids)} token ids.")
    return token_ids[num_extra:]
