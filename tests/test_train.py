import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_material import make_drafter_config, make_text_rows, run_without_package, save_tiny_target

from dflash_hf import DFlashDraftModel
from dflash_hf.trainer import DFlashTrainer
from dflash_hf.trainer import train as train_module
from dflash_hf.trainer.data import read_json_lines, write_json_lines
from dflash_hf.trainer.train import TrainOptions, train
from dflash_hf.trainer.training_args import DFlashTrainingArguments


@pytest.fixture
def options(tmp_path) -> TrainOptions:
    target = save_tiny_target(tmp_path / "target")
    rows = make_text_rows(target, 10)
    write_json_lines(tmp_path / "a.jsonl", rows[:6])
    write_json_lines(tmp_path / "b.jsonl", rows[6:])
    make_drafter_config(target).to_json_file(tmp_path / "drafter.json")
    return TrainOptions(
        train_files=[str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")],
        target=str(tmp_path / "target"),
        target_dtype="float32",
        drafter_config=str(tmp_path / "drafter.json"),
        eval_rows=2,
        num_threads=1,
    )


def make_args(tmp_path, **overrides) -> DFlashTrainingArguments:
    fields = {
        "output_dir": str(tmp_path / "run"),
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "per_device_train_batch_size": 4,
        "num_anchors": 8,
        "max_steps": 3,
        "save_steps": 2,
        "logging_steps": 1,
    }
    return DFlashTrainingArguments(**(fields | overrides))


def trainer_state(folder: Path) -> dict:
    return json.loads((folder / "trainer_state.json").read_text())


def test_training_writes_a_hub_ready_folder_that_drafts_without_the_package(options, tmp_path):
    folder = train(options, make_args(tmp_path))
    assert folder == tmp_path / "run" / "drafter"
    assert {"config.json", "model.safetensors", "README.md", "modeling_dflash.py"} <= {
        p.name for p in folder.iterdir()
    }
    weights = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    last = DFlashDraftModel.from_pretrained(tmp_path / "run" / "checkpoint-3").state_dict()
    assert set(weights) == set(last)
    assert all(torch.equal(weights[name], last[name].to(torch.bfloat16)) for name in weights)
    row = json.loads(Path(options.train_files[0]).read_text().splitlines()[0])
    code = f"""
import torch
from transformers import AutoModel, AutoModelForCausalLM
drafter = AutoModel.from_pretrained({str(folder)!r}, trust_remote_code=True, dtype=torch.float32)
target = AutoModelForCausalLM.from_pretrained({options.target!r})
prompt = torch.tensor([{row["input_ids"][:6]}])
options = dict(attention_mask=torch.ones_like(prompt), max_new_tokens=30, do_sample=False)
print(target.generate(prompt, assistant_model=drafter, **options)[0].tolist())
"""
    assert json.loads(run_without_package(code, tmp_path).strip().splitlines()[-1]) == row["input_ids"]


def test_card_tells_data_recipe_and_result(options, tmp_path):
    folder = train(options, make_args(tmp_path, eval_strategy="steps", eval_steps=3))
    card = (folder / "README.md").read_text()
    assert f"base_model: {options.target}" in card
    # Eight rows of 30 supervised tokens train; the last two are held out.
    assert "8 answers of the target, 240 supervised tokens, from 2 file(s)" in card
    assert "3 steps of 4 rows with up to 8 anchors, learning rate 0.0006, seed 42, init `target`" in card
    log = trainer_state(tmp_path / "run" / "checkpoint-3")["log_history"]
    (accepted_length,) = [entry["eval_accepted_length"] for entry in log if "eval_accepted_length" in entry]
    assert f"accepted length on 2 held-out rows: {accepted_length}." in card


def test_last_rows_are_held_out_and_long_rows_are_cut(options, tmp_path, monkeypatch):
    trainers = []

    class RecordedTrainer(DFlashTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            trainers.append(self)

    monkeypatch.setattr(train_module, "DFlashTrainer", RecordedTrainer)
    train(replace(options, max_length=20), make_args(tmp_path, max_steps=1))
    rows = [row["input_ids"][:20] for file in options.train_files for row in read_json_lines(file)]
    (trainer,) = trainers
    trained, held_out = (
        [dataset[i]["input_ids"] for i in range(len(dataset))]
        for dataset in (trainer.train_dataset, trainer.eval_dataset)
    )
    assert trained == rows[:8]
    assert held_out == rows[8:]


def test_second_call_goes_on_from_the_last_checkpoint_and_replaces_the_folder(options, tmp_path, capsys):
    folder = train(options, make_args(tmp_path))
    first = load_file(folder / "model.safetensors")
    before = trainer_state(tmp_path / "run" / "checkpoint-3")["log_history"]
    assert "Going on from" not in capsys.readouterr().out
    train(options, make_args(tmp_path, max_steps=5))
    assert f"Going on from {tmp_path / 'run' / 'checkpoint-3'}." in capsys.readouterr().out
    state = trainer_state(tmp_path / "run" / "checkpoint-5")
    steps = [entry["step"] for entry in state["log_history"] if "loss" in entry]
    assert steps == [1, 2, 3, 4, 5]
    # Their learning rates are those of three steps in all, so they were not done again.
    assert state["log_history"][: len(before)] == before
    second = load_file(folder / "model.safetensors")
    assert any(not torch.equal(first[name], second[name]) for name in first)
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith(".")] == []


def test_call_after_the_last_step_trains_no_more_and_gives_the_same_drafter(options, tmp_path):
    folder = train(options, make_args(tmp_path))
    first = load_file(folder / "model.safetensors")
    again = load_file(train(options, make_args(tmp_path)) / "model.safetensors")
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_trained_drafter_can_be_trained_on(options, tmp_path):
    folder = train(options, make_args(tmp_path))
    start = load_file(folder / "model.safetensors")
    warm = replace(options, drafter_config=None, drafter=str(folder))
    args = make_args(tmp_path, output_dir=str(tmp_path / "warm"), max_steps=1, learning_rate=1e-6, warmup_steps=0)
    trained = load_file(train(warm, args) / "model.safetensors")
    for name, tensor in start.items():
        torch.testing.assert_close(trained[name].float(), tensor.float(), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("fields", [{"drafter_config": None}, {"drafter": "some/drafter"}])
def test_neither_or_both_of_config_and_drafter_are_refused(options, tmp_path, fields):
    with pytest.raises(ValueError, match="either `drafter_config`.*or `drafter`"):
        train(replace(options, **fields), make_args(tmp_path))


def test_too_few_rows_are_refused(options, tmp_path):
    with pytest.raises(ValueError, match="hold 10 rows; more than `eval_rows` 10 needed"):
        train(replace(options, eval_rows=10), make_args(tmp_path))


def test_training_needs_no_evaluation_rows(options, tmp_path):
    folder = train(replace(options, eval_rows=0), make_args(tmp_path, max_steps=1))
    assert "10 answers of the target" in (folder / "README.md").read_text()
