"""Decoding with a drafter runs with the caches and inputs that plain decoding takes, and leaves them as it does."""

import copy

import pytest
import torch
from generation_material import (
    BATCH,
    BATCH_MASK,
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
    make_drafter,
    make_oracle,
    make_target,
    read_prefix,
)
from oracle_drafters import OracleDrafter, always_right, expected_lengths, never_right
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache, QuantizedLayer


@pytest.fixture
def llama():
    return make_target("llama")


# Given caches


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_given_cache_that_holds_a_prefix_is_used(kind, num_tokens):
    target = make_target(kind, **({"sliding_window": 4} if kind == "gemma3" else {}))
    expected = generate(target, **read_prefix(target, num_tokens))
    drafter = make_oracle(target, MIXED)
    given = read_prefix(target, num_tokens)
    output = generate(target, assistant_model=drafter, **given)
    assert output.tolist() == expected.tolist() == generate(target).tolist()
    assert drafter.accepted_lengths == expected_lengths(MIXED, NEW, BLOCK)
    first = drafter.calls[0]
    assert first.num_features == PROMPT.shape[1] - num_tokens  # the rest was not read again
    assert first.positions == list(range(num_tokens, PROMPT.shape[1] + BLOCK))
    (cache,) = given.values()
    assert cache.get_seq_length() == output.shape[1] - 1


def test_only_the_new_tokens_may_be_given_with_a_cache_of_the_others(llama):
    kwargs = {"attention_mask": torch.ones_like(PROMPT)}
    expected = generate(llama, PROMPT[:, 4:], **kwargs, **read_prefix(llama, 4))
    drafter = make_oracle(llama, MIXED)
    output = generate(llama, PROMPT[:, 4:], assistant_model=drafter, **kwargs, **read_prefix(llama, 4))
    assert output.tolist() == expected.tolist() == generate(llama)[:, 4:].tolist()
    assert drafter.accepted_lengths == expected_lengths(MIXED, NEW, BLOCK)


def test_batch_goes_on_from_a_padded_prefix(llama):
    def prefix():
        return read_prefix(llama, 4, BATCH, attention_mask=BATCH_MASK[:, :4], position_ids=positions[:, :4])

    positions = (BATCH_MASK.cumsum(dim=1) - 1).clamp(min=0)
    expected = generate_batch(llama, **prefix())
    drafter = make_batch_oracle(llama)
    assert generate_batch(llama, assistant_model=drafter, **prefix()).tolist() == expected.tolist()
    assert drafter.all_accepted_lengths == [expected_lengths(pattern, NEW, BLOCK) for pattern in BATCH_PATTERNS]


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_cache_of_an_earlier_turn_goes_on(kind):
    target = make_target(kind)
    first = generate(target, assistant_model=make_oracle(target, MIXED), return_dict_in_generate=True)
    cache = cache_of(first)
    assert cache.get_seq_length() == first.sequences.shape[1] - 1
    prompt = torch.cat([first.sequences, PROMPT], dim=1)
    kwargs = {"attention_mask": torch.ones_like(prompt)}
    text = generate(target, prompt, max_new_tokens=NEW + BLOCK, **kwargs)
    expected = generate(target, prompt, **kwargs, **{cache_argument(target): copy.deepcopy(cache)})
    drafter = OracleDrafter(make_config(target), target, text, MIXED)
    output = generate(target, prompt, assistant_model=drafter, **kwargs, **{cache_argument(target): cache})
    assert output.tolist() == expected.tolist()
    assert drafter.accepted_lengths == expected_lengths(MIXED, NEW, BLOCK)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_given_empty_cache_without_a_config_is_used(kind):
    target = make_target(kind)
    cache = DynamicCache()
    drafter = make_oracle(target, MIXED)
    assert generate(target, assistant_model=drafter, **{cache_argument(target): cache}).tolist() == (
        generate(target).tolist()
    )
    assert cache.get_seq_length() == PROMPT.shape[1] + NEW - 1


# Kinds of caches


@pytest.mark.parametrize("max_new_tokens", [1, 2, 9, NEW])
@pytest.mark.parametrize("pattern", [always_right, never_right, MIXED], ids=["always", "never", "mixed"])
def test_static_cache_is_filled_to_the_last_place(llama, max_new_tokens, pattern):
    kwargs = {"max_new_tokens": max_new_tokens, "cache_implementation": "static"}
    drafter = make_oracle(llama, pattern, max_new_tokens=max_new_tokens)
    output = generate(llama, assistant_model=drafter, **kwargs)
    assert output.tolist() == generate(llama, **kwargs).tolist()
    assert output.shape[1] == PROMPT.shape[1] + max_new_tokens


