"""A fault of the drafter costs speed, never a token; and no call leaves anything behind."""

import copy
import gc
import logging

import pytest
import torch
from generation_material import (
    BLOCK,
    NEW,
    PROMPT,
    count_hooks,
    generate,
    generate_batch,
    make_batch_oracle,
    make_config,
    make_drafter,
    make_oracle,
    make_target,
)
from oracle_drafters import (
    OracleDrafter,
    RecordingDrafter,
    expected_lengths,
    never_right,
    reference_draft,
    right_at,
    right_for,
)
from transformers import LogitsProcessor

from dflash_hf import decoding_dflash, verification_dflash
from dflash_hf.context_dflash import ROUNDS_BEFORE_ALARM, ContextCache
from dflash_hf.decoding_dflash import _MAX_FAULTS, _ROUNDS_AFTER_FAULT
from dflash_hf.target_cache_dflash import TargetCache


@pytest.fixture
def llama():
    return make_target("llama")


class Failing:
    """A drafter whose forwards number `failing` raise an error, counted from 0."""

    failing: tuple[int, ...] = ()
    error: Exception = RuntimeError("out of memory")

    def start_recording(self, rows=None):
        super().start_recording(rows)
        self.num_attempts = 0

    def forward(self, *args, **kwargs):
        self.num_attempts += 1
        output = super().forward(*args, **kwargs)
        if self.num_attempts - 1 in self.failing:
            if isinstance(self, OracleDrafter):
                self.num_drafts = [count - 1 for count in self.num_drafts]
            raise self.error
        return output


class FailingOracle(Failing, OracleDrafter):
    pass


class FailingDrafter(Failing, RecordingDrafter):
    pass


def make_failing_oracle(target, failing, pattern):
    text = generate(target, max_new_tokens=100)
    drafter = FailingOracle(make_config(target), target, text, pattern)
    drafter.failing = failing
    return drafter


