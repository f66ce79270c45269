"""Logits processors act on a text decoded with a drafter as they act in plain decoding."""

import pytest
import torch
from generation_material import (
    BATCH,
    BATCH_MASK,
    BATCH_PATTERNS,
    BLOCK,
    MIXED,
    NEW,
    generate,
    generate_batch,
    make_batch_oracle,
    make_config,
    make_oracle,
    make_target,
)
from oracle_drafters import OracleDrafter, always_right, expected_lengths
from transformers import LogitsProcessor, SynthIDTextWatermarkingConfig, WatermarkingConfig
from transformers.utils import logging as transformers_logging


@pytest.fixture
def llama():
    return make_target("llama")


@pytest.fixture
def repeating_llama():
    """Its text repeats itself, which the penalties forbid."""
    return make_target("llama", initializer_range=0.2)


class FavourSumOfPrefix(LogitsProcessor):
    """Raises the token whose id is the prefix's sum, so one wrong token in the prefix changes all later scores."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for row, total in enumerate(input_ids.sum(dim=1).tolist()):
            scores[row, total % 90] += 3.0
        return scores


PROCESSORS = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "sequence_bias": {"sequence_bias": [[[43], -2.0], [[7, 8], 9.0]]},
    "suppress_tokens": {"suppress_tokens": [7, 43, 56]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [58, 76]},
    "bad_words_ids": {"bad_words_ids": [[7], [43], [56], [24, 21]]},
    "forced_eos_token_id": {"forced_eos_token_id": 98},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (10, 1.2), "eos_token_id": 98},
    "prefix_allowed_tokens_fn": {
        "prefix_allowed_tokens_fn": lambda row, ids: list(range((len(ids) + row) % 2, 96, 2))
    },
    "watermark": {"watermarking_config": WatermarkingConfig(bias=4.0)},
    "custom": {"logits_processor": [FavourSumOfPrefix()]},
    "penalty and custom": {"repetition_penalty": 1.1, "logits_processor": [FavourSumOfPrefix()]},
}
# These leave greedy text as it is.
HARMLESS = {
    "renormalize_logits": {"renormalize_logits": True},
    "remove_invalid_values": {"remove_invalid_values": True},
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_change_the_text_as_in_plain_generate(name, repeating_llama):
    target, kwargs = repeating_llama, PROCESSORS[name]
    expected = generate(target, **kwargs)
    assert expected.tolist() != generate(target).tolist()
    for pattern in (always_right, MIXED):
        text = torch.cat([expected, expected[:, -BLOCK:]], dim=1)
        drafter = OracleDrafter(make_config(target), target, text, pattern)
        assert generate(target, assistant_model=drafter, **kwargs).tolist() == expected.tolist()
        if pattern is always_right and "eos_token_id" not in kwargs:
            assert drafter.accepted_lengths == expected_lengths(always_right, NEW, BLOCK)


@pytest.mark.parametrize("name", PROCESSORS | HARMLESS)
def test_processors_change_every_row_of_a_padded_batch_as_in_plain_generate(name, repeating_llama):
    target, kwargs = repeating_llama, (PROCESSORS | HARMLESS)[name]
    expected = generate_batch(target, **kwargs)
    num_padding = (1 - BATCH_MASK).sum(dim=1).tolist()
    texts = [text[padding:].tolist() + [0] * BLOCK for text, padding in zip(expected, num_padding, strict=True)]
    drafter = OracleDrafter(make_config(target), target, texts, BATCH_PATTERNS)
    assert generate_batch(target, assistant_model=drafter, **kwargs).tolist() == expected.tolist()
    assert max(map(max, drafter.all_accepted_lengths)) > 2
    if name in HARMLESS:
        assert expected.tolist() == generate_batch(target).tolist()


def test_encoder_repetition_penalty_and_several_processors_at_once(repeating_llama):
    kwargs = {
        "encoder_repetition_penalty": 1.2,
        "repetition_penalty": 1.1,
        "no_repeat_ngram_size": 3,
        "renormalize_logits": True,
        "suppress_tokens": [43],
        "sequence_bias": [[[7, 8], 9.0]],
    }
    for call, make in ((generate, make_oracle), (generate_batch, make_batch_oracle)):
        drafter = make(repeating_llama, **kwargs)
        assert (
            call(repeating_llama, assistant_model=drafter, **kwargs).tolist()
            == call(repeating_llama, **kwargs).tolist()
        )


# What a draft obeys


@pytest.mark.parametrize("is_batch", [False, True], ids=["one prompt", "batch"])
def test_drafts_obey_bad_words_so_a_banned_favourite_costs_nothing(llama, is_batch):
    banned = 50
    kwargs = {"bad_words_ids": [[banned], [3, 4]]}
    call = generate_batch if is_batch else generate
    if is_batch:
        drafter = make_batch_oracle(llama, [always_right] * 3, **kwargs)
        drafter.decoy = banned
    else:
        drafter = make_oracle(llama, decoy=banned, **kwargs)
    assert call(llama, assistant_model=drafter, **kwargs).tolist() == call(llama, **kwargs).tolist()
    for lengths in drafter.all_accepted_lengths:
        assert lengths == expected_lengths(always_right, NEW, BLOCK)
    call(llama, assistant_model=drafter)
    assert drafter.proposals[0] == [banned] * (BLOCK - 1)


class RecordingProcessor(LogitsProcessor):
    def __init__(self):
        self.prefixes = []
        self.scores = []

    def __call__(self, input_ids, scores):
        self.prefixes.append(input_ids.tolist())
        self.scores.append(scores.clone())
        return scores


def test_custom_processor_sees_each_prefix_once_and_in_order_with_plain_scores(llama):
    plain, ours = RecordingProcessor(), RecordingProcessor()
    generate(llama, logits_processor=[plain])
    generate(llama, assistant_model=make_oracle(llama, MIXED), logits_processor=[ours])
    assert ours.prefixes == plain.prefixes and len(ours.prefixes) == NEW
    torch.testing.assert_close(ours.scores, plain.scores, atol=1e-4, rtol=1e-4)


def test_custom_processor_of_a_batch_gets_the_whole_batch_and_each_rows_prefixes_in_order(llama):
    ours = RecordingProcessor()
    drafter = make_batch_oracle(llama)
    output = generate_batch(llama, assistant_model=drafter, logits_processor=[ours])
    assert {len(prefixes) for prefixes in ours.prefixes} == {3}
    for row, text in enumerate(output.tolist()):
        # Calls for other rows hold this row's text as far as it is known, so lengths may repeat, but never fall.
        is_known = [prefixes[row] == text[: len(prefixes[row])] for prefixes in ours.prefixes]
        lengths = [len(prefixes[row]) for prefixes, known in zip(ours.prefixes, is_known, strict=True) if known]
        assert set(lengths) == set(range(BATCH.shape[1], BATCH.shape[1] + NEW))


# Processors that must be called once a token


COUNTING = {
    "guidance": {"guidance_scale": 1.5},
    "guidance with a negative prompt": {"guidance_scale": 1.7, "negative_prompt_ids": torch.tensor([[9, 8, 7]])},
    "synthid": {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3)},
}


@pytest.mark.parametrize("pattern", [always_right, MIXED], ids=["always", "mixed"])
@pytest.mark.parametrize("name", COUNTING)
def test_processors_that_count_their_calls_work_with_the_drafter(llama, name, pattern):
    kwargs = COUNTING[name]
    expected = generate(llama, **kwargs)
    assert expected.tolist() != generate(llama).tolist()
    text = torch.cat([expected, expected[:, -BLOCK:]], dim=1)
    drafter = OracleDrafter(make_config(llama), llama, text, pattern)
    assert generate(llama, assistant_model=drafter, **kwargs).tolist() == expected.tolist()
    assert drafter.accepted_lengths == expected_lengths(pattern, NEW, BLOCK)


@pytest.mark.parametrize("name", ["guidance", "synthid"])
def test_processors_that_count_their_calls_decode_a_batch_without_the_drafter(llama, name, caplog):
    transformers_logging.warning_once.cache_clear()
    kwargs = COUNTING[name] | {"max_new_tokens": 12}
    expected = generate_batch(llama, **kwargs)
    drafter = make_batch_oracle(llama)
    for _ in range(2):
        assert generate_batch(llama, assistant_model=drafter, **kwargs).tolist() == expected.tolist()
    assert drafter.calls == []
    assert sum("decoded without its drafter" in record.message for record in caplog.records) == 1


def test_sampled_synthid_watermark_equals_plain_generate(llama):
    kwargs = COUNTING["synthid"] | {"do_sample": True, "max_new_tokens": 20}
    drafter = make_oracle(llama)
    torch.manual_seed(5)
    expected = generate(llama, **kwargs)
    torch.manual_seed(5)
    assert generate(llama, assistant_model=drafter, **kwargs).tolist() == expected.tolist()
