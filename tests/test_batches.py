import pytest
import reference_dflash
import torch

from dflash_hf.trainer.batches import NO_DOCUMENT, AnchorCollator
from dflash_hf.trainer.data import TokenRows
from dflash_hf.trainer.loss import decay_weights
from dflash_hf.trainer.packing import PackedRows


def make_rows(lengths=(12, 30, 21, 17), prompt_length=5) -> list[dict]:
    return [
        {"input_ids": torch.randint(3, 90, (length,)).tolist(), "prompt_length": prompt_length} for length in lengths
    ]


def make_collator(num_anchors=4, seed=0, **options) -> AnchorCollator:
    return AnchorCollator(num_anchors, decay_weights(8, 4.0), seed, **options)


def anchors_by_row(batch: dict) -> dict[int, list[int]]:
    return {
        rows[0]: anchors[is_valid].tolist()
        for rows, anchors, is_valid in zip(batch["rows"].tolist(), batch["anchors"], batch["is_valid"], strict=True)
    }


def test_one_row_with_an_answer_is_enough():
    rows = TokenRows([{"input_ids": [4, 5, 6], "loss_mask": mask} for mask in ([0, 0, 0], [0, 1, 1])])
    batch = make_collator()([rows[0], rows[1]])
    assert batch["is_valid"].tolist() == [[False], [True]]
    assert batch["weights"][0].sum() == 0 and batch["weights"][1].sum() > 0


def test_anchors_do_not_depend_on_batch_order_or_padding():
    rows = TokenRows(make_rows())
    collator = make_collator()
    alone = {}
    for index in range(4):
        alone |= anchors_by_row(collator([rows[index]]))
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 1]):
        together = anchors_by_row(collator([rows[index] for index in order]))
        assert list(together) == order
        assert all(together[index] == alone[index] for index in order)


def test_anchors_change_with_epoch_row_and_seed():
    same = make_rows(lengths=(80,))
    rows = TokenRows(same * 2)
    first = anchors_by_row(make_collator()([rows[0], rows[1]]))
    other_seed = anchors_by_row(make_collator(seed=1)([rows[0]]))
    rows.set_epoch(1)
    other_epoch = anchors_by_row(make_collator()([rows[0]]))
    draws = [first[0], first[1], other_seed[0], other_epoch[0]]
    assert len({tuple(draw) for draw in draws}) == 4
    rows.set_epoch(0)
    assert anchors_by_row(make_collator()([rows[0]]))[0] == first[0]


def test_first_answer_token_can_be_an_anchor_and_gets_its_turn():
    rows = TokenRows(make_rows(lengths=(12,)))
    collator = make_collator(num_anchors=2)
    drawn = set()
    for epoch in range(40):
        rows.set_epoch(epoch)
        drawn |= set(anchors_by_row(collator([rows[0]]))[0])
    # 5 is the first answer token, 10 the last with a successor.
    assert drawn == set(range(5, 11))


def test_batch_is_padded_on_the_right_and_holds_targets_of_its_rows():
    rows = TokenRows(make_rows())
    collator = make_collator(num_anchors=50)
    batch = collator([rows[index] for index in range(4)])
    assert batch["document_lengths"].tolist() == [[12], [30], [21], [17]]
    # No wider than the row with the most anchors: 30 - 5 - 1.
    assert batch["anchors"].shape == batch["is_valid"].shape == (4, 24)
    assert batch["labels"].shape == batch["weights"].shape == (4, 24, 8)
    for index in range(4):
        row = rows[index]
        length = len(row["input_ids"])
        assert batch["input_ids"][index, :length].tolist() == row["input_ids"]
        assert (batch["input_ids"][index, length:] == 0).all()
        candidates = reference_dflash.anchor_candidates(row["loss_mask"])
        assert batch["anchors"][index][batch["is_valid"][index]].tolist() == candidates
        for block, anchor in enumerate(candidates):
            labels, weights = reference_dflash.block_targets(
                row["input_ids"], row["loss_mask"], anchor, collator.slot_weights.tolist()
            )
            assert batch["weights"][index, block].tolist() == weights
            pairs = zip(batch["labels"][index, block].tolist(), labels, strict=True)
            assert all(expected is None or label == expected for label, expected in pairs)


