"""Generation with a drafter gives the target's own text, whatever the drafter proposes."""

import copy
import gc
import inspect
import logging
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from conftest import MASK_TOKEN_ID, make_tiny_target
from oracle_drafters import (
    OracleDrafter,
    RecordingDrafter,
    RecordingStreamer,
    always_right,
    expected_lengths,
    never_right,
    reference_dflash_greedy,
    reference_greedy,
    right_at,
    right_for,
)
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LogitsProcessor,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    StoppingCriteria,
    SynthIDTextWatermarkingConfig,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.generation.candidate_generator import AssistedCandidateGenerator
from transformers.generation.utils import GenerationMixin
from transformers.utils import logging as transformers_logging

from dflash_hf import create_drafter_config
from dflash_hf.generation_dflash import ContextCache, install_dispatch
from dflash_hf.target_dflash import draft_logits, embed_tokens

PROMPT = torch.tensor([[5, 17, 3, 42, 8, 29]])
BLOCK = 8
NEW = 40
LAYERS = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 1,
    "initializer_range": 0.4,
}
TARGETS = ("llama", "qwen3", "gemma3", "mixtral", "gpt2")
PATTERNS = {
    "always": always_right,
    "never": never_right,
    "slots 1 and 3": right_at(1, 3),
    "all but slot 2": lambda round_index, slot: slot != 2,
    "per round": right_for(2, 0, 6, 7, 1, 5),
}


def make_target(kind, **overrides):
    torch.manual_seed(2)
    fields = LAYERS | overrides
    if kind == "llama":
        return make_tiny_target(**({"initializer_range": 0.4} | overrides))
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**fields)).eval()
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**fields, num_local_experts=4, num_experts_per_tok=2)).eval()
    if kind == "gpt2":
        names = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range")
        fields = {name: fields[name] for name in names}
        return GPT2LMHeadModel(GPT2Config(**fields, n_embd=32, n_layer=6, n_head=4, n_positions=512)).eval()
    fields = {"sliding_window": 8, "query_pre_attn_scalar": 8} | fields
    config = Gemma3TextConfig(**fields, layer_types=["sliding_attention", "full_attention"] * 3)
    target = Gemma3ForCausalLM(config).eval()
    with torch.no_grad():  # or its tied head would only repeat the last token
        for name, parameter in target.named_parameters():
            if "post_" in name:
                parameter += 4.0
    return target


def make_config(target, **overrides):
    fields = {"num_hidden_layers": 2, "num_target_features": 3, "block_size": BLOCK, "mask_token_id": MASK_TOKEN_ID}
    if target.config.model_type in ("gemma3_text", "gpt2"):
        fields["rope_theta"] = 10000.0
    if target.config.model_type == "gpt2":
        fields["intermediate_size"] = 64
    return create_drafter_config(target.config, **(fields | overrides))


def make_drafter(target, **overrides):
    torch.manual_seed(3)
    return RecordingDrafter(make_config(target, **({"initializer_range": 0.3} | overrides))).eval()


def make_small_vocabulary_pair(**overrides):
    """A random drafter for eight tokens is right now and then."""
    target = make_target("llama", vocab_size=8, pad_token_id=None)
    drafter = make_drafter(target, mask_token_id=7, **overrides)
    return target, drafter


def generate(target, input_ids=PROMPT, *, max_new_tokens=NEW, do_sample=False, **kwargs):
    return target.generate(input_ids, max_new_tokens=max_new_tokens, do_sample=do_sample, **kwargs)


def make_oracle(target, pattern=always_right, input_ids=PROMPT, decoy=None, **kwargs):
    """A drafter that knows what `generate(target, input_ids, **kwargs)` gives, and one block more."""
    kwargs["max_new_tokens"] = kwargs.get("max_new_tokens", NEW) + BLOCK
    text = generate(target, input_ids, **kwargs)
    return OracleDrafter(make_config(target), target, text, pattern, decoy)


@pytest.fixture
def llama():
    return make_target("llama")


def count_hooks(target):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in target.modules())


