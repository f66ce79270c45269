"""Decoding with a drafter gives the target's own greedy text, whatever the drafter proposes."""

import threading
import time

import pytest
import torch
from generation_material import (
    BATCH,
    BATCH_MASK,
    BATCH_PATTERNS,
    BLOCK,
    DRAFTERS,
    MIXED,
    NEW,
    PATTERNS,
    PROMPT,
    TARGETS,
    count_hooks,
    generate,
    generate_batch,
    load_authors_twin,
    make_batch_oracle,
    make_config,
    make_drafter,
    make_oracle,
    make_small_vocabulary_pair,
    make_target,
)
from oracle_drafters import (
    OracleDrafter,
    RecordingStreamer,
    always_right,
    expected_lengths,
    reference_dflash_greedy,
    reference_greedy,
    right_for,
)
from transformers import LogitsProcessor, T5Config, T5ForConditionalGeneration


@pytest.fixture
def llama():
    return make_target("llama")


# Text and accepted lengths


@pytest.mark.parametrize("kind", TARGETS)
def test_text_equals_plain_generate_for_every_pattern(kind):
    target = make_target(kind)
    text = reference_greedy(target, PROMPT, NEW + BLOCK)
    expected = text[:, : PROMPT.shape[1] + NEW]
    assert len(set(expected[0].tolist())) > 10
    torch.testing.assert_close(generate(target), expected)
    for name, pattern in PATTERNS.items():
        drafter = OracleDrafter(make_config(target), target, text, pattern)
        streamer = RecordingStreamer()
        output = generate(target, assistant_model=drafter, streamer=streamer)
        assert output.tolist() == expected.tolist(), name
        lengths = expected_lengths(pattern, NEW, BLOCK)
        assert streamer.accepted_lengths == drafter.accepted_lengths == lengths, name


@pytest.mark.parametrize("kind", TARGETS)
def test_batch_gives_every_row_its_text_and_its_accepted_lengths(kind):
    target = make_target(kind)
    drafter = make_batch_oracle(target)
    assert generate_batch(target, assistant_model=drafter).tolist() == generate_batch(target).tolist()
    assert drafter.all_accepted_lengths == [expected_lengths(pattern, NEW, BLOCK) for pattern in BATCH_PATTERNS]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_text_is_right_when_it_outgrows_the_targets_sliding_window(implementation):
    target = make_target("gemma3", sliding_window=4)
    target.set_attn_implementation(implementation)
    drafter = make_oracle(target, MIXED)
    assert generate(target, assistant_model=drafter).tolist() == generate(target).tolist()
    assert drafter.accepted_lengths == expected_lengths(MIXED, NEW, BLOCK)
    drafter = make_batch_oracle(target)
    assert generate_batch(target, assistant_model=drafter).tolist() == generate_batch(target).tolist()
    assert drafter.all_accepted_lengths == [expected_lengths(pattern, NEW, BLOCK) for pattern in BATCH_PATTERNS]


@pytest.mark.parametrize("kind", TARGETS)
def test_random_drafter_gives_the_text_and_proposals_of_the_reference(kind):
    target = make_target(kind)
    drafter = make_drafter(target)
    reference = reference_dflash_greedy(target, drafter, PROMPT, 24)
    output = generate(target, assistant_model=drafter, max_new_tokens=24)
    assert output.tolist() == reference.tokens.tolist() == generate(target, max_new_tokens=24).tolist()
    assert drafter.proposals == reference.proposals
    assert drafter.accepted_lengths == reference.accepted_lengths


@pytest.mark.parametrize("name", DRAFTERS)
def test_accepted_lengths_equal_the_reference(name):
    target, drafter = make_small_vocabulary_pair(**DRAFTERS[name])
    prompt = PROMPT % 8
    reference = reference_dflash_greedy(target, drafter, prompt, NEW)
    streamer = RecordingStreamer()
    output = generate(target, prompt, assistant_model=drafter, streamer=streamer)
    assert output.tolist() == reference.tokens.tolist() == generate(target, prompt).tolist()
    assert drafter.proposals == reference.proposals
    assert drafter.accepted_lengths == streamer.accepted_lengths == reference.accepted_lengths
    assert max(reference.accepted_lengths) > 1


