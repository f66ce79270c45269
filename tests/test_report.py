import json

import pytest
from report_material import METHODS, TASKS, make_report, make_serving_report, result_row, serving_row

from dflash_hf.eval.report import compare_reports, markdown_report, read_report
from dflash_hf.eval.report_tables import (
    cost_tables,
    drafting_method,
    identity_table,
    percent,
    remarks,
    rows_at,
    summary_table,
    with_interval,
)


def table_rows(markdown: str, heading: str) -> list[list[str]]:
    """Cells of the table under a heading, head first, without the rule."""
    lines = markdown.split(f"## {heading}", 1)[1].split("\n## ", 1)[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("|")]
    return [rows[0], *rows[2:]]


def replaced(report, position, **figures):
    """The report with some figures of one result row replaced."""
    results = list(report["results"])
    results[position] = results[position] | figures
    return report | {"results": results}


# Reading


def test_report_is_read_from_a_dict_its_file_or_its_folder(tmp_path):
    report = make_report()
    (tmp_path / "report.json").write_text(json.dumps(report))
    assert read_report(report) is report
    assert read_report(tmp_path / "report.json") == read_report(str(tmp_path)) == report


def test_reports_of_before_the_format_are_refused_with_what_to_do():
    old = {"provenance": {}, "summary": {"plain": {}}, "answers": []}
    with pytest.raises(ValueError, match="before reports had a `format`.*Run its command again"):
        read_report(old)


@pytest.mark.parametrize("report", [{}, {"format": "dflash-eval 2"}])
def test_other_formats_are_refused_by_name(report):
    with pytest.raises(ValueError, match=f"its `format` is {report.get('format')!r}, and this version .* reads"):
        read_report(report)


@pytest.mark.parametrize(
    ("text", "message"),
    [("[1]", "holds a list, not an object"), ("{", "is no report of"), ('{"a": NaN}', "holds NaN, where unknown")],
)
def test_files_that_are_no_report_are_refused_by_name(tmp_path, text, message):
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ValueError, match=f"other.json.*{message}"):
        read_report(tmp_path / "other.json")


def test_everything_that_is_missing_is_named():
    report = make_report()
    del report["provenance"]["dtype"], report["provenance"]["warm_up"]
    del report["results"][3]["tau_interval"]
    with pytest.raises(ValueError, match=r"provenance lacks 'dtype', 'warm_up'; results\[3\] lacks 'tau_interval'\."):
        read_report(report)
    without = {key: value for key, value in make_report().items() if key != "methods"}
    with pytest.raises(ValueError, match="the report lacks 'methods'"):
        read_report(without)


def test_long_lists_of_faults_are_cut():
    with pytest.raises(ValueError, match=r"results\[0\] lacks .*results\[4\] lacks .*; and 35 more\."):
        read_report(make_report() | {"results": [{"method": "plain"}] * 40})


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({"tau_interval": [2.0, 1.0]}, r"results\[0\]: 'tau_interval' is \[2.0, 1.0\], not null or"),
        ({"speedup_interval": [1.0]}, "'speedup_interval' is"),
        ({"method": "magic"}, "of the method 'magic', which `methods` does not name"),
    ],
)
def test_wrong_values_are_named(figures, message):
    with pytest.raises(ValueError, match=message):
        read_report(replaced(make_report(), 0, **figures))


def test_report_without_results_is_refused_but_a_cost_model_is_enough():
    empty = make_report() | {"results": [], "identity": []}
    with pytest.raises(ValueError, match="it holds no results"):
        read_report(empty)
    assert read_report(empty | {"cost_model": {"cycle_ms": 1.0}})


# Markdown


def test_results_have_a_row_per_method_and_task_with_a_spread_beside_every_mean():
    for heading, tau in (("Results, greedy", "3.14 [2.98, 3.30]"), ("Results, temperature 1", "2.64 [2.50, 2.77]")):
        head, *rows = table_rows(markdown_report(make_report()), heading)
        assert [row[:2] for row in rows[:4]] == [["all, 120 prompts", method] for method in METHODS]
        assert len(rows) == len(METHODS) * (len(TASKS) + 1) and {len(row) for row in rows} == {len(head)}
        assert rows[1][2] == tau
        for name in ("tau", "speed-up", "end to end", "first token, ms", "tokens/s"):
            assert all("[" in row[head.index(name)] for row in rows), name


