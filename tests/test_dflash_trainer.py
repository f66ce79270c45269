import json
import math
from dataclasses import replace

import pytest
import reference_dflash
import torch
from conftest import make_tiny_target
from safetensors.torch import load_file
from tiny_material import (
    losses,
    make_drafter_config,
    make_random_rows,
    make_text_rows,
    make_tokenizer,
    make_trainer,
    record_batches,
    run_python,
    run_without_package,
    save_tiny_target,
)
from two_process_step import train_steps

from dflash_hf import DFlashDraftModel
from dflash_hf.trainer import DFlashTrainer, DFlashTrainingArguments, dflash_trainer
from dflash_hf.trainer.loss import DFlashLossOutput

FOUR_ROWS = make_random_rows([9, 30, 18, 50])


def one_sgd_step(folder, **options) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Parameters before and after one optimizer step over the four rows."""
    sgd = {"optim": "sgd", "learning_rate": 0.5, "warmup_steps": 0, "lr_scheduler_type": "constant"}
    trainer = make_trainer(folder, FOUR_ROWS, max_steps=1, max_grad_norm=0.0, num_anchors=12, **(sgd | options))
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.train()
    return before, trainer.model.state_dict()


def assert_same_parameters(first, second, tolerance=1e-6):
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize(("batch_size", "accumulation"), [(2, 2), (1, 4)])
def test_update_does_not_depend_on_how_rows_are_split_over_accumulation_steps(tmp_path, batch_size, accumulation):
    before, together = one_sgd_step(tmp_path / "a")
    _, split = one_sgd_step(
        tmp_path / "b", per_device_train_batch_size=batch_size, gradient_accumulation_steps=accumulation
    )
    assert_same_parameters(together, split)
    assert max((together[name] - before[name]).abs().max() for name in before) > 1e-2


def test_update_is_the_gradient_of_the_mean_weighted_loss_of_the_step(tmp_path):
    before, after = one_sgd_step(tmp_path)
    trainer = make_trainer(tmp_path, FOUR_ROWS, num_anchors=12)
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
    output = trainer.block_loss(trainer.model, batch)
    (output.loss_sum / output.weight_sum).backward()
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(after[name], before[name] - 0.5 * parameter.grad, rtol=0, atol=1e-6)


def test_sampled_softmax_over_the_whole_vocabulary_gives_the_same_update(tmp_path):
    _, full = one_sgd_step(tmp_path / "a")
    _, sampled = one_sgd_step(tmp_path / "b", sampled_negatives=100)
    _, coarse = one_sgd_step(tmp_path / "c", sampled_negatives=5)
    assert_same_parameters(full, sampled)
    assert any((full[name] - coarse[name]).abs().max() > 1e-3 for name in full)


@pytest.mark.slow
def test_two_processes_give_the_parameters_losses_and_anchors_of_one(tmp_path):
    train_steps(str(tmp_path / "one"), 4, 3)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    run_python(*torchrun, two_process_script(), str(tmp_path / "two"), "2", "3")
    one, two = (torch.load(tmp_path / name / "parameters.pt") for name in ("one", "two"))
    assert_same_parameters(one, two)
    one, two = (json.loads((tmp_path / name / "losses.json").read_text()) for name in ("one", "two"))
    assert two == pytest.approx(one, abs=1e-4)
    alone = anchors_by_step(json.loads((tmp_path / "one" / "batches.0.json").read_text()))
    shared = [json.loads((tmp_path / "two" / f"batches.{rank}.json").read_text()) for rank in (0, 1)]
    assert [sorted(batch["rows"]) != [0, 1, 2, 3] for batch in shared[0]] == [True] * 3
    assert anchors_by_step(shared[0] + shared[1]) == alone
    # Every step is an epoch here, and every epoch draws anew.
    assert len({json.dumps(alone[step]) for step in range(3)}) == 3


@pytest.mark.slow
def test_process_with_nothing_to_learn_neither_hangs_nor_changes_the_update(tmp_path):
    train_steps(str(tmp_path / "one"), 2, 4)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    run_python(*torchrun, two_process_script(), str(tmp_path / "two"), "1", "4")
    batches = [json.loads((tmp_path / "two" / f"batches.{rank}.json").read_text()) for rank in (0, 1)]
    assert sum(batch["rows"] == [0] and batch["anchors"] == [[]] for batch in batches[0] + batches[1]) == 2
    one, two = (torch.load(tmp_path / name / "parameters.pt") for name in ("one", "two"))
    assert_same_parameters(one, two)


def two_process_script() -> str:
    return str(train_steps.__code__.co_filename)


def anchors_by_step(batches: list[dict]) -> dict[int, dict[int, list[int]]]:
    found: dict[int, dict[int, list[int]]] = {}
    for batch in batches:
        found.setdefault(batch["step"], {}).update(zip(batch["rows"], batch["anchors"], strict=True))
    return {step: dict(sorted(anchors.items())) for step, anchors in found.items()}


@pytest.mark.parametrize("options", [{}, {"sampled_negatives": 20}, {"cache_features": True}])
def test_resumed_run_has_the_losses_anchors_and_parameters_of_an_unbroken_one(tmp_path, options):
    if "cache_features" in options:
        options = {"cache_features": str(tmp_path / "features")}
    # Three rows, one a step: the checkpoint at step 4 lies inside the second epoch.
    options |= {"per_device_train_batch_size": 1, "max_steps": 7, "save_strategy": "steps", "save_steps": 4}
    rows = make_random_rows([20, 40, 30])
    unbroken = make_trainer(tmp_path / "run", rows, **options)
    all_batches = record_batches(unbroken)
    unbroken.train()
    resumed = make_trainer(tmp_path / "run", rows, **options)
    batches = record_batches(resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    assert [batch["step"] for batch in batches] == [4, 5, 6]
    assert batches == all_batches[4:]
    assert losses(resumed) == pytest.approx(losses(unbroken), abs=1e-6)
    assert len(losses(resumed)) == 7
    assert_same_parameters(resumed.model.state_dict(), unbroken.model.state_dict())


def test_stored_features_train_the_same_drafter(tmp_path):
    fresh = make_trainer(tmp_path / "a", FOUR_ROWS, max_steps=4, per_device_train_batch_size=2)
    fresh.train()
    for _ in range(2):  # the second run finds all features in the folder
        stored = make_trainer(
            tmp_path / "b",
            FOUR_ROWS,
            max_steps=4,
            per_device_train_batch_size=2,
            cache_features=str(tmp_path / "features"),
        )
        stored.train()
        assert losses(stored) == pytest.approx(losses(fresh), abs=1e-5)
        assert_same_parameters(stored.model.state_dict(), fresh.model.state_dict(), tolerance=1e-5)


def test_anchors_are_drawn_anew_every_epoch_also_beside_an_evaluation_of_the_same_rows(tmp_path):
    rows = make_random_rows([40, 40, 40, 40])
    options = {"per_device_train_batch_size": 1, "num_train_epochs": 3}
    plain = make_trainer(tmp_path, rows, **options)
    expected = record_batches(plain)
    plain.train()
    evaluated = make_trainer(
        tmp_path, plain.train_dataset, eval_rows=plain.train_dataset, eval_strategy="steps", eval_steps=1, **options
    )
    batches = record_batches(evaluated)
    evaluated.train()
    assert batches == expected
    of_first_row = {tuple(batch["anchors"][0]) for batch in expected if batch["rows"] == [0]}
    assert len(of_first_row) == 3


def test_dataloader_workers_draw_the_same_anchors(tmp_path):
    options = {"per_device_train_batch_size": 2, "num_train_epochs": 2}
    plain = make_trainer(tmp_path, FOUR_ROWS, **options)
    expected = record_batches(plain)
    plain.train()
    worked = make_trainer(tmp_path, FOUR_ROWS, dataloader_num_workers=1, **options)
    batches = record_batches(worked)
    worked.train()
    assert batches == expected


def test_persistent_workers_are_refused_because_they_never_hear_of_a_new_epoch(tmp_path):
    with pytest.raises(ValueError, match="dataloader_persistent_workers"):
        DFlashTrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, dataloader_num_workers=1, dataloader_persistent_workers=True
        )


@pytest.mark.parametrize(
    "layer_types", [["full_attention"], ["sliding_attention"], ["sliding_attention", "full_attention"]]
)
def test_blocks_get_no_gradient_from_target_features_at_or_after_their_anchor(tmp_path, layer_types):
    target = make_tiny_target()
    sliding = {"sliding_window": 6} if "sliding_attention" in layer_types else {}
    config = make_drafter_config(target, num_hidden_layers=len(layer_types), layer_types=layer_types, **sliding)
    trainer = make_trainer(tmp_path, make_random_rows([40]), target=target, config=config)
    anchors = [10, 12, 13, 20, 35]
    row = trainer.train_dataset[0]
    batch = trainer.data_collator([row])
    batch["anchors"] = torch.tensor([anchors])
    batch["is_valid"] = torch.ones(1, 5, dtype=torch.bool)
    targets = [
        reference_dflash.block_targets(row["input_ids"], row["loss_mask"], anchor, [0.0] + [1.0] * 7)
        for anchor in anchors
    ]
    batch["labels"] = torch.tensor([[[label or 0 for label in labels] for labels, _ in targets]])
    features = torch.randn(1, 40, 64, requires_grad=True)
    batch["context_starts"] = torch.zeros(1, 5, dtype=torch.long)
    trainer.target_features = lambda input_ids, document_lengths: features
    for block, anchor in enumerate(anchors):
        batch["weights"] = torch.zeros(1, 5, 8)
        batch["weights"][0, block] = torch.tensor(targets[block][1])
        batch["active"] = batch["weights"].flatten().nonzero()[:, 0]
        (gradient,) = torch.autograd.grad(trainer.block_loss(trainer.model, batch).loss_sum, features)
        sizes = gradient[0].abs().sum(dim=-1)
        assert (sizes[anchor:] == 0).all()
        first_visible = 0 if "full_attention" in layer_types else anchor - 4  # slot 1 sees window - 2 tokens
        assert (sizes[first_visible:anchor] > 0).all()


@pytest.mark.parametrize("sees_its_answers", [False, True])
def test_random_tokens_cannot_be_learned_unless_blocks_see_their_answers(tmp_path, monkeypatch, sees_its_answers):
    vocab_size, steps = 20, 60
    attention_masks = dflash_trainer.attention_masks

    def leaking_masks(form, config, anchors, is_valid, context_length, **rule):
        (layout,) = attention_masks(form, config, anchors, is_valid, context_length, **rule).values()
        starts = anchors[:, :, None].expand_as(layout.context_starts)
        ends = (anchors + config.block_size).clamp(max=context_length)
        return {"full_attention": replace(layout, context_starts=starts, context_ends=ends)}

    if sees_its_answers:
        monkeypatch.setattr(dflash_trainer, "attention_masks", leaking_masks)
    target = make_tiny_target(vocab_size=vocab_size)
    config = make_drafter_config(target, block_size=4, mask_token_id=17, target_layer_ids=[0])
    # New rows in every step, with many overlapping blocks.
    rows = make_random_rows([64] * 4 * steps, prompt_length=0, vocab_size=vocab_size)
    trainer = make_trainer(
        tmp_path,
        rows,
        target=target,
        config=config,
        init="random",
        num_train_epochs=1,
        num_anchors=40,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        warmup_steps=0,
        loss_decay=2.0,
    )
    trainer.train()
    bound = math.log(vocab_size)
    assert len(losses(trainer)) == steps
    if sees_its_answers:
        assert losses(trainer)[-1] < bound - 1
    else:
        assert min(losses(trainer)) > bound - 0.05
        assert sum(losses(trainer)[-30:]) / 30 > bound


def test_checkpoint_is_a_drafter_that_loads_and_drafts_without_the_package(tmp_path):
    target = save_tiny_target(tmp_path / "target")
    rows = make_text_rows(target, 4)
    trainer = make_trainer(tmp_path / "run", rows, target=target, max_steps=2, save_strategy="steps", save_steps=1)
    trainer.train()
    for step in (1, 2):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        config = json.loads((folder / "config.json").read_text())
        assert config["architectures"] == ["DFlashDraftModel"] and config["dflash_config"]["mask_token_id"] == 97
        assert {"configuration_dflash.py", "modeling_dflash.py"} <= {path.name for path in folder.glob("*.py")}
        assert set(load_file(folder / "model.safetensors")) == set(trainer.model.state_dict())
        assert not any("embed" in name or "lm_head" in name for name in load_file(folder / "model.safetensors"))
    assert_same_parameters(DFlashDraftModel.from_pretrained(folder).state_dict(), trainer.model.state_dict(), 0)
    code = f"""
