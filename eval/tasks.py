"""Prompts of an evaluation: public benchmark sets, the offline set, and files of one's own."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy

from dflash_hf.eval.prompts import OFFLINE_TASKS, offline_prompts
from dflash_hf.eval.task_sources import PUBLIC_TASKS, load_source
from dflash_hf.trainer.data import read_json_lines

TASKS = (*PUBLIC_TASKS, *OFFLINE_TASKS)
TASK_GROUPS = {
    "longbench": tuple(task for task in PUBLIC_TASKS if task.startswith("longbench-")),
    "offline": OFFLINE_TASKS,
}
_CONTENT_KEYS = ("prompt", "turns", "messages")


@dataclass(frozen=True)
class EvalPrompt:
    """One conversation of an evaluation.

    Args:
        task (`str`): Task it counts for, such as `"gsm8k"`.
        prompt_id (`str`): Stable, and unique in its task, such as `"gsm8k/17"`.
        turns: User turns; each is answered, the answer is appended, then comes the next turn.
    """

    task: str
    prompt_id: str
    turns: tuple[str, ...]


def load_tasks(
    names: Sequence[str], *, samples: int | None = None, seed: int = 0, data_dir: str | None = None
) -> list[EvalPrompt]:
    """The prompts of the named tasks, task after task.

    If a task has more prompts than are taken, they are shuffled with `seed` and the first ones taken, as
    `Dataset.shuffle` and `select` do in the authors' benchmark script.

    Args:
        names: Tasks of `TASKS`, groups of `TASK_GROUPS`, or paths of JSONL files whose rows have `prompt`, `turns`
            (list of user turns) or `messages`, and optionally `task` and `id`.
        samples (`int`, *optional*): Prompts of each task or file; defaults to the paper's count, for files to all.
        seed (`int`): Of the shuffle.
        data_dir (`str`, *optional*): Folder with a copy of each public data set as JSONL or Parquet in `<task>/`;
            it is read instead of the Hub.
    Raises:
        ImportError: If a package is missing that a task needs.
        ValueError: If a name is unknown, a data set or file cannot be read, lacks a column, or names a prompt twice.
    """
    if samples is not None and samples < 1:
        raise ValueError(f"`samples` is {samples}; it must be at least 1, or None for the default of each task.")
    expanded = dict.fromkeys(task for name in names for task in TASK_GROUPS.get(name, (name,)))
    folder = None if data_dir is None else Path(data_dir)
    prompts = [prompt for name in expanded for prompt in _load_task(name, samples, seed, folder)]
    counts = Counter((prompt.task, prompt.prompt_id) for prompt in prompts)
    for (task, prompt_id), count in counts.items():
        if count > 1:
            raise ValueError(
                f"{count} prompts of task {task!r} have the id {prompt_id!r}; ids must be unique in a task."
            )
    return prompts


def prompts_sha256(prompts: Sequence[EvalPrompt]) -> str:
    """Hash over tasks, ids and texts in order; two runs with equal hashes asked the same."""
    return hashlib.sha256(json.dumps([astuple(prompt) for prompt in prompts]).encode()).hexdigest()


def _load_task(name: str, samples: int | None, seed: int, data_dir: Path | None) -> list[EvalPrompt]:
    if name in PUBLIC_TASKS:
        return _load_public(name, samples, seed, None if data_dir is None else data_dir / name)
    if name in OFFLINE_TASKS:
        prompts = [EvalPrompt(name, prompt_id, (text,)) for prompt_id, text in offline_prompts(name).items()]
    elif name.endswith(".jsonl"):
        prompts = list(_read_prompts(Path(name)))
    else:
        raise ValueError(
            f"There is no task {name!r}. Tasks: {', '.join(TASKS)}; groups: {', '.join(TASK_GROUPS)}; or give the "
            "path of a .jsonl file."
        )
    return [prompts[index] for index in _chosen(len(prompts), samples, seed)]


def _load_public(task: str, samples: int | None, seed: int, folder: Path | None) -> list[EvalPrompt]:
    source = PUBLIC_TASKS[task]
    rows = load_source(task, source, folder)
    prompts = []
    for index in _chosen(len(rows), samples or source.samples, seed):
        row = rows[index]
        row_id = index if source.id_column is None else row[source.id_column]
        # HumanEval's ids name their set already.
        prompt_id = str(row_id) if task == "humaneval" else f"{task}/{row_id}"
        prompts.append(EvalPrompt(task, prompt_id, tuple(source.turns(row))))
    return prompts


def _chosen(count: int, samples: int | None, seed: int) -> list[int]:
    """Which of `count` prompts are taken, in order; the permutation is that of `Dataset.shuffle(seed)`."""
    if samples is None or samples >= count:
        return list(range(count))
    return numpy.random.default_rng(seed).permutation(count)[:samples].tolist()


def _read_prompts(path: Path) -> Iterator[EvalPrompt]:
    """The prompts of a JSONL file.

    Raises:
        ValueError: If the file is missing, empty, or a row has no user turn; names file and row.
    """
    if not path.is_file():
        raise ValueError(f"There is no file {path}; a task that ends in .jsonl is the path of a file.")
    number = -1
    for number, row in enumerate(read_json_lines(path)):
        place = f"{path}, row {number}"
        turns = _turns_of(row, place)
        if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
            raise ValueError(f"{place} has an empty user turn or none: {turns!r}. Every turn must be text.")
        yield EvalPrompt(str(row.get("task", path.stem)), str(row.get("id", number)), tuple(turns))
    if number < 0:
        raise ValueError(f"{path} has no rows; give one prompt a line.")


def _turns_of(row: Mapping[str, Any], place: str) -> list[Any]:
    """The user turns of a row; earlier answers are left out, because the target gives its own."""
    found = [key for key in _CONTENT_KEYS if isinstance(row, dict) and key in row]
    if len(found) != 1:
        raise ValueError(
            f"{place} must be an object with exactly one of the keys {list(_CONTENT_KEYS)}, got {found or row!r}."
        )
    content = row[found[0]]
    if found[0] == "prompt":
        return [content]
    if not isinstance(content, list):
        raise ValueError(f"{place}: `{found[0]}` must be a list, got {content!r}.")
    if found[0] == "turns":
        return content
    roles = [message.get("role") if isinstance(message, dict) else None for message in content]
    if not set(roles) <= {"user", "assistant"}:
        raise ValueError(
            f"{place}: `messages` may have the roles user and assistant, got {roles}. Put the text of a system "
            "message into the first user turn."
        )
    return [message.get("content") for message in content if message["role"] == "user"]
