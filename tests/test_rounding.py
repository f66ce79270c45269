import pytest
import torch

from dflash_hf.eval.decode import timed_generate
from dflash_hf.eval.rounding import Difference, explain_difference


@pytest.fixture
def prompt():
    return torch.randint(2, 97, (1, 9))


def greedy(target, prompt, **options) -> list[int]:
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    return timed_generate(target, inputs, max_new_tokens=24, do_sample=False, **options).token_ids


def test_equal_answers_have_no_difference(tiny_target, prompt):
    ids = greedy(tiny_target, prompt)
    assert explain_difference(tiny_target, prompt, ids, ids) is None


def test_a_wrong_token_is_no_near_tie(tiny_target, prompt):
    ids = greedy(tiny_target, prompt)
    wrong = [*ids[:5], (ids[5] + 1) % 97, *ids[6:]]
    difference = explain_difference(tiny_target, prompt, ids, wrong)
    with torch.no_grad():
        logits = tiny_target(torch.cat([prompt, torch.tensor([ids[:5]])], dim=1)).logits[0, -1]
    assert difference.position == 5
    assert difference.margin == pytest.approx(float(logits[ids[5]] - logits[wrong[5]]), abs=1e-4)
    assert difference.bound < 1e-4 and not difference.is_near_tie


def test_a_planted_tie_is_a_near_tie(tiny_target, prompt):
    ids = greedy(tiny_target, prompt)
    twin = next(token for token in range(2, 97) if token not in ids)
    # Two tokens with the same row of the head have the same logit.
    tiny_target.lm_head.weight.data[twin] = tiny_target.lm_head.weight.data[ids[5]]
    difference = explain_difference(tiny_target, prompt, ids, [*ids[:5], twin, *ids[6:]])
    assert difference.position == 5 and difference.margin == 0.0 and difference.is_near_tie


def test_bfloat16_has_a_wider_bound_than_float32(tiny_target, prompt):
    ids = greedy(tiny_target, prompt)
    wrong = [*ids[:5], (ids[5] + 1) % 97]
    exact = explain_difference(tiny_target, prompt, ids, wrong)
    coarse = explain_difference(tiny_target.bfloat16(), prompt, ids, wrong)
    assert coarse.bound > 100 * exact.bound


def test_an_answer_that_only_ends_earlier_is_a_fault(tiny_target, prompt):
    difference = explain_difference(tiny_target, prompt, [1, 2, 3], [1, 2, 3, 4])
    assert difference == Difference(3, None, 0.0) and not difference.is_near_tie


def test_a_near_tie_lies_within_its_bound():
    assert Difference(0, 0.1, 0.1).is_near_tie and not Difference(0, 0.2, 0.1).is_near_tie


def test_doubt_grows_with_the_margin_and_is_greatest_without_one():
    differences = [Difference(0, None, 0.0), Difference(0, 0.2, 0.1), Difference(0, 0.3, 0.6), Difference(0, 0.0, 0.0)]
    assert [difference.doubt() for difference in differences] == pytest.approx([float("inf"), 2.0, 0.5, 0.0])
