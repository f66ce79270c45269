import pytest
import torch

from dflash_hf.trainer.data import StreamedRows, TokenRows
from dflash_hf.trainer.packing import PackedRows, PackedStream, pack_documents


def test_every_document_is_in_exactly_one_row_that_it_fits():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        lengths = torch.randint(1, 65, (40,), generator=generator).tolist()
        rows = pack_documents(lengths, 64)
        assert sorted(document for row in rows for document in row) == list(range(40))
        assert all(sum(lengths[document] for document in row) <= 64 for row in rows)


def test_rows_are_nearly_full():
    lengths = torch.randint(20, 400, (500,), generator=torch.Generator().manual_seed(1)).tolist()
    rows = pack_documents(lengths, 1024)
    assert sum(lengths) / (1024 * len(rows)) > 0.98


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [([], []), ([8], [[0]]), ([5, 3, 8, 3, 2], [[0, 1], [2], [3, 4]]), ([4, 4, 4], [[0, 1], [2]])],
)
def test_small_cases_by_hand(lengths, expected):
    assert pack_documents(lengths, 8) == expected


def test_document_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="9 tokens does not fit into a packed row of 8 tokens"):
        pack_documents([3, 9], 8)


def make_documents(lengths) -> list[dict]:
    return [{"input_ids": list(range(3, 3 + length)), "prompt_length": 1} for length in lengths]


def test_packed_rows_pass_on_the_epoch_and_need_a_length():
    rows = TokenRows(make_documents((5, 3, 8, 3)), max_length=8)
    packed = PackedRows(rows)
    packed.set_epoch(3)
    numbers = [[document["row"] for document in packed[i]["documents"]] for i in range(len(packed))]
    assert numbers == [[0, 1], [2], [3]]
    assert {document["epoch"] for i in range(len(packed)) for document in packed[i]["documents"]} == {3}
    with pytest.raises(ValueError, match="Packing needs `max_length`"):
        PackedRows(TokenRows(make_documents((5,))))


def test_stream_is_packed_window_by_window_without_loss(monkeypatch):
    monkeypatch.setattr("dflash_hf.trainer.packing._WINDOW", 7)
    documents = make_documents([3 + i % 9 for i in range(20)])
    stream = PackedStream(StreamedRows(documents, max_length=16))
    stream.set_epoch(2)
    packs: list[list[dict]] = []
    for pack in stream:
        assert sum(len(document["input_ids"]) for document in pack["documents"]) <= 16
        packs.append(pack["documents"])
        if sum(map(len, packs)) >= 70:  # five windows of two passes
            break
    found = sorted((document["epoch"], document["input_ids"]) for pack in packs for document in pack)[:20]
    assert found == sorted((2, document["input_ids"]) for document in documents)
