"""Training prompts that need no hub: docstrings of the standard library, seeded maths generators, topics.

No benchmark set is among them. The maths source `gsm_symbolic` is made of GSM8K-like templates, so GSM8K figures of
a drafter trained on it are in-domain. Modules in `HELD_OUT_MODULES` never appear here; `dflash_hf.eval.prompts` uses
them.
"""

import importlib
import inspect
import itertools
import random
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dflash_hf.trainer.command_line import parse_options
from dflash_hf.trainer.data import read_json_lines, write_json_lines

HELD_OUT_MODULES = frozenset(
    "bisect calendar colorsys csv difflib fractions heapq ipaddress shlex statistics textwrap zipfile".split()
)
# Modules whose import has side effects or opens windows.
_NEVER_IMPORT = frozenset("antigravity this idlelib turtle turtledemo tkinter lib2to3 test ensurepip venv".split())

_DOCSTRING_TEMPLATES = (
    "Explain in simple terms what this Python function does:\n\n```python\n{code}\n```",
    "What does the following Python code do, and when would I use it?\n\n```python\n{code}\n```",
    "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{code}\n```",
    "Complete this Python function:\n\n```python\n{code}\n```",
    "Write unit tests for this function:\n\n```python\n{code}\n```",
    "Give a short example of how to use `{name}` from Python's `{module}` module.",
    "Write a Python function that does the following: {summary}",
)
_MATHS_SOURCES = {
    "gsm_symbolic": 6,
    "leg_counting": 1,
    "simple_geometry": 1,
    "coin_flip": 1,
    "time_intervals": 1,
    "calendar_arithmetic": 1,
    "simple_equations": 1,
    "aiw": 1,
    "chain_sum": 1,
}
_MATHS_SUFFIXES = ("", " Explain your reasoning.", " Think step by step.", " Show each step of the calculation.")
_TOPIC_TEMPLATES = (
    "Explain {topic} to a beginner.",
    "What is {topic} and why does it matter?",
    "Write a short story about {topic}.",
    "Give me five practical tips about {topic}.",
    "Summarise the history of {topic} in a few sentences.",
    "What are the advantages and disadvantages of {topic}?",
    "Write a friendly email to a colleague about {topic}.",
    "How would you teach {topic} to a ten-year-old child?",
    "What are common mistakes people make with {topic}?",
    "Write a poem about {topic}.",
    "Describe {topic} step by step.",
    "I want to learn more about {topic}. Where should I start?",
    "Compare the past and the future of {topic}.",
    "Write a short dialogue between two friends who talk about {topic}.",
    "List the key facts about {topic} as bullet points.",
    "Write an introduction for a blog post on {topic}.",
)
_TOPICS = """
photosynthesis|black holes|the water cycle|plate tectonics|the immune system|vaccines|DNA|evolution|the periodic table
|electric motors|solar panels|nuclear energy|wind turbines|batteries|the internet|computer networks|databases
|operating systems|compilers|recursion|sorting algorithms|hash tables|machine learning|neural networks|encryption
|version control|unit testing|web design|open source software|the French Revolution|the Roman Empire|ancient Egypt
|the Silk Road|the Industrial Revolution|the Renaissance|the Cold War|democracy|inflation|supply and demand|taxes
|personal budgeting|saving for retirement|starting a small business|marketing|negotiation|public speaking
|time management|remote work|job interviews|writing a resume|learning a language|reading habits|creative writing
|poetry|photography|painting|music theory|playing the guitar|jazz|classical music|film making|theatre|architecture
|gardening|growing tomatoes|composting|beekeeping|baking bread|making pasta|vegetarian cooking|coffee|tea|chocolate
|healthy eating|sleep|meditation|yoga|running a marathon|strength training|swimming|cycling|football|chess|board games
|hiking|camping|travelling by train|visiting Japan|visiting Italy|city planning|public transport|electric cars
|self-driving cars|space exploration|the Moon landing|Mars|satellites|telescopes|weather forecasting|hurricanes
|earthquakes|volcanoes|coral reefs|rainforests|deserts|whales|dolphins|elephants|wolves|owls|bees|butterflies|dogs
|cats|horses|dinosaurs|friendship|courage|honesty|a lost key|a robot who wants to cook|a lighthouse keeper|a magic tree
|a talking cat|a train journey at night|a small village by the sea|fractions|percentages|probability|prime numbers
|algebra|geometry|the Pythagorean theorem|statistics for beginners|graphs and functions|logic|critical thinking
|the scientific method|ethics|artificial intelligence|renewable energy|recycling|climate change|water conservation
""".replace("\n", "").split("|")