# Greedy text


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


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_text_is_right_when_it_outgrows_the_targets_sliding_window(implementation):
    target = make_target("gemma3", sliding_window=4)
    target.set_attn_implementation(implementation)
    plain = generate(target)
    drafter = make_oracle(target, right_for(2, 0, 6, 7, 1, 5))
    assert generate(target, assistant_model=drafter).tolist() == plain.tolist()
    assert drafter.accepted_lengths == expected_lengths(drafter.is_right, NEW, BLOCK)


@pytest.mark.parametrize("kind", TARGETS)
def test_random_drafter_gives_the_text_and_proposals_of_the_reference(kind):
    target = make_target(kind)
    drafter = make_drafter(target)
    reference = reference_dflash_greedy(target, drafter, PROMPT, 24)
    output = generate(target, assistant_model=drafter, max_new_tokens=24)
    assert output.tolist() == reference.tokens.tolist() == generate(target, max_new_tokens=24).tolist()
    assert drafter.proposals == reference.proposals
    assert drafter.accepted_lengths == reference.accepted_lengths


DRAFTERS = {
    "full attention": {},
    "sliding attention": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
    "all causal": {"is_causal": True},
    "multiplier and soft cap": {"output_multiplier": 0.5, "final_logit_softcapping": 2.0},
    "scaled embedding": {"input_embedding_scale": 3.0},
    "one feature": {"num_target_features": 1},
    "block of 2": {"block_size": 2},
    "block of 16": {"block_size": 16},
}


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


def load_authors_twin(drafter):
    """The authors' module with the weights of `drafter`, as their own code would load it from a saved folder."""
    authors = pytest.importorskip("dflash.model")
    config = Qwen3Config(**drafter.config.to_dict())
    twin = authors.DFlashDraftModel(config).eval()
    twin.load_state_dict(drafter.state_dict())
    return authors, twin


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


# Transformers' own DFlash path


def run_native(target, drafter, input_ids=PROMPT):
    streamer = RecordingStreamer()
    drafter.start_recording()
    output = generate(target, input_ids, assistant_model=drafter, speculation_type="dflash", streamer=streamer)
    assert drafter.proposals == []  # our candidate generator had no part in it
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
    drafter = make_oracle(target, right_for(2, 0, 6, 7, 1, 5))
    output, lengths, _ = run_native(target, drafter)
    assert output.tolist() == generate(target).tolist()
    assert lengths == expected_lengths(drafter.is_right, NEW, BLOCK)


WITHOUT_DISPATCH = """
import sys
from transformers.generation.utils import GenerationMixin
sys.path.insert(0, sys.argv[1])
from test_generation_dflash import PROMPT, generate, make_oracle, make_target, right_for, run_native
GenerationMixin._get_candidate_generator = GenerationMixin._get_candidate_generator.__wrapped__
target = make_target("llama")
drafter = make_oracle(target, right_for(2, 0, 6, 7, 1, 5))
output, lengths, _ = run_native(target, drafter)
assert output.tolist() == generate(target).tolist()
print(lengths)
"""


def test_native_path_needs_no_dispatch():
    command = [sys.executable, "-c", WITHOUT_DISPATCH, os.path.dirname(__file__)]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(expected_lengths(right_for(2, 0, 6, 7, 1, 5), NEW, BLOCK))


def test_dispatch_is_installed_once_and_leaves_other_assistants_alone(llama):
    installed = GenerationMixin._get_candidate_generator
    install_dispatch()
    assert GenerationMixin._get_candidate_generator is installed
    seen = []

    class Assistant(type(llama)):
        def generate(self, *args, **kwargs):
            seen.append(type(sys._getframe(2).f_locals.get("self")))
            return super().generate(*args, **kwargs)

    assistant = Assistant(llama.config).eval()
    assert generate(llama, assistant_model=assistant).tolist() == generate(llama).tolist()
    assert any(issubclass(kind, AssistedCandidateGenerator) for kind in seen)


# The end of the text


def test_end_token_at_every_place_of_a_block_stops_as_plain_generate_does(llama):
    text = generate(llama, max_new_tokens=NEW + BLOCK)
    plain = text[0, PROMPT.shape[1] :].tolist()
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


