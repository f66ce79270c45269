import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import make_tiny_target
from safetensors.torch import load_file
from tiny_material import make_drafter_config, make_text_rows, run_without_package, save_tiny_target
from transformers import AutoTokenizer

from dflash_hf import DFlashConfig, DFlashDraftModel
from dflash_hf.trainer import DFlashTrainer
from dflash_hf.trainer import train as train_module
from dflash_hf.trainer.data import read_json_lines, write_json_lines
from dflash_hf.trainer.train import TrainOptions, last_whole_checkpoint, train
from dflash_hf.trainer.training_args import DFlashTrainingArguments


@pytest.fixture
def options(tmp_path) -> TrainOptions:
    target = save_tiny_target(tmp_path / "target")
    rows = make_text_rows(target, 10)
    write_json_lines(tmp_path / "a.jsonl", rows[:6])
    write_json_lines(tmp_path / "b.jsonl", rows[6:])
    make_drafter_config(target).to_json_file(tmp_path / "drafter.json")
    return TrainOptions(
        train_data=[str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")],
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


def files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


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
    row = json.loads(Path(options.train_data[0]).read_text().splitlines()[0])
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
    folder = train(
        options, make_args(tmp_path, eval_strategy="steps", eval_steps=3, live_prompts=2, live_max_new_tokens=8)
    )
    card = (folder / "README.md").read_text()
    assert f"base_model: {options.target}" in card
    # Eight rows of 30 supervised tokens train; the last two are held out.
    assert f"8 rows with 240 supervised tokens, from `{options.train_data[0]}`, `{options.train_data[1]}`" in card
    assert "chat template mode: template default" in card
    assert "3 steps of 4 rows of at most 3072 tokens, up to 8 anchors a document, cross_entropy" in card
    assert "learning rate 0.0006, seed 42, from init `target`" in card
    log = trainer_state(tmp_path / "run" / "checkpoint-3")["log_history"]
    (tau,) = [entry["eval_teacher_forced_tau"] for entry in log if "eval_teacher_forced_tau" in entry]
    (live,) = [entry["eval_live_tau"] for entry in log if "eval_live_tau" in entry]
    assert f"Teacher-forced tau on held-out rows: {tau}." in card
    assert f"Live tau, greedy, whole blocks, 2 held-out prompts, 8 new tokens: {live}." in card


def test_last_rows_are_held_out_and_long_rows_are_cut(options, tmp_path, monkeypatch):
    trainers = []

    class RecordedTrainer(DFlashTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            trainers.append(self)

    monkeypatch.setattr(train_module, "DFlashTrainer", RecordedTrainer)
    train(replace(options, max_length=20), make_args(tmp_path, max_steps=1))
    rows = [row["input_ids"][:20] for file in options.train_data for row in read_json_lines(file)]
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
    assert "10 rows with 300 supervised tokens" in (folder / "README.md").read_text()


def test_plan_says_what_a_run_takes_and_writes_nothing(options, tmp_path, capsys):
    before = files_below(tmp_path)
    args = make_args(tmp_path, gradient_accumulation_steps=2, cache_features=str(tmp_path / "features"))
    assert train(replace(options, plan=True), args) is None
    shown = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines() if "  " in line)
    facts = {name: value.strip() for name, value in shown.items()}
    drafter = DFlashDraftModel(DFlashConfig(**json.loads((tmp_path / "drafter.json").read_text())))
    count = sum(parameter.numel() for parameter in drafter.parameters())
    assert facts["drafter"] == f"{count / 1e6:.1f} M parameters, {count / 1e6:.1f} M of them trained"
    assert facts["data"] == "8 rows with 8 documents: 288 tokens, 240 supervised"
    assert facts["steps"] == "3 of 4 rows x 2 accumulated x 1 processes"
    assert facts["a batch"].startswith("144 tokens (0% padding added), 32 anchors, ")
    # 288 tokens of two tapped layers with 32 float32 values each.
    assert facts["disk"].startswith("0.1 MB of features to write")
    assert " s a batch with the target's forward" in facts["time"]
    assert files_below(tmp_path) == before


def test_batch_is_shown_with_its_blocks_and_nothing_is_written(options, tmp_path, capsys):
    before = files_below(tmp_path)
    assert train(replace(options, show_batch=True), make_args(tmp_path)) is None
    shown = capsys.readouterr().out
    assert shown.count("Document ") == 4 and "36 tokens, 30 supervised, 8 anchors; blocks of 8" in shown
    rows = [row for file in options.train_data for row in read_json_lines(file)]
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    number, anchor, labels = re.search(
        r"Document (\d+):.*?block at (\d+): \S* -> *([^\n]*)", shown, re.DOTALL
    ).groups()
    first = rows[int(number)]["input_ids"][int(anchor) + 1]
    assert labels.startswith(f"{tokenizer.decode([first])} 1.00")
    assert files_below(tmp_path) == before


def test_packed_run_takes_the_documents_of_an_unpacked_one(options, tmp_path):
    folder = train(replace(options, packing=True, max_length=80), make_args(tmp_path))
    assert "3 steps of 4 rows (packed) of at most 80 tokens" in (folder / "README.md").read_text()


def test_streamed_run_needs_max_steps_and_held_out_rows(options, tmp_path):
    stream = replace(options, streaming=True)
    with pytest.raises(ValueError, match="give `max_steps`"):
        train(stream, make_args(tmp_path, max_steps=-1))
    with pytest.raises(ValueError, match="give `eval_data`"):
        train(stream, make_args(tmp_path))
    folder = train(replace(stream, eval_data=[options.train_data[1]], shuffle_buffer=4), make_args(tmp_path))
    assert "a stream of rows from" in (folder / "README.md").read_text()


def test_warm_start_with_another_block_size_says_so_in_its_config(options, tmp_path):
    folder = train(options, make_args(tmp_path))
    warm = replace(options, drafter_config=None, drafter=str(folder), block_size=4)
    args = make_args(tmp_path, output_dir=str(tmp_path / "warm"), loss_decay=2.0, max_steps=1)
    config = DFlashDraftModel.from_pretrained(train(warm, args)).config
    assert config.block_size == 4
    # Rows may now be longer than the first run's positions.
    assert config.max_position_embeddings == options.max_length > make_tiny_target().config.max_position_embeddings
    with pytest.raises(ValueError, match="`block_size` is 1"):
        train(replace(warm, block_size=1), args)


def test_warm_start_from_a_drafter_of_another_target_is_refused(options, tmp_path):
    folder = train(options, make_args(tmp_path))
    save_tiny_target(tmp_path / "deeper", num_hidden_layers=10)
    other = replace(options, drafter_config=None, drafter=str(folder), target=str(tmp_path / "deeper"))
    with pytest.raises(ValueError, match="`num_target_layers` 8, but LlamaForCausalLM has 10"):
        train(other, make_args(tmp_path, output_dir=str(tmp_path / "other")))


def test_lora_run_ships_the_merged_drafter_and_the_adapter(options, tmp_path):
    folder = train(options, make_args(tmp_path))
    adapt = replace(options, drafter_config=None, drafter=str(folder), lora_rank=2)
    args = make_args(tmp_path, output_dir=str(tmp_path / "lora"), learning_rate=1e-2)
    merged = train(adapt, args)
    start, adapted = (load_file(path / "model.safetensors") for path in (folder, merged))
    assert set(start) == set(adapted) and any(not torch.equal(start[name], adapted[name]) for name in start)
    assert (tmp_path / "lora" / "adapter" / "adapter_model.safetensors").is_file()
    assert "LoRA of rank 2 merged" in (merged / "README.md").read_text()
    with pytest.raises(ValueError, match="`lora_rank` adapts a trained drafter"):
        train(replace(options, lora_rank=2), args)


def test_run_record_lies_in_every_checkpoint(options, tmp_path):
    train(options, make_args(tmp_path))
    record = json.loads((tmp_path / "run" / "checkpoint-2" / "run.json").read_text())
    assert record["step"] == 2 and record["seed"] == 42 and record["options"]["eval_rows"] == 2
    assert len(record["data"]["fingerprint"]) > 30


def test_template_mode_is_in_the_config_of_the_drafter(options, tmp_path):
    folder = train(options, make_args(tmp_path, max_steps=1))
    assert DFlashDraftModel.from_pretrained(folder).config.dflash_config["template_mode"] == "template default"


def test_checkpoint_that_was_not_written_to_its_end_is_passed_over(tmp_path):
    assert last_whole_checkpoint(tmp_path / "none") is None
    for step in (9, 10, 100):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "checkpoint-tmp").mkdir()
    assert last_whole_checkpoint(tmp_path) is None
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    (tmp_path / "checkpoint-100" / "trainer_state.json").write_text('{"log_history": [')
    assert last_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
