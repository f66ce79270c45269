import sys

import pytest
import torch
from conftest import make_tiny_target

from dflash_hf.compilation_dflash import known_forwards
from dflash_hf.eval.methods import COMPILED, METHODS, MethodUnavailable, decoder, method_options, sampling_options

IN_PROCESS = [method for method in METHODS if method not in COMPILED | {"authors", "forced", "assistant"}]


@pytest.fixture
def inputs():
    input_ids = torch.randint(2, 97, (1, 9))
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}


@pytest.mark.parametrize("method", IN_PROCESS)
def test_every_method_gives_the_plain_tokens_and_accepted_lengths_that_add_up(
    method, tiny_target, tiny_drafter, inputs
):
    plain = decoder("plain", tiny_target)(inputs, 24, 0.0)
    answer = decoder(method, tiny_target, tiny_drafter)(inputs, 24, 0.0)
    assert answer.token_ids == plain.token_ids
    # Transformers' own assisted decoding drafts for the prompt's forward, too.
    assert answer.num_first == 1 or method == "self_draft"
    assert answer.num_first + sum(answer.accepted_lengths) == len(answer.token_ids)


def test_plain_decoding_has_tau_one(tiny_target, inputs):
    assert decoder("plain", tiny_target)(inputs, 12, 0.0).tau == 1.0


def test_an_assistant_drafts_and_its_time_is_told(tiny_target, inputs):
    assistant = make_tiny_target(num_hidden_layers=2)
    plain = decoder("plain", tiny_target)(inputs, 24, 0.0)
    answer = decoder("assistant", tiny_target, assistant=assistant)(inputs, 24, 0.0)
    assert answer.token_ids == plain.token_ids and answer.draft_seconds > 0


def test_the_authors_loop_gives_the_plain_tokens(tiny_target, tiny_drafter, inputs):
    pytest.importorskip("dflash", reason="the authors' package is not installed (`pip install --no-deps dflash`)")
    plain = decoder("plain", tiny_target)(inputs, 24, 0.0)
    answer = decoder("authors", tiny_target, tiny_drafter)(inputs, 24, 0.0)
    assert answer.token_ids == plain.token_ids
    assert answer.draft_seconds > 0 and answer.prefill_seconds > 0


@pytest.mark.parametrize("method", sorted(COMPILED))
def test_compiled_methods_ask_for_a_static_cache_and_compile_on_every_device(method, tiny_drafter):
    options = method_options(method, tiny_drafter)
    assert options["cache_implementation"] == "static" and options["compile_config"]._compile_all_devices
    assert ("assistant_model" in options) == (method == "fast")


def test_our_fast_path_gives_the_plain_tokens(tiny_target, tiny_drafter, inputs):
    plain = decoder("plain", tiny_target)(inputs, 24, 0.0)
    with torch.compiler.set_stance("force_eager"):
        answer = decoder("fast", tiny_target, tiny_drafter)(inputs, 24, 0.0)
    assert answer.token_ids == plain.token_ids and known_forwards(tiny_target).is_in_use
    assert 1 + sum(answer.accepted_lengths) == len(answer.token_ids)


@pytest.mark.slow
def test_compiled_decoding_gives_the_plain_tokens(inputs):
    target = make_tiny_target(num_hidden_layers=2)
    plain = decoder("plain", target)(inputs, 8, 0.0)
    assert decoder("compiled", target)(inputs, 8, 0.0).token_ids == plain.token_ids


def test_sampling_ignores_the_targets_own_truncation(tiny_target, tiny_drafter, inputs):
    tiny_target.generation_config.top_k = 1
    torch.manual_seed(0)
    plain = decoder("plain", tiny_target)(inputs, 24, 1.0)
    assert plain.token_ids != decoder("plain", tiny_target)(inputs, 24, 0.0).token_ids
    torch.manual_seed(0)
    assert decoder("dflash", tiny_target, tiny_drafter)(inputs, 24, 1.0).token_ids == plain.token_ids


def test_end_tokens_can_be_ignored_in_every_arm(tiny_target, tiny_drafter, inputs):
    plain = decoder("plain", tiny_target)(inputs, 24, 0.0)
    tiny_target.generation_config.eos_token_id = plain.token_ids[3]
    first_end = plain.token_ids.index(plain.token_ids[3])
    for method in ("plain", "dflash", "prompt_lookup", "native"):
        assert len(decoder(method, tiny_target, tiny_drafter)(inputs, 24, 0.0).token_ids) == first_end + 1
        answer = decoder(method, tiny_target, tiny_drafter, ignore_eos=True)(inputs, 24, 0.0)
        assert answer.token_ids == plain.token_ids


def test_greedy_options_name_no_temperature():
    assert "temperature" not in sampling_options(8, 0.0) and sampling_options(8, 0.7)["temperature"] == 0.7


def test_unknown_methods_and_missing_drafters_are_named(tiny_target, inputs):
    with pytest.raises(ValueError, match="'beam'"):
        method_options("beam", None)
    with pytest.raises(ValueError, match="needs a drafter"):
        method_options("dflash", None)


def test_methods_that_cannot_run_say_what_to_do(tiny_target, tiny_drafter, monkeypatch):
    monkeypatch.setitem(sys.modules, "dflash", None)
    advices = {"assistant": "--assistant", "forced": "--simulate_accept_len", "authors": "pip install"}
    for method, advice in advices.items():
        with pytest.raises(MethodUnavailable, match=advice):
            decoder(method, tiny_target, tiny_drafter)


def test_a_draft_window_reaches_our_loop_and_changes_no_answer(tiny_target, tiny_drafter, inputs, monkeypatch):
    plain = decoder("plain", tiny_target)(inputs, 24, 0.0)
    seen = []
    generate = type(tiny_target).generate
    monkeypatch.setattr(
        type(tiny_target), "generate", lambda self, **kwargs: seen.append(kwargs) or generate(self, **kwargs)
    )
    for method in ("dflash", "whole_block", "tree", "native"):
        answer = decoder(method, tiny_target, tiny_drafter, draft_window=3)(inputs, 24, 0.0)
        assert answer.token_ids == plain.token_ids
    assert [kwargs.get("draft_window") for kwargs in seen] == [3, 3, 3, None]
