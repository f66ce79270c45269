"""Where the public evaluation sets come from and how their rows become prompts; nothing is read at import.

Data sets, splits, wording and sample counts are those of the DFlash paper and its authors' benchmark script where
they state them; `docs/tasks.md` says where they do not.
"""

import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_hf.eval.prompts import HUMAN_EVAL_TEMPLATE

_LOCAL_KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_REASONING = "\nPlease reason step by step, and put your final answer within \\boxed{{}}."
_SWE_BENCH = "Problem Statement:\n{problem_statement}\nPlease fix the issue described above."
_LIVE_CODE_BENCH = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
    "correct Python program that matches the specification and passes all tests. You will NOT return anything except "
    "for the program\n\n### Question:\n{question}\n\n### Format: {instruction}\n```python\n{code}\n```\n\n"
    "### Answer: (use the provided format with backticks)"
)
_GPQA = (
    "Answer the following multiple choice question. The last line of your response should be of the following format: "
    "'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think step by step before answering.\n\n"
    "{question}\n\nA) {a}\nB) {b}\nC) {c}\nD) {d}"
)
_GPQA_ANSWERS = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
_HOTPOT_QA = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "The following are given passages.\n{context}\n\nAnswer the question based on the given passages. Only give me "
    "the answer and do not output any other words.\n\nQuestion: {input}\nAnswer:"
)
_QASPER_RULE = (
    "as concisely as you can, using a single phrase or sentence if possible. If the question cannot be answered based "
    'on the information in the article, write "unanswerable". If the question is a yes/no question, answer "yes", '
    '"no", or "unanswerable". Do not provide any explanation.'
)
_QASPER = (
    f"You are given a scientific article and a question. Answer the question {_QASPER_RULE}\n\nArticle: {{context}}"
    f"\n\n Answer the question based on the above article {_QASPER_RULE}\n\nQuestion: {{input}}\n\nAnswer:"
)
_GOV_REPORT = (
    "You are given a report by a government agency. Write a one-page summary of the report.\n\nReport:\n{context}\n\n"
    "Now, write a one-page summary of the report.\n\nSummary:"
)
_SPEED_BENCH_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"


@dataclass(frozen=True)
class TaskSource:
    """A public data set and its way into prompts.

    Args:
        repository (`str`): Data set on the Hub.
        split (`str`): Split that is used; of no meaning with `files`.
        columns: What `turns` and `id_column` read.
        turns: The user turns of a row.
        samples (`int`, *optional*): Prompts that are used by default; None takes all.
        configuration (`str`, *optional*): Of the data set.
        id_column (`str`, *optional*): Names a row; without it the number of the row does.
        files: Files of the repository that hold the rows, where `datasets` finds no split.
        member (`str`, *optional*): The file inside `files`, if those are archives.
    """

    repository: str
    split: str
    columns: tuple[str, ...]
    turns: Callable[[Mapping[str, Any]], Sequence[str]]
    samples: int | None = None
    configuration: str | None = None
    id_column: str | None = None
    files: tuple[str, ...] = ()
    member: str | None = None


def load_source(task: str, source: TaskSource, folder: Path | None) -> Any:
    """The rows of a task as a `datasets.Dataset`, from the Hub or from the files in `folder`.

    Raises:
        ImportError: If `datasets` is not installed.
        ValueError: If the rows cannot be had, or lack a column.
    """
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f"Task {task!r} needs `datasets`: `pip install 'dflash-hf[eval]'`.") from error
    place = f"Data set {source.repository}" if folder is None else f"The local copy {folder} of {source.repository}"
    try:
        if folder is not None:
            rows = _load_files(_local_files(folder))
        elif source.files:
            rows = _load_files(_hub_files(source))
        else:
            rows = datasets.load_dataset(source.repository, source.configuration, split=source.split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"{place} (task {task!r}) cannot be read: {error}\nWith a network: `hf auth login`, and accept the terms "
            f"at https://huggingface.co/datasets/{source.repository} if it is gated. Without: set `data_dir` to a "
            f"folder with a copy of its rows as JSONL or Parquet in `{task}/`, or use the task `offline`."
        ) from error
    missing = [column for column in source.columns if column not in rows.column_names]
    if missing:
        raise ValueError(
            f"{place} (task {task!r}) has no column {missing[0]!r}, but {rows.column_names}. The task needs "
            f"{list(source.columns)}: rename the columns of a local copy and set `data_dir`."
        )
    return rows.select_columns(list(source.columns))


def _load_files(files: Sequence[str]) -> Any:
    import datasets

    kinds = {_LOCAL_KINDS[Path(file).suffix] for file in files}
    if len(kinds) != 1:
        raise ValueError(f"the files are of {len(kinds)} kinds; keep only JSON lines or only Parquet: {list(files)}")
    return datasets.load_dataset(kinds.pop(), data_files=list(files), split="train")


def _local_files(folder: Path) -> list[str]:
    files = sorted(str(path) for path in folder.rglob("*") if path.suffix in _LOCAL_KINDS)
    if not files:
        raise FileNotFoundError(f"there is no .jsonl, .json or .parquet file in {folder}")
    return files


