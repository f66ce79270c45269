"""Packing, stored features, averages, Muon, LoRA and the other options, each against the plain run."""

import json

import pytest
import reference_dflash
import torch
from conftest import make_tiny_target
from peft import PeftModel
from tiny_material import losses, make_drafter_config, make_random_rows, make_text_rows, make_trainer, record_batches

from dflash_hf import DFlashDraftModel
from dflash_hf.trainer import DFlashTrainer, DFlashTrainingArguments
from dflash_hf.trainer.adapters import add_lora, load_target_adapter, merged_drafter
from dflash_hf.trainer.data import StreamedRows, TokenRows
from dflash_hf.trainer.packing import PackedRows

ROWS = make_random_rows([9, 30, 18, 50, 26, 12])
SGD = {"optim": "sgd", "learning_rate": 0.5, "warmup_steps": 0, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}


def parameters(trainer: DFlashTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def assert_same(first: dict, second: dict, tolerance: float) -> None:
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=tolerance)


def one_step(folder, rows, batch_size, **options) -> dict[str, torch.Tensor]:
    trainer = make_trainer(
        folder, rows, max_steps=1, per_device_train_batch_size=batch_size, num_anchors=12, **(SGD | options)
    )
    trainer.train()
    return parameters(trainer)


@pytest.mark.parametrize(
    "rule", [{}, {"layer_types": ["sliding_attention"], "sliding_window": 6}, {"is_causal": True}]
)
def test_packed_rows_give_the_update_of_unpacked_ones(tmp_path, rule):
    target = make_tiny_target()
    config = make_drafter_config(target, **rule)
    documents = TokenRows(ROWS, max_length=64)
    packed = PackedRows(documents)
    assert len(packed) < len(ROWS) / 1.9
    plain = one_step(tmp_path / "a", documents, len(ROWS), target=target, config=config)
    together = one_step(tmp_path / "b", packed, len(packed), target=target, config=config)
    assert_same(plain, together, 1e-6)


@pytest.mark.parametrize("needs_teacher", [False, True])
def test_packed_and_stored_features_give_the_losses_of_online_ones(tmp_path, needs_teacher):
    packed = PackedRows(TokenRows(ROWS, max_length=64))
    options = {"max_steps": 4, "per_device_train_batch_size": 2} | ({"objective": "kl"} if needs_teacher else {})
    online = make_trainer(tmp_path / "a", packed, **options)
    online.train()
    stored = make_trainer(tmp_path / "b", packed, cache_features=str(tmp_path / "features"), **options)
    stored.train()
    assert losses(stored) == pytest.approx(losses(online), abs=1e-5)


def test_features_of_answers_only_hide_the_prompt_and_take_less_room(tmp_path):
    options = {"max_steps": 2, "per_device_train_batch_size": 2}
    trainers = {}
    for name, extra in {"all": {}, "answers": {"cache_answers_only": True}}.items():
        folder = str(tmp_path / f"features-{name}")
        trainers[name] = make_trainer(tmp_path / name, ROWS, cache_features=folder, **options, **extra)
        before = trainers[name].feature_store().missing_bytes
        trainers[name].train()
        trainers[name] = (trainers[name], before)
    (everything, all_bytes), (answers, answer_bytes) = trainers["all"], trainers["answers"]
    assert all_bytes - answer_bytes == 5 * len(ROWS) * 2 * 32 * 4
    assert losses(everything) != losses(answers)
    # Features of the prompt are not there, so what blocks see must not depend on them.
    batch = answers.data_collator([answers.train_dataset[1]])
    seen = answers.block_loss(answers.model.train(), batch).loss_sum
    features = answers.target_features.stored(
        batch["input_ids"], batch["document_lengths"], batch["rows"], answers._store
    )
    assert (features[:, :5] == 0).all() and (features[:, 5:] != 0).any(dim=-1).all()
    answers._store = None
    torch.testing.assert_close(answers.block_loss(answers.model, batch).loss_sum, seen)


