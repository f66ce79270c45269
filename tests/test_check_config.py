"""Faults of a drafter's config, each of which `dflash-hub check` names."""

from pathlib import Path

import pytest
from check_material import PROMPTS, check, copy_pair, plant_config, the
from conftest import make_tiny_target
from generation_material import make_drafter as make_family_drafter
from generation_material import make_target
from test_damaged_folders import change_config
from tiny_material import make_drafter_config, make_tokenizer

from dflash_hf import DFlashDraftModel, create_drafter
from dflash_hf.hub_configs.check import check_drafter

SWITCH = "{% if enable_thinking is defined and not enable_thinking %} w1{% else %} w2{% endif %}"


@pytest.fixture
def pair(tmp_path) -> Path:
    return copy_pair(tmp_path)


CONFIG_FAULTS = {
    "depth": (plant_config(num_target_layers=12), "depth", "error", "`num_target_layers` 12, but the target's is 8"),
    "ids too deep": (plant_config(nested={"target_layer_ids": [1, 9]}), "layer ids", "error", "[9] cannot be tapped"),
    "last layer": (plant_config(nested={"target_layer_ids": [1, 7]}), "layer ids", "error", "only 0 to 6"),
    "order of ids": (plant_config(nested={"target_layer_ids": [5, 1]}), "layer ids", "error", "in rising order"),
    "same id twice": (plant_config(nested={"target_layer_ids": [5, 5]}), "layer ids", "error", "different ids"),
    "ids counted from the embedding": (
        plant_config(nested={"target_layer_ids": [2, 6]}),
        "layer ids",
        "warning",
        "usual ones plus 1",
    ),
    "unusual ids": (plant_config(nested={"target_layer_ids": [0, 5]}), "layer ids", "note", "would be [1, 5]"),
    "smaller vocabulary": (
        plant_config(vocab_size=90, nested={"mask_token_id": 89}),
        "vocabulary",
        "error",
        "`vocab_size` 90, but the target has 100 with 96 real tokens",
    ),
    "larger vocabulary": (plant_config(vocab_size=5000), "vocabulary", "error", "`vocab_size` 5000"),
    "padded vocabulary": (plant_config(vocab_size=128), "vocabulary", "ok", "padding only, 96 tokens are real"),
    "mask id without a row": (
        plant_config(vocab_size=128, nested={"mask_token_id": 100}),
        "mask token",
        "error",
        "id 100 has no row",
    ),
    "mask is eos": (plant_config(nested={"mask_token_id": 2}), "mask token", "error", "the target's eos token"),
    "mask is pad": (plant_config(nested={"mask_token_id": 1}), "mask token", "error", "the target's pad token"),
    "mask is bos": (plant_config(nested={"mask_token_id": 0}), "mask token", "error", "the target's bos token"),
    "mask is unk": (plant_config(nested={"mask_token_id": 3}), "mask token", "warning", "the target's unk token"),
    "mask is a word": (plant_config(nested={"mask_token_id": 50}), "mask token", "error", "'w44', an ordinary token"),
    "mask is in the template": (
        plant_config(nested={"mask_token_id": 5}),
        "mask token",
        "error",
        "'assistant', which the chat template writes",
    ),
    "theta": (
        plant_config(rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
        "rope theta",
        "warning",
        "1e+06, but the target's is 10000",
    ),
    "scaled rope": (
        plant_config(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
        "rope type",
        "note",
        "'linear'",
    ),
    "embedding scale": (
        plant_config(nested={"input_embedding_scale": 5.5}),
        "embedding scale",
        "warning",
        "`input_embedding_scale` 5.5, but the target multiplies by 1",
    ),
    "soft cap": (
        plant_config(nested={"final_logit_softcapping": 30.0}),
        "soft cap",
        "warning",
        "`final_logit_softcapping` is 30.0, the target's None",
    ),
    "stored in float16": (plant_config(dtype="float16"), "dtype", "warning", "stored in float16"),
    "mode not recorded": (plant_config(nested={"template_mode": None}), "template mode", "note", "not recorded"),
    "mode without a switch": (
        plant_config(nested={"template_mode": "thinking"}),
        "template mode",
        "note",
        "has no such switch",
    ),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_fault_of_the_config_is_named(pair, fault):
    plant, subject, level, text = CONFIG_FAULTS[fault]
    plant(pair)
    report = check(pair, prompts=PROMPTS[:1], max_new_tokens=4)
    finding = the(report, subject)
    assert (finding.level, text in finding.text) == (level, True), finding
    assert bool(finding.advice) == (level in ("warning", "error"))
    if level in ("warning", "error"):
        assert subject in report.advice and report.has_errors == (level == "error")


def test_drafter_of_another_width_is_named_and_not_run(pair):
    other = make_tiny_target(hidden_size=64, num_attention_heads=8)
    create_drafter(other, make_drafter_config(other)).save_pretrained(pair / "drafter")
    report = check(pair)
    assert the(report, "hidden size").text == "`hidden_size` 64, but the target's is 32"
    assert "dflash-hub match" in the(report, "hidden size").advice
    assert the(report, "decoding").level == "note" and report.metrics == {}
    assert the(report, "weights").level == "ok"


def test_all_faults_are_reported_at_once(pair):
    change_config(
        pair / "drafter",
        hidden_size=64,
        num_target_layers=40,
        rope_parameters=None,
        vocab_size=5000,
        nested={"target_layer_ids": [39, 3], "mask_token_id": 200},
    )
    report = check(pair)
    assert {finding.subject for finding in report.of("error")} == {
        "loading",
        "config",
        "hidden size",
        "depth",
        "vocabulary",
        "mask token",
        "layer ids",
    }
    assert "missing or no numbers: rope_theta" in the(report, "config").text
    assert len([finding for finding in report.findings if finding.subject == "layer ids"]) == 2


@pytest.mark.parametrize(("mode", "default"), [("no thinking", "thinking"), ("thinking", "thinking")])
def test_template_mode_is_compared_with_what_the_template_does_by_default(pair, mode, default):
    (template,) = pair.glob("target/chat_template.jinja")
    template.write_text(template.read_text() + SWITCH)
    change_config(pair / "drafter", nested={"template_mode": mode})
    finding = the(check(pair, prompts=PROMPTS[:1], max_new_tokens=4), "template mode")
    if mode == default:
        assert (finding.level, finding.text) == ("ok", "thinking")
    else:
        assert finding.level == "warning" and "trained on 'no thinking' texts" in finding.text
        assert "pass `enable_thinking=False` to `apply_chat_template`" in finding.advice


def test_prompts_are_rendered_in_the_mode_of_the_training(pair, monkeypatch):
    (template,) = pair.glob("target/chat_template.jinja")
    template.write_text(template.read_text() + SWITCH)
    change_config(pair / "drafter", nested={"template_mode": "no thinking"})
    ends = []
    monkeypatch.setattr(
        "dflash_hf.hub_configs.check.check_decoding",
        lambda target, drafter, prompts, count: (ends.extend(ids[-1] for ids in prompts), ([], {}))[1],
    )
    check(pair, prompts=[PROMPTS[0], [{"role": "user", "content": PROMPTS[1]}]])
    assert ends == [make_tokenizer().convert_tokens_to_ids("w1")] * 2


def test_published_drafter_without_a_mode_has_that_of_the_list(pair, monkeypatch):
    change_config(pair / "drafter", nested={"template_mode": None})
    monkeypatch.setattr("dflash_hf.hub_configs.check.drafter_of", lambda shipped: str(pair / "drafter"))
    assert "not recorded" not in the(check(pair, prompts=[], max_new_tokens=4), "template mode").text


# Gemma-like targets


@pytest.mark.parametrize(
    ("fields", "subject", "level"),
    [
        ({}, "soft cap", "ok"),
        ({}, "embedding scale", "ok"),
        ({"final_logit_softcapping": None}, "soft cap", "warning"),
        ({"input_embedding_scale": 1.0}, "embedding scale", "warning"),
        ({"input_embedding_scale": None}, "embedding scale", "ok"),
    ],
)
def test_scale_and_soft_cap_of_a_gemma_like_target_are_compared(fields, subject, level):
    target = make_target("gemma3", final_logit_softcapping=5.0)
    drafter = make_family_drafter(target, DFlashDraftModel)
    for key, value in fields.items():
        drafter.config.dflash_config[key] = value
    report = check_drafter(target, drafter, prompts=[[5, 6, 7]], max_new_tokens=6)
    assert the(report, subject).level == level
    assert the(report, "logits").level == the(report, "taps").level == the(report, "identity").level == "ok"


@pytest.mark.parametrize(("num_rows", "level"), [(48, "error"), (90, "error"), (96, None)])
def test_tokenizer_with_more_tokens_than_the_target_has_rows_is_named(num_rows, level):
    target = make_tiny_target(vocab_size=num_rows)
    drafter = create_drafter(target, make_drafter_config(target, mask_token_id=num_rows - 1))
    report = check_drafter(target, drafter, tokenizer=make_tokenizer(), prompts=[[5, 6, 7]], max_new_tokens=4)
    levels = [finding.level for finding in report.findings if finding.subject == "tokenizer"]
    assert levels == ([level] if level else [])


def test_one_token_more_than_rows_is_no_fault():
    target = make_tiny_target()
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([f"x{number}" for number in range(4)] + ["<image>"])
    assert len(tokenizer) == 101
    drafter = create_drafter(target, make_drafter_config(target))
    report = check_drafter(target, drafter, tokenizer=tokenizer, prompts=[[5, 6, 7]], max_new_tokens=4)
    assert the(report, "tokenizer").level == "note" and the(report, "vocabulary").level == "ok"