def test_result_row_shows_all_its_figures():
    row = result_row("dflash", "code") | {"speedup": 2.5, "speedup_interval": [2.25, 2.75], "speedup_median": 2.625}
    row |= {"tau": 3.5, "tau_interval": [3.25, 3.75], "tau_pooled": 3.375, "draft_share": 0.125, "identical": 1.0}
    row |= {"end_to_end_speedup": 2.0, "end_to_end_speedup_interval": None, "tokens_per_second": 31.25}
    row |= {"tokens_per_second_interval": [30.0, 32.5]}
    table = summary_table(make_report() | {"results": [row]}, 0.0)
    assert table.rows == [
        (
            *("code, 30 prompts", "dflash", "3.50 [3.25, 3.75]", "3.38", "2.50x [2.25, 2.75]", "2.62x", "2.00x [–]"),
            *("310 [290, 330]", "31.2 [30.0, 32.5]", "12%", "100%"),
        )
    ]
    assert "bonus token included" in table.note and "95% interval over prompts" in table.note


def test_precision_stands_in_the_heading_of_the_results():
    assert "## Results, greedy (bfloat16, not quantised)" in markdown_report(make_report())
    quantised = make_report(quantization="int4")
    assert "## Results, greedy (bfloat16, quantised: int4)" in markdown_report(quantised)
    assert "- Quantisation: int4\n" in markdown_report(quantised)


def test_acceptance_never_stands_without_its_length():
    head, *rows = table_rows(markdown_report(make_report()), "Acceptance by slot, greedy")
    slots = [head.index(f"slot {k}") for k in range(1, 8)]
    assert [row[1] for row in rows[:2]] == ["dflash", "assistant"]
    assert rows[0][2:5] == ["3.14 [2.98, 3.30]", "2.08", "8%"]
    assert [rows[0][k] for k in slots] == ["70%", "49%", "34%", "24%", "17%", "12%", "8%"]


def test_methods_with_fewer_slots_leave_the_others_blank():
    row = result_row("assistant", "all") | {"acceptance_per_slot": [0.5, 0.25]}
    report = make_report() | {"results": [result_row("dflash", "all"), row]}
    _, first, second = table_rows(markdown_report(report), "Acceptance by slot")
    assert len(first) == len(second) == 12 and second[-5:] == ["–"] * 5 and second[-7:-5] == ["50%", "25%"]


def test_identity_is_explained_and_unexplained_differences_are_shouted():
    report = make_report()
    head, first, *_ = table_rows(markdown_report(report), "Identity with plain decoding")
    assert first == ["greedy", "dflash", "bfloat16", "120", "117", "3", "0", "0.0312", "0.25"]
    assert "A near tie: at the first differing token" in markdown_report(report)
    assert not any("fault" in remark for remark in remarks(report))
    report["identity"][0] |= {"near_ties": 1, "unexplained": 2}
    assert (
        "> **Note.** dflash, greedy: 2 of 120 answers differ from plain decoding without a near tie. This is a fault"
        in (markdown_report(report))
    )
    assert identity_table(report | {"identity": []}) is None


def test_repetition_is_remarked_on_only_above_its_bound():
    found = [remark for remark in remarks(make_report()) if "4-grams" in remark]
    assert len(found) == 2 and "(greedy): code 0.21 (plain)." in found[0] and "chat" not in found[0]
    report = make_report()
    for row in report["results"]:
        row["repeated_4grams"] = {"code": 0.15, "chat": None}.get(row["task"], 0.1)
    assert not any("4-grams" in remark for remark in remarks(report))
    report["results"][0]["repeated_4grams"] = 0.16
    assert any("code 0.16 (plain)" in remark for remark in remarks(report))


def test_prompts_that_did_not_fit_are_counted():
    assert "3 prompts were left out, too long for the target." in remarks(make_report(left_out_prompts=3))
    assert not any("left out" in remark for remark in remarks(make_report(left_out_prompts=0)))


def test_folders_are_named_by_their_last_part_in_the_title():
    text = markdown_report(make_report(drafter="/home/me/runs/my-drafter", target="org/target"))
    assert (
        text.startswith("# Evaluation of my-drafter for org/target\n")
        and "- Drafter: /home/me/runs/my-drafter\n" in text
    )
    assert markdown_report(make_report(drafter=None)).startswith("# Evaluation of org/target\n")