def warnings_of(caplog) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyError("gone")], ids=["runtime", "other"])
@pytest.mark.parametrize("failing_round", [0, 2])
def test_failed_round_costs_that_round_and_a_pause_and_warns_once(llama, failing_round, error, caplog):
    drafter = make_failing_oracle(llama, (failing_round,), right_at(1))
    drafter.error = error
    output = generate(llama, max_new_tokens=60, assistant_model=drafter)
    assert output.tolist() == generate(llama, max_new_tokens=60).tolist()
    num_single = 1 + _ROUNDS_AFTER_FAULT
    num_left = 59 - 2 * failing_round - num_single
    lengths = [2] * failing_round + [1] * num_single + [2] * (num_left // 2) + [1] * (num_left % 2)
    assert drafter.accepted_lengths == lengths
    (warning,) = warnings_of(caplog)
    assert "The drafter failed" in warning and str(error) in warning
    assert count_hooks(llama) == 0


@pytest.mark.parametrize("failing", [(0,), (2,), (1, 3)], ids=str)
@torch.no_grad()
def test_drafting_resumes_with_the_features_and_positions_of_all_tokens_in_between(failing):
    target = make_target("llama", vocab_size=8, pad_token_id=None)
    drafter = make_drafter(target, FailingDrafter, mask_token_id=7)
    drafter.failing = failing
    prompt = PROMPT % 8
    output = generate(target, prompt, max_new_tokens=50, assistant_model=drafter)
    assert output.tolist() == generate(target, prompt, max_new_tokens=50).tolist()
    assert len(drafter.calls) > max(failing) + 3
    lengths, proposals, calls = drafter.accepted_lengths, drafter.proposals, drafter.calls
    assert [len(drafted) for drafted in proposals].count(0) >= (1 + _ROUNDS_AFTER_FAULT) * len(failing)
    num_context = 0
    for index, call in enumerate(calls):
        assert call.positions == list(range(num_context, num_context + call.num_features + BLOCK))
        num_context += call.num_features * (index not in failing)
    drafter.failing, length = (), prompt.shape[1] + 1
    for accepted, drafted in zip(lengths, proposals, strict=True):
        if drafted:
            assert drafted == reference_draft(target, drafter, output[:, :length])[: len(drafted)]
        length += accepted


def test_third_fault_turns_the_drafter_off(llama, caplog):
    drafter = make_failing_oracle(llama, tuple(range(99)), right_at(1))
    output = generate(llama, max_new_tokens=60, assistant_model=drafter)
    assert output.tolist() == generate(llama, max_new_tokens=60).tolist()
    assert drafter.num_attempts == _MAX_FAULTS == 3
    assert drafter.accepted_lengths == [1] * 59
    assert len(warnings_of(caplog)) == 1


def test_failed_round_of_a_batch_changes_no_row(llama, caplog):
    oracle = make_batch_oracle(llama)
    drafter = FailingOracle(make_config(llama), llama, oracle.text, oracle.is_right)
    drafter.failing = (1,)
    assert generate_batch(llama, assistant_model=drafter).tolist() == generate_batch(llama).tolist()
    for lengths in drafter.all_accepted_lengths:
        assert lengths[1 : 2 + _ROUNDS_AFTER_FAULT] == [1] * (1 + _ROUNDS_AFTER_FAULT)
        assert max(lengths[2 + _ROUNDS_AFTER_FAULT :]) > 1
    assert len(warnings_of(caplog)) == 1


def test_target_whose_layers_are_not_seen_is_decoded_without_the_drafter(llama, monkeypatch, caplog):
    drafter = make_oracle(llama)

    def take(taps):
        raise RuntimeError("no forward was seen")

    monkeypatch.setattr(verification_dflash.TargetTaps, "take", take)
    assert generate(llama, assistant_model=drafter).tolist() == generate(llama).tolist()
    assert drafter.calls == [] and drafter.accepted_lengths == [1] * (NEW - 1)
    assert warnings_of(caplog) == ["The drafter is off in this call: no forward was seen"]


def test_float16_drafter_that_overflows_says_so(llama, caplog):
    drafter = make_drafter(llama).half()
    with torch.no_grad():
        drafter.fc.weight *= 1e5
    assert generate(llama, assistant_model=drafter).tolist() == generate(llama).tolist()
    assert "overflows in float16. Load it in bfloat16 or float32" in caplog.text
    assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize(
    ("num_draft_rounds", "pattern", "is_reported"),
    [(16, never_right, True), (15, never_right, False), (24, right_for(*[0] * 9, 1), False)],
    ids=["16 rounds", "15 rounds", "right once in ten"],
)
def test_drafter_that_is_never_right_is_reported_once_a_call(llama, num_draft_rounds, pattern, is_reported, caplog):
    # The last round of a text has room for one token and drafts nothing.
    max_new_tokens = 2 + sum(expected_lengths(pattern, 200, BLOCK)[:num_draft_rounds])
    drafter = make_oracle(llama, pattern, max_new_tokens=max_new_tokens)
    for num_calls in (1, 2):
        generate(llama, assistant_model=drafter, max_new_tokens=max_new_tokens)
        assert len(drafter.calls) == num_draft_rounds
        assert len(warnings_of(caplog)) == is_reported * num_calls
    assert (f"No proposal was accepted in {ROUNDS_BEFORE_ALARM} rounds" in caplog.text) == is_reported


# Nothing is left behind


def count_call_states() -> int:
    gc.collect()
    kinds = (ContextCache, TargetCache, decoding_dflash.DecodeCall)
    return sum(type(thing) in kinds for thing in gc.get_objects())


@pytest.mark.parametrize("is_batch", [False, True], ids=["one prompt", "batch"])
def test_nothing_is_left_on_target_or_drafter(llama, is_batch):
    call = generate_batch if is_batch else generate
    drafter = make_batch_oracle(llama) if is_batch else make_oracle(llama)
    configs = copy.deepcopy([model.config.to_dict() for model in (llama, drafter)])
    generation_config, keys = copy.deepcopy(llama.generation_config), [set(vars(llama)), set(vars(drafter))]
    num_states = count_call_states()
    first = call(llama, assistant_model=drafter)
    assert count_hooks(llama) == 0
    assert [model.config.to_dict() for model in (llama, drafter)] == configs
    assert llama.generation_config.to_dict() == generation_config.to_dict()
    assert [set(vars(llama)), set(vars(drafter))] == keys
    assert count_call_states() == num_states
    # A second call starts from nothing, with another prompt in between.
    lengths = drafter.all_accepted_lengths
    generate(llama, PROMPT.flip(1), assistant_model=make_drafter(llama))
    assert call(llama, assistant_model=drafter).tolist() == first.tolist()
    assert drafter.all_accepted_lengths == lengths


def test_no_hook_is_left_after_an_exception(llama):
    class Fails(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] > PROMPT.shape[1] + 3:
                raise KeyError("planned")
            return scores

    with pytest.raises(KeyError, match="planned"):
        generate(llama, assistant_model=make_drafter(llama), logits_processor=[Fails()])
    assert count_hooks(llama) == 0
