import threading
import time
from types import SimpleNamespace

import pytest
from streaming_server import StreamingServer

from dflash_hf.eval.chat_stream import read_events
from dflash_hf.eval.serving import measure_server
from dflash_hf.trainer import server_connection
from dflash_hf.trainer.server_connection import AnswerServerError

NO_ACCEPTANCE = {"tau": None, "acceptance_per_slot": None, "acceptance_source": None}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(server_connection, "_FIRST_WAIT", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def prompts(number: int, *, task: str = "code", turns: int = 1) -> list:
    """`number` prompts whose texts differ."""
    return [
        SimpleNamespace(task=task, prompt_id=f"{task}/{n}", turns=tuple(f"{task} {n} turn {t}" for t in range(turns)))
        for n in range(number)
    ]


def measure(server: StreamingServer, asked: list, **options) -> list[dict]:
    settings = {"concurrency": (4,), "max_new_tokens": 9, "temperature": 0.0, "timeout": 10.0} | options
    return measure_server(server.url, asked, **settings)


def failing(fault: object, *numbers: int):
    """A fault of the chat requests with these numbers; 1 is the warm-up."""
    return lambda number, body: fault if number in numbers else None


def test_of_32_requests_in_flight_none_is_lost():
    all_there = threading.Barrier(32, timeout=10)

    def wait_for_the_others(number, body):
        if 1 < number <= 33:
            all_there.wait()

    with StreamingServer(fault=wait_for_the_others) as server:
        (row,) = measure(server, prompts(96), concurrency=(32,))
    assert server.most_in_flight == 32
    assert (row["requests"], row["failed"], row["retries"], row["tokens"]) == (96, 0, 0, 96 * 9)
    asked = [body["messages"][0]["content"] for body in server.bodies[1:]]
    assert sorted(asked) == sorted(prompt.turns[0] for prompt in prompts(96))
    assert server.connections <= 34  # used again, so that no time to first token holds a new connection


def test_row_has_the_fields_of_the_report_and_acceptance_without_the_warm_up():
    with StreamingServer(first_delay=0.01) as server:
        (row,) = measure(server, prompts(6))
    assert (row["task"], row["concurrency"], row["requests"], row["failures"]) == ("code", 4, 6, {})
    assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
    for name in ("request_seconds", "time_to_first_token_ms", "time_per_token_ms"):
        assert 0 <= row[name]["p50"] <= row[name]["p90"] <= row[name]["p99"]
    assert (row["tau"], row["acceptance_source"]) == (4.0, "vllm metrics")
    assert row["acceptance_per_slot"] == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert "speedup" not in row and "baseline" not in row


def test_figures_are_those_of_known_delays():
    with StreamingServer(num_tokens=13, first_delay=0.1, chunk_delay=0.1) as server:
        (row,) = measure(server, prompts(4), concurrency=(2,), max_new_tokens=13)
    # Two waves of 0.1 + 3 x 0.1 s; the role chunk at once is not the first token.
    assert 0.8 <= row["seconds"] <= 2.4
    assert 52 / 2.4 <= row["tokens_per_second"] <= 52 / 0.8
    assert 0.4 <= row["request_seconds"]["p50"] <= 1.2
    assert 100 <= row["time_to_first_token_ms"]["p50"] <= 390
    assert 24 <= row["time_per_token_ms"]["p50"] <= 75  # 0.3 s for 12 tokens after the first


def test_answers_of_one_token_have_no_time_per_token():
    with StreamingServer(num_tokens=1) as server:
        (row,) = measure(server, prompts(2))
    assert row["time_per_token_ms"] == {"p50": None, "p90": None, "p99": None}
    assert row["tokens"] == 2 and row["tau"] is None


def test_turns_are_sent_with_the_servers_earlier_answers():
    with StreamingServer(num_tokens=2, answer=lambda messages: f"said-{len(messages)}") as server:
        (row,) = measure(server, prompts(1, turns=3))
    assert row["requests"] == 3
    assert server.bodies[-1]["messages"] == [
        {"role": "user", "content": "code 0 turn 0"},
        {"role": "assistant", "content": "said-1 said-1 "},
        {"role": "user", "content": "code 0 turn 1"},
        {"role": "assistant", "content": "said-3 said-3 "},
        {"role": "user", "content": "code 0 turn 2"},
    ]


def test_every_request_holds_the_settings_and_the_warm_up_is_short():
    with StreamingServer("plain") as server:
        measure(server, prompts(2), ignore_eos=True, max_new_tokens=40, temperature=0.5, extra_body={"top_p": 0.9})
    expected = {"max_tokens": 40, "temperature": 0.5, "ignore_eos": True, "top_p": 0.9, "model": "target"}
    expected |= {"stream": True, "stream_options": {"include_usage": True}}
    assert [body["max_tokens"] for body in server.bodies] == [16, 40, 40]
    for body in server.bodies[1:]:
        assert {name: value for name, value in body.items() if name != "messages"} == expected


def test_levels_ask_as_many_prompts_as_wanted(caplog):
    with StreamingServer() as server:
        rows = measure(server, prompts(3) + prompts(5, task="maths"), concurrency=(1, 2), requests_per_level=4)
    cells = [(row["task"], row["concurrency"], row["requests"]) for row in rows]
    assert cells == [("code", 1, 4), ("code", 2, 4), ("maths", 1, 4), ("maths", 2, 4)]
    asked = [body["messages"][0]["content"] for body in server.bodies[1:5]]
    assert asked == [f"code {n} turn 0" for n in (0, 1, 2, 0)]
    assert "never reached" not in caplog.text
    with StreamingServer() as server:
        measure(server, prompts(3), concurrency=(4,))
    assert "code has 3 prompts for concurrency 4, which is therefore never reached" in caplog.text


REASONS = {
    "break": "the connection broke amid the answer",
    "cut": "the stream ended before the answer did",
    "error": "error in the stream: the engine is out of memory",
    "malformed": 'malformed event in the stream: {"choices": [{"delta"',
    "no usage": "streams no `usage`",
    "abort": "the server ended the answer with 'abort'",
    "silent": "no end within 0.7 s",
    "comments": "no end within 0.7 s",
}


@pytest.mark.parametrize("fault", REASONS)
def test_request_without_a_whole_answer_has_failed_and_is_not_asked_again(fault, caplog):
    with StreamingServer(fault=failing(fault, 3, 5)) as server:
        (row,) = measure(server, prompts(8), timeout=0.7 if fault in ("silent", "comments") else 10.0)
    assert (row["requests"], row["failed"], row["retries"], row["tokens"]) == (6, 2, 0, 54)
    ((reason, number),) = row["failures"].items()
    assert REASONS[fault] in reason and number == 2
    assert len(server.bodies) == 9
    assert "code, concurrency 4: 2 requests failed" in caplog.text


def test_answer_is_whole_although_the_connection_breaks_after_its_last_event():
    with StreamingServer(fault=lambda number, body: "no end") as server:
        (row,) = measure(server, prompts(3))
    assert (row["requests"], row["failed"], row["retries"], row["tokens"]) == (3, 0, 0, 27)


def test_slow_reply_has_failed_after_the_timeout():
    with StreamingServer(fault=lambda number, body: time.sleep(1.5 if number == 2 else 0)) as server:
        started = time.monotonic()
        (row,) = measure(server, prompts(2), concurrency=(1,), timeout=0.5)
    assert row["failures"] == {"no end within 0.5 s": 1} and row["requests"] == 1
    assert 0.5 <= time.monotonic() - started < 1.4
    assert len(server.bodies) == 3


@pytest.mark.parametrize("fault", [(429, {}), (500, {}), (503, {"Retry-After": "0.01"}), "hang up"])
def test_fault_before_the_first_byte_is_tried_again_and_counted(fault):
    with StreamingServer(fault=failing(fault, 2, 3)) as server:
        (row,) = measure(server, prompts(4), concurrency=(1,))
    assert (row["requests"], row["failed"], row["retries"]) == (4, 0, 2)
    assert len(server.bodies) == 7


def test_retry_after_is_waited_for_but_times_are_those_of_the_last_try():
    with StreamingServer(fault=failing((429, {"Retry-After": "0.4"}), 2)) as server:
        (row,) = measure(server, prompts(1), concurrency=(1,))
    assert row["retries"] == 1
    assert row["seconds"] >= 0.4
    assert row["request_seconds"]["p99"] < 0.3


def test_refused_request_has_failed_with_the_servers_reason():
    with StreamingServer(fault=failing((400, {}), 2)) as server:
        (row,) = measure(server, prompts(3), concurrency=(1,))
    ((reason, number),) = row["failures"].items()
    assert "status 400" in reason and "not now" in reason and number == 1
    assert (row["requests"], row["failed"], row["retries"]) == (2, 1, 0)


def test_request_that_always_fails_is_given_up_and_its_later_turns_count():
    def fail_one(number, body):
        return (500, {}) if body["messages"][-1]["content"] == "code 1 turn 1" else None

    with StreamingServer(fault=fail_one) as server:
        (row,) = measure(server, prompts(2, turns=3))
    assert (row["requests"], row["failed"], row["retries"]) == (4, 2, 4)
    assert row["failures"]["an earlier turn failed"] == 1
    assert any("status 500" in reason and "after 5 tries" in reason for reason in row["failures"])


def test_level_where_everything_failed_ends_the_sweep_with_the_reason():
    with StreamingServer(fault=lambda number, body: "error" if number > 3 else None) as server:
        with pytest.raises(
            AnswerServerError, match="all 2 requests at concurrency 2 failed, 2 of them .*out of memory"
        ):
            measure(server, prompts(2), concurrency=(1, 2))


def test_wrong_address_model_or_key_is_an_error_before_the_sweep(monkeypatch):
    with StreamingServer(models=("target", "adapter"), api_key="sk-right") as server:
        with pytest.raises(AnswerServerError, match="401.*OPENAI_API_KEY"):
            measure(server, prompts(1))
        monkeypatch.setenv("OPENAI_API_KEY", "sk-right")
        with pytest.raises(ValueError, match=r"serves \['adapter', 'target'\]. Choose one with `--server_model`"):
            measure(server, prompts(1))
        with pytest.raises(ValueError, match="serves not 'other'.*`--baseline_model`"):
            measure(server, prompts(1), model="target", baseline_url=server.url, baseline_model="other")
        with pytest.raises(AnswerServerError, match="404.*ends with /v1"):
            measure_server(server.url + "/v2", prompts(1), max_new_tokens=9, temperature=0.0)
        assert server.bodies == []
        measure(server, prompts(1), model="adapter")
        assert {body["model"] for body in server.bodies} == {"adapter"}
    with pytest.raises(AnswerServerError, match="gives no answer.*Given up after 5 tries"):
        measure(server, prompts(1))


@pytest.mark.parametrize(
    ("fault", "problem"), [("no usage", "streams no `usage`.*include_usage"), ((400, {}), "not now")]
)
def test_first_request_shows_what_all_would_fail_with(fault, problem):
    with StreamingServer(fault=lambda number, body: fault) as server:
        with pytest.raises(AnswerServerError, match=f"first request: .*{problem}"):
            measure(server, prompts(4))
        assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"concurrency": (1, 0)}, r"`concurrency` must be levels of at least 1, got \[1, 0\]"),
        ({"concurrency": ()}, "`concurrency`"),
        ({"max_new_tokens": 0}, "`max_new_tokens` 0"),
        ({"requests_per_level": 0}, "`requests_per_level` 0"),
        ({"temperature": -1.0}, "`temperature` -1.0"),
        ({"timeout": 0}, "`timeout` 0"),
        ({"extra_body": {"max_tokens": 5}}, r"must not hold \['max_tokens'\]"),
    ],
)
def test_options_out_of_range_are_named(options, problem):
    with StreamingServer() as server:
        with pytest.raises(ValueError, match=problem):
            measure(server, prompts(1), **options)
        with pytest.raises(ValueError, match="`prompts` is empty"):
            measure(server, [])


