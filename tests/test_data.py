import itertools

import pytest
import torch

from dflash_hf.trainer.data import StreamedRows, TokenRows, read_json_lines, write_json_lines


def make_rows(lengths=(12, 30, 21, 17), prompt_length=5) -> list[dict]:
    return [
        {"input_ids": torch.randint(3, 90, (length,)).tolist(), "prompt_length": prompt_length} for length in lengths
    ]


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


class EpochStream:
    """A stream that begins with another row in every epoch, as a shuffled one does."""

    def __init__(self, rows):
        self.rows, self.epoch = rows, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        yield from self.rows[self.epoch :] + self.rows[: self.epoch]


def test_streamed_rows_keep_their_numbers_pass_after_pass():
    rows = make_rows()
    found = list(itertools.islice(StreamedRows(EpochStream(rows), max_length=25), 12))
    for epoch in range(3):
        order = [(epoch + i) % 4 for i in range(4)]
        passed = found[4 * epoch : 4 * epoch + 4]
        assert [row["input_ids"] for row in passed] == [rows[i]["input_ids"][:25] for i in order]
        assert [row["row"] for row in passed] == [found[i]["row"] for i in order]
        assert {row["epoch"] for row in passed} == {epoch}
    assert len({row["row"] for row in found}) == 4


def test_streamed_rows_without_an_answer_are_left_out():
    stream = StreamedRows(make_rows(lengths=(12, 6, 20)))
    assert [len(row["input_ids"]) for row in itertools.islice(stream, 4)] == [12, 20, 12, 20]
    with pytest.raises(ValueError, match="nothing to learn from"):
        next(iter(StreamedRows(make_rows(lengths=(6, 3)))))
