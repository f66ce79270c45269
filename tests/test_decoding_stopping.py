"""A text decoded with a drafter ends at the token at which plain decoding ends it."""

from types import SimpleNamespace

import pytest
import torch
from generation_material import (
    BATCH,
    BATCH_PATTERNS,
    BLOCK,
    MIXED,
    NEW,
    PROMPT,
    TARGETS,
    generate,
    generate_batch,
    make_batch_oracle,
    make_config,
    make_oracle,
    make_small_vocabulary_pair,
    make_target,
    new_tokens,
    ragged_ends,
)
from oracle_drafters import (
    OracleDrafter,
    RecordingStreamer,
    always_right,
    expected_lengths,
    never_right,
    reference_dflash_greedy,
    right_for,
)
from tiny_material import make_tokenizer
from transformers import MaxLengthCriteria, StoppingCriteria
from transformers.generation import stopping_criteria as stopping_criteria_module


@pytest.fixture
def llama():
    return make_target("llama")


# End tokens


def test_end_token_at_every_place_of_a_block_stops_as_plain_generate_does(llama):
    text = generate(llama, max_new_tokens=NEW + BLOCK)
    plain = new_tokens(text)
    slots = set()
    for count in range(2 * BLOCK + 1):
        end, stop_at = plain[count], plain.index(plain[count]) + 1
        eos = end if count % 2 else [end, 99]
        expected = generate(llama, eos_token_id=eos)
        assert expected.shape[1] == PROMPT.shape[1] + stop_at
        for pattern in (always_right, right_for(3, 0, 7)):
            drafter = OracleDrafter(make_config(llama), llama, text, pattern)
            streamer = RecordingStreamer()
            output = generate(llama, eos_token_id=eos, assistant_model=drafter, streamer=streamer)
            assert output.tolist() == expected.tolist()
            assert streamer.tokens == output[0].tolist() and streamer.has_ended
            assert drafter.accepted_lengths == expected_lengths(pattern, NEW, BLOCK, stop_at=stop_at)
        slots.add((stop_at - 1) % BLOCK)
    assert slots == set(range(BLOCK))


@pytest.mark.parametrize("max_new_tokens", [1, 2, NEW])
def test_prompt_that_ends_in_an_end_token_is_continued(llama, max_new_tokens):
    eos = [int(PROMPT[0, -1]), 99]
    expected = generate(llama, eos_token_id=eos, max_new_tokens=max_new_tokens)
    assert expected.shape[1] == PROMPT.shape[1] + max_new_tokens
    drafter = make_oracle(llama, right_for(2, 0, 6))
    output = generate(llama, eos_token_id=eos, max_new_tokens=max_new_tokens, assistant_model=drafter)
    assert output.tolist() == expected.tolist()
    assert drafter.accepted_lengths == expected_lengths(drafter.is_right, max_new_tokens, BLOCK)


def test_drafter_that_always_proposes_the_end_does_not_end_the_text(llama):
    expected = generate(llama, eos_token_id=50)
    assert 50 not in expected
    drafter = OracleDrafter(make_config(llama), llama, torch.full((1, 99), 50))
    assert generate(llama, eos_token_id=50, assistant_model=drafter).tolist() == expected.tolist()
    assert drafter.proposals[0] == [50] * (BLOCK - 1)


def test_end_token_cuts_the_reference_at_the_same_lengths():
    target, drafter = make_small_vocabulary_pair()
    prompt = PROMPT % 8
    for end in range(8):
        reference = reference_dflash_greedy(target, drafter, prompt, NEW, eos=[end])
        output = generate(target, prompt, eos_token_id=end, assistant_model=drafter)
        assert output.tolist() == reference.tokens.tolist()
        assert drafter.accepted_lengths == reference.accepted_lengths
        assert drafter.proposals == reference.proposals


def test_min_new_tokens_holds_back_the_end_token(llama):
    kwargs = {"eos_token_id": new_tokens(generate(llama))[3], "min_new_tokens": 11}
    expected = generate(llama, **kwargs)
    assert expected.shape[1] >= PROMPT.shape[1] + 11
    for pattern in (always_right, right_for(2, 0, 6)):
        drafter = make_oracle(llama, pattern)
        assert generate(llama, assistant_model=drafter, **kwargs).tolist() == expected.tolist()


# Length


@pytest.mark.parametrize("max_new_tokens", range(1, 2 * BLOCK + 2))
def test_length_limit_is_exact_and_the_last_block_shrinks_to_it(llama, max_new_tokens):
    drafter = make_oracle(llama, max_new_tokens=2 * BLOCK)
    expected = generate(llama, max_new_tokens=max_new_tokens)
    rows = []
    handle = llama.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    output = generate(llama, max_new_tokens=max_new_tokens, assistant_model=drafter)
    handle.remove()
    assert output.tolist() == expected.tolist()
    lengths = expected_lengths(always_right, max_new_tokens, BLOCK)
    assert drafter.accepted_lengths == lengths and sum(lengths) == max_new_tokens - 1
    assert rows == [PROMPT.shape[1], *lengths]
    # A round with room for one token has nothing to draft for.
    assert len(drafter.calls) == sum(length > 1 for length in lengths)
    assert all(call.width == BLOCK for call in drafter.calls)


