"""What a call with a drafter returns and streams is what plain decoding returns and streams."""

import asyncio
import threading

import pytest
import torch
from generation_material import (
    BATCH,
    BATCH_PATTERNS,
    BLOCK,
    MIXED,
    NEW,
    PROMPT,
    cache_argument,
    cache_of,
    generate,
    generate_batch,
    make_batch_oracle,
    make_config,
    make_oracle,
    make_target,
    new_tokens,
    ragged_ends,
)
from oracle_drafters import OracleDrafter, RecordingStreamer, always_right, expected_lengths
from tiny_material import make_tokenizer
from transformers import AsyncTextIteratorStreamer, DynamicCache, TextIteratorStreamer, TextStreamer
from transformers.utils import logging as transformers_logging

ALL = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
}


@pytest.fixture
def llama():
    return make_target("llama")


def make_eager_target(kind):
    overrides = {"sliding_window": 4} if kind == "gemma3" else {"initializer_range": 0.2}
    target = make_target(kind, **overrides)
    target.set_attn_implementation("eager")
    return target


def assert_close(ours, plain):
    torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-4)


# Dictionaries


@pytest.mark.parametrize("pattern", [always_right, MIXED], ids=["always", "mixed"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_every_output_equals_plain_generate(kind, pattern):
    target = make_eager_target(kind)
    kwargs = ALL | {"output_attentions": True, "repetition_penalty": 1.2}
    plain = generate(target, **kwargs)
    text = generate(target, repetition_penalty=1.2, max_new_tokens=NEW + BLOCK)
    drafter = OracleDrafter(make_config(target), target, text, pattern)
    ours = generate(target, assistant_model=drafter, **kwargs)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    for name in ("scores", "logits", "hidden_states", "attentions"):
        assert len(ours[name]) == len(plain[name]) == NEW, name
        for our_step, step in zip(ours[name], plain[name], strict=True):
            assert_close(our_step, step)
    assert ours.accepted_lengths == [drafter.accepted_lengths] == [expected_lengths(pattern, NEW, BLOCK)]


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_rows_of_a_batch_have_their_outputs_up_to_their_ends(kind):
    target = make_eager_target(kind)
    ends, lengths = ragged_ends(target)
    plain = generate_batch(target, eos_token_id=ends, **ALL)
    ours = generate_batch(target, eos_token_id=ends, assistant_model=make_batch_oracle(target), **ALL)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    steps = max(lengths)
    for name in ("scores", "logits", "hidden_states"):
        assert len(ours[name]) == len(plain[name]) == steps
    after_end = torch.full((target.config.vocab_size,), -torch.inf)
    after_end[target.config.pad_token_id] = 0.0
    for step in range(steps):
        for row, length in enumerate(lengths):
            for name in ("scores", "logits"):
                assert ours[name][step].shape == plain[name][step].shape
                assert_close(ours[name][step][row], plain[name][step][row] if step < length else after_end)
            for our_states, states in zip(ours.hidden_states[step], plain.hidden_states[step], strict=True):
                assert our_states.shape == states.shape
                is_text = slice((BATCH[row] == 1).sum(), None) if step == 0 else slice(None)
                wanted = states[row, is_text]
                assert_close(our_states[row, is_text], wanted if step < length else torch.zeros_like(wanted))


def test_attentions_of_a_batch_are_decoded_without_the_drafter(caplog):
    transformers_logging.warning_once.cache_clear()
    target = make_eager_target("llama")
    kwargs = {"return_dict_in_generate": True, "output_attentions": True, "max_new_tokens": 8}
    drafter = make_batch_oracle(target)
    plain = generate_batch(target, **kwargs)
    for _ in range(2):
        ours = generate_batch(target, assistant_model=drafter, **kwargs)
        assert ours.sequences.tolist() == plain.sequences.tolist()
        torch.testing.assert_close(ours.attentions, plain.attentions)
    assert drafter.calls == []
    assert sum("decoded without its drafter" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("is_batch", [False, True], ids=["one prompt", "batch"])
def test_transition_scores_equal_those_of_plain_generate(llama, is_batch):
    call = generate_batch if is_batch else generate
    kwargs = {"return_dict_in_generate": True, "output_scores": True, "repetition_penalty": 1.2}
    plain = call(llama, **kwargs)
    ours = call(llama, assistant_model=make_batch_oracle(llama) if is_batch else make_oracle(llama), **kwargs)
    found, wanted = (
        llama.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
        for output in (ours, plain)
    )
    assert_close(found, wanted)


def test_accepted_lengths_and_tau_tell_each_rows_rounds(llama):
    drafter = make_batch_oracle(llama)
    output = generate_batch(llama, assistant_model=drafter, return_dict_in_generate=True)
    lengths = [expected_lengths(pattern, NEW, BLOCK) for pattern in BATCH_PATTERNS]
    assert output.accepted_lengths == drafter.all_accepted_lengths == lengths
    assert output.tau == sum(map(sum, lengths)) / sum(map(len, lengths))
    short = generate(llama, assistant_model=drafter, return_dict_in_generate=True, max_new_tokens=1)
    assert short.accepted_lengths == [[]] and short.tau == 1.0


def test_outputs_that_were_not_asked_for_are_none(llama):
    output = generate(llama, assistant_model=make_oracle(llama), return_dict_in_generate=True)
    assert [output.scores, output.logits, output.hidden_states, output.attentions] == [None] * 4


# The returned cache


def assert_equal_caches(ours, plain):
    assert ours.get_seq_length() == plain.get_seq_length()
    for our_layer, layer in zip(ours.layers, plain.layers, strict=True):
        assert type(our_layer) is type(layer)
        assert_close(our_layer.keys, layer.keys)
        assert_close(our_layer.values, layer.values)
        assert getattr(our_layer, "record_past", False) == getattr(layer, "record_past", False)


@pytest.mark.parametrize("max_new_tokens", [1, 2, 5, NEW])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_returned_cache_equals_the_one_of_plain_generate_and_can_be_continued(kind, max_new_tokens):
    target = make_eager_target(kind)
    kwargs = {"return_dict_in_generate": True, "max_new_tokens": max_new_tokens}
    plain = generate(target, **kwargs)
    ours = generate(target, assistant_model=make_oracle(target, MIXED), **kwargs)
    assert_equal_caches(cache_of(ours), cache_of(plain))
    assert generate(target, ours.sequences, **{cache_argument(target): cache_of(ours)}).tolist() == (
        generate(target, plain.sequences, **{cache_argument(target): cache_of(plain)}).tolist()
    )


def test_returned_cache_of_a_batch_has_no_gaps(llama):
    kwargs = {"return_dict_in_generate": True}
    plain = generate_batch(llama, **kwargs)
    ours = generate_batch(llama, assistant_model=make_batch_oracle(llama), **kwargs)
    is_text = torch.cat([BATCH != 1, torch.ones(3, NEW - 1, dtype=torch.bool)], dim=1)
    for our_layer, layer in zip(cache_of(ours).layers, cache_of(plain).layers, strict=True):
        # Columns without a token may hold anything.
        width = our_layer.keys.shape[2]
        for states, wanted in ((our_layer.keys, layer.keys), (our_layer.values, layer.values)):
            columns = is_text[:, -width:]
            assert_close(states.transpose(1, 2)[columns], wanted[:, :, -width:].transpose(1, 2)[columns])
    ended = generate_batch(
        llama, assistant_model=make_batch_oracle(llama), eos_token_id=ragged_ends(llama)[0], **kwargs
    )
    assert cache_of(ended) is None


@pytest.mark.parametrize("eos_place", [1, 4, 9])
def test_given_cache_is_left_as_plain_generate_leaves_it(llama, eos_place):
    eos = new_tokens(generate(llama))[eos_place]
    caches = [DynamicCache(config=llama.config) for _ in range(2)]
    plain = generate(llama, eos_token_id=eos, **{cache_argument(llama): caches[0]})
    drafter = make_oracle(llama, MIXED)
    ours = generate(llama, eos_token_id=eos, assistant_model=drafter, **{cache_argument(llama): caches[1]})
    assert ours.tolist() == plain.tolist()
    assert_equal_caches(caches[1], caches[0])


# Streamers


def test_text_streamer_prints_what_it_prints_in_plain_generate(llama, capsys):
    printed = []
    for kwargs in ({}, {"assistant_model": make_oracle(llama, MIXED)}):
        generate(llama, streamer=TextStreamer(make_tokenizer(), skip_prompt=True), **kwargs)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != ""


def test_iterator_streamer_gives_the_text_in_a_thread(llama):
    streamer = TextIteratorStreamer(make_tokenizer(), timeout=20)
    kwargs = {"assistant_model": make_oracle(llama, MIXED), "streamer": streamer}
    thread = threading.Thread(target=generate, args=(llama,), kwargs=kwargs)
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == make_tokenizer().decode(generate(llama)[0])


def test_asynchronous_streamer_gives_the_text(llama):
    async def stream() -> str:
        streamer = AsyncTextIteratorStreamer(make_tokenizer(), timeout=20)
        kwargs = {"assistant_model": make_oracle(llama, MIXED), "streamer": streamer}
        thread = threading.Thread(target=generate, args=(llama,), kwargs=kwargs)
        thread.start()
        pieces = [piece async for piece in streamer]
        thread.join()
        return "".join(pieces)

    assert asyncio.run(stream()) == make_tokenizer().decode(generate(llama)[0])


def test_token_streamer_gets_the_same_puts_through_custom_generate(llama):
    drafter = make_oracle(llama, MIXED)
    usual, own = RecordingStreamer(), RecordingStreamer()
    generate(llama, assistant_model=drafter, streamer=usual)
    generate(llama, custom_generate=drafter.decode, token_streamer=own)
    assert own.puts == usual.puts and own.has_ended
    assert own.puts[0] == PROMPT[0].tolist() and own.accepted_lengths == expected_lengths(MIXED, NEW, BLOCK)


def test_streamers_are_refused_for_a_batch(llama):
    drafter = make_batch_oracle(llama)
    with pytest.raises(ValueError, match="A streamer takes one row, but the batch has 3"):
        generate_batch(llama, assistant_model=drafter, streamer=RecordingStreamer())
    with pytest.raises(ValueError, match="A streamer takes one row, but the batch has 3"):
        generate_batch(llama, custom_generate=drafter.decode, token_streamer=RecordingStreamer())


def test_token_streamer_gets_the_text_that_is_decoded_without_the_drafter(llama, caplog):
    streamer = RecordingStreamer()
    drafter = make_batch_oracle(llama)
    output = generate_batch(llama, custom_generate=drafter.decode, token_streamer=streamer, output_attentions=True)
    assert len(streamer.tokens) == output.numel() and streamer.has_ended
    assert drafter.calls == []


def test_drawn_proposals_and_trees_exclude_each_other(llama):
    drafter = make_oracle(llama)
    with pytest.raises(ValueError, match="leave out `tree_builder`, or `sample_drafts`"):
        generate(llama, custom_generate=drafter.decode, sample_drafts=True, tree_builder=lambda logits, anchors: None)
