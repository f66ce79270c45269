import pytest
import reference_dflash
import torch
from conftest import make_tiny_target
from tiny_material import make_drafter_config, make_text_rows, make_trainer

from dflash_hf import create_drafter
from dflash_hf.trainer.data import TokenRows
from dflash_hf.trainer.live_tau import decode_live, live_metrics, live_prompts


def test_prompts_are_what_comes_before_the_first_answer():
    rows = TokenRows(
        [
            {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 0, 1, 1, 1]},
            {"input_ids": [5, 6, 7, 8, 9, 10], "loss_mask": [1] * 6},
            {"input_ids": list(range(80)), "loss_mask": [1] * 80},
            {"input_ids": [5], "loss_mask": [1]},
        ]
    )
    assert live_prompts(rows, 9) == [[5, 6], [5, 6, 7], list(range(32)), [5]]
    assert len(live_prompts(rows, 2)) == 2


def test_sums_are_those_of_a_plain_loop_and_modes_are_left_alone():
    target = make_tiny_target()
    rows = make_text_rows(target, 3)
    torch.manual_seed(3)
    drafter = create_drafter(target, make_drafter_config(target), init="target").train()
    prompts = [row["input_ids"][:6] for row in rows]
    sums = decode_live(target, drafter, prompts, 20)
    assert drafter.training and not target.training
    lengths = []
    for row in rows:
        text = row["input_ids"][:26]
        place = 6  # the newest committed token
        while place < 25:
            _, logits = reference_dflash.draft_block(drafter.eval(), target, torch.tensor([text[: place + 1]]), place)
            run = reference_dflash.accepted_length(logits[1:].argmax(dim=-1).tolist(), text[place + 1 : place + 8])
            lengths.append(min(run, 25 - place))
            place += lengths[-1]
    assert sums[0] == len(lengths) and sums[1] == sum(lengths)
    assert sums[2:].tolist() == [sum(length > slot for length in lengths) for slot in range(1, 8)]
    figures = live_metrics(sums + sums)
    assert figures["live_tau"] == pytest.approx(sum(lengths) / len(lengths))
    assert figures["live_acceptance_slot_1"] == pytest.approx(sum(length > 1 for length in lengths) / len(lengths))
    assert len(figures) == 8
    assert live_metrics(torch.zeros(9)) == {}


def test_evaluation_logs_live_tau_and_keeps_the_best_checkpoint_by_it(tmp_path):
    target = make_tiny_target()
    rows = make_text_rows(target, 4)
    options = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4, "max_steps": 12}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "live_tau", "greater_is_better": True}
    trainer = make_trainer(
        tmp_path, rows, target=target, eval_rows=rows, live_prompts=3, live_max_new_tokens=20, **options, **best
    )
    trainer.train()
    taus = {e["step"]: e["eval_live_tau"] for e in trainer.state.log_history if "eval_live_tau" in e}
    assert list(taus) == [4, 8, 12]
    assert trainer.state.best_metric == pytest.approx(max(taus.values()), abs=1e-4)
    assert trainer.state.best_global_step in [step for step, tau in taus.items() if tau == max(taus.values())]
    assert trainer.evaluate()["eval_live_tau"] == pytest.approx(max(taus.values()), abs=1e-4)
