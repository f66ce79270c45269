"""Which way a call of generate() takes: the drafter's own loop, Transformers' loop, or neither."""

import os

import pytest
import torch
from generation_material import (
    BLOCK,
    MIXED,
    NEW,
    PROMPT,
    TARGETS,
    generate,
    generate_batch,
    load_authors_twin,
    make_batch_oracle,
    make_drafter,
    make_oracle,
    make_small_vocabulary_pair,
    make_target,
)
from oracle_drafters import (
    RecordingStreamer,
    expected_lengths,
)
from tiny_material import run_python
from transformers.generation.candidate_generator import AssistedCandidateGenerator, PromptLookupCandidateGenerator
from transformers.generation.utils import GenerationMixin

from dflash_hf import decoding_dflash
from dflash_hf.generation_dflash import install_dispatch

WRAPPED = (
    "_prepare_generation_config",
    "_validate_generation_mode",
    "_assisted_decoding",
    "_get_candidate_generator",
)


@pytest.fixture
def llama():
    return make_target("llama")


# The dispatch


def test_dispatch_is_installed_once():
    installed = [getattr(GenerationMixin, name) for name in WRAPPED]
    install_dispatch()
    assert [getattr(GenerationMixin, name) for name in WRAPPED] == installed
    for method, name in zip(installed, WRAPPED, strict=True):
        assert method.__name__ == name and method.dispatches_dflash
        assert not hasattr(method.__wrapped__, "dispatches_dflash")


def forbid_our_loop(monkeypatch):
    def decode(*args, **kwargs):
        raise AssertionError("The drafter's loop ran.")

    monkeypatch.setattr(decoding_dflash, "DecodeCall", decode)


def record_candidate_generators(monkeypatch) -> list[type]:
    kinds, original = [], GenerationMixin._get_candidate_generator

    def recording(self, *args, **kwargs):
        generator = original(self, *args, **kwargs)
        kinds.append(type(generator))
        return generator

    monkeypatch.setattr(GenerationMixin, "_get_candidate_generator", recording)
    return kinds


def test_other_assistants_and_prompt_lookup_take_transformers_loop(llama, monkeypatch):
    forbid_our_loop(monkeypatch)
    kinds = record_candidate_generators(monkeypatch)
    expected = generate(llama)
    assistant = make_target("llama")
    assert generate(llama, assistant_model=assistant).tolist() == expected.tolist()
    assert generate(llama, prompt_lookup_num_tokens=3).tolist() == expected.tolist()
    assert kinds == [AssistedCandidateGenerator, PromptLookupCandidateGenerator]


def test_limits_of_transformers_loop_hold_for_other_assistants(llama):
    assistant = make_target("llama", num_hidden_layers=2)
    with pytest.raises(ValueError, match="batch_size = 1"):
        generate_batch(llama, assistant_model=assistant)
    with pytest.raises(ValueError, match="num_return_sequences"):
        generate(llama, assistant_model=assistant, do_sample=True, num_return_sequences=2)


def test_plain_generate_with_beams_takes_neither_loop(llama, monkeypatch):
    forbid_our_loop(monkeypatch)
    kinds = record_candidate_generators(monkeypatch)
    assert generate(llama, num_beams=2, max_new_tokens=4).shape == (1, PROMPT.shape[1] + 4)
    assert kinds == []


def test_drafter_takes_its_own_loop(llama, monkeypatch):
    kinds = record_candidate_generators(monkeypatch)
    drafter = make_oracle(llama, MIXED)
    assert generate(llama, assistant_model=drafter).tolist() == generate(llama).tolist()
    assert drafter.accepted_lengths == expected_lengths(MIXED, NEW, BLOCK)
    assert kinds == []


@pytest.mark.parametrize("is_batch", [False, True], ids=["one prompt", "batch"])
@pytest.mark.parametrize("kwargs", [{}, {"do_sample": True, "top_k": 9}, {"num_assistant_tokens": 3}], ids=str)
def test_decode_as_custom_generate_equals_assistant_model(llama, is_batch, kwargs):
    call = generate_batch if is_batch else generate
    drafter = make_batch_oracle(llama) if is_batch else make_oracle(llama, MIXED)
    torch.manual_seed(5)
    expected, lengths = call(llama, assistant_model=drafter, **kwargs), drafter.all_accepted_lengths
    state = torch.get_rng_state()
    torch.manual_seed(5)
    output = call(llama, custom_generate=drafter.decode, **kwargs)
    assert output.tolist() == expected.tolist() and drafter.all_accepted_lengths == lengths
    assert torch.equal(torch.get_rng_state(), state)