def documents_of(batch: dict, row: int) -> list[tuple[int, int, int]]:
    """(number, first column, column behind the last) of each document in a row."""
    found, start = [], 0
    for number, length in zip(batch["rows"][row].tolist(), batch["document_lengths"][row].tolist(), strict=True):
        if number != NO_DOCUMENT:
            found.append((number, start, start + length))
            start += length
    return found


def test_packed_documents_have_the_anchors_labels_and_weights_that_they_have_alone():
    rows = TokenRows(make_rows(lengths=(12, 30, 21, 17, 9)), max_length=60)
    packed = PackedRows(rows)
    collator = make_collator(num_anchors=6)
    batch = collator([packed[i] for i in range(len(packed))])
    seen = []
    for row in range(len(packed)):
        places = documents_of(batch, row)
        assert len(places) > 1
        offset = 0
        for number, start, end in places:
            alone = collator([rows[number]])
            count = int(alone["is_valid"].sum())
            blocks = slice(offset, offset + count)
            assert batch["input_ids"][row, start:end].tolist() == rows[number]["input_ids"]
            assert batch["loss_mask"][row, start:end].tolist() == rows[number]["loss_mask"]
            assert batch["positions"][row, start:end].tolist() == list(range(end - start))
            assert torch.equal(batch["anchors"][row, blocks] - start, alone["anchors"][0])
            assert (batch["context_starts"][row, blocks] == start).all()
            assert torch.equal(batch["labels"][row, blocks], alone["labels"][0])
            assert torch.equal(batch["weights"][row, blocks], alone["weights"][0])
            offset += count
            seen.append(number)
        assert batch["is_valid"][row].tolist() == [True] * offset + [False] * (batch["anchors"].shape[1] - offset)
    assert sorted(seen) == list(range(5))


def test_active_slots_are_those_with_weight():
    rows = TokenRows(make_rows())
    batch = make_collator()([rows[i] for i in range(4)])
    weights = batch["weights"].flatten()
    assert batch["active"].tolist() == [i for i, weight in enumerate(weights.tolist()) if weight > 0]
    assert 0 < len(batch["active"]) < weights.numel()


def test_hidden_prompt_is_out_of_sight_and_changes_nothing_else():
    rows = TokenRows(make_rows())
    plain, hidden = make_collator(), make_collator(hides_prompt=True)
    first, second = (collator([rows[i] for i in range(4)]) for collator in (plain, hidden))
    assert (first.pop("context_starts") == 0).all()
    assert (second.pop("context_starts")[second["is_valid"]] == 5).all()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_padded_shapes_are_multiples_and_padding_carries_no_weight():
    rows = TokenRows(make_rows())
    plain = make_collator()([rows[i] for i in range(4)])
    padded = make_collator(token_multiple=16, anchor_multiple=10)([rows[i] for i in range(4)])
    assert padded["input_ids"].shape == padded["positions"].shape == (4, 32)
    assert padded["anchors"].shape == (4, 10) and padded["labels"].shape == padded["weights"].shape == (4, 10, 8)
    assert padded["weights"].sum() == plain["weights"].sum()
    assert not padded["is_valid"][:, 4:].any()
    assert torch.equal(padded["anchors"][:, :4], plain["anchors"])


@pytest.mark.parametrize("loss_mask", [[0, 0, 0], [0, 0, 1]])
def test_batch_without_anything_to_learn_has_one_empty_slot(loss_mask):
    row = {"input_ids": [4, 5, 6], "loss_mask": loss_mask, "row": 0, "epoch": 0}
    batch = make_collator()([row])
    assert batch["anchors"].shape == (1, 1) and not batch["is_valid"].any()
    assert batch["weights"].sum() == 0 and batch["active"].shape == (0,)