def test_drafter_is_not_called_for_a_last_single_token(llama):
    drafter = make_oracle(llama, never_right)
    generate(llama, max_new_tokens=10, assistant_model=drafter)
    assert drafter.accepted_lengths == [1] * 9
    assert [len(proposals) for proposals in drafter.proposals] == [7, 7, 6, 5, 4, 3, 2, 1, 0]
    assert len(drafter.calls) == 8


def test_length_limit_of_a_batch_is_exact(llama):
    drafter = make_batch_oracle(llama, max_new_tokens=2 * BLOCK)
    for max_new_tokens in (1, 2, 3, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1):
        output = generate_batch(llama, max_new_tokens=max_new_tokens, assistant_model=drafter)
        assert output.tolist() == generate_batch(llama, max_new_tokens=max_new_tokens).tolist()
        lengths = [expected_lengths(pattern, max_new_tokens, BLOCK) for pattern in BATCH_PATTERNS]
        assert drafter.all_accepted_lengths == lengths


def test_shorter_length_criterion_is_exact(llama):
    criteria = [MaxLengthCriteria(PROMPT.shape[1] + 5)]
    output = generate(llama, assistant_model=make_oracle(llama), stopping_criteria=criteria)
    assert output.tolist() == generate(llama, max_new_tokens=5).tolist()


# Other criteria


@pytest.mark.parametrize("num_words", [1, 2, 3])
def test_stop_strings_stop_as_in_plain_generate(num_words):
    target, tokenizer = make_target("llama"), make_tokenizer()
    tokenizer.add_tokens(["abcdef"])  # Transformers reads the vocabulary by this prefix
    words = tokenizer.convert_ids_to_tokens(new_tokens(generate(target)))
    for start in (0, 5, 11):
        stop_string = " ".join(words[start : start + num_words])[1:]  # without the first word's first letter
        kwargs = {"stop_strings": [stop_string, "nowhere"], "tokenizer": tokenizer}
        expected = generate(target, **kwargs)
        assert expected.shape[1] <= PROMPT.shape[1] + start + num_words
        drafter = make_oracle(target, MIXED)
        assert generate(target, assistant_model=drafter, **kwargs).tolist() == expected.tolist()


class RecordingCriterion(StoppingCriteria):
    """Ends a row behind `end`, and writes its calls down."""

    def __init__(self, end=None, start=PROMPT.shape[1]):
        self.end, self.start = end, start
        self.calls = []

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append((input_ids.tolist(), scores, kwargs))
        if self.end is None:
            return torch.zeros(len(input_ids), dtype=torch.bool)
        return (input_ids[:, self.start :] == self.end).any(dim=1)


@pytest.mark.parametrize("place", [0, 1, 4, 8, 17, None])
@pytest.mark.parametrize("has_scores", [False, True], ids=["ids", "scores"])
def test_custom_criterion_gets_each_token_once_with_the_arguments_of_plain_generate(llama, place, has_scores):
    end = None if place is None else new_tokens(generate(llama))[place]
    options = {"return_dict_in_generate": True, "output_scores": True} if has_scores else {}
    plain, ours = RecordingCriterion(end), RecordingCriterion(end)
    generate(llama, stopping_criteria=[plain], **options)
    generate(llama, assistant_model=make_oracle(llama, MIXED), stopping_criteria=[ours], **options)
    assert len(ours.calls) == len(plain.calls)
    for (our_ids, our_scores, our_kwargs), (ids, scores, kwargs) in zip(ours.calls, plain.calls, strict=True):
        assert our_ids == ids and our_kwargs == kwargs
        assert (our_scores is not None) == has_scores
        torch.testing.assert_close(our_scores, scores, atol=1e-4, rtol=1e-4)


def test_every_criterion_is_asked_even_after_another_has_met(llama):
    end = new_tokens(generate(llama))[9]
    first, last = RecordingCriterion(end), RecordingCriterion(end)
    drafter = make_oracle(llama)
    output = generate(llama, assistant_model=drafter, stopping_criteria=[first, last], eos_token_id=[end])
    num_new = output.shape[1] - PROMPT.shape[1]
    assert len(first.calls) == len(last.calls) == num_new <= 10


@pytest.mark.parametrize("max_time", [0.5, 4.5, 9.5, 20.5])
def test_max_time_stops_inside_a_block_by_the_clock(llama, max_time, monkeypatch):
    """The clock ticks when it is read."""

    def decode(**kwargs):
        times = iter(range(10**6))
        monkeypatch.setattr(stopping_criteria_module, "time", SimpleNamespace(time=lambda: next(times)))
        return generate(llama, max_time=max_time, **kwargs)

    expected = decode()
    assert expected.shape[1] == PROMPT.shape[1] + int(max_time) + 1
    assert decode(assistant_model=make_oracle(llama)).tolist() == expected.tolist()


