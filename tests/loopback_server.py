"""A real HTTP server on the loopback address that speaks vLLM's or SGLang's protocol; a tiny target answers."""

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase


class LoopbackServer:
    """Serves `target` until the `with` block ends.

    Args:
        target: The model that answers.
        tokenizer: Its tokenizer.
        kind: "vllm", "sglang" (2026, token ids on both endpoints), "old sglang" (token ids by /generate only, with the
            prompt's tail before them, as in sglang issue 17240) or "text" (an OpenAI endpoint without token ids).
        fault: Called with (number of the completion request, its body); returns None, a status with headers such as
            `(429, {"Retry-After": "0"})`, "drop" (close without an answer), "half" (close amid the answer), or a
            finish reason such as "abort".
        delay: Seconds that an answer takes at least.
        api_key: Key that every request must carry.
        models: Names of the served models.
        alter: Changes the JSON of a completion before it is sent.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        kind: str = "vllm",
        *,
        fault: Callable[[int, dict], object] = lambda number, body: None,
        delay: float = 0.0,
        api_key: str | None = None,
        models: tuple[str, ...] = ("target",),
        max_model_len: int = 512,
        alter: Callable[[dict], None] = lambda response: None,
    ):
        self.target, self.tokenizer, self.kind, self.fault, self.delay = target, tokenizer, kind, fault, delay
        self.api_key, self.models, self.max_model_len, self.alter = api_key, models, max_model_len, alter
        self.bodies: list[dict] = []
        self.most_in_flight = 0
        self._in_flight = 0
        self._lock = threading.Lock()
        self._generate_lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                outer._handle(self, None)

            def do_POST(self):
                outer._handle(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def log_message(self, *_):
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 128
            daemon_threads = True

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> "LoopbackServer":
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._server.server_close()

    def prompts(self, *, skip: int = 0) -> list[tuple[int, ...]]:
        """Token ids of the prompts asked so far, short requests that try the server left out."""
        asked = [(body.get("prompt") or body.get("input_ids"), _limit(body)) for body in self.bodies[skip:]]
        return [tuple(prompt) for prompt, limit in asked if limit > 1]

    def _handle(self, request: BaseHTTPRequestHandler, body: dict | None) -> None:
        if self.api_key is not None and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return _send(request, 401, {"error": f"Unauthorized: {request.headers.get('Authorization')}"})
        if request.path == "/v1/models":
            facts = {"object": "model", "root": "weights/target", "max_model_len": self.max_model_len}
            return _send(request, 200, {"object": "list", "data": [{"id": name, **facts} for name in self.models]})
        endpoints = {"/v1/completions": self._completion}
        if "sglang" in self.kind:
            endpoints["/generate"] = self._native
        if request.path not in endpoints or body is None:
            return _send(request, 404, {"detail": "Not Found"})
        with self._lock:
            self.bodies.append(body)
            number = len(self.bodies)
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
        try:
            fault = self.fault(number, body)
            if fault == "drop":
                request.close_connection = True
                return
            if isinstance(fault, tuple):
                return _send(request, fault[0], {"error": {"message": "not now"}}, fault[1])
            time.sleep(self.delay)
            status, response = endpoints[request.path](body, fault)
            if status == 200:
                self.alter(response)
            _send(request, status, response, is_half=fault == "half")
        finally:
            with self._lock:
                self._in_flight -= 1

    def _completion(self, body: dict, fault: object) -> tuple[int, dict]:
        if body["model"] not in self.models:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        prompt, limit = body["prompt"], body["max_tokens"]
        if not all(type(token) is int for token in prompt) or len(prompt) + limit > self.max_model_len:
            return 400, {"error": {"message": f"This model's maximum context length is {self.max_model_len}."}}
        ids, reason, stop_id = self._generate(prompt, limit, body, body.get("seed"))
        reason = fault if isinstance(fault, str) and fault != "half" else reason
        choice = {"index": 0, "text": self._text(ids, reason, body), "logprobs": None, "finish_reason": reason}
        if self.kind == "vllm":
            choice |= {"stop_reason": None, "prompt_logprobs": None, "token_ids": None, "prompt_token_ids": None}
        elif "sglang" in self.kind:
            choice["matched_stop"] = stop_id
        if self.kind in ("vllm", "sglang") and body.get("return_token_ids"):
            choice |= {"token_ids": ids, "prompt_token_ids": prompt}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
        facts = {"id": "cmpl-1", "object": "text_completion", "created": 0, "model": body["model"], "usage": usage}
        return 200, facts | {"choices": [choice]}

    def _native(self, body: dict, fault: object) -> tuple[int, dict]:
        sampling, prompt = body["sampling_params"], body["input_ids"]
        if sampling["top_k"] == 0:
            return 400, {"error": {"message": "top_k must be -1 (disable) or at least 1, got 0."}}
        ids, reason, stop_id = self._generate(
            prompt, sampling["max_new_tokens"], sampling, sampling.get("sampling_seed")
        )
        finish = {"type": "stop", "matched": stop_id} if reason == "stop" else {"type": "length", "length": len(ids)}
        if isinstance(fault, str) and fault != "half":
            finish = {"type": fault, "message": "Aborted"}
        facts = {"id": "1", "finish_reason": finish, "prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        extra = prompt[-5:] if self.kind == "old sglang" else []
        return 200, {"text": self._text(ids, reason, sampling), "output_ids": extra + ids, "meta_info": facts}

    def _generate(self, prompt: list[int], limit: int, sampling: dict, seed: int | None) -> tuple[list[int], str, int]:
        end_id = self.target.generation_config.eos_token_id
        names = ("temperature", "top_p", "repetition_penalty", "min_p")
        settings = {"do_sample": False, "repetition_penalty": sampling["repetition_penalty"]}
        if sampling["temperature"] > 0:
            settings = {"do_sample": True, "top_k": max(sampling["top_k"], 0), **{n: sampling[n] for n in names}}
        input_ids = torch.tensor([prompt])
        with self._generate_lock:
            torch.manual_seed(time.time_ns() if seed is None else seed)
            output = self.target.generate(
                input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=limit, **settings
            )
        ids = output[0, len(prompt) :].tolist()
        return ids, "stop" if ids[-1] == end_id else "length", end_id

    def _text(self, ids: list[int], reason: str, options: dict) -> str:
        written = ids[:-1] if reason == "stop" else ids
        return self.tokenizer.decode(written, skip_special_tokens=options.get("skip_special_tokens", True))


def _limit(body: dict) -> int:
    return body["max_tokens"] if "max_tokens" in body else body["sampling_params"]["max_new_tokens"]


def _send(
    request: BaseHTTPRequestHandler, status: int, response: dict, headers: dict | None = None, is_half: bool = False
) -> None:
    content = json.dumps(response).encode()
    request.send_response(status)
    for name, value in {
        "Content-Type": "application/json",
        "Content-Length": str(len(content)),
        **(headers or {}),
    }.items():
        request.send_header(name, value)
    request.end_headers()
    request.wfile.write(content[: len(content) // 2] if is_half else content)
    if is_half:
        request.close_connection = True