@dataclass
class OfflinePromptOptions:
    """Options of `python -m dflash_hf.trainer.offline_prompts`."""

    output: str = field(metadata={"help": "JSONL file to write: one `messages` row a line."})
    num_prompts: int = field(default=9600, metadata={"help": "Prompts in all; topics give at most 1,900."})
    docstring_share: float = field(default=0.47, metadata={"help": "Share made from Python docstrings."})
    maths_share: float = field(default=0.21, metadata={"help": "Share from reasoning-gym's generators."})
    seed: int = field(default=0, metadata={"help": "Seed of every draw."})


def python_functions(*, held_out: bool) -> Iterator[dict[str, str]]:
    """Public standard-library functions as `{module, name, code, summary}`, in a fixed order.

    Args:
        held_out (`bool`): Take only the modules in `HELD_OUT_MODULES`, or only the others. A held-out function whose
            code is also found elsewhere (methods inherit docstrings) is left out.
    """
    known_code = {function["code"] for function in python_functions(held_out=False)} if held_out else set()
    for module_name in sorted(sys.stdlib_module_names):
        is_held_out = module_name in HELD_OUT_MODULES
        if module_name.startswith("_") or module_name in _NEVER_IMPORT or is_held_out != held_out:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = importlib.import_module(module_name)
        except ImportError:  # a module of another operating system
            continue
        yield from (function for function in _functions_of(module) if function["code"] not in known_code)


def _functions_of(module) -> Iterator[dict[str, str]]:
    for name, member in sorted(vars(module).items()):
        if name.startswith("_") or getattr(member, "__module__", None) != module.__name__:
            continue
        methods = vars(member).items() if inspect.isclass(member) else ()
        for function_name, function in [(name, member), *((f"{name}.{n}", f) for n, f in sorted(methods))]:
            if not inspect.isroutine(function) or "._" in function_name:
                continue
            documentation = inspect.getdoc(function)
            try:
                signature = str(inspect.signature(function))
            except (ValueError, TypeError):
                continue
            if documentation is None or not 30 <= len(documentation) <= 600 or len(signature) > 120:
                continue
            body = documentation.replace("\n", "\n    ").rstrip()
            code = f'def {function_name.split(".")[-1]}{signature}:\n    """{body}\n    """'
            summary = documentation.split("\n\n")[0].replace("\n", " ")
            yield {"module": module.__name__, "name": function_name, "code": code, "summary": summary}


def docstring_prompts(count: int, generator: random.Random) -> list[str]:
    """`count` prompts about functions of the standard library that are not held out."""
    functions = list(python_functions(held_out=False))
    pairs = list(itertools.product(_DOCSTRING_TEMPLATES, functions))
    generator.shuffle(pairs)
    return [template.format(**function) for template, function in pairs[:count]]


def maths_prompts(count: int, seed: int) -> list[str]:
    """`count` word problems and exercises from reasoning-gym's seeded generators."""
    import reasoning_gym

    generator = random.Random(seed)
    total_weight = sum(_MATHS_SOURCES.values())
    prompts = []
    for source, weight in _MATHS_SOURCES.items():
        size = max(1, round(count * weight / total_weight))
        for row in reasoning_gym.create_dataset(source, size=size, seed=seed):
            question = row["question"].split("Give the result as")[0].split("Return only the")[0].strip()
            prompts.append(question + generator.choice(_MATHS_SUFFIXES))
    return prompts


def topic_prompts(count: int, generator: random.Random) -> list[str]:
    """`count` open questions: every topic with every template, shuffled."""
    pairs = list(itertools.product(_TOPIC_TEMPLATES, _TOPICS))
    generator.shuffle(pairs)
    return [template.format(topic=topic.strip()) for template, topic in pairs[:count]]


def build_offline_prompts(options: OfflinePromptOptions) -> int:
    """Writes the prompts to `options.output` and returns how many there are; an existing file is kept."""
    output = Path(options.output)
    if output.exists():
        return sum(1 for _ in read_json_lines(output))
    generator = random.Random(options.seed)
    num_docstrings = round(options.num_prompts * options.docstring_share)
    num_maths = round(options.num_prompts * options.maths_share)
    sources = {
        "docstring": docstring_prompts(num_docstrings, generator),
        "maths": maths_prompts(num_maths, options.seed),
        "topic": topic_prompts(options.num_prompts - num_docstrings - num_maths, generator),
    }
    rows = [
        {"source": source, "messages": [{"role": "user", "content": prompt}]}
        for source, prompts in sources.items()
        for prompt in prompts
    ]
    generator.shuffle(rows)
    return write_json_lines(output, rows)


def main() -> None:
    (options,) = parse_options(OfflinePromptOptions, description="Write training prompts that need no hub.")
    print(f"{build_offline_prompts(options)} prompts in {options.output}")


if __name__ == "__main__":
    main()