@pytest.mark.parametrize("max_new_tokens", [1, 2, 9, NEW])
def test_static_cache_of_a_batch_is_filled_to_the_last_place(llama, max_new_tokens):
    kwargs = {"max_new_tokens": max_new_tokens, "cache_implementation": "static"}
    drafter = make_batch_oracle(llama, max_new_tokens=max_new_tokens)
    output = generate_batch(llama, assistant_model=drafter, **kwargs)
    assert output.tolist() == generate_batch(llama, **kwargs).tolist()
    if max_new_tokens == NEW:
        assert max(map(max, drafter.all_accepted_lengths)) > 3


def test_static_cache_of_rows_that_end_in_different_rounds_is_not_handed_out(llama):
    kwargs = {"cache_implementation": "static", "return_dict_in_generate": True}
    output = generate_batch(
        llama, assistant_model=make_batch_oracle(llama, [always_right, never_right, MIXED]), **kwargs
    )
    assert output.sequences.tolist() == generate_batch(llama).tolist() and cache_of(output) is None
    output = generate_batch(llama, assistant_model=make_batch_oracle(llama, [MIXED] * 3), **kwargs)
    assert cache_of(output).get_seq_length() == BATCH.shape[1] + NEW - 1


def test_given_static_cache_of_exactly_the_needed_size_works(llama):
    drafter = make_oracle(llama, MIXED)
    cache = StaticCache(config=llama.config, max_cache_len=PROMPT.shape[1] + NEW - 1)
    output = generate(llama, assistant_model=drafter, **{cache_argument(llama): cache})
    assert output.tolist() == generate(llama).tolist()
    assert int(cache.get_seq_length()) == PROMPT.shape[1] + NEW - 1


def test_static_cache_of_a_sliding_window_is_refused_unless_it_never_slides():
    target = make_target("gemma3")
    with pytest.raises(ValueError, match="static cache of a sliding-window layer forgets tokens"):
        generate(target, assistant_model=make_oracle(target), cache_implementation="static")
    target = make_target("gemma3", sliding_window=PROMPT.shape[1] + NEW)
    expected = generate(target, cache_implementation="static")
    output = generate(target, assistant_model=make_oracle(target, MIXED), cache_implementation="static")
    assert output.tolist() == expected.tolist()


def test_offloaded_cache_works(llama):
    try:
        expected = generate(llama, cache_implementation="offloaded")
    except (RuntimeError, ValueError, NotImplementedError, AssertionError) as error:
        pytest.skip(f"Plain generate cannot offload on this machine: {error}")
    output = generate(llama, assistant_model=make_oracle(llama, MIXED), cache_implementation="offloaded")
    assert output.tolist() == expected.tolist()


class LosslessQuantizedLayer(QuantizedLayer):
    """A quantized layer that needs no backend."""

    def _quantize(self, tensor, axis):
        return tensor

    def _dequantize(self, tensor):
        return tensor


def test_quantized_cache_is_refused_by_name(llama):
    cache = Cache(layers=[LosslessQuantizedLayer() for _ in range(llama.config.num_hidden_layers)])
    with pytest.raises(ValueError, match="rejected tokens back out of the cache, which LosslessQuantizedLayer cannot"):
        generate(llama, assistant_model=make_oracle(llama), **{cache_argument(llama): cache})


@pytest.mark.parametrize("place", ["argument", "config"])
def test_text_is_the_same_without_a_cache(llama, place):
    if place == "config":
        llama.generation_config.use_cache = False
    kwargs = {} if place == "config" else {"use_cache": False}
    drafter = make_oracle(llama, MIXED)
    assert generate(llama, assistant_model=drafter, **kwargs).tolist() == generate(llama, **kwargs).tolist()
    assert drafter.accepted_lengths == expected_lengths(MIXED, NEW, BLOCK)
    drafter = make_batch_oracle(llama)
    assert generate_batch(llama, assistant_model=drafter, **kwargs).tolist() == generate_batch(llama).tolist()


# Recurrent targets


@pytest.mark.parametrize("pattern", [always_right, never_right, MIXED], ids=["always", "never", "mixed"])
def test_recurrent_target_gives_its_text(pattern):
    target = make_target("qwen3_next")
    expected = generate(target, max_new_tokens=20)
    drafter = make_oracle(target, pattern, max_new_tokens=20)
    assert generate(target, max_new_tokens=20, assistant_model=drafter).tolist() == expected.tolist()
    assert drafter.accepted_lengths == expected_lengths(pattern, 20, BLOCK)