@pytest.mark.parametrize("name", DRAFTERS)
def test_accepted_lengths_of_every_row_equal_the_reference_of_its_prompt(name):
    target, drafter = make_small_vocabulary_pair(**DRAFTERS[name])
    prompts = [row[mask.bool()][None] % 8 for row, mask in zip(BATCH, BATCH_MASK, strict=True)]
    references = [reference_dflash_greedy(target, drafter, prompt, 24) for prompt in prompts]
    output = generate_batch(target, input_ids=BATCH % 8, assistant_model=drafter, max_new_tokens=24)
    for row, (prompt, reference) in enumerate(zip(prompts, references, strict=True)):
        assert output[row, BATCH.shape[1] - prompt.shape[1] :].tolist() == reference.tokens[0].tolist()
        assert drafter.all_accepted_lengths[row] == reference.accepted_lengths


def test_verifying_as_much_as_pays_changes_no_token(llama):
    drafter = make_oracle(llama, MIXED)
    drafter.is_cost_aware = True
    for _ in range(3):
        assert generate(llama, assistant_model=drafter).tolist() == generate(llama).tolist()
    drafter = make_batch_oracle(llama)
    drafter.is_cost_aware = True
    assert generate_batch(llama, assistant_model=drafter).tolist() == generate_batch(llama).tolist()


@pytest.mark.parametrize("name", DRAFTERS)
def test_text_and_accepted_lengths_equal_the_authors_loop(name, monkeypatch):
    target, drafter = make_small_vocabulary_pair(**DRAFTERS[name])
    authors, twin = load_authors_twin(drafter)
    monkeypatch.setattr(authors, "_cuda_time", time.perf_counter)
    prompt = PROMPT % 8
    theirs = authors.dflash_generate(twin, target, prompt, NEW, None, 0.0, return_stats=True)
    output = generate(target, prompt, assistant_model=drafter)
    assert output.tolist() == theirs.output_ids.tolist()
    # Near the end their draft is narrower than a block, ours is not, so the last proposals differ.
    num_comparable, num_new = 0, 1
    while num_new + drafter.config.block_size <= NEW:
        num_new += drafter.accepted_lengths[num_comparable]
        num_comparable += 1
    assert drafter.accepted_lengths[:num_comparable] == theirs.acceptance_lengths[:num_comparable]
    assert max(drafter.accepted_lengths[:num_comparable]) > 1


@pytest.mark.parametrize("kind", TARGETS)
def test_text_equals_the_authors_loop_for_every_target(kind):
    target = make_target(kind)
    drafter = make_drafter(target)
    authors, twin = load_authors_twin(drafter)
    theirs = authors.dflash_generate(twin, target, PROMPT, 24, None, 0.0)
    assert generate(target, assistant_model=drafter, max_new_tokens=24).tolist() == theirs.tolist()


# Positions, padding, widths


def test_positions_are_a_plain_counter_and_the_first_anchor_is_the_first_new_token(llama):
    drafter = make_oracle(llama, right_for(2, 0, 6))
    output = generate(llama, assistant_model=drafter)
    num_context = 0
    for call in drafter.calls:
        assert call.positions == list(range(num_context, num_context + call.num_features + BLOCK))
        num_context += call.num_features
    first = drafter.calls[0]
    assert first.num_features == PROMPT.shape[1]
    torch.testing.assert_close(first.anchor_embedding, llama.get_input_embeddings().weight[output[0, PROMPT.shape[1]]])


def pad_left(input_ids, num_padding=3):
    padded = torch.cat([torch.ones(1, num_padding, dtype=torch.long), input_ids], dim=1)
    return {"input_ids": padded, "attention_mask": (torch.arange(padded.shape[1]) >= num_padding).long()[None]}


@pytest.mark.parametrize("kind", TARGETS)
def test_left_padding_changes_neither_text_nor_proposals(kind):
    target = make_target(kind)
    drafter = make_drafter(target)
    expected = generate(target, max_new_tokens=20, assistant_model=drafter)
    proposals, calls = drafter.proposals, drafter.calls
    output = generate(target, **pad_left(PROMPT), max_new_tokens=20, assistant_model=drafter)
    assert output[:, 3:].tolist() == expected.tolist()
    assert drafter.proposals == proposals
    assert [call.positions for call in drafter.calls] == [call.positions for call in calls]
    torch.testing.assert_close(drafter.calls[0].hidden_states, calls[0].hidden_states, atol=1e-4, rtol=1e-4)


def test_left_padding_keeps_the_accepted_lengths(llama):
    drafter = make_oracle(llama, MIXED)
    output = generate(llama, **pad_left(PROMPT), assistant_model=drafter)
    assert output[:, 3:].tolist() == generate(llama).tolist()
    assert drafter.accepted_lengths == expected_lengths(MIXED, NEW, BLOCK)


def test_prompt_of_one_token_works():
    target, drafter = make_small_vocabulary_pair()
    prompt = torch.tensor([[3]])
    reference = reference_dflash_greedy(target, drafter, prompt, NEW)
    assert generate(target, prompt, assistant_model=drafter).tolist() == reference.tokens.tolist()
    assert drafter.proposals == reference.proposals


