import pytest
import reference_dflash
import torch

from dflash_hf.trainer.anchors import block_targets, row_generator, select_anchors


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_mask(batch: int, num_tokens: int, share: float = 0.7) -> torch.Tensor:
    return (torch.rand(batch, num_tokens) < share).long()


@pytest.mark.parametrize("num_tokens", [2, 3, 17, 40])
def test_anchors_are_all_candidates_if_there_are_enough_slots(num_tokens):
    loss_mask = random_mask(6, num_tokens)
    anchors, is_valid = select_anchors(loss_mask, num_tokens, 4, generator=seeded())
    for row in range(6):
        expected = reference_dflash.anchor_candidates(loss_mask[row].tolist())
        assert anchors[row][is_valid[row]].tolist() == expected


def test_first_answer_token_is_a_candidate_and_the_last_is_not():
    loss_mask = torch.tensor([[0, 0, 0, 1, 1, 1, 0]])
    anchors, is_valid = select_anchors(loss_mask, 7, 16, generator=seeded())
    assert anchors[is_valid].tolist() == [3, 4]


def test_anchors_are_different_candidates_in_rising_order():
    loss_mask = random_mask(5, 60)
    anchors, is_valid = select_anchors(loss_mask, 9, 4, generator=seeded())
    assert anchors.shape == is_valid.shape == (5, 9)
    assert is_valid.all()
    assert (anchors[:, 1:] > anchors[:, :-1]).all()
    for row in range(5):
        assert set(anchors[row].tolist()) <= set(reference_dflash.anchor_candidates(loss_mask[row].tolist()))


def test_unused_slots_hold_position_0_and_are_invalid():
    loss_mask = torch.tensor([[0, 1, 1, 1, 0], [0, 0, 0, 0, 0], [0, 1, 0, 1, 0]])
    anchors, is_valid = select_anchors(loss_mask, 8, 4, generator=seeded())
    assert anchors.tolist() == [[1, 2, 0, 0, 0, 0, 0, 0], [0] * 8, [0] * 8]
    assert is_valid.sum(dim=1).tolist() == [2, 0, 0]
    assert is_valid[0, :2].all()


def test_anchors_repeat_with_the_seed_and_differ_without():
    loss_mask = torch.ones(1, 200)
    draws = [select_anchors(loss_mask, 20, 4, generator=seeded(seed))[0].tolist() for seed in (0, 0, 1)]
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]


def test_every_candidate_is_drawn_equally_often():
    draws, candidates, width = 4000, 12, 3
    loss_mask = torch.tensor([[0] * 4 + [1] * (candidates + 1)]).expand(draws, -1)
    anchors, _ = select_anchors(loss_mask, width, 4, generator=seeded())
    counts = torch.bincount(anchors.flatten(), minlength=17)[4:16].double()
    share = width / candidates
    standard_error = (draws * share * (1 - share)) ** 0.5
    assert (counts - draws * share).abs().max() < 4 * standard_error


@pytest.mark.parametrize(("num_anchors", "block_size"), [(0, 4), (3, 1)])
def test_too_few_anchors_or_slots_are_refused(num_anchors, block_size):
    with pytest.raises(ValueError, match="num_anchors.*block_size"):
        select_anchors(torch.ones(1, 5), num_anchors, block_size, generator=seeded())


@pytest.mark.parametrize("share", [0.5, 0.9, 1.0])
def test_block_targets_equal_the_plain_twin(share):
    loss_mask = random_mask(4, 31, share)
    input_ids = torch.randint(5, 90, (4, 31))
    slot_weights = torch.tensor([0.0, 1.0, 0.8, 0.6, 0.4, 0.2])
    anchors, is_valid = select_anchors(loss_mask, 40, 6, generator=seeded())
    labels, weights = block_targets(input_ids, loss_mask, anchors, is_valid, slot_weights)
    assert labels.shape == weights.shape == (4, 40, 6)
    compared = 0
    for row in range(4):
        for block in range(40):
            if not is_valid[row, block]:
                assert weights[row, block].tolist() == [0.0] * 6
                continue
            expected_labels, expected_weights = reference_dflash.block_targets(
                input_ids[row].tolist(), loss_mask[row].tolist(), int(anchors[row, block]), slot_weights.tolist()
            )
            assert weights[row, block].tolist() == expected_weights
            for label, expected in zip(labels[row, block].tolist(), expected_labels, strict=True):
                assert expected is None or label == expected
                compared += expected is not None
    assert compared > 50


def test_slot_k_is_taught_the_token_k_places_after_the_anchor():
    input_ids = torch.arange(100, 112)[None]
    labels, weights = block_targets(
        input_ids,
        torch.ones(1, 12),
        torch.tensor([[2, 5]]),
        torch.ones(1, 2, dtype=torch.bool),
        torch.tensor([0, 1, 1, 1.0]),
    )
    assert labels.tolist() == [[[102, 103, 104, 105], [105, 106, 107, 108]]]
    assert weights.tolist() == [[[0, 1, 1, 1], [0, 1, 1, 1]]]


def test_slots_after_a_gap_or_past_the_end_carry_no_weight():
    input_ids = torch.arange(8)[None]
    loss_mask = torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1]])
    anchors, is_valid = torch.tensor([[0, 4, 6]]), torch.ones(1, 3, dtype=torch.bool)
    _, weights = block_targets(input_ids, loss_mask, anchors, is_valid, torch.tensor([0, 1, 1, 1, 1.0]))
    assert weights.tolist() == [[[0, 1, 0, 0, 0], [0, 1, 1, 1, 0], [0, 1, 0, 0, 0]]]


def test_row_generator_depends_on_each_of_seed_epoch_and_row():
    def draw(*numbers):
        return torch.rand(4, generator=row_generator(*numbers)).tolist()

    assert draw(1, 2, 3) == draw(1, 2, 3)
    others = [(0, 2, 3), (1, 3, 3), (1, 2, 4), (12, 0, 3), (1, 20, 3), (2, 1, 3), (1, 3, 2)]
    assert len({tuple(draw(*numbers)) for numbers in [(1, 2, 3), *others]}) == len(others) + 1
