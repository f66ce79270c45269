"""Sampling with a drafter follows the target's processed law, and a seed gives the text of plain sampling."""

import pytest
import torch
from generation_material import (
    BATCH,
    MIXED,
    PROMPT,
    generate,
    generate_batch,
    make_batch_oracle,
    make_drafter,
    make_oracle,
    make_small_vocabulary_pair,
    make_target,
    ragged_ends,
)


@pytest.fixture
def llama():
    return make_target("llama")


def sample(call, seed, *args, **kwargs):
    """The sampled ids, and the state of the random generator afterwards."""
    torch.manual_seed(seed)
    ids = call(*args, do_sample=True, **kwargs).tolist()
    return ids, torch.get_rng_state().tolist()


SETTINGS = {
    "plain": {},
    "warpers": {"temperature": 0.7, "top_k": 12, "top_p": 0.9},
    "penalty": {"repetition_penalty": 1.3, "temperature": 1.5},
    "end token": {"eos_token_id": [7, 43, 56, 90, 12, 3]},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_seed_gives_the_ids_and_the_random_state_of_plain_generate(llama, name):
    kwargs = SETTINGS[name] | {"max_new_tokens": 24}
    for seed, drafter in enumerate((make_oracle(llama, MIXED), make_drafter(llama))):
        expected = sample(generate, seed, llama, **kwargs)
        assert sample(generate, seed, llama, assistant_model=drafter, **kwargs) == expected


@pytest.mark.parametrize("name", SETTINGS)
def test_seed_gives_the_ids_and_the_random_state_of_plain_generate_for_a_batch(llama, name):
    kwargs = SETTINGS[name] | {"max_new_tokens": 24}
    for drafter in (make_batch_oracle(llama), make_drafter(llama)):
        expected = sample(generate_batch, 3, llama, **kwargs)
        assert sample(generate_batch, 3, llama, assistant_model=drafter, **kwargs) == expected


def test_seed_gives_the_plain_text_where_proposals_are_accepted():
    target, drafter = make_small_vocabulary_pair()
    prompts = BATCH % 8
    for call, input_ids in ((generate, PROMPT % 8), (generate_batch, None)):
        kwargs = {"input_ids": prompts if input_ids is None else input_ids, "top_k": 0}
        expected = sample(call, 4, target, **kwargs)
        assert sample(call, 4, target, assistant_model=drafter, **kwargs) == expected
        assert max(map(max, drafter.all_accepted_lengths)) > 2


def test_nearly_greedy_sampling_of_ragged_rows_equals_plain_generate(llama):
    """So cold that the oracle's proposals are accepted; rows leave the batch at different steps."""
    kwargs = {"temperature": 0.01, "eos_token_id": ragged_ends(llama)[0]}
    drafter = make_batch_oracle(llama)
    expected = sample(generate_batch, 5, llama, **kwargs)
    assert sample(generate_batch, 5, llama, assistant_model=drafter, **kwargs) == expected
    assert max(map(max, drafter.all_accepted_lengths)) > 3


def test_block_sizes_change_no_sampled_token():
    texts = []
    for block_size in (2, 3, 8):
        target, drafter = make_small_vocabulary_pair(block_size=block_size)
        kwargs = {"input_ids": PROMPT % 8, "top_k": 0, "assistant_model": drafter}
        texts.append(sample(generate, 1, target, **kwargs))
        assert texts[-1] != sample(generate, 2, target, **kwargs)
        assert max(map(len, drafter.proposals)) == block_size - 1
    assert texts[0] == texts[1] == texts[2]