def test_two_samples_of_one_prompt_equal_plain_generate(llama):
    kwargs = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 12}
    drafter = make_drafter(llama)
    torch.manual_seed(5)
    expected = generate(llama, **kwargs)
    torch.manual_seed(5)
    assert generate(llama, assistant_model=drafter, **kwargs).tolist() == expected.tolist()
    assert expected[0].tolist() != expected[1].tolist()


def test_beams_leave_the_drafter_out_and_its_loop_refuses_them(llama):
    drafter, kwargs = make_drafter(llama), {"num_beams": 2, "max_new_tokens": 4}
    assert generate(llama, assistant_model=drafter, **kwargs).tolist() == generate(llama, **kwargs).tolist()
    assert drafter.calls == []  # Transformers says so in a warning
    with pytest.raises(ValueError, match="`num_beams` is 2"):
        generate(llama, custom_generate=drafter.decode, **kwargs)


# Transformers' own DFlash path


def run_native(target, drafter, input_ids=PROMPT):
    streamer = RecordingStreamer()
    drafter.start_recording()
    output = generate(target, input_ids, assistant_model=drafter, speculation_type="dflash", streamer=streamer)
    assert drafter.proposals == []  # neither our loop nor our candidate generator had a part in it
    return output, streamer.accepted_lengths, drafter.calls


def test_native_path_reads_our_drafter_as_we_do():
    target, drafter = make_small_vocabulary_pair()
    prompt = PROMPT % 8
    output, lengths, calls = run_native(target, drafter, prompt)
    assert generate(target, prompt, assistant_model=drafter).tolist() == output.tolist()
    assert drafter.accepted_lengths == lengths and max(lengths) > 1
    assert len(drafter.calls) == len(calls) > 2
    for ours, theirs in zip(drafter.calls, calls, strict=True):
        assert ours.positions == theirs.positions
        torch.testing.assert_close(ours.hidden_states, theirs.hidden_states, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", TARGETS)
def test_native_path_gives_the_same_text(kind):
    target = make_target(kind)
    drafter = make_oracle(target, MIXED)
    output, lengths, _ = run_native(target, drafter)
    assert output.tolist() == generate(target).tolist()
    assert lengths == expected_lengths(MIXED, NEW, BLOCK)


WITHOUT_DISPATCH = """
import sys
from transformers.generation.utils import GenerationMixin
sys.path.insert(0, sys.argv[1])
from test_generation_dflash import MIXED, WRAPPED, generate, make_oracle, make_target, run_native
for name in WRAPPED:
    setattr(GenerationMixin, name, getattr(GenerationMixin, name).__wrapped__)
target = make_target("llama")
drafter = make_oracle(target, MIXED)
output, lengths, _ = run_native(target, drafter)
assert output.tolist() == generate(target).tolist()
print(lengths)
"""


@pytest.mark.slow
def test_native_path_needs_no_dispatch():
    lengths = run_python("-c", WITHOUT_DISPATCH, os.path.dirname(__file__))
    assert lengths.strip() == str(expected_lengths(MIXED, NEW, BLOCK))


# spec_generate


def run_spec_generate(drafter, target, stop):
    arguments = {"input_ids": PROMPT % 8, "max_new_tokens": NEW, "temperature": 0.0, "stop_token_ids": [stop]}
    return drafter.spec_generate(target=target, **arguments).tolist()


def test_spec_generate_equals_plain_generate():
    target, drafter = make_small_vocabulary_pair()
    plain = generate(target, PROMPT % 8)
    stop = int(plain[0, PROMPT.shape[1] + 20])
    output = run_spec_generate(drafter, target, stop)
    assert output == generate(target, PROMPT % 8, eos_token_id=stop).tolist()
    assert output[0][-1] == stop and len(output[0]) < plain.shape[1]


def test_spec_generate_takes_the_authors_arguments():
    target, drafter = make_small_vocabulary_pair()
    _, twin = load_authors_twin(drafter)
    for stop in range(8):
        assert run_spec_generate(drafter, target, stop) == run_spec_generate(twin, target, stop)


def test_spec_generate_samples_by_seed():
    target, drafter = make_small_vocabulary_pair()

    def sample(seed):
        torch.manual_seed(seed)
        return drafter.spec_generate(target, PROMPT % 8, max_new_tokens=NEW, temperature=1.0, top_p=0.9, top_k=6)

    assert sample(1).tolist() == sample(1).tolist() != sample(2).tolist()


def test_drafter_does_not_generate_alone(llama):
    with pytest.raises(TypeError, match="assistant_model=drafter"):
        make_drafter(llama).generate(PROMPT)
