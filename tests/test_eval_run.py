"""`dflash-eval` as users call it: processes, a kill, a server, the cost model, comparisons."""

import json
import os
import subprocess
import sys
import time

import psutil
import pytest
import torch
from streaming_server import StreamingServer
from tiny_material import make_drafter_config, run_python, save_tiny_target

from dflash_hf import DFlashDraftModel
from dflash_hf.eval.cost_model import CostRow, cost_table, cycle_costs, random_pair
from dflash_hf.eval.decode import Answer
from dflash_hf.eval.report import read_report
from dflash_hf.eval.run import EvalOptions, evaluate_server, main

pytest.importorskip("matplotlib", reason="reports with plots need matplotlib (extra `eval`)")


@pytest.fixture
def pair(tmp_path):
    target = save_tiny_target(tmp_path / "target")
    DFlashDraftModel(make_drafter_config(target)).save_pretrained(tmp_path / "drafter")
    prompts = [{"prompt": f"w{n} w{n + 1} w{n + 2} w{n + 5}", "task": "words"} for n in range(6)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    return tmp_path


def arguments(folder, *extra: str) -> list[str]:
    return [
        *("--target", str(folder / "target"), "--drafter", str(folder / "drafter"), "--dtype", "float32"),
        *("--tasks", str(folder / "prompts.jsonl"), "--output_dir", str(folder / "out"), *extra),
    ]


def launch(folder, *extra: str) -> list[str]:
    return [
        *("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "dflash_hf.eval.run"),
        *arguments(folder, *extra),
    ]


def answered(folder) -> list[str]:
    return [json.loads(line)["id"] for path in folder.glob("out/answers.*.jsonl") for line in open(path)]


@pytest.mark.slow
def test_two_processes_are_killed_go_on_and_report_every_prompt_once(pair):
    options = ("--max_new_tokens", "128", "--temperatures", "0", "1")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    run = subprocess.Popen(
        [sys.executable, *launch(pair, *options)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not any(pair.glob("out/answers.*.jsonl")):
        time.sleep(0.02)
    # The workers have sessions of their own.
    launcher = psutil.Process(run.pid)
    for process in [*launcher.children(recursive=True), launcher]:
        process.kill()
    run.wait()
    before = answered(pair)
    assert 0 < len(before) < 12 and not (pair / "out" / "report.json").exists()
    run_python(*launch(pair, *options))
    assert set(before) < set(answered(pair)) and len(answered(pair)) == len(set(answered(pair))) == 12
    report = read_report(pair / "out")
    every = [row for row in report["results"] if row["task"] == "all"]
    assert len(every) == 2 * 3 and all(row["prompts"] == 6 for row in every)
    assert all(row["identical"] == 1.0 for row in every if row["temperature"] == 0.0 or row["method"] == "dflash")
    assert report["provenance"]["world_size"] == 2
    for name in ("report.md", "report.html", "plots/speedup-greedy.svg"):
        assert (pair / "out" / name).stat().st_size > 500


def call(monkeypatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["dflash-eval", *words])
    main()


def test_two_reports_are_compared(pair, monkeypatch, capsys):
    call(monkeypatch, *arguments(pair, "--samples", "2", "--max_new_tokens", "8"))
    assert "| words | dflash |" in capsys.readouterr().out
    call(monkeypatch, "--compare", str(pair / "out" / "report.json"), str(pair / "out"))
    assert "dflash" in capsys.readouterr().out
    with pytest.raises(ValueError, match="takes two report.json files, got 1"):
        call(monkeypatch, "--compare", str(pair / "out"))


def test_forced_acceptance_is_a_method_with_exactly_that_tau(pair, monkeypatch):
    call(
        monkeypatch,
        *arguments(pair, "--samples", "2", "--max_new_tokens", "41", "--methods", "forced", "dflash"),
        *("--simulate_accept_len", "4"),
    )
    row = next(row for row in read_report(pair / "out")["results"] if row["method"] == "forced")
    assert row["tau"] == row["tau_pooled"] == 4.0 and row["identical"] == 1.0


def test_a_server_is_measured_and_a_second_run_asks_for_missing_levels_only(pair):
    with StreamingServer() as server:
        options = EvalOptions(
            server=server.url,
            tasks=[str(pair / "prompts.jsonl")],
            concurrency=[1, 4],
            max_new_tokens=9,
            enable_thinking=False,
            output_dir=str(pair / "serving"),
        )
        report = read_report(evaluate_server(options))
        num_asked = len(server.bodies)
        assert [row["concurrency"] for row in report["serving"]] == [1, 4]
        assert all(row["requests"] == 6 and row["failed"] == 0 for row in report["serving"])
        assert server.bodies[-1]["chat_template_kwargs"] == {"enable_thinking": False}
        options.concurrency = [1, 4, 8]
        again = evaluate_server(options)
    assert [row["concurrency"] for row in again["serving"]] == [1, 4, 8]
    assert again["serving"][:2] == report["serving"]
    assert len(server.bodies) - num_asked in (6, 7)  # the new level and a warm-up
    options.max_new_tokens = 5
    with pytest.raises(ValueError, match="`max_new_tokens` was 9, now 5"):
        evaluate_server(options)


def test_cost_model_needs_no_weights(pair, monkeypatch, capsys):
    (pair / "target" / "model.safetensors").unlink()
    (pair / "drafter" / "model.safetensors").unlink()
    call(
        monkeypatch,
        *arguments(pair, "--cost_model", "true", "--num_proposals", "1", "7", "--accept_lengths", "4", "--taus", "3"),
    )
    table = capsys.readouterr().out
    assert table.count("\n") >= 4 and "tau 3" in table
    costs = json.loads((pair / "out" / "cost.json").read_text())
    assert [(row["num_proposals"], row["accept_length"]) for row in costs["rows"]] == [(1, None), (7, None), (7, 4.0)]


def test_costs_are_those_of_real_rounds(tiny_target, tiny_drafter):
    (row,) = cycle_costs(tiny_target, tiny_drafter, num_proposals=[7], num_rounds=6, repetitions=2)
    assert 0 < row.cost_range[0] <= row.cost <= row.cost_range[1]
    assert 0 < row.draft_share < 1 and 0 < row.verify_share < 1 - row.draft_share


def test_the_first_round_reads_the_context_and_costs_are_medians(tiny_target, tiny_drafter, monkeypatch):
    # Plain steps take 1 s, cycles 2, 3 and 4 s after the first, and a repetition that is not counted comes before.
    seconds = iter([[9.0, 1.0], [9.0, 7.0], [9.0, 1.0], [9.0, 2.0], [9.0, 1.0], [9.0, 4.0], [9.0, 1.0], [9.0, 3.0]])
    monkeypatch.setattr(
        "dflash_hf.eval.cost_model.timed_generate",
        lambda *_, **__: Answer([1, 2, 3], [1, 1], 0.5, next(seconds), draft_seconds=1.0, verify_seconds=2.0),
    )
    (row,) = cycle_costs(tiny_target, tiny_drafter, num_proposals=[7], num_rounds=2, repetitions=3)
    assert (row.cost, row.cost_range, row.plain_ms, row.cycle_ms) == (3.0, (2.0, 4.0), 1000.0, 3000.0)
    assert row.draft_share == 3 / 36 and row.verify_share == 6 / 36


def test_a_speedup_is_tau_over_the_cost_and_only_where_a_block_can_give_it():
    row = CostRow(128, 7, None, 10.0, 15.0, 1.5, (1.4, 1.6), 0.1, 0.8)
    assert row.speedup(3.0) == 2.0
    line = cost_table([row], [3.0, 9.0]).splitlines()[-1]
    assert "1.50 (1.40 to 1.60)" in line and line.endswith("| 2.00x |  |")


def test_random_weights_are_finite(pair):
    target, drafter = random_pair(str(pair / "target"), str(pair / "drafter"), torch.float32, torch.device("cpu"))
    assert all(weight.isfinite().all() for model in (target, drafter) for weight in model.parameters())
    assert not target.training and not drafter.training
