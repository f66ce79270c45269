import pytest
import torch
from transformers.generation.streamers import BaseStreamer

from dflash_hf.eval.decode import METHODS, Answer, RoundRecorder, answer_prompt, method_options


@pytest.fixture
def inputs():
    input_ids = torch.randint(2, 97, (1, 9))
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_the_plain_tokens_and_accepted_lengths_that_add_up(
    method, tiny_target, tiny_drafter, inputs
):
    plain = answer_prompt(tiny_target, inputs, "plain", max_new_tokens=24)
    answer = answer_prompt(tiny_target, inputs, method, drafter=tiny_drafter, max_new_tokens=24)
    assert answer.token_ids == plain.token_ids
    # The first token comes from the prompt's forward, every other one from a verify forward.
    assert sum(answer.accepted_lengths) == len(answer.token_ids) - 1


def test_tau_is_new_tokens_over_verify_forwards(tiny_target, tiny_drafter, inputs):
    forwards = []
    handle = tiny_target.register_forward_hook(lambda *_: forwards.append(1))
    answer = answer_prompt(tiny_target, inputs, "dflash", drafter=tiny_drafter, max_new_tokens=24)
    handle.remove()
    assert answer.tau == pytest.approx((len(answer.token_ids) - 1) / (len(forwards) - 1))


def test_plain_decoding_has_tau_one(tiny_target, inputs):
    assert answer_prompt(tiny_target, inputs, "plain", max_new_tokens=12).tau == 1.0


def test_streamer_gets_every_token_once(tiny_target, tiny_drafter, inputs):
    class Collector(BaseStreamer):
        def __init__(self):
            self.tokens, self.is_ended = [], False

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.is_ended = True

    collector = Collector()
    answer = answer_prompt(tiny_target, inputs, "dflash", drafter=tiny_drafter, max_new_tokens=20, streamer=collector)
    assert collector.tokens == inputs["input_ids"][0].tolist() + answer.token_ids
    assert collector.is_ended


def test_recorder_notes_the_size_of_every_put():
    recorder = RoundRecorder()
    for size in (5, 1, 3):
        recorder.put(torch.zeros(1, size, dtype=torch.long))
    assert recorder.sizes == [5, 1, 3] and recorder.times == sorted(recorder.times)


def test_unknown_methods_and_missing_drafters_are_named():
    with pytest.raises(ValueError, match="'beam'"):
        method_options("beam", None)
    with pytest.raises(ValueError, match="needs a drafter"):
        method_options("dflash", None)


def test_answer_without_rounds_has_no_speed():
    answer = Answer(token_ids=[4], accepted_lengths=[], prefill_seconds=0.1, decode_seconds=0.0)
    assert answer.tokens_per_second == 0.0 and answer.tau == 0.0
