import importlib.util
import random

import pytest

from dflash_hf.trainer import offline_prompts
from dflash_hf.trainer.data import read_json_lines
from dflash_hf.trainer.offline_prompts import OfflinePromptOptions, build_offline_prompts

needs_reasoning_gym = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed"
)


@pytest.fixture(scope="module")
def training_functions() -> list[dict]:
    return list(offline_prompts.python_functions(held_out=False))


@pytest.fixture(scope="module")
def held_out_functions() -> list[dict]:
    return list(offline_prompts.python_functions(held_out=True))


def test_held_out_modules_and_only_those_are_held_out(training_functions, held_out_functions):
    assert len(training_functions) > 1000
    assert not {function["module"] for function in training_functions} & offline_prompts.HELD_OUT_MODULES
    assert {function["module"] for function in held_out_functions} <= offline_prompts.HELD_OUT_MODULES
    assert len({function["module"] for function in held_out_functions}) > 6


def test_code_of_held_out_functions_is_in_no_training_prompt(training_functions, held_out_functions):
    prompts = offline_prompts.docstring_prompts(10**6, random.Random(0))
    assert len(prompts) == 7 * len(training_functions)
    codes = {prompt.split("```python\n")[1].split("\n```")[0] for prompt in prompts if "```python\n" in prompt}
    assert codes == {function["code"] for function in training_functions}
    assert not codes & {function["code"] for function in held_out_functions}


def test_functions_come_in_the_same_order_every_time(held_out_functions):
    assert list(offline_prompts.python_functions(held_out=True)) == held_out_functions


@pytest.mark.parametrize("make", [offline_prompts.docstring_prompts, offline_prompts.topic_prompts])
def test_draws_repeat_with_the_seed_differ_without_and_never_repeat_a_prompt(make):
    first, again, other = (make(60, random.Random(seed)) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert len(first) == len(set(first)) == 60


def test_every_topic_meets_every_template_once():
    prompts = offline_prompts.topic_prompts(10**6, random.Random(0))
    assert len(prompts) == len(set(prompts)) > 2000
    assert not any("{" in prompt or "|" in prompt for prompt in prompts)


@needs_reasoning_gym
def test_maths_prompts_repeat_with_the_seed_and_ask_for_no_bare_number():
    first, again, other = (offline_prompts.maths_prompts(40, seed) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert not any("Give the result as" in prompt or "Return only the" in prompt for prompt in first)


@needs_reasoning_gym
def test_file_holds_the_asked_mix_of_user_turns_and_repeats(tmp_path):
    options = OfflinePromptOptions(str(tmp_path / "a.jsonl"), num_prompts=100, docstring_share=0.3, maths_share=0.2)
    count = build_offline_prompts(options)
    rows = list(read_json_lines(options.output))
    sources = [row["source"] for row in rows]
    assert count == len(rows)
    assert (sources.count("docstring"), sources.count("topic")) == (30, 50)
    assert abs(sources.count("maths") - 20) <= 9  # each of nine generators gives a whole number
    assert sources != sorted(sources)
    for row in rows:
        (message,) = row["messages"]
        assert message["role"] == "user" and message["content"].strip()
    again = OfflinePromptOptions(str(tmp_path / "b.jsonl"), num_prompts=100, docstring_share=0.3, maths_share=0.2)
    build_offline_prompts(again)
    assert list(read_json_lines(again.output)) == rows


def test_existing_file_is_kept(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"messages": []}\n')
    assert build_offline_prompts(OfflinePromptOptions(str(path))) == 1
    assert path.read_text() == '{"messages": []}\n'
