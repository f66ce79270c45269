"""Broken weights, dead layers and useless drafters, each of which `dflash-hub check` names."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from check_material import PROMPTS, check, copy_pair, healthy, plant_config, plant_tensors, prompt_ids, the
from conftest import make_tiny_target
from target_cells import make_case
from test_damaged_folders import change_tensors
from tiny_material import make_drafter_config

from dflash_hf import DFlashDraftModel, create_drafter
from dflash_hf.hub_configs.check import check_drafter
from dflash_hf.hub_configs.check_repairs import check_repairs
from dflash_hf.hub_configs.check_report import CheckReport, Finding


@pytest.fixture
def pair(tmp_path) -> Path:
    return copy_pair(tmp_path)


def fill(name: str, value: float) -> Callable[[Path], None]:
    return plant_tensors(lambda tensors: tensors[name].fill_(value))


def shuffle_weights(tensors: dict[str, torch.Tensor]) -> None:
    """All values stay, at other places."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        places = torch.randperm(tensor.numel(), generator=generator)
        tensors[name] = tensor.flatten()[places].reshape(tensor.shape).contiguous()


def swap_features(tensors: dict[str, torch.Tensor]) -> None:
    first, second = tensors["fc.weight"].chunk(2, dim=1)
    tensors["fc.weight"] = torch.cat([second, first], dim=1)


# Weights and values

WEIGHT_FAULTS = {
    "NaN": (
        fill("layers.0.mlp.up_proj.weight", float("nan")),
        "error",
        "NaN or infinite: layers.0.mlp.up_proj.weight",
    ),
    "infinite": (fill("norm.weight", float("inf")), "error", "NaN or infinite: norm.weight"),
    "no context": (fill("fc.weight", 0.0), "error", "all zero: fc.weight"),
    "no output": (fill("norm.weight", 0.0), "error", "all zero: norm.weight"),
    "no attention": (fill("layers.0.self_attn.o_proj.weight", 0.0), "warning", "layers.0.self_attn.o_proj.weight"),
    "unread layer": (
        plant_tensors(lambda tensors: tensors["fc.weight"][:, 32:].zero_()),
        "warning",
        "`fc` gives the tapped layers [5] no weight",
    ),
}


@pytest.mark.parametrize("fault", WEIGHT_FAULTS)
def test_broken_weights_are_named(pair, fault):
    plant, level, text = WEIGHT_FAULTS[fault]
    plant(pair)
    report = check(pair, prompts=PROMPTS[:1], max_new_tokens=4)
    finding = the(report, "weights")
    assert finding.level == level and text in finding.text
    assert report.has_errors == (level == "error") and bool(report.metrics) == (level != "error")


def test_useless_drafter_is_found_by_its_tau(pair):
    change_tensors(pair / "drafter", shuffle_weights)
    report = check(pair)
    finding = the(report, "tau")
    assert finding.level == "warning" and "useless" in finding.advice
    assert report.metrics["tau"] < 1.1 and report.metrics["identical"] == 1
    assert report.advice.startswith("the answers stay the target's, but look at this first: tau.")
    assert {finding.level for finding in report.findings if finding.subject != "tau"} == {"ok"}


