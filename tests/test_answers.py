import threading
import time

import pytest
from tiny_material import make_tokenizer
from transformers import GenerationConfig

from dflash_hf.trainer.answer_server import ServerAnswer
from dflash_hf.trainer.answers import Decoding, end_token_ids, final_ids, in_flight


def test_greedy_decoding_names_no_sampling_and_a_server_is_told_everything():
    decoding = Decoding(max_new_tokens=7)
    assert decoding.for_generate() == {"max_new_tokens": 7, "do_sample": False}
    # Qwen2.5 ships a repetition penalty; `generate` heeds it, so a server must, too.
    config = GenerationConfig(repetition_penalty=1.05, top_k=20, temperature=0.7)
    assert decoding.for_server(config) == {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.05,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    sampled = Decoding(max_new_tokens=7, temperature=0.6, top_p=0.95, top_k=20)
    assert sampled.for_generate() == {
        "max_new_tokens": 7,
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
    }
    sent = sampled.for_server(GenerationConfig(min_p=0.1))
    assert (sent["temperature"], sent["top_p"], sent["top_k"]) == (0.6, 0.95, 20)
    assert (sent["min_p"], sent["repetition_penalty"]) == (0.1, 1.0)


def test_end_tokens_are_collected_from_every_form_of_eos_token_id():
    assert end_token_ids(None) == set()
    assert end_token_ids(2, [3, 4], None) == {2, 3, 4}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (ServerAnswer([7, 8, 2], "", "stop"), ([7, 8, 2], "stop", False)),
        (ServerAnswer([7, 8, 3], "", "stop"), ([7, 8, 3], "stop", False)),
        (ServerAnswer([7, 9], "", "stop", 9), ([7, 9], "stop", False)),  # an end token that only the server knows
        (ServerAnswer([7, 8], "", "stop", 3), ([7, 8, 3], "stop", False)),
        (ServerAnswer([], "", "stop", 3), ([3], "stop", False)),
        (ServerAnswer([7, 8], "", "stop"), ([7, 8], "stop without an end token", False)),
        (ServerAnswer([7, 8], "", "length"), ([7, 8], "length", False)),
        (ServerAnswer([], "", "length"), ([], "empty answer", False)),
        (ServerAnswer([7], "", "abort"), ([7], "abort", False)),
        (ServerAnswer(None, "", "failed request"), ([], "failed request", True)),
        (ServerAnswer(None, "w1 w2", "stop"), ([7, 8, 2], "stop", True)),
        (ServerAnswer(None, "w1 w2", "stop", 3), ([7, 8, 3], "stop", True)),
        (ServerAnswer(None, "w1 w2 <eos>", "stop"), ([7, 8, 2], "stop", True)),
        (ServerAnswer(None, "w1 w2", "length"), ([7, 8], "length", True)),
    ],
)
def test_finished_answers_end_with_their_end_token(answer, expected):
    assert final_ids(answer, {2, 3}, make_tokenizer()) == expected


def test_items_added_while_others_run_are_worked_on_and_each_once():
    items = [1, 2, 3]
    done = []
    for item, result in in_flight(lambda item: item * item, lambda: items.pop() if items else None, 2):
        done.append((item, result))
        if item < 10:
            items.append(item + 10)
    assert sorted(done) == [(n, n * n) for n in (1, 2, 3, 11, 12, 13)]


def test_exception_of_a_worker_reaches_the_caller_and_ends_the_workers():
    before = set(threading.enumerate())
    items = iter(range(100))

    def fail_at_three(item):
        if item == 3:
            raise KeyError("three")
        return item

    with pytest.raises(KeyError, match="three"):
        for _ in in_flight(fail_at_three, lambda: next(items, None), 4):
            pass
    assert next(items) < 100
    deadline = time.monotonic() + 5
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - before
