"""Invented rows with the columns of the public evaluation sets, and the prompts that they must become."""

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
EXPERT = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
    "correct Python program that matches the specification and passes all tests. You will NOT return anything except "
    "for the program\n\n### Question:\n{}\n\n### Format: {}\n\n### Answer: (use the provided format with backticks)"
)
LONG = {"answers": ["x"], "length": 9, "dataset": "d", "language": "en", "all_classes": None}
SPEED = {"category": "qa", "sub_category": "", "source": "own", "src_id": "1", "difficulty": "", "multiturn": True}

ROWS = {
    "gsm8k": [{"question": "What is {1} plus 1?", "answer": "#### 2"}],
    "math500": [
        {
            "problem": "Find $x^{2}$.",
            "solution": "s",
            "answer": "4",
            "subject": "Algebra",
            "level": 1,
            "unique_id": "test/algebra/7.json",
        }
    ],
    "aime24": [{"id": 60, "problem": "Find n.", "solution": "s", "answer": "7", "url": "u", "year": "2024"}],
    "aime25": [{"problem_idx": 1, "problem": "Find m.", "answer": 7, "problem_type": ["Algebra"]}],
    "humaneval": [
        {
            "task_id": "HumanEval/3",
            "prompt": "def one():\n",
            "canonical_solution": "    return 1",
            "test": "t",
            "entry_point": "one",
        }
    ],
    "mbpp": [
        {
            "source_file": "f",
            "task_id": 2,
            "prompt": "Write one.",
            "code": "c",
            "test_imports": ["import math"],
            "test_list": ["assert True"],
        }
    ],
    "livecodebench": [
        {
            "question_title": "t",
            "question_content": "Print 1.",
            "platform": "p",
            "question_id": "a_1",
            "contest_id": "c",
            "contest_date": "2024-01-01T00:00:00",
            "starter_code": "",
            "difficulty": "easy",
            "public_test_cases": "[]",
            "private_test_cases": "",
            "metadata": "{}",
        }
    ],
    "mt-bench": [{"category": "writing", "prompt": ["Write a line.", "Now rhyme."], "reference": [], "prompt_id": 81}],
    "alpaca": [{"instruction": "Sort these.", "input": "b, a", "output": "a, b", "text": "t"}],
    "swe-bench-lite": [
        {
            "repo": "own/repo",
            "instance_id": "own__repo-1",
            "base_commit": "c",
            "patch": "p",
            "test_patch": "t",
            "problem_statement": "It fails.",
            "hints_text": "",
            "created_at": "2024",
            "version": "1",
            "FAIL_TO_PASS": "[]",
            "PASS_TO_PASS": "[]",
            "environment_setup_commit": "e",
        }
    ],
    "gpqa": [
        {
            "Record ID": "rec1",
            "Question": "Which one?\n",
            "Correct Answer": "right",
            "Incorrect Answer 1": "wrong 1",
            "Incorrect Answer 2": "wrong 2",
            "Incorrect Answer 3": "wrong 3",
            "Subdomain": "s",
        }
    ],
    "longbench-hotpotqa": [{"input": "Who?", "context": "Passage 1", "_id": "h1", **LONG}],
    "longbench-qasper": [{"input": "Why?", "context": "Abstract", "_id": "q1", **LONG}],
    "longbench-gov_report": [{"input": "", "context": "Report", "_id": "g1", **LONG}],
    "speed-bench": [{"question_id": "s1", "turns": ["First.", "Second."], **SPEED}],
}
EXPECTED = {
    "gsm8k": ("gsm8k/0", "What is {1} plus 1?" + BOXED),
    "math500": ("math500/test/algebra/7.json", "Find $x^{2}$." + BOXED),
    "aime24": ("aime24/0", "Find n." + BOXED),
    "aime25": ("aime25/0", "Find m." + BOXED),
    "humaneval": (
        "HumanEval/3",
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        "```python\ndef one():\n\n```",
    ),
    "mbpp": ("mbpp/2", "Write one."),
    "livecodebench": (
        "livecodebench/a_1",
        EXPERT.format("Print 1.", "Write your code in the following format:\n```python\n# YOUR CODE HERE\n```"),
    ),
    "mt-bench": ("mt-bench/81", "Write a line.", "Now rhyme."),
    "alpaca": ("alpaca/0", "Sort these.\n\nInput:\nb, a"),
    "swe-bench-lite": (
        "swe-bench-lite/own__repo-1",
        "Problem Statement:\nIt fails.\nPlease fix the issue described above.",
    ),
    "speed-bench": ("speed-bench/s1", "First.", "Second."),
}
