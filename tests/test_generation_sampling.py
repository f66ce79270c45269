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
    make_config,
    make_drafter,
    make_oracle,
    make_small_vocabulary_pair,
    make_target,
    ragged_ends,
)
from oracle_drafters import OracleDrafter, RecordingDrafter


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


# Frequencies


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
