"""Sampled text with a drafter: the ids of plain sampling, or with drawn proposals its exact distribution."""

import random

import pytest
import torch
from generation_material import (
    BATCH,
    BATCH_MASK,
    BLOCK,
    NEW,
    PROMPT,
    generate,
    generate_batch,
    make_small_vocabulary_pair,
)
from sampling_material import (
    VOCABULARY,
    TableDrafter,
    draft_table,
    make_table_target,
    p_value,
    random_laws,
    text_law,
    two_branches,
)

from dflash_hf import decoding_dflash

NUM_TOKENS = 4  # the first of them from the prompt, the others in rounds of two proposals
NUM_COMPARED = 3
ROWS = 1500
SETTINGS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "typical_p": {"typical_p": 0.8},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "temperature, top_k, top_p": {"temperature": 1.4, "top_k": 4, "top_p": 0.9},
    "penalty, temperature, min_p, typical_p": {
        "repetition_penalty": 1.3,
        "temperature": 0.7,
        "min_p": 0.05,
        "typical_p": 0.9,
    },
}
RULES = {"point mass": False, "drawn proposals": True}


def sample_texts(target, drafter, num_texts, start, *, num_tokens=NUM_TOKENS, **kwargs):
    """New tokens of many rows with the same prompt."""
    texts = []
    while len(texts) < num_texts:
        prompts = torch.tensor(start).repeat(min(ROWS, num_texts - len(texts)), 1)
        options = {"do_sample": True, "top_k": 0, "custom_generate": drafter.decode} | kwargs
        output = target.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=num_tokens, **options
        )
        texts += map(tuple, output[:, len(start) :][:, :NUM_COMPARED].tolist())
    return texts


def check_law(name, rule, kind, num_texts, **options):
    laws = random_laws()
    target, start = make_table_target(laws), [2, 0]
    drafter = TableDrafter(target, draft_table(kind, laws, num_slots=2))
    torch.manual_seed(12)
    texts = sample_texts(
        target, drafter, num_texts, start, sample_drafts=RULES.get(rule, False), **options, **SETTINGS[name]
    )
    value = p_value(texts, text_law(laws, start, NUM_COMPARED, **SETTINGS[name]))
    print(f"{name}, {rule}, {kind}: p {value:.3f} over {len(texts)} texts")
    assert value > 0.01
    if SETTINGS[name]:
        assert p_value(texts, text_law(laws, start, NUM_COMPARED)) < 1e-6  # the unprocessed law does not pass
    return drafter


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", SETTINGS)
def test_texts_follow_the_targets_processed_law(name, rule):
    check_law(name, rule, "random", num_texts=2 * ROWS)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["likely", "unlikely", "marginals"])
def test_texts_follow_the_law_whatever_the_drafter(kind, rule):
    drafter = check_law("temperature", rule, kind, num_texts=2 * ROWS)
    lengths = [length for row in drafter.all_accepted_lengths for length in row]
    share = sum(length > 1 for length in lengths) / len(lengths)
    assert share < 0.1 if kind == "unlikely" else share > 0.25


@pytest.mark.parametrize("num_tree_nodes", [7, "auto"])
@pytest.mark.parametrize("kind", ["likely", "marginals"])
def test_texts_follow_the_law_with_trees(kind, num_tree_nodes):
    drafter = check_law("temperature", "trees", kind, num_texts=ROWS, num_tree_nodes=num_tree_nodes)
    lengths = [length for row in drafter.all_accepted_lengths for length in row]
    assert sum(length > 1 for length in lengths) / len(lengths) > 0.25


