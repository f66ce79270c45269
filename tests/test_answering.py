import json
from dataclasses import replace

import pytest
import torch
from tiny_material import make_tokenizer

from dflash_hf.eval import evaluate_drafter
from dflash_hf.eval.answering import AnswerFiles, Answering, answer_share, work_name
from dflash_hf.eval.methods import decoder
from dflash_hf.eval.tasks import EvalPrompt

PROMPTS = [
    EvalPrompt("one", "a", ("w1 w2 w3 w4 w5",)),
    EvalPrompt("one", "b", ("w7 w8 w9",)),
    EvalPrompt("two", "c", ("w11 w12", "w13 w14 w15")),
]


@pytest.fixture
def answering(tiny_target, tiny_drafter) -> Answering:
    decoders = {method: decoder(method, tiny_target, tiny_drafter) for method in ("plain", "dflash", "prompt_lookup")}
    return Answering(tiny_target, make_tokenizer(), decoders, 12, {}, 0)


def test_every_method_answers_every_turn_after_the_plain_answer(answering):
    seen = []
    for method, decode in list(answering.decoders.items()):
        answering.decoders[method] = lambda inputs, *rest, decode=decode: (
            seen.append(inputs["input_ids"][0].tolist()) or decode(inputs, *rest)
        )
    records = answering.answer(PROMPTS[2], 0.0)
    assert [record["turn"] for record in records] == [0, 0, 0, 1, 1, 1]
    assert {record["method"] for record in records[3:]} == {"plain", "dflash", "prompt_lookup"}
    assert records[0]["method"] == records[3]["method"] == "plain"
    assert len({tuple(record["token_ids"]) for record in records[:3]}) == 1
    # The second turn holds the first one's plain answer.
    reply = answering.tokenizer.decode(records[0]["token_ids"], skip_special_tokens=True)
    assert seen[3] == seen[4] == seen[5]
    assert reply.split()[0] in answering.tokenizer.decode(seen[3])


def test_methods_take_turns_in_an_order_that_changes_with_the_prompt(answering):
    answering.decoders["whole_block"] = answering.decoders["dflash"]
    prompts = [EvalPrompt("one", str(number), (f"w{number} w{number + 1} w3",)) for number in range(8)]
    orders = {tuple(record["method"] for record in answering.answer(prompt, 0.0)) for prompt in prompts}
    assert len(orders) > 2 and {order[0] for order in orders} == {"plain"}


def test_all_methods_sample_from_the_same_seed_and_prompts_from_different_ones(answering):
    (first, second) = (answering.answer(prompt, 1.0) for prompt in PROMPTS[:2])
    by_method = {record["method"]: record["token_ids"] for record in first}
    assert by_method["dflash"] == by_method["plain"] != second[0]["token_ids"]
    assert {record["method"]: record["token_ids"] for record in answering.answer(PROMPTS[0], 1.0)} == by_method
    other = replace(answering, seed=1).answer(PROMPTS[0], 1.0)
    assert other[0]["token_ids"] != by_method["plain"]


def test_a_wrong_method_is_explained_as_a_fault(answering):
    right = answering.decoders["dflash"]

    def wrong(*arguments):
        answer = right(*arguments)
        ids = answer.token_ids
        return replace(answer, token_ids=[*ids[:4], (ids[4] + 1) % 97, *ids[5:]])

    answering.decoders["dflash"] = wrong
    records = {record["method"]: record for record in answering.answer(PROMPTS[0], 0.0)}
    assert records["dflash"]["difference"]["position"] == 4
    assert records["dflash"]["difference"]["margin"] > records["dflash"]["difference"]["bound"]
    assert records["prompt_lookup"]["difference"] is None


def test_a_baseline_that_fails_is_left_out_with_its_reason_but_plain_must_work(answering, caplog):
    def broken(*_):
        raise NotImplementedError("no compiler\nhere")

    answering.decoders["prompt_lookup"] = broken
    left_out = answering.warm_up(PROMPTS, 0.0, {"prompt_lookup"})
    assert left_out == {"prompt_lookup": "NotImplementedError: no compiler"}
    assert list(answering.decoders) == ["plain", "dflash"] and "no compiler" in caplog.text
    answering.decoders["dflash"] = broken
    with pytest.raises(NotImplementedError):
        answering.warm_up(PROMPTS, 0.0, {"prompt_lookup"})


def test_processes_share_the_work_without_overlap(answering, tmp_path):
    work = [(temperature, prompt) for temperature in (0.0, 1.0) for prompt in PROMPTS]
    for rank in range(2):
        answer_share(answering, work, AnswerFiles(tmp_path, rank), set(), rank=rank, world_size=2)
    lines = [json.loads(line)["id"] for rank in range(2) for line in open(tmp_path / f"answers.{rank}.jsonl")]
    assert sorted(lines) == sorted(work_name(*pair) for pair in work)


