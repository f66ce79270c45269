import pytest
import torch
from chat_material import real_tokenizer

from dflash_hf.trainer.batches import AnchorCollator
from dflash_hf.trainer.conversations import encode_conversation
from dflash_hf.trainer.loss import decay_weights
from dflash_hf.trainer.show_batch import show_batch


def chat_document(question: str, answer: str, row: int) -> dict:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {**encode_conversation(messages, real_tokenizer()), "row": row, "epoch": 0}


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    """A row of two packed documents and a shorter one of one; every possible anchor is drawn."""
    first, second, third = (
        chat_document("Name\ntwo.", "Red\nand blue.", 31),
        chat_document("One?", "Green.", 44),
        chat_document("Hm?", "No.", 5),
    )
    collator = AnchorCollator(num_anchors=20, slot_weights=decay_weights(4, 2.0), seed=0)
    return collator([{"documents": [first, second]}, {"documents": [third]}])


def test_plain_view_shows_documents_masks_anchors_and_blocks(batch):
    lines = show_batch(batch, real_tokenizer(), 4, use_color=False).split("\n")
    padding = batch["input_ids"].shape[1] - int(batch["document_lengths"][1].sum())
    assert lines == [
        f"Row 0: 2 document(s), {batch['input_ids'].shape[1]} tokens, 0 of padding",
        "  Document 31: 19 tokens, 6 supervised, 5 anchors; blocks of 4",
        "    read    | <|im_start|>user⏎",
        "            | Name⏎",
        "            | two.<|im_end|>⏎",
        "            | <|im_start|>assistant⏎",
        "    written | [Red][⏎]",
        "            | [and][ blue][.]<|im_end|>",
        "    block at 13: [Red] -> ⏎ 1.00 | and 0.61 |  blue 0.37",
        "    block at 14: [⏎] -> and 1.00 |  blue 0.61 | . 0.37",
        "    block at 15: [and] ->  blue 1.00 | . 0.61 | <|im_end|> 0.37",
        "  Document 44: 14 tokens, 3 supervised, 2 anchors; blocks of 4",
        "    read    | <|im_start|>user⏎",
        "            | One?<|im_end|>⏎",
        "            | <|im_start|>assistant⏎",
        "    written | [Green][.]<|im_end|>",
        "    block at 11: [Green] -> . 1.00 | <|im_end|> 0.61 | -",
        "    block at 12: [.] -> <|im_end|> 1.00 | - | -",
        f"Row 1: 1 document(s), {batch['input_ids'].shape[1] - padding} tokens, {padding} of padding",
        "  Document 5: 15 tokens, 3 supervised, 2 anchors; blocks of 4",
        "    read    | <|im_start|>user⏎",
        "            | Hm?<|im_end|>⏎",
        "            | <|im_start|>assistant⏎",
        "    written | [No][.]<|im_end|>",
        "    block at 12: [No] -> . 1.00 | <|im_end|> 0.61 | -",
        "    block at 13: [.] -> <|im_end|> 1.00 | - | -",
    ]


def without_colors(text: str) -> str:
    return text.replace("\033[0m", "").replace("\033[2m", "").replace("\033[32m", "").replace("\033[7;32m", "")


def test_colors_mark_what_was_read_what_was_written_and_the_anchors(batch):
    colored = show_batch(batch, real_tokenizer(), 4, use_color=True)
    assert "\033[2mName\033[0m" in colored  # dim
    assert "written | \033[7;32mGreen\033[0m\033[7;32m.\033[0m\033[32m<|im_end|>\033[0m" in colored
    assert "block at 11: \033[7;32mGreen\033[0m -> \033[32m.\033[0m 1.00" in colored
    plain = show_batch(batch, real_tokenizer(), 4, use_color=False)
    assert without_colors(colored) == plain.replace("[", "").replace("]", "")


def test_colors_are_for_terminals_that_want_them(batch, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\033" not in show_batch(batch, real_tokenizer(), 4)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert "\033" in show_batch(batch, real_tokenizer(), 4)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033" not in show_batch(batch, real_tokenizer(), 4)


def test_rows_and_blocks_are_limited_and_blocks_spread_over_the_document(batch):
    text = show_batch(batch, real_tokenizer(), 4, num_rows=1, num_blocks=2, use_color=False)
    assert "Row 1" not in text
    blocks = [line.strip().split(":")[0] for line in text.split("\n") if "block at" in line]
    assert blocks == ["block at 13", "block at 15", "block at 11", "block at 12"]
    assert "block at" not in show_batch(batch, real_tokenizer(), 4, num_blocks=0, use_color=False)


def test_text_of_the_data_cannot_steer_the_terminal():
    document = chat_document("Hi\x1b[2J", "Tab\there.", 0)
    collator = AnchorCollator(num_anchors=1, slot_weights=decay_weights(4, 2.0), seed=0)
    text = show_batch(collator([document]), real_tokenizer(), 4, use_color=False)
    assert "\x1b" not in text and "Hi\\x1b[2J" in text and "\t" not in text and "[\\t]" in text


def test_document_without_anchors_is_shown_too():
    document = {"input_ids": [28120, 28120], "loss_mask": [0, 1], "row": 7, "epoch": 0}
    collator = AnchorCollator(num_anchors=1, slot_weights=decay_weights(4, 2.0), seed=0)
    lines = show_batch(collator([document]), real_tokenizer(), 4, use_color=False).split("\n")
    assert lines[1:] == [
        "  Document 7: 2 tokens, 1 supervised, 0 anchors; blocks of 4",
        "    read    | hello",
        "    written | hello",
    ]
