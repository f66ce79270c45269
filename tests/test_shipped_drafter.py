"""The drafter that ships, with the real target and tokenizer."""

import json
from pathlib import Path

import pytest
import torch

from dflash_hf import DFlashDraftModel
from dflash_hf.eval import evaluate_drafter, load_tasks
from dflash_hf.eval.decode import encode_prompt
from dflash_hf.eval.generate import GenerateOptions, fast_dtype, run_prompt
from dflash_hf.eval.methods import decoder
from dflash_hf.eval.prompts import demo_prompts
from dflash_hf.eval.report import read_report
from dflash_hf.hub_configs import load_hub_config, shipped_drafter_folder
from dflash_hf.hub_configs.embedded_target import EMBEDDED_TARGET, load_target

FOLDER = Path(shipped_drafter_folder())


@pytest.fixture(scope="module")
def target_and_tokenizer():
    try:
        return load_target(EMBEDDED_TARGET, dtype=torch.float32)
    except ImportError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def drafter():
    return DFlashDraftModel.from_pretrained(FOLDER, dtype=torch.float32).eval()


def test_weights_are_bf16_and_at_most_12_megabytes():
    from safetensors import safe_open

    assert (FOLDER / "model.safetensors").stat().st_size <= 12_000_000
    with safe_open(FOLDER / "model.safetensors", framework="pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}


def test_shipped_config_is_the_config_of_the_recipe():
    recipe = json.loads((FOLDER.parent.parent / "smollm2-135m-instruct.json").read_text())
    shipped = json.loads((FOLDER / "config.json").read_text())
    assert shipped.pop("dtype") == "bfloat16" and recipe.pop("hub")
    assert shipped == recipe
    assert load_hub_config("smollm2-135m-instruct").block_size == shipped["block_size"]


def test_card_names_data_recipe_results_and_limits():
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    for heading in ("## Data", "## Recipe", "## Results", "## Limits"):
        assert heading in card
    assert "base_model: HuggingFaceTB/SmolLM2-135M-Instruct" in card


@pytest.mark.slow
def test_float32_answers_equal_plain_greedy_and_proposals_are_accepted(target_and_tokenizer, drafter):
    target, tokenizer = target_and_tokenizer
    rounds = []
    for row in demo_prompts()[::2]:
        inputs = encode_prompt(tokenizer, row["prompt"], target.device)
        plain = decoder("plain", target)(inputs, 32, 0.0)
        drafted = decoder("dflash", target, drafter)(inputs, 32, 0.0)
        assert drafted.token_ids == plain.token_ids
        rounds += drafted.accepted_lengths
    assert sum(rounds) / len(rounds) > 1.3


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"method": "tree", "draft_window": 16}], ids=["default", "tree"])
def test_dflash_generate_streams_text_and_prints_tau(target_and_tokenizer, drafter, capsys, options):
    target, tokenizer = target_and_tokenizer
    options = GenerateOptions(max_new_tokens=12, **options)
    answer = run_prompt(target, drafter, tokenizer, "Name three colours.", options)
    printed = capsys.readouterr().out
    text = tokenizer.decode(answer.token_ids, skip_special_tokens=True)
    assert text.split()[0] in printed and f"tau {answer.tau:.2f}" in printed


@pytest.mark.slow
def test_evaluation_covers_every_method_and_task_with_provenance(target_and_tokenizer, drafter):
    target, tokenizer = target_and_tokenizer
    prompts = load_tasks(["chat", "maths"], samples=2)
    report = read_report(evaluate_drafter(target, drafter, tokenizer, prompts, max_new_tokens=12))
    assert report["methods"] == ["plain", "prompt_lookup", "dflash"]
    for row in report["results"]:
        assert row["identical"] == 1.0 and row["prompts"] == (4 if row["task"] == "all" else 2)
    assert len(report["results"]) == 3 * 3
    assert report["provenance"]["versions"]["torch"] == torch.__version__


def test_fast_dtype_is_one_that_the_processor_can_use():
    assert fast_dtype() in (torch.bfloat16, torch.float32)