def test_skipped_methods_are_named_with_the_reason():
    assert "authors was not measured: the package `dflash` is not installed" in markdown_report(make_report())


def test_how_it_was_measured_is_complete():
    text = markdown_report(make_report(max_new_tokens=96)).split("## How it was measured")[1]
    for fact in (
        "Target: org/target",
        "Drafter: org/drafter",
        "Number format: bfloat16",
        "Quantisation: none",
        "Attention: sdpa",
        "Block size: 8",
        "Chat template mode: thinking off",
        "Seed: 0",
        f"Prompts (SHA-256): {'0123456789abcdef' * 4}",
        "Warm-up: one answer per method, not measured",
        "Left out of the times: the prompt's forward, from decode times",
        "Processes: 2",
        "Hardware: machine x86_64, cpus 2, processor a processor",
        "Versions: dflash_hf 0.1.0, torch 2.13.0, transformers 5.24.0, python 3.11.7",
        "Code: commit 0123abc, has_changes false",
        "Options: max_new_tokens 128, num_threads 1, temperatures 0 1, output_dir runs/eval",
        "Command: dflash-eval --output_dir runs/eval --temperatures 0 1",
        "Max new tokens: 96",
    ):
        assert f"- {fact}\n" in f"{text}\n", fact


def test_text_cannot_break_a_table_or_become_html():
    text = markdown_report(make_report(command="dflash-eval a|b\n<script>", target="a|b"))
    assert r"- Command: dflash-eval a\|b &lt;script>" in text and r"# Evaluation of org/drafter for a\|b" in text


def test_shares_just_below_one_never_read_as_all():
    assert [percent(share) for share in (0.0, 0.5, 0.99, 0.996, 0.99999, 1.0, None)] == [
        *("0%", "50%", "99%", "99.6%", "100.0%", "100%", "–")
    ]


def test_unknown_figures_are_dashes():
    assert with_interval(None, None) == "–" and with_interval(1.0, None, digits=1, unit="x") == "1.0x [–]"


def test_all_tasks_come_first_and_methods_keep_their_order():
    rows = rows_at(make_report() | {"results": make_report()["results"][::-1]}, 0.0)
    assert [row["task"] for row in rows[:5]] == ["all"] * 4 + ["json"]
    assert [row["method"] for row in rows[:4]] == list(METHODS)


def test_headlines_are_about_dflash_or_else_the_first_method_with_slots():
    assert drafting_method(make_report()) == "dflash"
    others = [row for row in make_report()["results"] if row["method"] != "dflash"]
    assert drafting_method({"results": others}) == "assistant" and drafting_method({"results": others[:10]}) is None


def test_serving_report_shows_throughput_latency_and_acceptance():
    report = make_serving_report()
    report["serving"][0] |= {"failed": 2, "requests": 62, "speedup": 2.5, "temperature": 0.0}
    text = markdown_report(report)
    first, second = table_rows(text, "Serving")[1:3]
    assert first[:4] == ["code, greedy", "1", "440.0", "2.50x"] and second[3] == "–"
    assert first[4:8] == ["1.00 / 1.50 / 2.25", "40 / 60 / 95", "7.5 / 9.2 / 12.0", "3.50"]
    assert table_rows(text, "Acceptance by slot, from the server's metrics")[1][2:5] == ["3.50", "80%", "60%"]
    assert "code, greedy, concurrency 1: 2 requests failed, 62 were answered." in text
    assert "- Quantisation: not recorded" in text and "## Results" not in text


def test_cost_model_shows_single_figures_and_tables_of_rows():
    model = {"target": {"layers": 30}, "rows": [{"proposals": 7, "cost": 1.23456789}, {"proposals": 3, "cost": None}]}
    single, rows = cost_tables({"cost_model": model})
    assert single.rows == [("target.layers", "30")]
    assert rows.columns == ("proposals", "cost") and rows.rows == [("7", "1.23457"), ("3", "–")]
    assert "## Cost model: rows" in markdown_report(make_report() | {"cost_model": model})
    assert cost_tables({}) == []


# Comparison