# Batches


@pytest.mark.parametrize("kind", TARGETS)
def test_rows_end_at_different_steps_and_are_padded(kind):
    target = make_target(kind)
    ends, lengths = ragged_ends(target)
    expected = generate_batch(target, eos_token_id=ends)
    drafter = make_batch_oracle(target)
    output = generate_batch(target, eos_token_id=ends, assistant_model=drafter)
    assert output.tolist() == expected.tolist()
    assert output.shape[1] == BATCH.shape[1] + max(lengths)
    for row, (length, pattern) in enumerate(zip(lengths, BATCH_PATTERNS, strict=True)):
        assert set(output[row, BATCH.shape[1] + length :].tolist()) <= {target.config.pad_token_id}
        assert drafter.all_accepted_lengths[row] == expected_lengths(pattern, NEW, BLOCK, stop_at=length)


@pytest.mark.parametrize("pad", [0, 77, "the end token"])
def test_ended_rows_are_filled_with_the_pad_token_of_the_call(llama, pad):
    ends, lengths = ragged_ends(llama)
    kwargs = {"eos_token_id": ends, "pad_token_id": ends[0] if pad == "the end token" else pad}
    output = generate_batch(llama, assistant_model=make_batch_oracle(llama), **kwargs)
    assert output.tolist() == generate_batch(llama, **kwargs).tolist()
    row = lengths.index(min(lengths))
    assert set(output[row, BATCH.shape[1] + min(lengths) :].tolist()) == {kwargs["pad_token_id"]}


def test_first_token_may_end_some_rows_or_all(llama):
    firsts = generate_batch(llama)[:, BATCH.shape[1]].tolist()
    for ends in (firsts[:1], firsts[1:], firsts):
        drafter = make_batch_oracle(llama)
        expected = generate_batch(llama, eos_token_id=ends)
        assert generate_batch(llama, eos_token_id=ends, assistant_model=drafter).tolist() == expected.tolist()
        is_ended = [first in ends for first in firsts]
        assert [lengths == [] for lengths in drafter.all_accepted_lengths] == is_ended


class EndsRowsAt(StoppingCriteria):
    """Ends each row of `BATCH` after its own number of new tokens."""

    def __init__(self, *counts):
        self.counts = dict(zip(BATCH[:, -1].tolist(), counts, strict=True))

    def __call__(self, input_ids, scores, **kwargs):
        num_new = input_ids.shape[1] - BATCH.shape[1]
        return torch.tensor([num_new >= self.counts[row[BATCH.shape[1] - 1]] for row in input_ids.tolist()])


@pytest.mark.parametrize("counts", [(4, 26, 13), (1, 1, 1), (30, 2, 29), (9, 9, 8)], ids=str)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_rows_go_on_until_the_last_ends_when_no_criterion_has_end_tokens(kind, counts):
    target = make_target(kind)
    criteria = [EndsRowsAt(*counts)]
    expected = generate_batch(target, stopping_criteria=criteria)
    # No row is padded: the early ones go on.
    assert expected.tolist() == generate_batch(target, max_new_tokens=max(counts)).tolist()
    for patterns in (BATCH_PATTERNS, [always_right, never_right, always_right], [never_right, always_right, MIXED]):
        drafter = make_batch_oracle(target, patterns)
        output = generate_batch(target, stopping_criteria=criteria, assistant_model=drafter)
        assert output.tolist() == expected.tolist()


def test_rows_are_padded_when_a_custom_criterion_has_end_tokens(llama):
    ends, _ = ragged_ends(llama)
    criterion = RecordingCriterion(ends[1], BATCH.shape[1])
    criterion.eos_token_id = torch.tensor(ends[1:])
    kwargs = {"stopping_criteria": [criterion], "pad_token_id": 77}
    expected = generate_batch(llama, **kwargs)
    assert 77 in expected[:, BATCH.shape[1] :]
    output = generate_batch(llama, assistant_model=make_batch_oracle(llama), **kwargs)
    assert output.tolist() == expected.tolist()


def test_custom_criterion_of_a_batch_gets_each_rows_prefixes_once_and_in_order(llama):
    ends, lengths = ragged_ends(llama)
    criterion = RecordingCriterion()
    drafter = make_batch_oracle(llama)
    output = generate_batch(llama, eos_token_id=ends, assistant_model=drafter, stopping_criteria=[criterion])
    seen = [ids for ids, _, _ in criterion.calls]
    for text, length in zip(output.tolist(), lengths, strict=True):
        prefixes = [[text[: BATCH.shape[1] + count]] for count in range(1, length + 1)]
        assert [ids for ids in seen if ids[0][: BATCH.shape[1]] == text[: BATCH.shape[1]]] == prefixes