def test_baseline_is_asked_level_by_level_and_compared():
    slow = StreamingServer("plain", first_delay=0.06)
    order = []
    with StreamingServer(fault=lambda number, body: order.append("own")) as own, slow:
        slow.fault = lambda number, body: order.append("plain")
        rows = measure(own, prompts(2), baseline_url=slow.url, concurrency=(1, 2))
    assert order == 1 * ["own"] + 1 * ["plain"] + 2 * ["own"] + 2 * ["plain"] + 2 * ["plain"] + 2 * ["own"]
    for row in rows:
        assert row["speedup"] == row["tokens_per_second"] / row["baseline"]["tokens_per_second"] > 1.5
        assert row["identical"] == 1.0
        assert row["tau"] == 4.0
        assert row["baseline"]["tokens"] == row["tokens"] == 18
        assert NO_ACCEPTANCE.items() <= row["baseline"].items()


def test_identical_counts_prompts_whose_answers_are_equal_in_every_turn():
    def other(messages):
        return "else" if messages[-1]["content"] == "code 1 turn 1" else messages[-1]["content"]

    def fail_one(number, body):
        return "error" if body["messages"][-1]["content"] == "code 3 turn 0" else None

    with StreamingServer(fault=fail_one) as own, StreamingServer("plain", answer=other) as plain:
        (row,) = measure(own, prompts(4, turns=2), baseline_url=plain.url)
        assert row["identical"] == pytest.approx(2 / 3)
        (sampled,) = measure(own, prompts(4), baseline_url=plain.url, temperature=1.0)
        assert sampled["identical"] is None


