"""Random numbers and choices of sampling: those of plain decoding, or the rule of speculative sampling."""

import itertools

import pytest
import torch
from reference_dflash import speculative_sampling_law
from sampling_material import p_value, random_laws
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TypicalLogitsWarper,
)

from dflash_hf.sampling_dflash import (
    StepNoise,
    choose_after_drafts,
    choose_tokens,
    counts_its_calls,
    draft_processors,
    group_by_length,
    is_prefix_free,
)

CPU = torch.device("cpu")
VOCABULARY = 11


def make_scores(num_rows, num_steps):
    """Scores for each step of each row, some of them forbidden."""
    scores = 2.0 * torch.randn(num_steps, num_rows, VOCABULARY)
    return scores.masked_fill(torch.rand(scores.shape) < 0.2, -torch.inf)


def draw_plainly(scores, seed):
    """The ids of `torch.multinomial`, step by step, shape (steps, rows), and the generator's state after it."""
    torch.manual_seed(seed)
    drawn = torch.stack([torch.multinomial(step.softmax(dim=-1), num_samples=1)[:, 0] for step in scores])
    return drawn, torch.get_rng_state()


@pytest.mark.parametrize("num_rows", [1, 5])
def test_step_noise_draws_the_ids_of_multinomial_and_leaves_its_state(num_rows):
    scores = make_scores(num_rows, 40)
    expected, state = draw_plainly(scores, seed=7)
    torch.manual_seed(7)
    noise = StepNoise(num_rows, VOCABULARY, CPU)
    for step in range(40):
        variates = torch.stack([noise.get(row, step) for row in range(num_rows)])
        assert choose_tokens(scores[step], variates).tolist() == expected[step].tolist()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("num_rows", [1, 5])
def test_step_noise_does_not_depend_on_how_rows_advance(num_rows):
    num_steps = 40
    scores = make_scores(num_rows, num_steps)
    expected, state = draw_plainly(scores, seed=8)
    torch.manual_seed(8)
    noise = StepNoise(num_rows, VOCABULARY, CPU)
    pace = torch.Generator().manual_seed(3)
    first = {row: 0 for row in range(num_rows)}
    while first:
        for row, step in list(first.items()):
            # Nodes of a block look ahead; some of them are accepted.
            for ahead in range(min(8, num_steps - step)):
                token = choose_tokens(scores[step + ahead, row], noise.get(row, step + ahead))
                assert int(token) == int(expected[step + ahead, row])
            first[row] = step + 1 + int(torch.randint(0, 7, (), generator=pace))
            if first[row] >= num_steps:
                del first[row]
        noise.forget_before(first)
        held = {(row, step) for step, rows in noise._steps.items() for row in rows}
        assert all(row in first and step >= first[row] for row, step in held)
    assert noise._steps == {}
    assert torch.equal(torch.get_rng_state(), state)


def test_rewound_noise_leaves_the_state_of_fewer_steps():
    _, state = draw_plainly(make_scores(3, 10), seed=9)
    torch.manual_seed(9)
    noise = StepNoise(3, VOCABULARY, CPU)
    noise.get(0, 16)
    noise.rewind(10)
    assert torch.equal(torch.get_rng_state(), state)


def test_rewinding_to_what_was_drawn_changes_nothing():
    noise = StepNoise(1, VOCABULARY, CPU)
    noise.get(0, 4)
    state = torch.get_rng_state()
    noise.rewind(5)
    assert torch.equal(torch.get_rng_state(), state)


def test_forgotten_steps_and_ended_rows_hold_no_memory():
    noise = StepNoise(4, VOCABULARY, CPU)
    noise.get(2, 9)
    assert sum(len(rows) for rows in noise._steps.values()) == 40
    noise.forget_before({1: 4, 2: 8})
    assert {step: sorted(rows) for step, rows in noise._steps.items()} == (
        {step: [1] for step in range(4, 8)} | {8: [1, 2], 9: [1, 2]}
    )
    noise.get(1, 10)
    assert sorted(noise._steps[10]) == [1, 2]  # other rows have ended
    # Each row's variates have their own storage, which goes with them.
    assert noise._steps[10][1].untyped_storage().nbytes() == 4 * VOCABULARY
    assert sorted(noise._states) == list(range(4, 11))


def test_greedy_choice_is_the_first_of_the_most_likely_tokens():
    assert choose_tokens(torch.tensor([[0.0, 3.0, 3.0], [1.0, -1.0, 0.0]]), None).tolist() == [1, 0]


# Speculative sampling


def committed(drawn, proposals):
    """The tokens of each row up to the first that differs from its proposal."""
    texts = []
    for tokens, proposed in zip(drawn.tolist(), proposals.tolist(), strict=True):
        num_kept = next((i for i, token in enumerate(proposed) if token != tokens[i]), len(proposed))
        texts.append(tuple(tokens[: num_kept + 1]))
    return texts


@pytest.mark.parametrize("proposals", [[1, 4], [0, 0], [5, 2]])
def test_choices_follow_algorithm_1_for_given_proposals(proposals):
    target, draft = random_laws(1)[:3], random_laws(2)[:2]
    rows = 20_000
    given = torch.tensor(proposals).expand(rows, -1)
    drawn = choose_after_drafts(target.log().expand(rows, -1, -1), draft.log().expand(rows, -1, -1), given)
    law = speculative_sampling_law(target.tolist(), draft.tolist(), proposals)
    assert sum(law.values()) == pytest.approx(1.0)
    assert p_value(committed(drawn, given), law) > 0.01