MISTAKES = {
    "ids one too high": (plant_config(nested={"target_layer_ids": [2, 6]}), "`target_layer_ids` [1, 5]"),
    "ids one too low": (plant_config(nested={"target_layer_ids": [0, 4]}), "`target_layer_ids` [1, 5]"),
    "columns in another order": (plant_tensors(swap_features), "`fc` read as for the layers [5, 1]"),
    "theta": (plant_config(rope_parameters={"rope_theta": 1.5}), "`rope_theta` 10000"),
    "embedding scale": (plant_config(nested={"input_embedding_scale": 0.02}), "no `input_embedding_scale`"),
    "causal": (plant_config(is_causal=True), "`is_causal` false"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_change_that_makes_a_drafter_work_is_named_and_taken_back(pair, mistake):
    plant, change = MISTAKES[mistake]
    plant(pair)
    drafter = DFlashDraftModel.from_pretrained(pair / "drafter").eval()
    before = (drafter.config.to_dict(), drafter.fc.weight.clone(), drafter.rotary_emb.inv_freq.clone())
    (finding,) = check_repairs(make_tiny_target(), drafter, prompt_ids()[:1], 16, 1.0, {"other chats": [[7, 8]]})
    assert finding.level == "warning" and finding.text.startswith(f"with {change} there are ")
    assert drafter.config.to_dict() == before[0] and torch.equal(drafter.fc.weight, before[1])
    assert torch.equal(drafter.rotary_emb.inv_freq, before[2])
    assert [layer.self_attn.is_causal for layer in drafter.layers] == [drafter.config.layer_is_causal(0)]


def test_other_template_mode_that_works_is_named():
    drafter = DFlashDraftModel.from_pretrained(healthy() / "drafter").eval()
    modes = {"chats in the template mode 'thinking'": prompt_ids()}
    (finding,) = check_repairs(make_tiny_target(), drafter, [[20, 21, 22]], 16, 1.0, modes)
    assert finding.text.startswith("with chats in the template mode 'thinking' there are ")


def test_no_change_is_named_where_none_helps_clearly():
    drafter = DFlashDraftModel.from_pretrained(healthy() / "drafter").eval()
    assert check_repairs(make_tiny_target(), drafter, prompt_ids()[:1], 16, 4.0, {}) == []


def test_likely_mistake_is_looked_for_if_the_gain_is_small(pair):
    change_tensors(pair / "drafter", swap_features)
    report = check(pair)
    assert 1 <= report.metrics["tau"] < 1.5 and report.metrics["identical"] == 1
    assert the(report, "likely mistake").text.startswith("with `fc` read as for the layers [5, 1] there are ")
    assert "likely mistake" in report.advice


def test_small_gain_advises_to_measure_speed():
    report = CheckReport("a", "b", [Finding("tau", "note", "1.30")], {"tau": 1.3})
    assert report.advice.startswith("measure speed with `dflash-eval` before you rely on it.")


def test_float16_overflow_is_an_error_that_names_it(pair):
    change_tensors(pair / "drafter", lambda tensors: tensors["fc.weight"].mul_(2e4))
    report = check(pair, prompts=PROMPTS[:1], max_new_tokens=4)
    assert the(report, "float16").level == "note" and "in fc, more than float16 holds" in the(report, "float16").text
    report = check(pair, dtype=torch.float16, prompts=PROMPTS[:1], max_new_tokens=4)
    assert the(report, "draft").level == "error" and "overflows in float16" in the(report, "draft").text
    dtype, running = (finding for finding in report.findings if finding.subject == "dtype")
    assert dtype.level == "ok" and running.level == "warning" and "float16 ends at 65504" in running.text


def test_answers_in_bfloat16_may_differ_by_rounding():
    report = check(healthy(), dtype="bfloat16", prompts=PROMPTS[:1])
    assert the(report, "identity").level in ("ok", "note") and "bfloat16" in the(report, "identity").text
    assert not report.has_errors


def test_models_of_different_dtypes_are_noted():
    target = make_tiny_target()
    drafter = create_drafter(target, make_drafter_config(target)).to(torch.bfloat16)
    report = check_drafter(target, drafter, prompts=[[5, 6, 7]], max_new_tokens=4)
    texts = [finding.text for finding in report.of("note")]
    assert "the target runs in float32, the drafter in bfloat16; features are cast" in texts


# The target's side


def test_dead_layer_of_the_target_is_named():
    target = make_tiny_target()
    target.model.layers[1].register_forward_hook(lambda module, arguments, output: torch.zeros_like(output))
    report = check_drafter(target, healthy() / "drafter", prompts=[[5, 6, 7]], max_new_tokens=4)
    assert any("Layer 1 of the target gives constant" in finding.text for finding in report.of("error"))
    assert the(report, "decoding").text.startswith("not tried")


def test_layer_whose_output_is_not_its_hidden_state_is_named():
    target = make_tiny_target()
    forward = target.forward

    def finished_elsewhere(*args, **kwargs):
        output = forward(*args, **kwargs)
        if output.hidden_states is not None:
            states = list(output.hidden_states)
            output.hidden_states = (*states[:2], states[2] * 2, *states[3:])
        return output

    target.forward = finished_elsewhere
    report = check_drafter(target, healthy() / "drafter", prompts=[[5, 6, 7]], max_new_tokens=4)
    finding = the(report, "taps")
    assert finding.level == "warning" and finding.text == "the output of layer 1 is not `hidden_states[2]`"


def test_logits_that_the_head_alone_does_not_give_are_named():
    target = make_tiny_target()
    forward = target.forward

    def with_another_scale(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits * 3
        return output

    target.forward = with_another_scale
    report = check_drafter(target, healthy() / "drafter", prompts=[[5, 6, 7]], max_new_tokens=4)
    assert the(report, "logits").level == "warning" and "do not give the target's logits" in the(report, "logits").text


def test_answer_that_differs_in_float32_is_an_error():
    target = make_tiny_target()
    generate = target.generate

    def with_a_fault(input_ids, **kwargs):
        output = generate(input_ids, **kwargs)
        if "assistant_model" in kwargs:
            output.sequences[0, -1] += 1
        return output

    target.generate = with_a_fault
    report = check_drafter(target, healthy() / "drafter", prompts=[[5, 6, 7], [8, 9]], max_new_tokens=4)
    assert the(report, "identity").level == "error" and "0 of 2 answers" in the(report, "identity").text


def test_target_that_generate_refuses_is_named():
    case = make_case("Mamba")
    report = check_drafter(case.target, DFlashDraftModel(case.drafter_config), prompts=[[5, 6, 7]], max_new_tokens=4)
    finding = the(report, "decoding")
    assert finding.level == "error" and finding.text.startswith("`generate` refuses: ")


def test_encoder_decoder_is_named():
    case = make_case("T5")
    report = check_drafter(case.target, DFlashDraftModel(case.drafter_config), prompts=[[5, 6, 7]])
    assert "an encoder-decoder model" in the(report, "decoding").text and report.has_errors


@pytest.mark.parametrize(
    "family", ["GPT-2", "Gemma 3, image", "Qwen3.5", "Llama, int8", "Llama, off-loaded to memory"]
)
def test_other_kinds_of_targets_rebuild_their_logits(family):
    case = make_case(family)
    if case.family.missing():
        pytest.skip(case.family.missing())
    drafter = DFlashDraftModel(case.drafter_config)
    report = check_drafter(case.target, drafter, prompts=[[5, 6, 7]], max_new_tokens=4)
    assert not report.has_errors and report.metrics["identical"] == 1
    assert the(report, "logits").level == the(report, "taps").level == "ok"


def test_target_that_searches_with_beams_by_default_is_decoded_greedily():
    target = make_tiny_target()
    target.generation_config.num_beams = 2
    report = check_drafter(target, healthy() / "drafter", prompts=[[5, 6, 7]], max_new_tokens=4)
    assert not report.has_errors and report.metrics["identical"] == 1
