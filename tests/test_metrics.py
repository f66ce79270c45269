import pytest
import reference_dflash
import torch

from dflash_hf.trainer.metrics import BlockMetrics


def test_figures_equal_the_plain_twin():
    block_size, num_blocks = 6, 40
    answers = torch.randint(3, (num_blocks, block_size - 1))
    proposals = torch.where(torch.rand(answers.shape) < 0.6, answers, 9)
    is_correct = torch.cat([torch.zeros(num_blocks, 1, dtype=torch.bool), proposals == answers], dim=1)
    weights = torch.rand(num_blocks, block_size) + 0.1
    weights[:, 0] = 0
    metrics = BlockMetrics(block_size)
    metrics.add(is_correct.view(4, 10, block_size), weights.view(4, 10, block_size))
    figures = metrics.compute()
    lengths = [
        reference_dflash.accepted_length(proposal, answer)
        for proposal, answer in zip(proposals.tolist(), answers.tolist(), strict=True)
    ]
    assert figures["teacher_forced_tau"] == pytest.approx(sum(lengths) / num_blocks)
    for slot in range(1, block_size):
        assert figures[f"accuracy_slot_{slot}"] == pytest.approx(
            (proposals[:, slot - 1] == answers[:, slot - 1]).double().mean().item()
        )
        assert figures[f"acceptance_slot_{slot}"] == pytest.approx(sum(n > slot for n in lengths) / num_blocks)
    assert len(figures) == 1 + 2 * (block_size - 1)


def test_teacher_forced_tau_counts_the_bonus_token_and_stops_at_the_first_miss():
    is_correct = torch.tensor([[[0, 1, 1, 0, 1], [0, 0, 1, 1, 1], [0, 1, 1, 1, 1]]]).bool()
    metrics = BlockMetrics(5)
    metrics.add(is_correct, torch.ones(1, 3, 5))
    figures = metrics.compute()
    assert figures["teacher_forced_tau"] == pytest.approx((3 + 1 + 5) / 3)
    assert [figures[f"accuracy_slot_{slot}"] for slot in range(1, 5)] == pytest.approx([2 / 3, 1, 2 / 3, 1])


def test_blocks_cut_by_the_end_of_an_answer_do_not_count():
    is_correct = torch.tensor([[[0, 1, 1, 1], [0, 0, 0, 0]]]).bool()
    weights = torch.tensor([[[0, 1, 0.8, 0.6], [0, 1, 0.8, 0]]])
    metrics = BlockMetrics(4)
    metrics.add(is_correct, weights)
    assert metrics.compute() == {
        "teacher_forced_tau": 4.0,
        **{f"{name}_slot_{slot}": 1.0 for name in ("accuracy", "acceptance") for slot in (1, 2, 3)},
    }


def test_parts_and_processes_add_up_to_the_whole():
    is_correct, weights = torch.rand(6, 3, 4) < 0.5, torch.ones(6, 3, 4)
    whole, first, second = (BlockMetrics(4) for _ in range(3))
    whole.add(is_correct, weights)
    for rows in (slice(0, 1), slice(1, 4)):
        first.add(is_correct[rows], weights[rows])
    second.add(is_correct[4:], weights[4:])
    assert BlockMetrics(4).compute(first.sums() + second.sums()) == whole.compute()


def test_no_whole_block_gives_no_figures():
    metrics = BlockMetrics(4)
    assert metrics.compute() == {}
    metrics.add(torch.ones(1, 2, 4, dtype=torch.bool), torch.zeros(1, 2, 4))
    assert metrics.compute() == {}
    metrics.add(torch.ones(1, 2, 4, dtype=torch.bool), torch.ones(1, 2, 4))
    assert metrics.compute()["teacher_forced_tau"] == 4
    metrics.reset()
    assert metrics.compute() == {}