def test_equal_settings_make_figures_comparable_and_differences_are_shown():
    a, b = make_report(), make_report(drafter="org/other", finished="2026-10-01T10:00:00Z")
    position = next(i for i, row in enumerate(b["results"]) if row["method"] == "dflash" and row["task"] == "all")
    figures = {"tau": 4.14, "tau_interval": [4.0, 4.3], "speedup": 2.5, "speedup_interval": [2.4, 2.6]}
    text = compare_reports(a, replaced(b, position, **figures))
    assert "the figures can be compared" in text and "not comparable" not in text
    assert table_rows(text, "What differs")[1:] == [
        ["finished", "2026-09-30T10:20:00Z", "2026-10-01T10:00:00Z"],
        ["drafter", "org/drafter", "org/other"],
    ]
    assert table_rows(text, "Results, greedy")[1] == [
        *("all", "dflash", "3.14 [2.98, 3.30]", "4.14 [4.00, 4.30]", "+1.00", "no"),
        *("2.42 [2.17, 2.66]", "2.50 [2.40, 2.60]", "+0.08", "yes"),
    ]
    assert table_rows(text, "Results, temperature 1")[1][4:6] == ["+0.00", "yes"]
    assert "## Only in" not in text and "plain" not in text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompts_sha256": "f" * 64}, "`prompts_sha256`: other prompts: neither tau nor speed-up"),
        ({"hardware": {"processor": "another"}}, "`hardware`: other hardware: speed-ups and times cannot"),
        ({"dtype": "float32"}, "`dtype`: another number format"),
        ({"quantization": "int4"}, "`quantization`: another quantisation"),
        ({"attention": "eager"}, "`attention`: another attention"),
        ({"options": {"max_new_tokens": 64}}, "`max_new_tokens`: answers of another length"),
        ({"num_threads": 2}, "`num_threads`: another number of threads"),
        ({"template_mode": "thinking on"}, "`template_mode`: another chat template mode"),
        ({"target": "org/another"}, "`target`: another target"),
    ],
)
def test_what_makes_figures_incomparable_is_named_first_with_the_reason(changes, reason):
    text = compare_reports(make_report(), make_report(**changes))
    assert "**The figures are not comparable as they stand:**" in text
    assert text.index(f"- {reason}") < text.index("## What differs") < text.index("## Results")


def test_what_a_run_used_counts_not_how_it_was_asked_for():
    a, b = make_report(options={"attention": None, "max_new_tokens": 128}), make_report(options=None)
    a["provenance"] |= {"max_new_tokens": 128}
    b["provenance"] |= {"max_new_tokens": 128}
    assert "the figures can be compared" in compare_reports(a, b)
    b["provenance"] |= {"max_new_tokens": 64}
    assert "- `max_new_tokens`: answers" in compare_reports(a, b) and "`attention`" not in compare_reports(a, b)


def test_a_report_is_the_same_as_itself():
    assert "they are one report" in compare_reports(make_report(), make_report())


def test_rows_of_only_one_report_are_listed():
    a = make_report()
    b = make_report() | {"results": [row for row in a["results"] if row["task"] != "chat" and row["temperature"] == 0]}
    text = compare_reports(a, b)
    only = text.split("## Only in A")[1]
    assert "- greedy, chat, dflash\n" in only and "- temperature 1, all, assistant\n" in only
    assert "## Only in B" not in text and only.strip() in compare_reports(b, a).split("## Only in B")[1]


def test_unknown_intervals_have_no_overlap():
    a = make_report() | {"results": [result_row("dflash", "all") | {"tau_interval": None, "speedup": None}]}
    row = table_rows(compare_reports(a, a), "Results, greedy")[1]
    assert row[2:6] == ["3.14 [–]", "3.14 [–]", "+0.00", "–"] and row[6:9] == ["–", "–", "–"]


def test_servers_are_compared_by_throughput():
    a = make_serving_report()
    b = a | {"serving": [serving_row("code", 1) | {"tokens_per_second": 880.0, "tau": 4.0}, serving_row("prose", 1)]}
    b["serving"][1]["tau"] = None
    text = compare_reports(a, b)
    assert table_rows(text, "Serving")[1:] == [
        ["code", "concurrency 1", "440.0", "880.0", "2.00x", "3.50", "4.00", "+0.50"]
    ]
    assert "- prose, concurrency 1" in text.split("## Only in B")[1]
    assert "- code, concurrency 2" in text.split("## Only in A")[1]
