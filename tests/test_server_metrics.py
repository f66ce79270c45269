import json
import urllib.request

import pytest
from streaming_server import StreamingServer

from dflash_hf.eval.server_metrics import Counts, Sample, Snapshot, acceptance, parse_prometheus, read_snapshot
from dflash_hf.trainer.server_connection import ServerConnection

UNKNOWN = {"tau": None, "acceptance_per_slot": None, "acceptance_source": None}
DETAILS = {
    "spec_verify_ct": 4,
    "spec_num_correct_drafts": 5,
    "spec_num_proposed_drafts": 12,
    "spec_correct_drafts_histogram": [1, 1, 2],
}


def ask(url: str, *, details: bool = False) -> None:
    """One chat request, of which the server counts the rounds."""
    body = {"messages": [{"role": "user", "content": "a b c"}], "max_tokens": 9, "stream": True}
    body |= {"stream_options": {"include_usage": True}, "return_spec_tokens_details": details}
    request = urllib.request.Request(url + "/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request) as response:
        response.read()


def page_of(monkeypatch, server: StreamingServer, text: str) -> None:
    monkeypatch.setattr(server, "_vllm_page", lambda: text)


@pytest.fixture
def connect():
    connections = []

    def make(server: StreamingServer) -> ServerConnection:
        connections.append(ServerConnection(server.url, timeout=5))
        return connections[-1]

    yield make
    for connection in connections:
        connection.close()


def test_labels_may_hold_quotes_commas_braces_and_line_breaks():
    page = (
        "# HELP a_total Text, with {braces}.\n# TYPE a_total counter\n"
        'a_total{model="x \\"y\\", {z}\\\\n",kind="two\\nlines",} 3.0 1700000000000\n'
        'b 1e3\n\n  c{ } NaN  \nd:e_1{f=""} +Inf\n'
    )
    first, second, third, fourth = parse_prometheus(page)
    assert first == Sample("a_total", {"model": 'x "y", {z}\\n', "kind": "two\nlines"}, 3.0)
    assert second == Sample("b", {}, 1000.0)
    assert third.name == "c" and third.value != third.value
    assert fourth == Sample("d:e_1", {"f": ""}, float("inf"))
    assert parse_prometheus("# EOF\n") == []


@pytest.mark.parametrize("line", ["<html>", 'a{b="c} 1', "a{b=c} 1", 'a{b="c"', "a", "a1", "a one", "1 2"])
def test_what_is_no_prometheus_line_is_named(line):
    with pytest.raises(ValueError) as error:
        parse_prometheus(f"x 1\n{line}\n")
    assert line.split(" ")[-1] in str(error.value)


def test_vllms_counters_are_summed_over_engines_and_counted_between_snapshots(connect):
    with StreamingServer("vllm") as server:
        connection = connect(server)
        ask(server.url)
        before = read_snapshot(connection)
        assert before == Snapshot("vllm metrics", Counts(2.0, 6.0, (2.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0)))
        for _ in range(3):
            ask(server.url)
        after = read_snapshot(connection)
    assert acceptance(before, after) == {
        "tau": 4.0,
        "acceptance_per_slot": [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0],
        "acceptance_source": "vllm metrics",
    }


def test_counters_under_names_without_total_are_read(connect, monkeypatch):
    page = (
        "vllm:spec_decode_num_drafts 10\nvllm:spec_decode_num_accepted_tokens 15\n"
        'vllm:spec_decode_num_accepted_tokens_per_pos{position="10"} 1\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos{position="2"} 4\n'
    )
    with StreamingServer("vllm") as server:
        page_of(monkeypatch, server, page)
        counts = read_snapshot(connect(server)).counts
    assert counts == Counts(10.0, 15.0, (0.0, 0.0, 4.0) + 7 * (0.0,) + (1.0,))


def test_sglangs_counters_leave_out_the_first_token_of_each_answer(connect):
    with StreamingServer("sglang") as server:
        connection = connect(server)
        before = read_snapshot(connection)
        ask(server.url)
        ask(server.url)
        after = read_snapshot(connection)
    assert before.is_sglang and server.generated == 18
    expected = {"tau": 4.0, "acceptance_per_slot": None, "acceptance_source": "sglang metrics"}
    assert acceptance(before, after) == expected


def test_details_of_the_requests_are_preferred_and_give_the_slots():
    counters = Snapshot("sglang metrics", Counts(0, 0, None)), Snapshot("sglang metrics", Counts(100, 100, None))
    figures = acceptance(*counters, [DETAILS, DETAILS | {"spec_correct_drafts_histogram": [2, 1, 0, 1]}])
    # Of 8 rounds 3 accepted none, 2 one, 2 two and 1 three of 3 proposals.
    assert figures["acceptance_per_slot"] == [5 / 8, 3 / 8, 1 / 8]
    assert figures["tau"] == 1 + 10 / 8
    assert figures["acceptance_source"] == "sglang requests"


def test_slots_that_nothing_reached_are_zero():
    assert acceptance(Snapshot(), Snapshot(), [DETAILS])["acceptance_per_slot"] == [3 / 4, 2 / 4, 0.0]


def test_an_older_sglang_gives_its_own_mean_and_says_so(connect):
    with StreamingServer("old sglang") as server:
        snapshot = read_snapshot(connect(server))
    assert snapshot.is_sglang
    expected = {"tau": 3.25, "acceptance_per_slot": None, "acceptance_source": "sglang server average"}
    assert acceptance(snapshot, snapshot) == expected


def test_server_that_tells_nothing_has_no_acceptance(connect):
    with StreamingServer("plain") as server:
        snapshot = read_snapshot(connect(server))
    assert snapshot == Snapshot()
    assert acceptance(snapshot, snapshot) == UNKNOWN


@pytest.mark.parametrize("page", ["<html>Welcome</html>", "vllm:num_requests_running 1", "a{", "vllm:x 1\n\xff"])
def test_page_without_the_counters_is_no_error(connect, monkeypatch, page):
    with StreamingServer("vllm") as server:
        page_of(monkeypatch, server, page)
        assert read_snapshot(connect(server)) == Snapshot()


def test_without_rounds_between_or_after_a_restart_nothing_is_claimed():
    early, late = Snapshot("vllm metrics", Counts(9, 9, (9.0,))), Snapshot("vllm metrics", Counts(20, 9, (9.0,)))
    assert acceptance(late, late) == UNKNOWN
    assert acceptance(late, early) == UNKNOWN
    assert acceptance(Snapshot(), late) == UNKNOWN
    assert acceptance(early, late)["tau"] == 1.0
