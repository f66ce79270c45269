import pytest
import reference_dflash
import torch

from dflash_hf.trainer.data import AnchorCollator, TokenRows, read_json_lines, write_json_lines
from dflash_hf.trainer.loss import decay_weights


def make_rows(lengths=(12, 30, 21, 17), prompt_length=5) -> list[dict]:
    return [
        {"input_ids": torch.randint(3, 90, (length,)).tolist(), "prompt_length": prompt_length} for length in lengths
    ]


def make_collator(num_anchors=4, seed=0) -> AnchorCollator:
    return AnchorCollator(num_anchors, decay_weights(8, 4.0), seed)


def anchors_by_row(batch: dict) -> dict[int, list[int]]:
    return {
        row: anchors[is_valid].tolist()
        for row, anchors, is_valid in zip(batch["rows"].tolist(), batch["anchors"], batch["is_valid"], strict=True)
    }


def test_prompt_length_equals_the_loss_mask_it_stands_for():
    rows = make_rows()
    masked = [
        {"input_ids": row["input_ids"], "loss_mask": [0] * 5 + [1] * (len(row["input_ids"]) - 5)} for row in rows
    ]
    first, second = TokenRows(rows), TokenRows(masked)
    assert [first[i] for i in range(4)] == [second[i] for i in range(4)]
    assert first[2]["row"] == 2 and first[2]["epoch"] == 0


def test_long_rows_are_cut_at_the_end():
    rows = make_rows()
    cut = TokenRows(rows, max_length=9)
    for index, row in enumerate(rows):
        assert cut[index]["input_ids"] == row["input_ids"][:9]
        assert cut[index]["loss_mask"] == [0] * 5 + [1] * 4
    assert len(cut) == 4


def test_row_without_mask_or_prompt_length_is_refused():
    with pytest.raises(ValueError, match=r"Row 0 has neither `loss_mask` nor `prompt_length`.*input_ids"):
        TokenRows([{"input_ids": [1, 2, 3]}])


def test_mask_of_another_length_is_refused():
    with pytest.raises(ValueError, match="Row 0 has 3 token ids but a loss mask of 2"):
        TokenRows([{"input_ids": [1, 2, 3], "loss_mask": [1, 1]}])


@pytest.mark.parametrize("loss_mask", [[0, 0, 0, 0, 0], [0, 0, 0, 0, 1], [1, 0, 1, 0, 1]])
def test_rows_that_give_no_anchor_are_refused(loss_mask):
    row = {"input_ids": [4, 5, 6, 7, 8], "loss_mask": loss_mask}
    with pytest.raises(ValueError, match="None of the 2 rows"):
        TokenRows([row, row])


def test_rows_whose_answers_are_cut_off_are_refused():
    with pytest.raises(ValueError, match="nothing to learn from"):
        TokenRows(make_rows(prompt_length=10), max_length=11)


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
    assert batch["lengths"].tolist() == [12, 30, 21, 17]
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


def test_json_lines_come_back_as_written(tmp_path):
    path = tmp_path / "deep" / "rows.jsonl"
    rows = [{"a": [1, 2]}, {"b": "é\n"}]
    assert write_json_lines(path, iter(rows)) == 2
    assert list(read_json_lines(path)) == rows
    assert [file.name for file in path.parent.iterdir()] == ["rows.jsonl"]


def test_error_while_writing_leaves_the_old_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    write_json_lines(path, [{"a": 1}])

    def rows():
        yield {"a": 2}
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_json_lines(path, rows())
    assert list(read_json_lines(path)) == [{"a": 1}]


def test_bad_line_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2 is not valid JSON"):
        list(read_json_lines(path))
