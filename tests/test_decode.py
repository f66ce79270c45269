import pytest
import torch
from transformers.generation.streamers import BaseStreamer

from dflash_hf.eval.decode import Answer, RoundRecorder, timed_generate


@pytest.fixture
def inputs():
    input_ids = torch.randint(2, 97, (1, 9))
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}


def test_tau_is_new_tokens_over_verify_forwards(tiny_target, tiny_drafter, inputs):
    forwards = []
    handle = tiny_target.register_forward_hook(lambda *_: forwards.append(1))
    answer = timed_generate(tiny_target, inputs, assistant_model=tiny_drafter, max_new_tokens=24, do_sample=False)
    handle.remove()
    assert answer.tau == pytest.approx((len(answer.token_ids) - 1) / (len(forwards) - 1))
    assert len(answer.round_seconds) == len(answer.num_proposals) == len(forwards) - 1


def test_draft_and_verify_times_are_parts_of_the_rounds(tiny_target, tiny_drafter, inputs):
    options = {"assistant_model": tiny_drafter, "num_assistant_tokens": 7, "max_new_tokens": 24, "do_sample": False}
    answer = timed_generate(tiny_target, inputs, drafter=tiny_drafter, **options)
    assert 0 < answer.draft_seconds < answer.decode_seconds
    assert 0 < answer.verify_seconds < answer.decode_seconds - answer.draft_seconds
    assert answer.num_proposals[0] == 7


def test_hooks_are_gone_after_a_call(tiny_target, tiny_drafter, inputs):
    timed_generate(tiny_target, inputs, drafter=tiny_drafter, assistant_model=tiny_drafter, max_new_tokens=4)
    for module in (tiny_target, tiny_target.get_output_embeddings(), tiny_drafter):
        assert not module._forward_hooks and not module._forward_pre_hooks


def test_streamer_gets_every_token_once(tiny_target, tiny_drafter, inputs):
    class Collector(BaseStreamer):
        def __init__(self):
            self.tokens, self.is_ended = [], False

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.is_ended = True

    collector = Collector()
    answer = timed_generate(
        tiny_target, inputs, streamer=collector, assistant_model=tiny_drafter, max_new_tokens=20, do_sample=False
    )
    assert collector.tokens == inputs["input_ids"][0].tolist() + answer.token_ids
    assert collector.is_ended


def test_recorder_notes_the_size_of_every_put():
    recorder = RoundRecorder()
    for size in (5, 1, 3):
        recorder.put(torch.zeros(1, size, dtype=torch.long))
    assert recorder.sizes == [5, 1, 3] and recorder.times == sorted(recorder.times)


def test_answer_without_rounds_has_no_speed():
    answer = Answer(token_ids=[4], accepted_lengths=[], prefill_seconds=0.1, round_seconds=[])
    assert answer.tokens_per_second == 0.0 and answer.tau == 0.0


def test_time_to_a_number_of_tokens_counts_the_last_round_in_part():
    answer = Answer(list(range(8)), [3, 4], prefill_seconds=1.0, round_seconds=[0.3, 0.8])
    assert [answer.seconds_to(n) for n in (1, 2, 4, 6, 8)] == pytest.approx([0.0, 0.1, 0.3, 0.7, 1.1])


def test_tokens_that_no_forward_gave_are_a_wrong_measurement():
    with pytest.raises(ValueError, match=r"9 tokens are not 1 \+ 7"):
        Answer(list(range(9)), [3, 4], prefill_seconds=1.0, round_seconds=[0.3, 0.8])