@pytest.mark.parametrize("is_batch", [False, True], ids=["one prompt", "batch"])
def test_fewer_assistant_tokens_verify_fewer_but_draft_the_whole_block(llama, is_batch):
    call = generate_batch if is_batch else generate
    drafter = make_batch_oracle(llama, [always_right] * 3) if is_batch else make_oracle(llama)
    output = call(llama, assistant_model=drafter, num_assistant_tokens=5)
    assert output.tolist() == call(llama).tolist()
    assert {drafted.width for drafted in drafter.calls} == {BLOCK}
    assert max(map(len, drafter.proposals)) == 5
    for lengths in drafter.all_accepted_lengths:
        assert lengths == expected_lengths(always_right, NEW, BLOCK, num_proposals=5)


@pytest.mark.parametrize("asked", [0, 8, 12])
def test_more_assistant_tokens_than_trained_are_refused(llama, asked):
    with pytest.raises(ValueError, match=f"`num_assistant_tokens` is {asked}.*proposes 1 to 7"):
        generate(llama, assistant_model=make_drafter(llama), num_assistant_tokens=asked)


# Calls side by side


def test_two_threads_on_one_target_do_not_mix(llama):
    prompts = [PROMPT, PROMPT.flip(1)]
    drafters = [make_drafter(llama) for _ in prompts]
    expected = []
    for prompt, drafter in zip(prompts, drafters, strict=True):
        output = generate(llama, prompt, max_new_tokens=12, assistant_model=drafter)
        expected.append((output.tolist(), drafter.proposals))
    # Each thread's next verify comes after both have read the tapped layers of their last.
    barrier, num_meetings = threading.Barrier(2), [0, 0]
    results = [None, None]

    def work(index):
        def meet():
            if not barrier.broken:  # the other thread has more rounds to go
                try:
                    barrier.wait(timeout=20)
                    num_meetings[index] += 1
                except threading.BrokenBarrierError:
                    pass

        streamer = RecordingStreamer(on_put=meet)
        options = {"max_new_tokens": 12, "assistant_model": drafters[index], "streamer": streamer}
        output = generate(llama, prompts[index], **options)
        barrier.abort()
        results[index] = (output.tolist(), drafters[index].proposals)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == expected
    assert min(num_meetings) >= 5
    assert count_hooks(llama) == 0


@pytest.mark.parametrize("place", ["streamer", "processor"])
def test_generate_inside_generate_disturbs_neither_call(llama, place):
    outer, inner = make_drafter(llama), make_drafter(llama)
    inner_prompt, inner_outputs = PROMPT.flip(1), []

    def run_inner():
        inner_outputs.append(generate(llama, inner_prompt, max_new_tokens=6, assistant_model=inner).tolist())

    class RunsInner(LogitsProcessor):
        def __call__(self, input_ids, scores):
            run_inner()
            return scores

    expected = generate(llama, max_new_tokens=14, assistant_model=outer)
    proposals = outer.proposals
    if place == "streamer":
        options = {"streamer": RecordingStreamer(on_put=run_inner)}
    else:
        options = {"logits_processor": [RunsInner()]}
    output = generate(llama, max_new_tokens=14, assistant_model=outer, **options)
    assert output.tolist() == expected.tolist() and outer.proposals == proposals
    assert len(inner_outputs) >= 5
    assert all(tokens == generate(llama, inner_prompt, max_new_tokens=6).tolist() for tokens in inner_outputs)


# Refusals


@pytest.mark.parametrize(
    ("field", "overrides"), [("hidden_size", {"hidden_size": 40}), ("num_target_layers", {"num_hidden_layers": 7})]
)
def test_drafter_of_another_target_is_refused_by_field(llama, field, overrides):
    (found,) = overrides.values()
    with pytest.raises(ValueError, match=f"`{field}` .* but LlamaForCausalLM has {found}"):
        generate(make_target("llama", **overrides), assistant_model=make_drafter(llama))


def test_mask_id_without_a_row_in_the_target_is_refused(llama):
    drafter = make_drafter(llama)
    llama.resize_token_embeddings(90)
    drafter.config.vocab_size = 90
    with pytest.raises(ValueError, match="`mask_token_id` 97 has no row"):
        generate(llama, assistant_model=drafter)


def test_encoder_decoder_target_is_refused(llama):
    config = T5Config(vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    with pytest.raises(ValueError, match="encoder-decoder model; DFlash needs a decoder-only target"):
        generate(T5ForConditionalGeneration(config).eval(), assistant_model=make_drafter(llama))