def _hub_files(source: TaskSource) -> list[str]:
    from datasets import DownloadManager
    from huggingface_hub import hf_hub_download

    files = [hf_hub_download(source.repository, name, repo_type="dataset") for name in source.files]
    if source.member is None:
        return files
    return [os.path.join(DownloadManager().extract(file), source.member) for file in files]


def _template(text: str) -> Callable[[Mapping[str, Any]], Sequence[str]]:
    return lambda row: [text.format(**row)]


def _alpaca_turns(row: Mapping[str, Any]) -> Sequence[str]:
    return [f"{row['instruction']}\n\nInput:\n{row['input']}" if row["input"] else row["instruction"]]


def _live_code_bench_turns(row: Mapping[str, Any]) -> Sequence[str]:
    code = row["starter_code"]
    instruction = "Use the following code structure:" if code else "Write your code in the following format:"
    return [
        _LIVE_CODE_BENCH.format(
            question=row["question_content"], instruction=instruction, code=code or "# YOUR CODE HERE"
        )
    ]


def _gpqa_turns(row: Mapping[str, Any]) -> Sequence[str]:
    # The order of the options depends on nothing but the question.
    options = [row[column].strip() for column in _GPQA_ANSWERS]
    random.Random(row["Record ID"]).shuffle(options)
    return [_GPQA.format(question=row["Question"].strip(), **dict(zip("abcd", options, strict=True)))]


def _speed_bench_turns(row: Mapping[str, Any]) -> Sequence[str]:
    if any(turn.startswith(_SPEED_BENCH_PLACEHOLDER) for turn in row["turns"]):
        raise ValueError(
            f"Row {row['question_id']} of nvidia/SPEED-Bench holds a placeholder, since its source may not be copied. "
            "Run `prepare_data.py --config qualitative` of NVIDIA's Model-Optimizer (examples/specdec_bench), put its "
            "test.parquet into DATA_DIR/speed-bench/ and set `data_dir` to DATA_DIR."
        )
    return row["turns"]


def _long_bench(subset: str, template: str) -> TaskSource:
    return TaskSource(
        "zai-org/LongBench",
        "test",
        columns=("input", "context", "_id"),
        turns=_template(template),
        samples=128,
        id_column="_id",
        files=("data.zip",),
        member=f"data/{subset}.jsonl",
    )


PUBLIC_TASKS: dict[str, TaskSource] = {
    "gsm8k": TaskSource(
        "openai/gsm8k", "test", ("question",), _template("{question}" + _REASONING), 128, configuration="main"
    ),
    "math500": TaskSource(
        "HuggingFaceH4/MATH-500",
        "test",
        ("problem", "unique_id"),
        _template("{problem}" + _REASONING),
        128,
        id_column="unique_id",
    ),
    "aime24": TaskSource("HuggingFaceH4/aime_2024", "train", ("problem",), _template("{problem}" + _REASONING), 30),
    "aime25": TaskSource("MathArena/aime_2025", "train", ("problem",), _template("{problem}" + _REASONING), 30),
    "humaneval": TaskSource(
        "openai/openai_humaneval",
        "test",
        ("task_id", "prompt"),
        _template(HUMAN_EVAL_TEMPLATE),
        164,
        id_column="task_id",
    ),
    "mbpp": TaskSource(
        "google-research-datasets/mbpp",
        "test",
        ("task_id", "prompt"),
        _template("{prompt}"),
        128,
        configuration="sanitized",
        id_column="task_id",
    ),
    "livecodebench": TaskSource(
        "livecodebench/code_generation_lite",
        "test",
        ("question_id", "question_content", "starter_code"),
        _live_code_bench_turns,
        128,
        id_column="question_id",
        files=("test.jsonl", *(f"test{number}.jsonl" for number in range(2, 7))),
    ),
    "mt-bench": TaskSource(
        "HuggingFaceH4/mt_bench_prompts",
        "train",
        ("prompt", "prompt_id"),
        lambda row: row["prompt"],
        80,
        id_column="prompt_id",
    ),
    "alpaca": TaskSource("tatsu-lab/alpaca", "train", ("instruction", "input"), _alpaca_turns, 128),
    "swe-bench-lite": TaskSource(
        "princeton-nlp/SWE-bench_Lite",
        "test",
        ("instance_id", "problem_statement"),
        _template(_SWE_BENCH),
        128,
        id_column="instance_id",
    ),
    "gpqa": TaskSource(
        "Idavidrein/gpqa",
        "train",
        ("Record ID", "Question", *_GPQA_ANSWERS),
        _gpqa_turns,
        configuration="gpqa_diamond",
        id_column="Record ID",
    ),
    "longbench-hotpotqa": _long_bench("hotpotqa", _HOTPOT_QA),
    "longbench-qasper": _long_bench("qasper", _QASPER),
    "longbench-gov_report": _long_bench("gov_report", _GOV_REPORT),
    "speed-bench": TaskSource(
        "nvidia/SPEED-Bench",
        "test",
        ("question_id", "turns"),
        _speed_bench_turns,
        configuration="qualitative",
        id_column="question_id",
    ),
}
