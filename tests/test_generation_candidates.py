"""Candidates of a drafter for Transformers' own assisted decoding give the target's own text."""

import logging

import pytest
import torch
from generation_material import (
    BATCH,
    BLOCK,
    NEW,
    PATTERNS,
    PROMPT,
    TARGETS,
    cache_argument,
    count_hooks,
    generate,
    make_config,
    make_drafter,
    make_oracle,
    make_small_vocabulary_pair,
    make_target,
    new_tokens,
    read_prefix,
    stock_loop,
)
from oracle_drafters import (
    OracleDrafter,
    RecordingStreamer,
    always_right,
    expected_lengths,
    never_right,
    reference_dflash_greedy,
    reference_greedy,
    right_at,
    right_for,
)
from transformers import SynthIDTextWatermarkingConfig


@pytest.fixture
def llama():
    return make_target("llama")


@pytest.mark.parametrize("kind", TARGETS)
def test_candidates_give_the_plain_text_for_every_pattern(kind):
    target = make_target(kind)
    expected = generate(target)
    text = generate(target, max_new_tokens=NEW + BLOCK)
    for name, pattern in PATTERNS.items():
        drafter = OracleDrafter(make_config(target), target, text, pattern)
        assert generate(target, custom_generate=stock_loop(drafter)).tolist() == expected.tolist(), name
        assert drafter.accepted_lengths == expected_lengths(pattern, NEW, BLOCK), name


def test_candidates_of_a_padded_prompt_are_those_of_the_bare_one(llama):
    drafter = make_drafter(llama)
    expected = generate(llama, max_new_tokens=20, custom_generate=stock_loop(drafter))
    proposals = drafter.proposals
    padded = torch.cat([torch.ones(1, 3, dtype=torch.long), PROMPT], dim=1)
    mask = (torch.arange(padded.shape[1]) >= 3).long()[None]
    output = generate(llama, padded, attention_mask=mask, max_new_tokens=20, custom_generate=stock_loop(drafter))
    assert output[:, 3:].tolist() == expected.tolist() and drafter.proposals == proposals


def test_candidates_stop_at_an_end_token_at_every_place_of_a_block(llama):
    text = generate(llama, max_new_tokens=NEW + BLOCK)
    plain = new_tokens(text)
    for count in range(2 * BLOCK + 1):
        eos = plain[count] if count % 2 else [plain[count], 99]
        stop_at = plain.index(plain[count]) + 1
        for pattern in (always_right, right_for(3, 0, 7)):
            drafter = OracleDrafter(make_config(llama), llama, text, pattern)
            output = generate(llama, eos_token_id=eos, custom_generate=stock_loop(drafter))
            assert output.tolist() == generate(llama, eos_token_id=eos).tolist()
            assert drafter.accepted_lengths == expected_lengths(pattern, NEW, BLOCK, stop_at=stop_at)


def test_candidates_leave_an_end_token_to_the_target(llama):
    drafter = OracleDrafter(make_config(llama), llama, torch.full((1, 99), 50))
    output = generate(llama, eos_token_id=50, custom_generate=stock_loop(drafter))
    assert output.tolist() == generate(llama, eos_token_id=50).tolist()
    assert 50 not in output and drafter.proposals[0] == []


@pytest.mark.parametrize("max_new_tokens", [1, 2, NEW])
def test_candidates_go_on_after_a_prompt_that_ends_in_an_end_token(llama, max_new_tokens):
    kwargs = {"eos_token_id": [int(PROMPT[0, -1]), 99], "max_new_tokens": max_new_tokens}
    drafter = make_oracle(llama, right_for(2, 0, 6))
    output = generate(llama, custom_generate=stock_loop(drafter), **kwargs)
    assert output.tolist() == generate(llama, **kwargs).tolist()
    assert output.shape[1] == PROMPT.shape[1] + max_new_tokens
    assert drafter.accepted_lengths == expected_lengths(drafter.is_right, max_new_tokens, BLOCK)


def test_prompt_that_ends_in_an_end_token_may_go_on_with_the_mask_token():
    target, drafter = make_small_vocabulary_pair()
    mask = drafter.config.mask_token_id
    prompts = torch.cartesian_prod(torch.arange(8), torch.arange(7))[:, None]
    prompt = next(prompt for prompt in prompts if reference_greedy(target, prompt, 1)[0, -1] == mask)
    eos = [int(prompt[0, -1])]
    reference = reference_dflash_greedy(target, drafter, prompt, NEW, eos=eos)
    streamer = RecordingStreamer()
    loop = stock_loop(drafter, streamer=streamer)
    output = generate(target, prompt, eos_token_id=eos, custom_generate=loop)
    # The placeholder behind the prompt was right, so the first forward gave two tokens.
    assert output.tolist() == reference.tokens.tolist() and len(streamer.puts[0]) == 2
    first = drafter.calls[0]
    assert first.positions == list(range(prompt.shape[1] + 1 + BLOCK)) and first.num_features == prompt.shape[1] + 1


