import threading
import time
from contextlib import contextmanager
from email.utils import formatdate

import pytest
import torch
from loopback_server import LoopbackServer
from tiny_material import make_tokenizer, save_tiny_target

from dflash_hf.trainer import server_connection
from dflash_hf.trainer.answer_server import AnswerServer, AnswerServerError
from dflash_hf.trainer.answers import in_flight

NEW_TOKENS = 12
PROMPTS = [[0, 4, 6 + number, 7 + 2 * number, 5] for number in range(8)]
KINDS = {"vllm": "openai", "sglang": "openai", "old sglang": "sglang"}
GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A target that ends some of its answers before the limit."""
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    endless = save_tiny_target(folder)
    return save_tiny_target(folder, eos_token_id=plain_answer(endless, PROMPTS[0])[4])


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(server_connection, "_FIRST_WAIT", 0.01)
    monkeypatch.setattr(server_connection, "_MAX_TRIES", 4)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def plain_answer(target, prompt):
    input_ids = torch.tensor([prompt])
    sequence = target.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=NEW_TOKENS, do_sample=False
    )
    return sequence[0, len(prompt) :].tolist()


@contextmanager
def client(target, kind="vllm", *, longest=64, needs_token_ids=True, prepare=True, sampling=GREEDY, **settings):
    """A client of a new loopback server, and the server."""
    names = ("model", "api", "timeout")
    own = {name: settings.pop(name) for name in names if name in settings}
    with LoopbackServer(target, make_tokenizer(), kind, **settings) as loopback:
        with AnswerServer(loopback.url, sampling=sampling, max_new_tokens=NEW_TOKENS, **own) as server:
            if prepare:
                server.prepare(PROMPTS[0], target="some/target", longest=longest, needs_token_ids=needs_token_ids)
            yield server, loopback


@pytest.mark.parametrize(("kind", "api"), KINDS.items())
def test_answers_are_the_ids_of_plain_generate_with_the_end_token(target, kind, api):
    end_id = target.generation_config.eos_token_id
    with client(target, kind) as (server, _):
        assert (server.model, server.api) == ("target", api)
        answers = [server.answer(prompt, seed=0) for prompt in PROMPTS]
    assert [answer.token_ids for answer in answers] == [plain_answer(target, prompt) for prompt in PROMPTS]
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}
    for answer in answers:
        assert (answer.token_ids[-1] == end_id) == (answer.finish_reason == "stop")


@pytest.mark.parametrize("api", ["openai", "sglang"])
def test_asked_api_is_taken(target, api):
    with client(target, "sglang", api=api) as (server, loopback):
        assert server.api == api
        assert server.answer(PROMPTS[0], seed=0).token_ids == plain_answer(target, PROMPTS[0])
    assert all(("input_ids" in body) == (api == "sglang") for body in loopback.bodies)


@pytest.mark.parametrize("kind", KINDS)
def test_every_sampling_parameter_is_named_and_seeds_only_where_one_samples(target, kind):
    sampled = GREEDY | {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}
    for sampling, seed in ((GREEDY, None), (sampled, 5)):
        with client(target, kind, sampling=sampling) as (server, loopback):
            first = server.answer(PROMPTS[0], seed=5)
            assert server.answer(PROMPTS[0], seed=5) == first
        body = loopback.bodies[-1]
        sent = body.get("sampling_params", body)
        assert sampling.items() <= sent.items()
        assert sent.get("seed", sent.get("sampling_seed")) == seed
        assert sent["skip_special_tokens"] is False
        assert body.get("return_token_ids", True) is True


def test_text_without_token_ids_is_refused_unless_it_will_do(target):
    with client(target, "text", prepare=False) as (server, _):
        with pytest.raises(ValueError, match="gives text without token ids.*--retokenize true"):
            server.prepare(PROMPTS[0], target="target", longest=64, needs_token_ids=True)
    with client(target, "text", needs_token_ids=False) as (server, _):
        answers = [server.answer(prompt, seed=0) for prompt in PROMPTS]
        tokenizer = make_tokenizer()
    for answer, prompt in zip(answers, PROMPTS, strict=True):
        expected = plain_answer(target, prompt)
        written = expected[:-1] if answer.finish_reason == "stop" else expected
        assert answer.token_ids is None
        assert answer.text == tokenizer.decode(written)


def test_requests_in_flight_reach_the_wanted_number_and_no_more(target):
    all_there = threading.Barrier(6, timeout=10)

    def wait_for_the_others(number, body):
        if body["max_tokens"] > 1:
            all_there.wait()

    with client(target, fault=wait_for_the_others) as (server, loopback):
        items = iter(PROMPTS[:6] * 2)
        pairs = list(in_flight(lambda prompt: server.answer(prompt, seed=0), lambda: next(items, None), 6))
    assert loopback.most_in_flight == 6
    assert sorted(prompt for prompt, _ in pairs) == sorted(PROMPTS[:6] * 2)
    for prompt, answer in pairs:
        assert answer.token_ids == plain_answer(target, prompt)


@pytest.mark.parametrize("fault", [(429, {}), (500, {}), (503, {"Retry-After": "nonsense"}), "drop", "half"])
def test_passing_faults_are_tried_again(target, fault):
    with client(target, fault=lambda number, body: fault if number in (2, 3) else None) as (server, loopback):
        assert server.answer(PROMPTS[0], seed=0).token_ids == plain_answer(target, PROMPTS[0])
        assert len(loopback.bodies) == 4


def test_retry_after_is_waited_for_in_seconds_and_as_a_date(target):
    with client(target, fault=lambda number, _: (429, {"Retry-After": "0.4"}) if number == 2 else None) as (server, _):
        started = time.monotonic()
        server.answer(PROMPTS[0], seed=0)
        assert time.monotonic() - started >= 0.4
    date = formatdate(time.time() + 100, usegmt=True)
    assert 95 < server_connection._retry_after(date) <= 100
    assert server_connection._retry_after("soon") == server_connection._retry_after(None) == 0.0
    with client(target, fault=lambda number, _: (429, {"Retry-After": "nan"}) if number == 2 else None) as (server, _):
        server.answer(PROMPTS[0], seed=0)


def test_slow_answers_end_by_the_timeout(target):
    with client(target, delay=0.5, prepare=False, timeout=0.1, model="target", api="openai") as (server, loopback):
        with pytest.raises(AnswerServerError, match="/completions gives no answer: .*Given up after 4 tries"):
            server.answer(PROMPTS[0], seed=0)
        assert len(loopback.bodies) == 4


def test_server_that_is_gone_is_given_up_with_its_address(target):
    with client(target) as (server, loopback):
        pass
    with AnswerServer(loopback.url, model="target", api="openai", sampling=GREEDY, max_new_tokens=4) as server:
        with pytest.raises(AnswerServerError, match=rf"{loopback.url}/completions gives no answer: .* 4 tries"):
            server.answer(PROMPTS[0], seed=0)


def test_prompt_that_always_fails_does_not_end_the_others(target):
    def fail_one(number, body):
        return (500, {}) if body["prompt"] == PROMPTS[2] else None

    with client(target, fault=fail_one) as (server, _):
        items = iter(PROMPTS)
        pairs = in_flight(lambda prompt: server.answer(prompt, seed=0), lambda: next(items, None), 2)
        reasons = {tuple(prompt): answer.finish_reason for prompt, answer in pairs}
        assert reasons.pop(tuple(PROMPTS[2])) == "failed request"
        assert len(reasons) == 7 and set(reasons.values()) == {"stop", "length"}
        with pytest.raises(AnswerServerError, match="status 500"):
            server.answer(PROMPTS[2], seed=0)  # nothing else is answered meanwhile


def test_refusals_are_not_tried_again_and_show_the_servers_reason(target):
    with client(target, max_model_len=16, longest=16) as (server, loopback):
        with pytest.raises(AnswerServerError, match=r"status 400: .*maximum context length is 16"):
            server.answer(PROMPTS[0], seed=0)
        assert len(loopback.bodies) == 2


def test_wrong_address_is_named_with_what_it_should_be(target):
    with client(target, prepare=False) as (server, loopback):
        server._connection.url = loopback.url.removesuffix("/v1")
        with pytest.raises(AnswerServerError, match="status 404.*ends with /v1"):
            server.prepare(PROMPTS[0], target="target", longest=64, needs_token_ids=True)
    for url, problem in (("localhost:8000/v1", "http://"), ("http://me:secret@localhost/v1", "OPENAI_API_KEY")):
        with pytest.raises(ValueError, match=problem) as error:
            AnswerServer(url, sampling=GREEDY, max_new_tokens=4)
        assert "secret" not in str(error.value)


def test_key_comes_from_the_environment_and_is_never_shown(target, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-right\n")
    with client(target, api_key="sk-right") as (server, _):
        assert server.answer(PROMPTS[0], seed=0).token_ids == plain_answer(target, PROMPTS[0])
    monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong")
    with client(target, api_key="sk-right", prepare=False) as (server, _):
        # The loopback server repeats the key that it got.
        with pytest.raises(AnswerServerError, match=r"401: .*Bearer \*\*\*.*OPENAI_API_KEY") as error:
            server.prepare(PROMPTS[0], target="target", longest=64, needs_token_ids=True)
        assert "sk-wrong" not in str(error.value)


def test_served_model_must_be_the_only_one_or_named(target):
    models = ("target", "adapter")
    with client(target, prepare=False, models=models) as (server, _):
        with pytest.raises(ValueError, match=r"serves \['adapter', 'target'\]. Choose one with `--server_model`"):
            server.prepare(PROMPTS[0], target="target", longest=64, needs_token_ids=True)
    with client(target, prepare=False, models=models, model="other") as (server, _):
        with pytest.raises(ValueError, match=r"serves not 'other', \['adapter', 'target'\]"):
            server.prepare(PROMPTS[0], target="target", longest=64, needs_token_ids=True)
    with client(target, models=models, model="adapter") as (server, loopback):
        server.answer(PROMPTS[0], seed=0)
    assert {body["model"] for body in loopback.bodies} == {"adapter"}


@pytest.mark.parametrize(
    ("name", "is_warned"), [("org/target", False), ("folder/weights/target/", False), ("org/other", True)]
)
def test_server_of_another_name_is_warned_about(target, caplog, name, is_warned):
    with client(target, prepare=False) as (server, _):
        server.prepare(PROMPTS[0], target=name, longest=64, needs_token_ids=True)
    warning = "serves ['target']. Make sure that this is the target, org/other."
    assert (warning in caplog.text) == is_warned


def test_too_little_room_is_seen_before_the_first_answer(target):
    with client(target, prepare=False, max_model_len=63) as (server, loopback):
        with pytest.raises(ValueError, match="`max_prompt_length` and `max_new_tokens` are 64 tokens .* takes 63"):
            server.prepare(PROMPTS[0], target="target", longest=64, needs_token_ids=True)
        assert loopback.bodies == []


def test_server_that_reads_another_prompt_is_refused(target):
    def add_beginning(response):
        response["choices"][0]["prompt_token_ids"] = [0, *response["choices"][0]["prompt_token_ids"]]

    with client(target, prepare=False, alter=add_beginning) as (server, _):
        with pytest.raises(AnswerServerError, match="read 6 other token ids than the 5 that were sent"):
            server.prepare(PROMPTS[0], target="target", longest=64, needs_token_ids=True)


def test_ids_that_do_not_add_up_are_refused(target):
    with client(target, alter=lambda response: response["choices"][0]["token_ids"].pop(), prepare=False) as (
        server,
        _,
    ):
        with pytest.raises(AnswerServerError, match="counts 1 tokens but returned 0"):
            server.prepare(PROMPTS[0], target="target", longest=64, needs_token_ids=True)


def test_wrong_answers_end_the_run_although_others_are_right(target):
    def spoil_one(response):
        if response["choices"][0]["prompt_token_ids"] == PROMPTS[2]:
            response["choices"][0]["token_ids"].pop()

    with client(target, alter=spoil_one) as (server, _):
        items = iter(PROMPTS)
        with pytest.raises(AnswerServerError, match="counts [0-9]+ tokens but returned"):
            for _ in in_flight(lambda prompt: server.answer(prompt, seed=0), lambda: next(items, None), 2):
                pass


def test_answer_of_unknown_form_is_shown(target):
    with client(target, alter=lambda response: response.pop("choices"), prepare=False) as (server, _):
        with pytest.raises(AnswerServerError, match="unknown form.*text_completion"):
            server.prepare(PROMPTS[0], target="target", longest=64, needs_token_ids=True)