def test_finished_levels_are_recorded_whole_and_not_measured_again():
    recorded = []
    with StreamingServer(fault=lambda number, body: "error" if number > 9 else None) as server:
        with pytest.raises(AnswerServerError):
            measure(server, prompts(4), concurrency=(1, 2, 4), record=recorded.append)
    assert [row["concurrency"] for row in recorded] == [1, 2]
    with StreamingServer() as server:
        rows = measure(server, prompts(4), concurrency=(1, 2, 4), done=recorded, record=recorded.append)
        assert len(server.bodies) == 1 + 4
    assert rows == recorded and [row["concurrency"] for row in rows] == [1, 2, 4]
    # Nothing is missing: the server, which is gone, is not asked.
    assert measure(server, prompts(4), concurrency=(4, 1), done=recorded) == [rows[2], rows[0]]


def test_rows_without_a_baseline_or_of_another_temperature_do_not_count_as_finished():
    with StreamingServer() as own, StreamingServer("plain") as plain:
        done = measure(own, prompts(1), concurrency=(1,))
        (row,) = measure(own, prompts(1), concurrency=(1,), baseline_url=plain.url, done=done)
        assert "speedup" in row and "speedup" not in done[0]
        (row,) = measure(own, prompts(1), concurrency=(1,), temperature=1.0, done=done)
        assert row["temperature"] == 1.0 and done[0]["temperature"] == 0.0


def test_sglang_is_asked_for_details_with_each_answer():
    with StreamingServer("sglang") as server:
        (row,) = measure(server, prompts(3))
    assert all(body["return_spec_tokens_details"] for body in server.bodies)
    assert (row["tau"], row["acceptance_source"]) == (4.0, "sglang requests")
    assert row["acceptance_per_slot"] == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_events_are_split_at_line_feeds_alone_wherever_the_chunks_end():
    text = 'data: {"a": "x\u2028y\x0bz\x85"}\r\n\r\n: comment\n\nevent: message\ndata:[DONE]\n\n'
    data = text.encode()
    expected = ['{"a": "x\u2028y\x0bz\x85"}', "[DONE]"]
    for size in (1, 3, len(data)):
        assert list(read_events(data[at : at + size] for at in range(0, len(data), size))) == expected


def test_answer_with_unicode_line_separators_is_whole():
    with StreamingServer(num_tokens=1, answer=lambda messages: "a\u2028b") as own:
        (row,) = measure(own, prompts(1, turns=2))
        assert row["failed"] == 0
        assert own.bodies[-1]["messages"][1]["content"] == "a\u2028b "