def test_candidates_shrink_to_the_length_limit(llama):
    drafter = make_oracle(llama, never_right)
    generate(llama, max_new_tokens=10, custom_generate=stock_loop(drafter))
    assert drafter.accepted_lengths == [1] * 9
    assert [len(proposals) for proposals in drafter.proposals] == [7, 7, 6, 5, 4, 3, 2, 1, 0]
    assert len(drafter.calls) == 8 and {call.width for call in drafter.calls} == {BLOCK}


def test_candidates_obey_bad_words_and_the_number_that_was_asked_for(llama):
    kwargs = {"bad_words_ids": [[50], [3, 4]]}
    drafter = make_oracle(llama, decoy=50, **kwargs)
    options = {"custom_generate": stock_loop(drafter), "num_assistant_tokens": 5}
    assert generate(llama, **options, **kwargs).tolist() == generate(llama, **kwargs).tolist()
    assert drafter.accepted_lengths == expected_lengths(always_right, NEW, BLOCK, num_proposals=5)


@torch.no_grad()
def test_candidates_read_the_prefix_of_a_given_cache_again(llama):
    drafter = make_oracle(llama, right_for(2, 0, 6))
    output = generate(llama, custom_generate=stock_loop(drafter), **read_prefix(llama, 4))
    assert output.tolist() == generate(llama).tolist()
    assert drafter.accepted_lengths == expected_lengths(drafter.is_right, NEW, BLOCK)
    mask = torch.ones(1, PROMPT.shape[1] + 2, dtype=torch.long)
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="needs the whole prompt as `input_ids`"):
        cache = {cache_argument(llama): read_prefix(llama, 2)[cache_argument(llama)]}
        generate(llama, custom_generate=stock_loop(drafter), attention_mask=mask, **cache)


def test_candidates_take_one_prompt_at_a_time(llama):
    with pytest.raises(ValueError, match="one prompt at a time, got a batch of 3"):
        generate(llama, BATCH, custom_generate=stock_loop(make_drafter(llama)))


@pytest.mark.parametrize(
    "kwargs",
    [
        {"guidance_scale": 1.5},
        {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3)},
    ],
    ids=["guidance", "synthid"],
)
def test_candidates_stop_for_processors_that_count_their_calls(llama, kwargs, caplog):
    expected = generate(llama, max_new_tokens=20, **kwargs)
    drafter = make_oracle(llama)
    output = generate(llama, max_new_tokens=20, custom_generate=stock_loop(drafter), **kwargs)
    assert output.tolist() == expected.tolist() != generate(llama, max_new_tokens=20).tolist()
    assert drafter.calls == [] and count_hooks(llama) == 0
    assert sum("drafter is off" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("failing_round", [0, 2])
def test_candidates_of_a_failing_drafter_end_with_one_warning(llama, failing_round, caplog):
    class Fails(OracleDrafter):
        def forward(self, *args, **kwargs):
            if len(self.calls) == failing_round:
                raise RuntimeError("out of memory")
            return super().forward(*args, **kwargs)

    drafter = Fails(make_config(llama), llama, reference_greedy(llama, PROMPT, 99), right_at(1))
    output = generate(llama, max_new_tokens=70, custom_generate=stock_loop(drafter))
    assert output.tolist() == generate(llama, max_new_tokens=70).tolist()
    assert drafter.accepted_lengths == [2] * failing_round + [1] * (69 - 2 * failing_round)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "out of memory" in caplog.text and count_hooks(llama) == 0


@pytest.mark.parametrize(("num_rounds", "is_reported"), [(16, True), (15, False)])
def test_candidates_that_are_never_right_are_reported(llama, num_rounds, is_reported, caplog):
    drafter = make_oracle(llama, never_right, max_new_tokens=1 + num_rounds)
    generate(llama, custom_generate=stock_loop(drafter), max_new_tokens=1 + num_rounds)
    assert len(drafter.accepted_lengths) == num_rounds
    assert ("No proposal was accepted in 16 rounds" in caplog.text) == is_reported