def test_streamed_rows_train_and_resume_exactly(tmp_path):
    options = {"max_steps": 6, "per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 4}
    unbroken = make_trainer(tmp_path / "run", StreamedRows(ROWS), **options)
    all_batches = record_batches(unbroken)
    unbroken.train()
    resumed = make_trainer(tmp_path / "run", StreamedRows(ROWS), **options)
    batches = record_batches(resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    assert batches == all_batches[4:]
    assert losses(resumed) == pytest.approx(losses(unbroken), abs=1e-6)
    # Six rows, two a step: the second epoch begins at step 3 with new anchors for the same rows.
    assert all_batches[0]["rows"] == all_batches[3]["rows"] and all_batches[0]["anchors"] != all_batches[3]["anchors"]


def test_a_stream_cannot_have_its_features_stored(tmp_path):
    trainer = make_trainer(tmp_path, StreamedRows(ROWS), max_steps=1, cache_features=str(tmp_path / "features"))
    with pytest.raises(ValueError, match="not a stream"):
        trainer.train()


@pytest.mark.parametrize("extra", [{"ema_decay": 0.7}, {"matrix_optimizer": "muon"}, {"gradient_checkpointing": True}])
def test_options_resume_exactly(tmp_path, extra):
    options = {"per_device_train_batch_size": 2, "max_steps": 6, "save_strategy": "steps", "save_steps": 3} | extra
    unbroken = make_trainer(tmp_path / "run", ROWS, **options)
    unbroken.train()
    resumed = make_trainer(tmp_path / "run", ROWS, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert losses(resumed) == pytest.approx(losses(unbroken), abs=1e-6)
    assert_same(parameters(resumed), parameters(unbroken), 1e-6)
    if resumed.weight_average is not None:
        assert_same(resumed.weight_average.average, unbroken.weight_average.average, 1e-6)


def test_gradient_checkpointing_changes_nothing_but_memory(tmp_path):
    plain = one_step(tmp_path / "a", ROWS, 6)
    checkpointed = one_step(tmp_path / "b", ROWS, 6, gradient_checkpointing=True)
    assert_same(plain, checkpointed, 1e-7)


def test_compiled_drafter_gives_the_same_update(tmp_path):
    plain = one_step(tmp_path / "a", ROWS, 6)
    compiled = one_step(
        tmp_path / "b",
        ROWS,
        6,
        torch_compile=True,
        torch_compile_backend="aot_eager",
        pad_tokens_to_multiple_of=64,
        pad_anchors_to_multiple_of=12,
    )
    assert_same(plain, {name.removeprefix("_orig_mod."): tensor for name, tensor in compiled.items()}, 1e-6)


def test_average_of_a_compiled_drafter_is_that_of_a_plain_one(tmp_path):
    options = {"max_steps": 2, "ema_decay": 0.5}
    plain = make_trainer(tmp_path / "a", ROWS, **options)
    plain.train()
    compiled = make_trainer(tmp_path / "b", ROWS, torch_compile=True, torch_compile_backend="aot_eager", **options)
    compiled.train()
    assert_same(plain.weight_average.average, compiled.weight_average.average, 1e-6)
    assert_same(plain.shipped_drafter().state_dict(), compiled.shipped_drafter().state_dict(), 1e-6)


def test_averaged_weights_are_evaluated_saved_and_shipped(tmp_path):
    target = make_tiny_target()
    rows = make_text_rows(target, 4)
    options = {"max_steps": 5, "save_strategy": "steps", "save_steps": 5, "learning_rate": 1e-2}
    trainer = make_trainer(tmp_path, rows, target=target, eval_rows=rows, ema_decay=0.9, **options)
    trainer.train()
    averaged = trainer.evaluate()["eval_loss"]
    own = parameters(trainer)
    trainer.weight_average, average = None, trainer.weight_average
    assert trainer.evaluate()["eval_loss"] != averaged
    trainer.weight_average = average
    folder = tmp_path / "checkpoint-5"
    assert_same(DFlashDraftModel.from_pretrained(folder).state_dict(), own, 0)
    saved = DFlashDraftModel.from_pretrained(folder / "average").state_dict()
    shipped = trainer.shipped_drafter().state_dict()
    assert_same(saved, shipped, 0)
    assert_same(parameters(trainer), own, 0)  # what is shipped is a copy
    assert any((saved[name] - own[name]).abs().max() > 1e-4 for name in own)


def test_checkpoint_says_where_it_came_from(tmp_path):
    trainer = make_trainer(tmp_path, ROWS, max_steps=2, save_strategy="steps", save_steps=2)
    trainer.train()
    record = json.loads((tmp_path / "checkpoint-2" / "run.json").read_text())
    assert record["step"] == 2 and {"command", "git", "versions", "hardware", "started"} <= set(record)


def make_lora_trainer(folder, target, rows, drafter=None, **options) -> DFlashTrainer:
    plain = make_trainer(folder, rows, target=target, **options)
    torch.manual_seed(5)
    model = add_lora(plain.model if drafter is None else drafter, rank=2, alpha=4)
    return DFlashTrainer(model, target, plain.args, train_dataset=rows, eval_dataset=rows)


def test_lora_trains_the_adapter_only_and_saves_loads_and_merges(tmp_path):
    target = make_tiny_target()
    rows = make_text_rows(target, 4)
    options = {"max_steps": 4, "learning_rate": 1e-2, "live_prompts": 2, "live_max_new_tokens": 10}
    trainer = make_lora_trainer(tmp_path, target, rows, save_strategy="steps", save_steps=4, **options)
    trained = [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
    trainer.train()
    assert "eval_live_tau" in trainer.evaluate()
    assert_same(before, {n: p for n, p in trainer.model.named_parameters() if not p.requires_grad}, 0)
    # The unmerged drafter drafts, and the merged one computes the same.
    prompt = torch.tensor([rows[0]["input_ids"][:6]])
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 30, "do_sample": False}
    assert target.generate(prompt, assistant_model=trainer.drafter, **options)[0].tolist() == rows[0]["input_ids"]
    torch.manual_seed(3)
    base = make_trainer(tmp_path / "base", rows, target=target).model
    loaded = PeftModel.from_pretrained(base, tmp_path / "checkpoint-4")
    batch = trainer.data_collator([trainer.train_dataset[0]])
    expected = trainer.block_loss(trainer.model.eval(), batch).loss_sum
    torch.testing.assert_close(trainer.block_loss(loaded.eval(), batch).loss_sum, expected)
    merged = merged_drafter(trainer.model)
    assert isinstance(merged, DFlashDraftModel) and not any("lora" in name for name in merged.state_dict())
    torch.testing.assert_close(trainer.block_loss(merged.eval(), batch).loss_sum, expected)


def test_lora_resumes_exactly(tmp_path):
    target = make_tiny_target()
    options = {"per_device_train_batch_size": 2, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    unbroken = make_lora_trainer(tmp_path, target, ROWS, **options)
    unbroken.train()
    resumed = make_lora_trainer(tmp_path, target, ROWS, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses(resumed) == pytest.approx(losses(unbroken), abs=1e-6)
    assert_same(parameters(resumed), parameters(unbroken), 1e-6)


def test_lora_on_a_layer_that_is_not_there_is_refused():
    target = make_tiny_target()
    with pytest.raises(ValueError, match=r"no layers named \['qkv'\]"):
        add_lora(DFlashDraftModel(make_drafter_config(target)), rank=2, alpha=4, modules=["q_proj", "qkv"])


def test_target_with_an_adapter_gives_other_features(tmp_path):
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(make_tiny_target(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    target = load_target_adapter(make_tiny_target(), str(tmp_path / "adapter"))
    rows = make_text_rows(target, 3)
    assert rows != make_text_rows(make_tiny_target(), 3)
    trainer = make_trainer(tmp_path / "run", rows, target=target, max_steps=2)
    trainer.train()
    batch = trainer.data_collator([trainer.train_dataset[0]])
    with torch.no_grad():
        hidden_states = adapted(batch["input_ids"], output_hidden_states=True).hidden_states
    layer_ids = trainer.model.config.target_layer_ids
    expected = torch.cat([hidden_states[layer_id + 1] for layer_id in layer_ids], dim=-1)
    torch.testing.assert_close(trainer.target_features(batch["input_ids"]), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "flash"}, "`attention` is 'flash'; choose from"),
        ({"objective": "mse"}, "`objective` is 'mse'; choose from"),
        ({"label_source": "teacher"}, "`label_source` is 'teacher'"),
        ({"matrix_optimizer": "sgd"}, "`matrix_optimizer` is 'sgd'"),
        ({"ema_decay": 1.0}, "`ema_decay` is 1.0; it must lie between 0 and 1"),
        ({"objective": "kl", "sampled_negatives": 10}, "`sampled_negatives` estimates .* needs the whole vocabulary"),
        ({"cache_answers_only": True}, "needs a `cache_features` folder"),
        ({"pad_tokens_to_multiple_of": 0}, "`pad_tokens_to_multiple_of` is 0; it must be at least 1"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        DFlashTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **options)


def test_several_gpus_in_one_process_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(DFlashTrainingArguments, "n_gpu", 2)
    with pytest.raises(ValueError, match="sees 2 GPUs.*accelerate launch"):
        make_trainer(tmp_path, ROWS)


@pytest.mark.parametrize(
    "options", [{"objective": "kl"}, {"objective": "tv"}, {"label_source": "target"}, {"d_pace_alpha": 0.5}]
)
def test_objectives_are_those_of_logits_from_the_targets_own_forward(tmp_path, options):
    target = make_tiny_target()
    trainer = make_trainer(tmp_path, ROWS, target=target, **options)
    packed = PackedRows(TokenRows(ROWS, max_length=64))
    batch = trainer.data_collator([packed[i] for i in range(len(packed))])
    states: list[torch.Tensor] = []
    trainer.model.register_forward_hook(lambda module, args, out: states.append(out.last_hidden_state.detach()))
    output = trainer.block_loss(trainer.model.train(), batch)
    teacher_logits = torch.zeros(*batch["labels"].shape, target.config.vocab_size)
    for row in range(len(packed)):
        start = 0
        for document in packed[row]["documents"]:
            length = len(document["input_ids"])
            with torch.no_grad():
                logits = target(torch.tensor([document["input_ids"]])).logits[0]
            for block, anchor in enumerate((batch["anchors"][row] - start).tolist()):
                if batch["is_valid"][row, block] and 0 <= anchor < length:
                    slots = torch.arange(1, 8)
                    teacher_logits[row, block, slots] = logits[(anchor + slots - 1).clamp(max=length - 1)]
            start += length
    loss_sum, weight_sum, hits = reference_dflash.weighted_loss(
        states[0].view(*batch["labels"].shape, -1),
        batch["labels"],
        batch["weights"],
        target.get_output_embeddings(),
        teacher_logits=teacher_logits,
        **options,
    )
    torch.testing.assert_close(output.loss_sum, loss_sum, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(output.weight_sum, weight_sum)
    assert torch.equal(output.is_correct.flatten(), hits)


@pytest.mark.parametrize("form", ["sdpa", "eager"])
def test_attention_forms_give_the_same_update(tmp_path, form):
    packed = PackedRows(TokenRows(ROWS, max_length=64))
    blocks = one_step(tmp_path / "a", packed, len(packed))
    assert_same(blocks, one_step(tmp_path / "b", packed, len(packed), attention=form), 1e-6)