def test_padding_of_a_single_prompt_stays_out_of_the_recurrent_state():
    target = make_target("qwen3_next")
    padding = torch.ones(1, 4, dtype=torch.long)
    inputs = {
        "input_ids": torch.cat([padding, PROMPT], dim=1),
        "attention_mask": torch.cat([0 * padding, torch.ones_like(PROMPT)], dim=1),
        "max_new_tokens": 20,
    }
    expected = generate(target, **inputs)
    drafter = make_oracle(target, MIXED, max_new_tokens=20)
    assert generate(target, **inputs, assistant_model=drafter).tolist() == expected.tolist()
    assert drafter.accepted_lengths == expected_lengths(MIXED, 20, BLOCK)


def test_batch_of_a_recurrent_target_is_refused():
    target = make_target("qwen3_next")
    with pytest.raises(ValueError, match="'qwen3_next'.* one prompt at a time with a drafter, got 3 rows"):
        generate_batch(target, assistant_model=make_drafter(target))


# Other inputs


@torch.no_grad()
def test_input_embeddings_give_the_text(llama):
    drafter = make_oracle(llama, MIXED)
    embeds = llama.get_input_embeddings()(PROMPT)
    kwargs = {"inputs_embeds": embeds, "max_new_tokens": NEW, "do_sample": False}
    for arguments in ((PROMPT,), ()):
        output = llama.generate(*arguments, assistant_model=drafter, **kwargs)
        assert output.tolist() == llama.generate(*arguments, **kwargs).tolist()
        assert output[:, -NEW:].tolist() == generate(llama)[:, -NEW:].tolist()
        assert drafter.accepted_lengths == expected_lengths(MIXED, NEW, BLOCK)


@torch.no_grad()
def test_input_embeddings_of_a_padded_batch_give_the_text(llama):
    drafter = make_batch_oracle(llama)
    embeds = llama.get_input_embeddings()(BATCH)
    kwargs = {"inputs_embeds": embeds, "attention_mask": BATCH_MASK, "max_new_tokens": NEW, "do_sample": False}
    output = llama.generate(assistant_model=drafter, **kwargs)
    assert output.tolist() == llama.generate(**kwargs).tolist() == generate_batch(llama)[:, -NEW:].tolist()
    assert drafter.all_accepted_lengths == [expected_lengths(pattern, NEW, BLOCK) for pattern in BATCH_PATTERNS]


@pytest.mark.parametrize("start", [0, 7])
def test_given_position_ids_are_counted_on(llama, start):
    kwargs = {"position_ids": torch.arange(start, start + PROMPT.shape[1])[None]}
    kwargs |= {"attention_mask": torch.ones_like(PROMPT)}
    expected = generate(llama, **kwargs)
    drafter = make_oracle(llama, MIXED, **kwargs)
    assert generate(llama, assistant_model=drafter, **kwargs).tolist() == expected.tolist()
    assert drafter.accepted_lengths == expected_lengths(MIXED, NEW, BLOCK)


@pytest.mark.parametrize("chunk", [1, 4, 6, 50])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_prompt_that_is_read_in_chunks_gives_the_same_text_and_features(kind, chunk):
    target = make_target(kind, **({"sliding_window": 4} if kind == "gemma3" else {}))
    drafter = make_oracle(target, MIXED)
    output = generate(target, assistant_model=drafter, prefill_chunk_size=chunk)
    assert output.tolist() == generate(target, prefill_chunk_size=chunk).tolist()
    assert drafter.accepted_lengths == expected_lengths(MIXED, NEW, BLOCK)
    states = drafter.calls[0].hidden_states
    generate(target, assistant_model=drafter)
    torch.testing.assert_close(states, drafter.calls[0].hidden_states, atol=1e-4, rtol=1e-4)


def test_padded_batch_that_is_read_in_chunks_gives_the_same_text(llama):
    drafter = make_batch_oracle(llama)
    output = generate_batch(llama, assistant_model=drafter, prefill_chunk_size=4)
    assert output.tolist() == generate_batch(llama, prefill_chunk_size=4).tolist()
    assert drafter.all_accepted_lengths == [expected_lengths(pattern, NEW, BLOCK) for pattern in BATCH_PATTERNS]