def test_a_run_that_was_killed_in_a_line_goes_on_with_what_is_missing(answering, tmp_path):
    work = [(0.0, prompt) for prompt in PROMPTS]
    files = AnswerFiles(tmp_path, 0)
    answer_share(answering, work[:2], files, set())
    with open(files.path, "a") as file:
        file.write('{"id": "0.0/two/c", "answers": [{"ta')
    # The next run has another number of processes.
    files = AnswerFiles(tmp_path, 1)
    done = files.finished()
    assert done == {work_name(*pair) for pair in work[:2]}
    answer_share(answering, work, files, done)
    assert len(open(files.path).readlines()) == 1
    assert len({record.key for record in files.records()}) == 4


def test_workers_that_outlived_their_launcher_do_not_count_twice(answering, tmp_path):
    work = [(0.0, prompt) for prompt in PROMPTS]
    for rank in range(2):
        answer_share(answering, work, AnswerFiles(tmp_path, rank), set())
    records = list(AnswerFiles(tmp_path, 0).records())
    assert len(records) == len({(record.key, record.method) for record in records}) == 3 * 4


def evaluated(tiny_target, tiny_drafter, folder=None, **options):
    return evaluate_drafter(
        tiny_target, tiny_drafter, make_tokenizer(), PROMPTS, max_new_tokens=12, output_dir=folder, **options
    )


def test_the_report_has_rows_identity_and_provenance(tiny_target, tiny_drafter):
    report = evaluated(tiny_target, tiny_drafter, temperatures=(0.0, 1.0))
    names = {(row["method"], row["temperature"], row["task"]) for row in report["results"]}
    assert names == {
        (method, temperature, task)
        for method in ("plain", "dflash", "prompt_lookup")
        for temperature in (0.0, 1.0)
        for task in ("one", "two", "all")
    }
    every = [row for row in report["results"] if row["task"] == "all"]
    assert [row["answers"] for row in every] == [4] * 6 and [row["prompts"] for row in every] == [3] * 6
    assert all(row["identical"] == 1.0 for row in every if row["temperature"] == 0)
    assert {row["method"]: row["unexplained"] for row in report["identity"]} == {"dflash": 0, "prompt_lookup": 0}
    facts = report["provenance"]
    assert facts["block_size"] == 8 and facts["dtype"] == "float32" and len(facts["prompts_sha256"]) == 64
    assert facts["versions"]["torch"] == torch.__version__ and facts["template_mode"] == "template default"
    json.dumps(report, allow_nan=False)


def test_a_finished_run_is_reported_again_without_new_answers(tiny_target, tiny_drafter, tmp_path, monkeypatch):
    first = evaluated(tiny_target, tiny_drafter, tmp_path)
    monkeypatch.setattr(Answering, "answer", None)
    again = evaluated(tiny_target, tiny_drafter, tmp_path)
    assert again["results"] == first["results"] and again["identity"] == first["identity"]


def test_a_folder_of_another_setting_is_refused(tiny_target, tiny_drafter, tmp_path):
    evaluated(tiny_target, tiny_drafter, tmp_path)
    with pytest.raises(ValueError, match="`seed` was 0, now 1"):
        evaluated(tiny_target, tiny_drafter, tmp_path, seed=1)


def test_all_methods_means_those_that_can_run_and_the_others_say_why(tiny_target, tiny_drafter, monkeypatch):
    monkeypatch.setattr("dflash_hf.eval.evaluate.METHODS", {"plain": "", "dflash": "", "assistant": "", "forced": ""})
    report = evaluated(tiny_target, tiny_drafter, methods=("all",))
    assert list(report["methods"]) == ["plain", "dflash"]
    assert "--assistant" in report["skipped_methods"]["assistant"]


def test_unknown_methods_are_named(tiny_target, tiny_drafter):
    with pytest.raises(ValueError, match=r"Unknown methods \['beam'\]"):
        evaluated(tiny_target, tiny_drafter, methods=("beam",))


def test_prompts_without_room_are_left_out_and_counted(tiny_target, tiny_drafter, caplog):
    tiny_target.config.max_position_embeddings = 24
    report = evaluated(tiny_target, tiny_drafter)
    assert report["provenance"]["left_out_prompts"] == 1 and "1 of 3 prompts are left out" in caplog.text
    tiny_target.config.max_position_embeddings = 14
    with pytest.raises(ValueError, match="None of the 3 prompts"):
        evaluated(tiny_target, tiny_drafter)


def test_another_template_mode_than_the_drafters_is_warned_about(tiny_target, tiny_drafter, caplog):
    tiny_drafter.config.dflash_config["template_mode"] = "no thinking"
    evaluated(tiny_target, tiny_drafter)
    assert "trained with the chat template in mode 'no thinking'" in caplog.text
