"""The figures of the benchmark of trees, from rows made by hand."""

import json
from pathlib import Path

import pytest


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import tree_speed

    return tree_speed


def make_row(task, number, **seconds):
    row = {"task": task, "prompt_id": f"{task}/{number}"}
    for method, (lengths, per_token) in seconds.items():
        row[method.replace("_", " ")] = {"accepted_lengths": lengths, "seconds_per_token": per_token}
    return row


def make_rows():
    return [
        make_row(
            "code",
            number,
            plain=([1, 1, 1], 0.2),
            whole_block=([2, 1], 0.1 + number / 100),
            chain=([3], 0.1),
            auto=([3], 0.05),
        )
        for number in range(4)
    ]


def make_short_row():
    return make_row("chat", 0, plain=([1], 0.2), whole_block=([1], 0.2), chain=([], None), auto=([], None))


METHODS = ["plain", "whole block", "chain", "auto"]


def test_ratios_are_of_mean_times(benchmark):
    found = benchmark.figures(make_rows(), METHODS)
    assert found["whole block"]["tokens_per_cycle"] == pytest.approx(1.5)
    assert found["auto"]["milliseconds"] == pytest.approx(50.0)
    assert found["auto"]["against chain"]["of_means"] == pytest.approx(2.0)
    assert found["auto"]["against whole block"]["of_means"] == pytest.approx(0.115 / 0.05)
    assert found["auto"]["against whole block"]["median"] == pytest.approx(2.3)
    low, high = found["auto"]["against whole block"]["interval"]
    assert low < 2.3 < high


def test_figures_are_of_all_and_of_each_kind_without_short_answers(benchmark):
    found = benchmark.by_kind([*make_rows(), make_short_row()], METHODS)
    assert list(found) == ["all", "code"] and found["all"] == found["code"]
    text = benchmark.render(found)
    assert text.count("| auto | 3.00 | 50.0 |") == 2 and "2.00 (2.00 to 2.00), median 2.00" in text
    assert benchmark.by_kind([make_short_row()], METHODS) == {}


def test_stopped_run_goes_on_only_with_its_own_options(benchmark, tmp_path):
    path = tmp_path / "runs.json"
    options = benchmark.TreeSpeedOptions(output=str(path))
    assert benchmark.earlier_rows(options, METHODS) == []
    path.write_text(json.dumps({"options": vars(options), "methods": METHODS, "rows": [{"task": "code"}]}))
    assert benchmark.earlier_rows(options, METHODS) == [{"task": "code"}]
    with pytest.raises(ValueError, match="a run with other options"):
        benchmark.earlier_rows(benchmark.TreeSpeedOptions(output=str(path), samples=1), METHODS)