def test_prompt_that_ends_in_an_end_token_may_go_on_with_the_mask_token():
    target, drafter = make_small_vocabulary_pair()
    mask = drafter.config.mask_token_id
    prompts = torch.cartesian_prod(torch.arange(8), torch.arange(7))[:, None]
    prompt = next(prompt for prompt in prompts if reference_greedy(target, prompt, 1)[0, -1] == mask)
    eos = [int(prompt[0, -1])]
    reference = reference_dflash_greedy(target, drafter, prompt, NEW, eos=eos)
    streamer = RecordingStreamer()
    output = generate(target, prompt, eos_token_id=eos, assistant_model=drafter, streamer=streamer)
    assert output.tolist() == reference.tokens.tolist() and len(streamer.puts[1]) == 2
    first = drafter.calls[0]
    assert first.positions == list(range(prompt.shape[1] + 1 + BLOCK)) and first.num_features == prompt.shape[1] + 1


def test_drafter_that_always_proposes_the_end_does_not_end_the_text(llama):
    end = 50
    expected = generate(llama, eos_token_id=end)
    assert end not in expected[0].tolist()
    drafter = OracleDrafter(make_config(llama), llama, torch.full((1, 99), end))
    assert generate(llama, eos_token_id=end, assistant_model=drafter).tolist() == expected.tolist()
    assert drafter.proposals[0] == []


def test_end_token_cuts_the_reference_at_the_same_lengths():
    target, drafter = make_small_vocabulary_pair()
    prompt = PROMPT % 8
    for end in range(8):
        reference = reference_dflash_greedy(target, drafter, prompt, NEW, eos=[end])
        assert (
            generate(target, prompt, eos_token_id=end, assistant_model=drafter).tolist() == reference.tokens.tolist()
        )
        assert drafter.accepted_lengths == reference.accepted_lengths
        assert drafter.proposals == reference.proposals


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