@pytest.mark.long
@pytest.mark.parametrize("name", SETTINGS)
def test_texts_follow_the_law_with_trees_over_200_000_draws(name):
    check_law(name, "trees", "random", num_texts=200_000 // NUM_TOKENS, num_tree_nodes=7)


@pytest.mark.long
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", SETTINGS)
def test_texts_follow_the_targets_processed_law_over_200_000_draws(name, rule):
    check_law(name, rule, "random", num_texts=200_000 // NUM_TOKENS)


def test_p_value_rejects_a_law_that_is_a_little_wrong():
    laws = random_laws()
    law = text_law(laws, [2, 0], NUM_COMPARED)
    chances = torch.tensor(list(law.values())).double()
    torch.manual_seed(4)
    drawn = [list(law)[i] for i in torch.multinomial(chances, 60_000, replacement=True).tolist()]
    assert p_value(drawn, law) > 0.01
    assert p_value(drawn, text_law(laws, [2, 0], NUM_COMPARED, temperature=1.05)) < 1e-3
    assert p_value([*drawn, (0, 0, VOCABULARY)], law) == 0.0


def two_moded_laws():
    """After token 0, texts 1 2 1 2 ... and 3 4 3 4 ... are nearly equally likely: two peaks in each slot."""
    laws = torch.full((VOCABULARY, VOCABULARY), 0.002)
    laws[5, 0] = 1.0
    laws[0, 1], laws[0, 3] = 0.52, 0.48
    laws[1, 2] = laws[2, 1] = laws[3, 4] = laws[4, 3] = 1.0
    return laws / laws.sum(dim=1, keepdim=True)


def test_likeliest_proposals_outlast_drawn_ones_where_marginals_have_two_peaks():
    laws = two_moded_laws()
    target = make_table_target(laws)
    mean_lengths = {}
    for rule, sample_drafts in RULES.items():
        drafter = TableDrafter(target, draft_table("marginals", laws, num_slots=BLOCK - 1))
        # Equal peaks have no one likeliest text; a drafter settles on one of them.
        drafter.table[0, :, [1, 2]] += 0.05
        torch.manual_seed(5)
        options = {"num_tokens": BLOCK + 1, "sample_drafts": sample_drafts}
        texts = sample_texts(target, drafter, ROWS, [5], **options)
        assert p_value(texts, text_law(laws, [5], NUM_COMPARED)) > 0.01
        first_rounds = [row[0] for row, text in zip(drafter.all_accepted_lengths, texts, strict=True) if text[0] == 0]
        mean_lengths[rule] = sum(first_rounds) / len(first_rounds)
    print(mean_lengths)
    # One choice at the first slot decides the block, against a new one at each slot.
    assert mean_lengths["point mass"] > 4.0 > 3.3 > mean_lengths["drawn proposals"]


# The same seed, the same ids


def sample(target, run, seed=3, **kwargs):
    torch.manual_seed(seed)
    output = run(target, do_sample=True, **({"top_k": 0} | kwargs))
    return output.tolist(), torch.get_rng_state()


def batch(target, **kwargs):
    return generate_batch(target, input_ids=BATCH % 8, attention_mask=BATCH_MASK, **kwargs)


def single(target, **kwargs):
    return generate(target, PROMPT % 8, **kwargs)


def three_answers(target, **kwargs):
    return generate(target, PROMPT % 8, num_return_sequences=3, **kwargs)


RUNS = {"one row": single, "batch": batch, "three answers": three_answers}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("name", SETTINGS)
def test_ids_and_random_state_equal_those_of_plain_sampling(name, run):
    target, drafter = make_small_vocabulary_pair()
    plain, state = sample(target, run, **SETTINGS[name])
    ours, our_state = sample(target, run, assistant_model=drafter, **SETTINGS[name])
    assert ours == plain
    assert torch.equal(our_state, state)
    assert max(map(max, drafter.all_accepted_lengths)) > 1


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_random_state_equals_plain_when_rows_end_early(run):
    target, drafter = make_small_vocabulary_pair()
    for seed in range(6):
        options = {"seed": seed, "eos_token_id": 5, "pad_token_id": 6}
        plain, state = sample(target, run, **options)
        ours, our_state = sample(target, run, assistant_model=drafter, **options)
        assert ours == plain
        assert torch.equal(our_state, state)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_ids_do_not_depend_on_how_many_proposals_are_verified(run):
    target, drafter = make_small_vocabulary_pair()
    plain, _ = sample(target, run, temperature=1.2)
    for asked in (1, 3, BLOCK - 1):
        ours, _ = sample(target, run, temperature=1.2, assistant_model=drafter, num_assistant_tokens=asked)
        assert ours == plain
        assert max(map(len, drafter.proposals)) == asked


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_ids_do_not_depend_on_the_clock_that_chooses_the_number_of_proposals(run, monkeypatch):
    target, drafter = make_small_vocabulary_pair()
    drafter.is_cost_aware = True
    plain, _ = sample(target, run)
    widths = set()
    for seed in range(4):
        draws, now = random.Random(seed), [0.0]

        def clock(draws=draws, now=now):
            now[0] += draws.uniform(0.1, 5.0)
            return now[0]

        monkeypatch.setattr(decoding_dflash.time, "perf_counter", clock)
        ours, _ = sample(target, run, assistant_model=drafter)
        assert ours == plain
        widths |= set(map(len, drafter.proposals))
    assert len(widths) > 3


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("name", ["temperature", "repetition_penalty"])
def test_ids_do_not_depend_on_the_size_of_trees(name, run):
    target, drafter = make_small_vocabulary_pair()
    plain, state = sample(target, run, **SETTINGS[name])
    for size in (1, 7, 31, "auto"):
        ours, our_state = sample(target, run, assistant_model=drafter, num_tree_nodes=size, **SETTINGS[name])
        assert ours == plain
        assert torch.equal(our_state, state)
        assert max(map(max, drafter.all_accepted_lengths)) > 1


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("name", ["temperature", "repetition_penalty"])
def test_ids_equal_plain_sampling_with_trees(name, run):
    target, drafter = make_small_vocabulary_pair()
    plain, state = sample(target, run, **SETTINGS[name])
    options = {"custom_generate": drafter.decode, "tree_builder": two_branches}
    ours, our_state = sample(target, run, **options, **SETTINGS[name])
    assert ours == plain
    assert torch.equal(our_state, state)
    assert max(map(max, drafter.all_accepted_lengths)) > 1


def test_drawn_proposals_repeat_by_seed():
    target, drafter = make_small_vocabulary_pair()
    options = {"custom_generate": drafter.decode, "sample_drafts": True}
    first, _ = sample(target, batch, **options)
    proposals = drafter.proposals
    again, _ = sample(target, batch, **options)
    other, _ = sample(target, batch, seed=4, **options)
    assert first == again != other
    assert len(first[0]) == BATCH.shape[1] + NEW and max(map(max, drafter.all_accepted_lengths)) > 1
    assert any(len(set(row)) > 1 for row in proposals)