def test_algorithm_1_gives_the_targets_law_whatever_the_draft():
    target, draft = random_laws(1)[:3].tolist(), random_laws(2)[:2].tolist()
    chances: dict = {}
    for proposals in itertools.product(range(6), repeat=2):
        drafted = draft[0][proposals[0]] * draft[1][proposals[1]]
        for text, chance in speculative_sampling_law(target, draft, list(proposals)).items():
            chances[text[0]] = chances.get(text[0], 0.0) + drafted * chance
    assert [chances[token] for token in range(6)] == pytest.approx(target[0])


def test_first_choice_has_the_targets_law_when_proposals_are_drawn():
    target, draft = random_laws(1)[:2], random_laws(2)[:1]
    rows = 100_000
    proposals = torch.multinomial(draft, rows, replacement=True).T
    drawn = choose_after_drafts(target.log().expand(rows, -1, -1), draft.log().expand(rows, -1, -1), proposals)
    law = {(token,): float(chance) for token, chance in enumerate(target[0])}
    assert p_value([(token,) for token in drawn[:, 0].tolist()], law) > 0.01
    is_kept = drawn[:, 0] == proposals[:, 0]
    kept_share = float(torch.minimum(target[0], draft[0]).sum())
    assert float(is_kept.float().mean()) == pytest.approx(kept_share, abs=0.01)


def test_equal_laws_keep_every_proposal():
    scores = make_scores(4000, 4).transpose(0, 1)
    scores[:, :, 0] = 0.0
    proposals = scores[:, :3].softmax(dim=-1).flatten(0, 1).multinomial(1).view(4000, 3)
    drawn = choose_after_drafts(scores, scores[:, :3], proposals)
    assert torch.equal(drawn[:, :3], proposals)
    assert bool(scores[:, 3].gather(1, drawn[:, 3:]).isfinite().all())


def test_without_proposals_the_choice_is_the_targets_draw():
    target = random_laws(1)[:1]
    rows = 20_000
    none = torch.zeros(rows, 0, dtype=torch.long)
    drawn = choose_after_drafts(target.log().expand(rows, 1, -1), torch.zeros(rows, 0, 6), none)
    assert drawn.shape == (rows, 1)
    law = speculative_sampling_law(target.tolist(), [], [])
    assert p_value(committed(drawn, none), law) > 0.01


def test_disjoint_laws_reject_every_proposal_and_draw_from_the_target():
    ninf = -torch.inf
    target = torch.tensor([0.0, 1.0, ninf, ninf]).expand(20_000, 2, -1)
    draft = torch.tensor([ninf, ninf, 0.5, 0.0]).expand(20_000, 1, -1)
    proposals = draft[:, 0].softmax(dim=-1).multinomial(1)
    drawn = choose_after_drafts(target, draft, proposals)
    assert set(drawn[:, 0].tolist()) == {0, 1}
    law = {(token,): chance for token, chance in enumerate(target[0, 0].softmax(dim=-1).tolist())}
    assert p_value([(token,) for token in drawn[:, 0].tolist()], law) > 0.01


# Processors


class Custom(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


def test_only_known_processors_of_scores_alone_are_prefix_free():
    free = [TemperatureLogitsWarper(0.5), TopKLogitsWarper(3), TypicalLogitsWarper(0.9)]
    assert is_prefix_free(LogitsProcessorList())
    assert is_prefix_free(LogitsProcessorList([*free, SuppressTokensLogitsProcessor([1])]))
    for other in (RepetitionPenaltyLogitsProcessor(1.2), Custom(), type("Mine", (TopKLogitsWarper,), {})(3)):
        assert not is_prefix_free(LogitsProcessorList([*free, other]))


def test_drafts_obey_processors_that_depend_on_their_arguments_alone():
    temperature, top_k, typical = TemperatureLogitsWarper(0.5), TopKLogitsWarper(3), TypicalLogitsWarper(0.9)
    penalty, banned = RepetitionPenaltyLogitsProcessor(1.2), SuppressTokensLogitsProcessor([1])
    prefix = PrefixConstrainedLogitsProcessor(lambda row, ids: [1], 1)
    history = {"sampling_table_size": 8, "sampling_table_seed": 0, "context_history_size": 8}
    watermark = SynthIDTextWatermarkLogitsProcessor(ngram_len=3, keys=[1, 2], device="cpu", **history)
    given = LogitsProcessorList([temperature, penalty, top_k, Custom(), banned, prefix, watermark, typical])
    assert list(draft_processors(given, keep_argmax=False)) == [temperature, penalty, top_k, banned, typical]
    assert list(draft_processors(given, keep_argmax=True)) == [penalty, banned, typical]
    assert list(draft_processors(None, keep_argmax=True)) == []
    assert counts_its_calls(given) and not counts_its_calls(LogitsProcessorList([temperature, penalty]))


def test_processors_that_hold_back_the_end_are_applied_to_drafts():
    hold_back = MinNewTokensLengthLogitsProcessor(1, 4, eos_token_id=2, device="cpu")
    assert list(draft_processors(LogitsProcessorList([hold_back]), keep_argmax=True)) == [hold_back]


def test_keys_are_grouped_by_length_in_order():
    assert group_by_length({3: 5, 0: 2, 7: 5, 1: 2}) == {5: [3, 7], 2: [0, 1]}
    assert group_by_length({}) == {}