import torch
from transformers import AutoModel, AutoModelForCausalLM
drafter = AutoModel.from_pretrained({str(folder)!r}, trust_remote_code=True)
target = AutoModelForCausalLM.from_pretrained({str(tmp_path / "target")!r})
prompt = torch.tensor([{rows[0]["input_ids"][:6]}])
options = dict(attention_mask=torch.ones_like(prompt), max_new_tokens=30, do_sample=False)
print(target.generate(prompt, assistant_model=drafter, **options)[0].tolist())
print(type(drafter).__name__, drafter.dtype, sum(p.double().abs().sum() for p in drafter.parameters()).item())
"""
    tokens, description = run_without_package(code, tmp_path).strip().splitlines()[-2:]
    assert json.loads(tokens) == rows[0]["input_ids"]
    name, dtype, size = description.split()
    assert (name, dtype) == ("DFlashDraftModel", "torch.float32")
    assert float(size) == sum(p.double().abs().sum() for p in trainer.model.parameters()).item()


def test_training_leaves_the_target_as_it_was(tmp_path):
    target = make_tiny_target()
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    trainer = make_trainer(tmp_path, FOUR_ROWS, target=target, max_steps=2)
    trainer.train()
    assert_same_parameters(target.state_dict(), before, 0)
    assert not any(parameter.grad is not None for parameter in target.parameters())


def test_mask_token_that_is_a_special_token_is_refused_by_name(tmp_path):
    target, tokenizer = make_tiny_target(), make_tokenizer()
    # The target's config does not know of the tokenizer's end token, so only the trainer can see the clash.
    drafter = DFlashDraftModel(make_drafter_config(target, mask_token_id=tokenizer.eos_token_id))
    args = DFlashTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(ValueError, match="`mask_token_id` 2 is the tokenizer's `eos_token_id`"):
        DFlashTrainer(drafter, target, args, FOUR_ROWS, processing_class=tokenizer)


def test_drafter_of_another_target_is_refused(tmp_path):
    config = make_drafter_config(make_tiny_target(num_hidden_layers=6))
    with pytest.raises(ValueError, match="num_target_layers"):
        make_trainer(tmp_path, FOUR_ROWS, config=config, init="random")


def test_rows_without_supervision_are_refused(tmp_path):
    rows = [row | {"loss_mask": [0] * len(row["input_ids"])} for row in FOUR_ROWS]
    with pytest.raises(ValueError, match="nothing to learn from"):
        make_trainer(tmp_path, rows)


def test_micro_batch_without_supervision_changes_nothing(tmp_path):
    empty = {"input_ids": [4, 5, 6, 7], "loss_mask": [0] * 4}
    options = {"per_device_train_batch_size": 1, "max_steps": 1, "optim": "sgd", "warmup_steps": 0}
    options |= {"lr_scheduler_type": "constant", "learning_rate": 0.5, "max_grad_norm": 0.0}
    plain = make_trainer(tmp_path, FOUR_ROWS[:1], gradient_accumulation_steps=1, **options)
    mixed = make_trainer(tmp_path, [FOUR_ROWS[0], empty], gradient_accumulation_steps=2, **options)
    plain.train()
    mixed.train()
    assert_same_parameters(plain.model.state_dict(), mixed.model.state_dict())


@pytest.mark.parametrize(
    ("mean", "step", "is_refused"), [(0.04, 9, True), (math.nan, 0, True), (0.06, 0, False), (0.04, 10, False)]
)
def test_loss_that_only_a_leak_can_give_is_refused_early_on(tmp_path, monkeypatch, mean, step, is_refused):
    trainer = make_trainer(tmp_path, FOUR_ROWS)
    batch = trainer.data_collator([trainer.train_dataset[1]])
    weight_sum = batch["weights"].sum()
    output = DFlashLossOutput(mean * weight_sum, weight_sum, torch.zeros_like(batch["weights"], dtype=torch.bool))
    monkeypatch.setattr(trainer, "block_loss", lambda model, inputs: output)
    trainer.model.train()
    trainer.state.global_step = step
    if is_refused:
        with pytest.raises(ValueError, match=f"at step {step}.*blocks see their answers"):
            trainer.compute_loss(trainer.model, batch)
    else:
        assert trainer.compute_loss(trainer.model, batch) == pytest.approx(mean)


def test_bf16_autocast_trains_float32_weights_on_nearly_the_same_loss(tmp_path):
    plain = make_trainer(tmp_path, FOUR_ROWS, max_steps=3, learning_rate=1e-3)
    plain.train()
    autocast = make_trainer(tmp_path, FOUR_ROWS, max_steps=3, learning_rate=1e-3, bf16=True)
    autocast.train()
    assert {parameter.dtype for parameter in autocast.model.parameters()} == {torch.float32}
    assert losses(autocast) == pytest.approx(losses(plain), rel=0.02)
    assert losses(autocast) != losses(plain)


def test_bf16_target_trains_a_float32_drafter(tmp_path):
    plain = make_trainer(tmp_path, FOUR_ROWS, max_steps=2)
    plain.train()
    half = make_trainer(tmp_path, FOUR_ROWS, target=make_tiny_target().to(torch.bfloat16), max_steps=2)
    half.train()
    assert {parameter.dtype for parameter in half.model.parameters()} == {torch.float32}
    assert losses(half) == pytest.approx(losses(plain), rel=0.05)


def test_logs_carry_teacher_forced_tau_accuracy_and_acceptance_of_every_slot(tmp_path):
    trainer = make_trainer(tmp_path, FOUR_ROWS, eval_rows=FOUR_ROWS[1:], max_steps=2)
    trainer.train()
    trainer.evaluate()
    entries = {prefix: next(e for e in trainer.state.log_history if prefix + "loss" in e) for prefix in ("", "eval_")}
    for prefix, entry in entries.items():
        assert 1 <= entry[prefix + "teacher_forced_tau"] <= 8
        assert all(0 <= entry[f"{prefix}accuracy_slot_{slot}"] <= 1 for slot in range(1, 8))
        acceptance = [entry[f"{prefix}acceptance_slot_{slot}"] for slot in range(1, 8)]
        assert acceptance == sorted(acceptance, reverse=True)
        assert entry[prefix + "teacher_forced_tau"] == pytest.approx(1 + sum(acceptance), abs=1e-3)
        assert f"{prefix}accuracy_slot_0" not in entry and f"{prefix}accuracy_slot_8" not in entry


def test_evaluation_figures_are_those_of_the_drafts_that_generation_would_make(tmp_path):
    target = make_tiny_target()
    rows = make_text_rows(target, 3, answer_length=20)
    trainer = make_trainer(tmp_path, rows, target=target, eval_rows=rows, max_steps=60, num_anchors=50)
    trainer.train()
    figures = trainer.evaluate()
    trainer.model.eval()
    lengths, hits = [], torch.zeros(7)
    for row in rows:
        input_ids = torch.tensor([row["input_ids"]])
        for anchor in range(6, 26 - 7):
            _, logits = reference_dflash.draft_block(trainer.model, target, input_ids, anchor)
            proposals, answer = logits[1:].argmax(dim=-1), input_ids[0, anchor + 1 : anchor + 8]
            lengths.append(reference_dflash.accepted_length(proposals.tolist(), answer.tolist()))
            hits += proposals == answer
    assert len(set(lengths)) > 2
    assert figures["eval_teacher_forced_tau"] == pytest.approx(sum(lengths) / len(lengths), abs=1e-4)
    for slot in range(1, 8):
        assert figures[f"eval_accuracy_slot_{slot}"] == pytest.approx(hits[slot - 1].item() / len(lengths), abs=1e-4)


def test_evaluation_gives_the_same_figures_twice(tmp_path):
    rows = make_random_rows([60, 50])
    trainer = make_trainer(tmp_path, FOUR_ROWS, eval_rows=rows, max_steps=2, per_device_eval_batch_size=2)
    trainer.train()
    first = trainer.evaluate()
    torch.rand(7)
    trainer.train_dataset.set_epoch(5)
    second = trainer.evaluate()
    given = trainer.evaluate(rows)
    names = [name for name in first if name in ("eval_loss", "eval_teacher_forced_tau") or "_slot_" in name]
    assert len(names) == 2 + 7 + 7
    assert [first[name] for name in names] == [second[name] for name in names] == [given[name] for name in names]


def test_trained_drafter_drafts_in_the_same_process(tmp_path):
    target = make_tiny_target()
    rows = make_text_rows(target, 2)
    trainer = make_trainer(tmp_path, rows, target=target, max_steps=2)
    trainer.train()
    prompt = torch.tensor([rows[0]["input_ids"][:6]])
    output = target.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        assistant_model=trainer.model,
        max_new_tokens=30,
        do_sample=False,
    )
    assert output[0].tolist() == rows[0]["input_ids"]
