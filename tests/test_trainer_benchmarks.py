"""The parts of the trainer benchmarks that decide whether a comparison is fair."""

from pathlib import Path

import pytest
import torch
from tiny_material import save_tiny_target

from dflash_hf.trainer.data import write_json_lines


@pytest.fixture(autouse=True)
def benchmarks_are_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))


def test_given_features_follow_their_rows_through_order_and_padding():
    from peer_trainers import GivenFeatures

    rows = [
        {"input_ids": torch.tensor([5, 0, 7]), "features": torch.ones(3, 2)},
        {"input_ids": torch.tensor([5]), "features": torch.full((1, 2), 2.0)},
    ]
    features = GivenFeatures(rows)(torch.tensor([[5, 0, 0], [5, 0, 7]]), "ignored")
    torch.testing.assert_close(features[:, :, 0], torch.tensor([[2.0, 0.0, 0.0], [1.0, 1.0, 1.0]]))


def test_no_row_is_trained_twice_or_held_out_too(tmp_path):
    from trainer_quality import QualityOptions, choose_rows

    file = tmp_path / "answers.jsonl"
    rows = [{"input_ids": [number] * (8 + number % 2), "prompt_length": 4} for number in range(40)]
    write_json_lines(file, rows)
    options = QualityOptions(
        train_files=[str(file)],
        output_dir=str(tmp_path),
        num_steps=4,
        batch_size=3,
        num_anchors=2,
        eval_rows=5,
        max_length=8,
    )
    train, held_out = ({part[i]["input_ids"][0] for i in range(len(part))} for part in choose_rows(options))
    assert (len(train), len(held_out), len(train & held_out)) == (12, 5, 0)

    options.num_steps = 12
    with pytest.raises(ValueError, match="have 40 rows with long enough answers, the run needs 41"):
        choose_rows(options)


def test_peers_compute_our_loss_and_gradient(tmp_path):
    pytest.importorskip("specforge", reason="needs the peers, see benchmarks/peer_trainers.py")
    pytest.importorskip("speculators", reason="needs the peers, see benchmarks/peer_trainers.py")
    from training_step import StepOptions, build, build_parts, compare_losses, run_step

    save_tiny_target(tmp_path)
    options = StepOptions(
        target=str(tmp_path), mask_token_id=97, num_hidden_layers=1, num_target_features=2, num_anchors=6,
        batch_size=3, length=40, prompt_length=4,
    )  # fmt: skip
    parts = build_parts(options, "float32", tmp_path)
    found = compare_losses(parts)
    assert set(found) == {"SpecForge, chunk 128", "speculators, packed"}

    # Row by row is the same step.
    for whole in ("ours", "SpecForge, chunk 4"):
        values = [run_step(*build(name, parts), parts) for name in (whole, f"{whole}, row by row")]
        assert values[0] == pytest.approx(values[1], rel=1e-5)