class StopAt(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


@pytest.mark.xfail(strict=True, reason="Assisted decoding commits a whole block before it asks the stopping criteria")
def test_stopping_criteria_stop_inside_a_block(llama):
    criteria = [StopAt(PROMPT.shape[1] + 4)]
    expected = generate(llama, stopping_criteria=criteria)
    drafter = make_oracle(llama)
    assert generate(llama, stopping_criteria=criteria, assistant_model=drafter).tolist() == expected.tolist()


# Processors and sampling


class FavourSumOfPrefix(LogitsProcessor):
    """Raises the token whose id is the prefix's sum, so one wrong token in the prefix changes all later scores."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, int(input_ids.sum()) % 90] += 3.0
        return scores


PROCESSORS = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "sequence_bias": {"sequence_bias": [[[43], -2.0], [[7, 8], 9.0]]},
    "suppress_tokens": {"suppress_tokens": [7, 43, 56]},
    "forced_eos_token_id": {"forced_eos_token_id": 98},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda _, ids: list(range(len(ids) % 2, 96, 2))},
    "custom": {"logits_processor": [FavourSumOfPrefix()]},
    "penalty and custom": {"repetition_penalty": 1.1, "logits_processor": [FavourSumOfPrefix()]},
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_change_the_text_as_in_plain_generate(name):
    target = make_target("llama", initializer_range=0.2)  # its text repeats itself, which the penalties forbid
    kwargs = PROCESSORS[name]
    expected = generate(target, **kwargs)
    assert expected.tolist() != generate(target).tolist()
    for pattern in (always_right, right_for(2, 0, 6, 7, 1, 5)):
        text = torch.cat([expected, expected[:, -BLOCK:]], dim=1)
        drafter = OracleDrafter(make_config(target), target, text, pattern)
        assert generate(target, assistant_model=drafter, **kwargs).tolist() == expected.tolist()
        if pattern is always_right:
            assert drafter.accepted_lengths == expected_lengths(always_right, NEW, BLOCK)


def test_min_new_tokens_holds_back_the_end_token(llama):
    plain = generate(llama)[0, PROMPT.shape[1] :].tolist()
    kwargs = {"eos_token_id": plain[3], "min_new_tokens": 11}
    expected = generate(llama, **kwargs)
    assert expected.shape[1] >= PROMPT.shape[1] + 11
    for pattern in (always_right, right_for(2, 0, 6)):
        drafter = make_oracle(llama, pattern)
        assert generate(llama, assistant_model=drafter, **kwargs).tolist() == expected.tolist()


def test_drafts_obey_bad_words_so_a_banned_favourite_costs_nothing(llama):
    banned = 50
    kwargs = {"bad_words_ids": [[banned], [3, 4]]}
    drafter = make_oracle(llama, decoy=banned, **kwargs)
    assert generate(llama, assistant_model=drafter, **kwargs).tolist() == generate(llama, **kwargs).tolist()
    assert drafter.accepted_lengths == expected_lengths(always_right, NEW, BLOCK)
    generate(llama, assistant_model=drafter)
    assert drafter.proposals[0] == [banned] * (BLOCK - 1)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"guidance_scale": 1.5},
        {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3)},
    ],
    ids=["guidance", "synthid"],
)
def test_processors_that_count_their_calls_turn_the_drafter_off(llama, kwargs, caplog):
    expected = generate(llama, max_new_tokens=20, **kwargs)
    assert expected.tolist() != generate(llama, max_new_tokens=20).tolist()
    drafter = make_oracle(llama)
    assert generate(llama, max_new_tokens=20, assistant_model=drafter, **kwargs).tolist() == expected.tolist()
    assert drafter.calls == []
    assert sum("drafter is off" in record.message for record in caplog.records) == 1


def make_markov_pair(drafter_kind):
    """A target whose next token depends on the last token only, so one long text holds many equal draws."""
    target = make_target("llama", vocab_size=6, hidden_size=16, num_hidden_layers=2, pad_token_id=None)
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.zero_()
        target.lm_head.weight *= 0.7
    config = make_config(target, num_hidden_layers=1, target_layer_ids=[0], block_size=3, mask_token_id=5)
    if drafter_kind == "random":
        torch.manual_seed(3)
        return target, RecordingDrafter(config).eval()
    laws = target(torch.arange(6)[:, None]).logits[:, 0].softmax(dim=-1)
    unlikely = int(laws.mean(dim=0).argsort()[2])
    return target, OracleDrafter(config, target, torch.full((1, 600), unlikely))


def processed_laws(target, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The law of the next token after each token, by plain arithmetic on sorted probabilities."""
    laws = (target(torch.arange(6)[:, None]).logits[:, 0] / temperature).softmax(dim=-1)
    for law in laws:
        if top_k:
            law[law < law.sort(descending=True).values[top_k - 1]] = 0.0
            law /= law.sum()
        ranked = law.sort(descending=True)
        mass_before = ranked.values.cumsum(dim=0) - ranked.values
        law[ranked.indices[mass_before >= top_p]] = 0.0
        law /= law.sum()
        law[law < min_p * law.max()] = 0.0
        law /= law.sum()
    return laws.double()


def chi_square_p_value(tokens, laws):
    """How likely transitions as uneven as those in `tokens` are under `laws`; 0 if one of them is impossible."""
    pairs = torch.tensor(list(zip(tokens, tokens[1:], strict=False)))
    counts = torch.zeros_like(laws).index_put((pairs[:, 0], pairs[:, 1]), torch.ones(len(pairs)).double(), True)
    expected = laws * counts.sum(dim=1, keepdim=True)
    if counts[laws == 0].sum() > 0:
        return 0.0
    statistic, degrees = 0.0, 0
    for row, wanted in zip(counts, expected, strict=True):
        is_frequent = wanted >= 5.0
        row = torch.cat([row[is_frequent], row[~is_frequent].sum()[None]])
        wanted = torch.cat([wanted[is_frequent], wanted[~is_frequent].sum()[None]])
        row, wanted = row[wanted > 1.0], wanted[wanted > 1.0]
        statistic += float(((row - wanted) ** 2 / wanted).sum())
        degrees += max(len(row) - 1, 0)
    return float(torch.special.gammaincc(torch.tensor(degrees / 2).double(), torch.tensor(statistic / 2).double()))


SAMPLING = {
    "temperature and top_k": {"temperature": 1.3, "top_k": 3},
    "top_p": {"top_p": 0.8},
    "temperature and min_p": {"temperature": 0.6, "min_p": 0.1},
}


@pytest.mark.parametrize("drafter_kind", ["confidently wrong", "random"])
@pytest.mark.parametrize("name", SAMPLING)
@torch.no_grad()
def test_sampled_tokens_follow_the_targets_processed_law(name, drafter_kind):
    target, drafter = make_markov_pair(drafter_kind)
    kwargs = {"top_k": 0} | SAMPLING[name]
    torch.manual_seed(11)
    output = generate(target, PROMPT % 6, max_new_tokens=500, do_sample=True, assistant_model=drafter, **kwargs)
    tokens = output[0, PROMPT.shape[1] - 1 :].tolist()
    assert len(drafter.accepted_lengths) < 490  # some proposals were kept, so both ways to a token are tested
    assert chi_square_p_value(tokens, processed_laws(target, **SAMPLING[name])) > 1e-3
    assert chi_square_p_value(tokens, processed_laws(target)) < 1e-6  # the unprocessed law does not pass


def test_sampling_repeats_by_seed_and_follows_the_block_sizes():
    for block_size in (2, 3, 8):
        target, drafter = make_small_vocabulary_pair(block_size=block_size)

        def sample(seed, target=target, drafter=drafter):
            torch.manual_seed(seed)
            return generate(target, PROMPT % 8, do_sample=True, top_k=0, assistant_model=drafter).tolist()

        assert sample(1) == sample(1) != sample(2)
        assert max(drafter.accepted_lengths) > 1
        assert max(map(len, drafter.proposals)) == block_size - 1


# Inputs and outputs of generate()


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


@pytest.mark.parametrize("kind", TARGETS)
def test_left_padding_changes_neither_text_nor_proposals(kind):
    target = make_target(kind)
    drafter = make_drafter(target)
    expected = generate(target, max_new_tokens=20, assistant_model=drafter)
    proposals, calls = drafter.proposals, drafter.calls
    padded = torch.cat([torch.ones(1, 3, dtype=torch.long), PROMPT], dim=1)
    mask = torch.tensor([[0] * 3 + [1] * PROMPT.shape[1]])
    output = generate(target, padded, attention_mask=mask, max_new_tokens=20, assistant_model=drafter)
    assert output[:, 3:].tolist() == expected.tolist()
    assert drafter.proposals == proposals
    assert [call.positions for call in drafter.calls] == [call.positions for call in calls]
    torch.testing.assert_close(drafter.calls[0].hidden_states, calls[0].hidden_states, atol=1e-4, rtol=1e-4)


def test_left_padding_keeps_the_accepted_lengths(llama):
    drafter = make_oracle(llama, right_for(2, 0, 6, 7, 1, 5))
    padded = torch.cat([torch.ones(1, 3, dtype=torch.long), PROMPT], dim=1)
    mask = (torch.arange(padded.shape[1]) >= 3).long()[None]
    output = generate(llama, padded, attention_mask=mask, assistant_model=drafter)
    assert output[:, 3:].tolist() == generate(llama).tolist()
    assert drafter.accepted_lengths == expected_lengths(drafter.is_right, NEW, BLOCK)


def test_two_prompts_at_once_are_refused(llama):
    with pytest.raises(ValueError, match="one prompt at a time, got a batch of 2"):
        generate(llama, PROMPT.repeat(2, 1), assistant_model=make_drafter(llama))


def test_fewer_assistant_tokens_verify_fewer_but_draft_the_whole_block(llama):
    drafter = make_oracle(llama)
    output = generate(llama, assistant_model=drafter, num_assistant_tokens=5)
    assert output.tolist() == generate(llama).tolist()
    assert {call.width for call in drafter.calls} == {BLOCK}
    assert max(map(len, drafter.proposals)) == 5
    assert drafter.accepted_lengths == expected_lengths(always_right, NEW, BLOCK, num_proposals=5)


@pytest.mark.parametrize("asked", [0, 8, 12])
def test_more_assistant_tokens_than_trained_are_refused(llama, asked):
    with pytest.raises(ValueError, match=f"`num_assistant_tokens` is {asked}.*proposes 1 to 7"):
        generate(llama, assistant_model=make_drafter(llama), num_assistant_tokens=asked)


def test_prompt_of_one_token_works():
    target, drafter = make_small_vocabulary_pair()
    prompt = torch.tensor([[3]])
    reference = reference_dflash_greedy(target, drafter, prompt, NEW)
    assert generate(target, prompt, assistant_model=drafter).tolist() == reference.tokens.tolist()
    assert drafter.proposals == reference.proposals


def test_dictionary_output_equals_plain_generate():
    llama = make_target("llama", initializer_range=0.2)
    kwargs = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    kwargs |= {"output_hidden_states": True, "repetition_penalty": 1.2}
    plain = generate(llama, **kwargs)
    text = generate(llama, repetition_penalty=1.2, max_new_tokens=NEW + BLOCK)
    drafter = OracleDrafter(make_config(llama), llama, text, right_for(2, 0, 6, 7, 1, 5))
    ours = generate(llama, assistant_model=drafter, **kwargs)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    assert drafter.accepted_lengths == expected_lengths(drafter.is_right, NEW, BLOCK)
    for name in ("scores", "logits"):
        assert len(ours[name]) == len(plain[name]) == NEW
        torch.testing.assert_close(ours[name], plain[name], atol=1e-4, rtol=1e-4)
    assert len(ours.hidden_states) == len(plain.hidden_states) == NEW
    torch.testing.assert_close(ours.hidden_states, plain.hidden_states, atol=1e-4, rtol=1e-4)


def cache_argument(target):
    """Transformers renamed the argument between 5.22 and 5.24."""
    return "cache" if "cache" in inspect.signature(target.forward).parameters else "past_key_values"


def read_prefix(target, num_tokens, input_ids=PROMPT):
    cache = DynamicCache(config=target.config)
    target(input_ids[:, :num_tokens], use_cache=True, **{cache_argument(target): cache})
    assert cache.get_seq_length() == num_tokens
    return {cache_argument(target): cache}


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@torch.no_grad()
def test_given_cache_that_holds_a_prefix_changes_nothing(kind):
    target = make_target(kind, **({"sliding_window": 4} if kind == "gemma3" else {}))
    expected = generate(target)
    for num_tokens in (1, 5):
        assert generate(target, **read_prefix(target, num_tokens)).tolist() == expected.tolist()
        drafter = make_oracle(target, right_for(2, 0, 6))
        output = generate(target, assistant_model=drafter, **read_prefix(target, num_tokens))
        assert output.tolist() == expected.tolist()
        assert drafter.accepted_lengths == expected_lengths(drafter.is_right, NEW, BLOCK)


@torch.no_grad()
def test_cache_of_an_earlier_turn_goes_on(llama):
    drafter = make_oracle(llama, right_for(2, 0, 6))
    first = generate(llama, assistant_model=drafter, return_dict_in_generate=True)
    cache = first["cache"] if "cache" in first else first.past_key_values
    assert cache.get_seq_length() == first.sequences.shape[1] - 1
    prompt = torch.cat([first.sequences, PROMPT], dim=1)
    drafter = make_oracle(llama, right_for(2, 0, 6), prompt)
    output = generate(llama, prompt, assistant_model=drafter, **{cache_argument(llama): cache})
    assert output.tolist() == generate(llama, prompt).tolist()


@torch.no_grad()
def test_input_embeddings_give_the_text_or_are_refused(llama):
    embeds = llama.get_input_embeddings()(PROMPT)
    expected = generate(llama)
    drafter = make_oracle(llama, right_for(2, 0, 6))
    kwargs = {"inputs_embeds": embeds, "max_new_tokens": NEW, "do_sample": False, "assistant_model": drafter}
    output = llama.generate(PROMPT, **kwargs)
    assert output.tolist() == expected.tolist()
    try:
        output = llama.generate(**kwargs)
    except ValueError as error:
        # Stock assisted decoding of older releases shortens the mask to the new tokens and gives another text.
        assert "needs the whole prompt as `input_ids`" in str(error)
        return
    assert output.tolist() == expected[:, PROMPT.shape[1] :].tolist()
    assert drafter.accepted_lengths == expected_lengths(drafter.is_right, NEW, BLOCK)


def test_given_position_ids_work(llama):
    drafter = make_oracle(llama, right_for(2, 0, 6))
    kwargs = {"position_ids": torch.arange(PROMPT.shape[1])[None], "attention_mask": torch.ones_like(PROMPT)}
    assert generate(llama, assistant_model=drafter, **kwargs).tolist() == generate(llama).tolist()
    assert drafter.accepted_lengths == expected_lengths(drafter.is_right, NEW, BLOCK)


def test_static_cache_works_or_is_refused(llama):
    drafter = make_oracle(llama, right_for(2, 0, 6))
    try:
        output = generate(llama, assistant_model=drafter, cache_implementation="static")
    except ValueError as error:
        assert "Static" in str(error)
        return
    assert output.tolist() == generate(llama).tolist()


# Nothing is left behind


def test_nothing_is_left_on_target_or_drafter(llama):
    drafter = make_oracle(llama)
    config, keys = copy.deepcopy(llama.generation_config), set(vars(drafter))
    first = generate(llama, assistant_model=drafter)
    assert count_hooks(llama) == 0
    assert llama.generation_config.to_dict() == config.to_dict()
    assert set(vars(drafter)) == keys
    gc.collect()
    assert not any(type(thing) is ContextCache for thing in gc.get_objects())
    # A second call starts from nothing, with another prompt in between.
    lengths = drafter.accepted_lengths
    generate(llama, PROMPT.flip(1), assistant_model=make_drafter(llama))
    assert generate(llama, assistant_model=drafter).tolist() == first.tolist()
    assert drafter.accepted_lengths == lengths


def test_no_hook_is_left_after_an_exception(llama):
    class Fails(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] > PROMPT.shape[1] + 3:
                raise KeyError("planned")
            return scores

    try:
        generate(llama, assistant_model=make_drafter(llama), logits_processor=[Fails()])
    except KeyError as error:
        message = str(error)
    assert message == "'planned'"
    assert count_hooks(llama) == 0


def test_two_threads_on_one_target_do_not_mix(llama):
    prompts = [PROMPT, PROMPT.flip(1)]
    drafters = [make_drafter(llama) for _ in prompts]
    expected = []
    for prompt, drafter in zip(prompts, drafters, strict=True):
        output = generate(llama, prompt, max_new_tokens=12, assistant_model=drafter)
        expected.append((output.tolist(), drafter.proposals))
    # Both threads have run their verify when either of them reads the tapped layers.
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


# Faults and refusals


@pytest.mark.parametrize("failing_round", [0, 2])
def test_failing_drafter_costs_only_speed_and_warns_once(llama, failing_round, caplog):
    class Fails(OracleDrafter):
        def forward(self, *args, **kwargs):
            if len(self.calls) == failing_round:
                raise RuntimeError("out of memory")
            return super().forward(*args, **kwargs)

    drafter = Fails(make_config(llama), llama, reference_greedy(llama, PROMPT, 99), right_at(1))
    output = generate(llama, max_new_tokens=70, assistant_model=drafter)
    assert output.tolist() == generate(llama, max_new_tokens=70).tolist()
    assert drafter.accepted_lengths == [2] * failing_round + [1] * (69 - 2 * failing_round)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "out of memory" in caplog.text
    assert count_hooks(llama) == 0


@pytest.mark.parametrize(
    ("num_rounds", "pattern", "is_reported"),
    [(48, never_right, True), (47, never_right, False), (50, right_for(*[0] * 9, 1), False)],
    ids=["48 rounds", "47 rounds", "right once in ten"],
)
def test_drafter_that_is_never_right_is_reported_once(llama, num_rounds, pattern, is_reported, caplog):
    transformers_logging.warning_once.cache_clear()
    max_new_tokens = 1 + sum(expected_lengths(pattern, 200, BLOCK)[:num_rounds])
    drafter = make_oracle(llama, pattern, max_new_tokens=max_new_tokens)
    for _ in range(2):
        generate(llama, assistant_model=drafter, max_new_tokens=max_new_tokens)
        assert len(drafter.accepted_lengths) == num_rounds
    warnings = [record for record in caplog.records if "No proposal was accepted in 48 rounds" in record.message]
    assert len(warnings) == is_reported


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


def test_target_with_recurrent_layers_is_refused(llama):
    linear = {f"linear_{name}": 8 for name in ("key_head_dim", "value_head_dim")}
    linear |= {"linear_num_value_heads": 2, "linear_num_key_heads": 2}
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    layer_types = ["linear_attention", "full_attention"] * 4
    fields = LAYERS | linear | moe | {"num_hidden_layers": 8, "layer_types": layer_types}
    target = Qwen3NextForCausalLM(Qwen3NextConfig(**fields, shared_expert_intermediate_size=16)).eval()
    with pytest.raises(ValueError, match="stateful|cropped"):
        generate(target, assistant_model=make_drafter(llama))


def test_drafter_does_not_generate_alone(llama):
    with pytest.raises(TypeError, match="assistant_model=drafter"):
        make_drafter(llama).generate(PROMPT)


# Parts


def test_context_cache_grows_and_keeps_its_content_and_gives_up_the_block():
    cache = ContextCache(num_layers=2)
    kept = [(torch.empty(1, 2, 0, 4), torch.empty(1, 2, 0, 4)) for _ in range(2)]
    for num_context in (3, 1, 9, 2, 40, 5):
        for layer in range(2):
            new = torch.randn(1, 2, num_context + 6, 4), torch.randn(1, 2, num_context + 6, 4)
            expected = [torch.cat(pair, dim=2) for pair in zip(kept[layer], new, strict=True)]
            assert cache.get_seq_length(layer) == kept[layer][0].shape[2]
            torch.testing.assert_close(list(cache.update(*new, layer)), expected, atol=0, rtol=0)
            kept[layer] = [states[:, :, :-6].clone() for states in expected]
        cache.keep_context(num_context)
    assert cache.get_seq_length() == 3 + 1 + 9 + 2 + 40 + 5


def test_context_cache_copies_its_buffers_only_when_they_double():
    cache = ContextCache(num_layers=1)
    addresses = []
    for _ in range(64):
        states = torch.zeros(1, 1, 1 + 3, 2)
        key, _ = cache.update(states, states, 0)
        addresses.append(key.data_ptr())
        cache.keep_context(1)
    num_moves = sum(before != after for before, after in zip(addresses, addresses[1:], strict=False))
    assert num_moves <= 4  # from 8 rows to 16, 32, 64 and 128


@pytest.mark.parametrize("scale", [None, 32**0.5, 1.0, 2.5])
@torch.no_grad()
def test_draft_embeddings_follow_the_stated_scale_on_a_scaled_embedding(scale):
    target = make_target("gemma3")
    config = make_config(target)
    assert config.input_embedding_scale == 32**0.5
    if scale is None:
        del config.dflash_config["input_embedding_scale"]
    else:
        config.dflash_config["input_embedding_scale"] = scale
    seen = []
    handle = target.model.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    target(PROMPT)
    handle.remove()
    embeds = embed_tokens(target, PROMPT, config)
    raw = target.get_input_embeddings().weight[PROMPT]
    torch.testing.assert_close(embeds, raw * (32**0.5 if scale is None else scale))
    is_what_the_target_reads = torch.allclose(embeds, seen[0], atol=1e-6)
    assert is_what_the_target_reads == (scale in (None, 32**0.5))


@torch.no_grad()
def test_draft_logits_apply_the_multiplier_and_then_the_soft_cap(llama):
    config = make_config(llama, output_multiplier=0.5, final_logit_softcapping=3.0)
    hidden_states = torch.randn(1, 4, 32)
    raw = hidden_states @ llama.lm_head.weight.T
    logits = draft_logits(llama, hidden_states, config)
    torch.testing.assert_close(logits, 3.0 * torch.tanh(0.5 * raw / 3.0))
    torch.testing.assert_close(draft_logits(llama, hidden_states, make_config(llama)), raw)
