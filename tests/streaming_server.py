"""A real HTTP server on the loopback address that streams chat answers as vLLM or SGLang do; no model answers."""

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CHUNK_TOKENS = 4  # what every round of the pretended drafter commits


class StreamingServer:
    """Serves until the `with` block ends.

    An answer is one token after `first_delay`, then a round of 4 tokens after each `chunk_delay`. `/metrics` counts
    the rounds; every round proposes 7 and accepts 3.

    Args:
        kind: "vllm", "sglang" (`/metrics` with SGLang's counters, details with each answer), "old sglang" (only
            `/server_info`) or "plain" (nothing but the OpenAI endpoints, and no unknown fields).
        num_tokens: Tokens of every answer, at most `max_tokens`.
        fault: Called with (number of the chat request, its body); returns None, a status with headers such as
            `(429, {"Retry-After": "0"})`, "hang up" (close without a byte), "break" (close amid the stream), "cut" (a
            stream that ends early), "error" (an error object in the stream), "malformed", "no usage", "abort",
            "no end" (close after the last event), "silent" (2 s without a byte after the first chunk) or "comments" (2
            s of nothing but comments).
        api_key: Key that every request must carry.
        models: Names of the served models.
        answer: Text of the answer to the messages, in words; one word is one token.
    """

    def __init__(
        self,
        kind: str = "vllm",
        *,
        num_tokens: int = 9,
        first_delay: float = 0.0,
        chunk_delay: float = 0.0,
        fault: Callable[[int, dict], object] = lambda number, body: None,
        api_key: str | None = None,
        models: tuple[str, ...] = ("target",),
        answer: Callable[[list[dict]], str] = lambda messages: messages[-1]["content"],
    ):
        self.kind, self.num_tokens, self.first_delay, self.chunk_delay = kind, num_tokens, first_delay, chunk_delay
        self.fault, self.api_key, self.models, self.answer = fault, api_key, models, answer
        self.bodies: list[dict] = []
        self.connections = 0
        self.most_in_flight = self._in_flight = 0
        self.rounds = self.generated = self.finished = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # it would hold small chunks back

            def setup(self):
                super().setup()
                outer.connections += 1

            def do_GET(self):
                outer._get(self)

            def do_POST(self):
                outer._post(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def log_message(self, *_):
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 128
            daemon_threads = True

            def handle_error(self, *_):
                pass  # a client that has given up

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> "StreamingServer":
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()

    def _get(self, request: BaseHTTPRequestHandler) -> None:
        if not self._is_allowed(request):
            return
        if request.path == "/v1/models":
            return _send(request, 200, json.dumps({"data": [{"id": name, "object": "model"} for name in self.models]}))
        if request.path == "/metrics" and self.kind in ("vllm", "sglang"):
            return _send(request, 200, self._vllm_page() if self.kind == "vllm" else self._sglang_page())
        if (request.path == "/server_info" and self.kind == "sglang") or (
            request.path == "/get_server_info" and self.kind == "old sglang"
        ):
            return _send(request, 200, json.dumps({"internal_states": [{"avg_spec_accept_length": 3.25}]}))
        _send(request, 404, json.dumps({"detail": "Not Found"}))

    def _post(self, request: BaseHTTPRequestHandler, body: dict) -> None:
        if not self._is_allowed(request):
            return
        if request.path != "/v1/chat/completions":
            return _send(request, 404, json.dumps({"detail": "Not Found"}))
        with self._lock:
            self.bodies.append(body)
            number = len(self.bodies)
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
        try:
            fault = self.fault(number, body)
            if fault == "hang up":
                request.close_connection = True
            elif isinstance(fault, tuple):
                _send(request, fault[0], json.dumps({"error": {"message": "not now"}}), fault[1])
            else:
                self._stream(request, body, fault)
        finally:
            with self._lock:
                self._in_flight -= 1

    def _stream(self, request: BaseHTTPRequestHandler, body: dict, fault: object) -> None:
        request.send_response(200)
        request.send_header("Content-Type", "text/event-stream; charset=utf-8")
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        words = (self.answer(body["messages"]).split(" ") * self.num_tokens)[
            : min(self.num_tokens, body["max_tokens"])
        ]
        parts = [words[:1]] + [words[at : at + CHUNK_TOKENS] for at in range(1, len(words), CHUNK_TOKENS)]
        _write(request, _event({"delta": {"role": "assistant", "content": ""}, "finish_reason": None}))
        for index, part in enumerate(parts):
            time.sleep(self.chunk_delay if index else self.first_delay)
            _write(request, b": keep-alive\n\nretry: 3000\nnonsense\n\n")
            _write(request, _event({"delta": {"content": " ".join(part) + " "}, "finish_reason": None}))
            if fault == "break":
                request.close_connection = True
                return
            if fault == "cut":
                return _write(request, b"")
            for _ in range(100 if fault in ("silent", "comments") else 0):  # 2 s
                if self._ended.wait(0.02):
                    return
                if fault == "comments":
                    _write(request, b": keep-alive\n\n")
            if fault == "malformed":
                _write(request, b'data: {"choices": [{"delta"\n\n')
            if fault == "error":
                error = {"object": "error", "message": "the engine is out of memory", "code": 500}
                _write(request, b"data: " + json.dumps({"error": error}).encode() + b"\n\n")
                break
        else:
            self._finish(request, body, len(words), len(parts) - 1, fault)
        _write(request, b"data: [DONE]\n\n")
        if fault == "no end":
            request.close_connection = True
        else:
            _write(request, b"")

    def _finish(
        self, request: BaseHTTPRequestHandler, body: dict, num_tokens: int, num_rounds: int, fault: object
    ) -> None:
        _write(request, _event({"delta": {}, "finish_reason": "abort" if fault == "abort" else "length"}))
        with self._lock:
            self.rounds += num_rounds
            self.generated += num_tokens
            self.finished += 1
        if body.get("return_spec_tokens_details"):
            details = {"spec_verify_ct": num_rounds, "spec_num_correct_drafts": 3 * num_rounds}
            details |= {
                "spec_num_proposed_drafts": 7 * num_rounds,
                "spec_correct_drafts_histogram": [0, 0, 0, num_rounds],
            }
            _write(request, _data({"choices": [], "sglext": {"spec_tokens_details": details}, "usage": None}))
        if body["stream_options"]["include_usage"] and fault != "no usage":
            usage = {"prompt_tokens": 5, "completion_tokens": num_tokens, "total_tokens": 5 + num_tokens}
            _write(request, _data({"choices": [], "usage": usage}))

    def _is_allowed(self, request: BaseHTTPRequestHandler) -> bool:
        key = request.headers.get("Authorization")
        is_allowed = self.api_key is None or key == f"Bearer {self.api_key}"
        if not is_allowed:
            _send(request, 401, json.dumps({"error": f"Unauthorized: {key}"}))
        return is_allowed

    def _vllm_page(self) -> str:
        """Half of the rounds by each of two engines, and a model's name that must be escaped."""
        lines = ["# HELP vllm:spec_decode_num_drafts_total Number of drafts.", "# TYPE vllm:x counter"]
        for engine, rounds in ((0, self.rounds // 2), (1, self.rounds - self.rounds // 2)):
            labels = f'engine="{engine}",model_name="a \\"b\\", {{c}}\\\\n"'
            counters = {"num_drafts": rounds, "num_draft_tokens": 7 * rounds, "num_accepted_tokens": 3 * rounds}
            lines += [f"vllm:spec_decode_{name}_total{{{labels}}} {value}.0" for name, value in counters.items()]
            for slot in range(7):
                accepted = rounds if slot < 3 else 0
                name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
                lines.append(f'{name}{{{labels},position="{slot}"}} {accepted}.0')
            lines.append(f"vllm:spec_decode_num_drafts_created{{{labels}}} 1.7e+09")
        return "\n".join(lines) + "\n"

    def _sglang_page(self) -> str:
        labels = '{model_name="target",is_streaming="true"}'
        return (
            f'sglang:spec_verify_calls_total{{model_name="target"}} {self.rounds}\n'
            f"sglang:generation_tokens_total{labels} {self.generated}\n"
            f"sglang:num_requests_total{labels} {self.finished}\n"
            'sglang:spec_accept_length{model_name="target"} 9.9\n'
        )


def _data(facts: dict) -> bytes:
    """An event with characters unescaped, as pydantic writes them."""
    return b"data: " + json.dumps(facts, ensure_ascii=False).encode() + b"\n\n"


def _event(choice: dict) -> bytes:
    return _data({"object": "chat.completion.chunk", "choices": [{"index": 0, **choice}]})


def _write(request: BaseHTTPRequestHandler, data: bytes) -> None:
    """One chunk of the body; empty data ends it."""
    request.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def _send(request: BaseHTTPRequestHandler, status: int, text: str, headers: dict | None = None) -> None:
    content = text.encode()
    request.send_response(status)
    for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
        request.send_header(name, value)
    request.end_headers()
    request.wfile.write(content)
