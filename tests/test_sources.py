import itertools
import json
import os
from collections import Counter

import datasets
import pytest
from chat_material import qwen3_tokenizer, real_tokenizer, supervised_texts
from test_source_files import KINDS, own_cache, write_rows  # noqa: F401 (a fixture)

from dflash_hf.trainer import sources as sources_module
from dflash_hf.trainer.conversations import encode_row
from dflash_hf.trainer.data import StreamedRows, TokenRows
from dflash_hf.trainer.sources import load_rows


def chat(name: str, number: int) -> dict:
    return {
        "messages": [
            {"role": "user", "content": f"Question {number} of {name}"},
            {"role": "assistant", "content": f"Answer {number} of {name}."},
        ]
    }


def chats(name: str, count: int) -> list[dict]:
    return [chat(name, number) for number in range(count)]


@pytest.fixture
def tokenizer():
    return real_tokenizer()


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    """Texts of the warnings of `load_rows`."""
    texts: list[str] = []
    monkeypatch.setattr(sources_module.logger, "warning", texts.append)
    sources_module.logger.warning_once.cache_clear()
    return texts


def texts_of(rows, tokenizer) -> list[str]:
    return [tokenizer.decode(row["input_ids"]) for row in rows]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_every_kind_are_encoded_alike(kind, streaming, tokenizer, tmp_path, warnings):
    raw = chats("a", 3)
    path = write_rows(tmp_path, kind, raw)
    loaded = load_rows([path], tokenizer, max_length=64, streaming=streaming)
    rows = list(loaded.rows)
    for row, original in zip(rows, raw, strict=True):
        expected = encode_row(original, tokenizer)
        assert row == {"input_ids": expected["input_ids"], "loss_mask": expected["loss_mask"], "source": path}
    assert supervised_texts(rows[2], tokenizer) == ["Answer 2 of a.<|im_end|>"]
    assert not warnings and loaded.reports[0].rows == 3


def test_rows_feed_the_training_datasets(tokenizer, tmp_path):
    path = write_rows(tmp_path, "parquet", chats("a", 3))
    rows = TokenRows(load_rows([path], tokenizer, max_length=64).rows, max_length=64)
    stream = StreamedRows(load_rows([path], tokenizer, max_length=64, streaming=True).rows, max_length=64)
    streamed = list(itertools.islice(stream, 3))
    for key in ("input_ids", "loss_mask"):
        assert [row[key] for row in streamed] == [rows[number][key] for number in range(3)]


def test_rows_of_the_target_keep_their_ids_and_their_source(tokenizer, tmp_path):
    answers = [
        {"id": "x", "source": "maths", "input_ids": [7, 7, 1, 2], "prompt_length": 1, "finish_reason": "stop"},
        {"id": "y", "source": "", "input_ids": [9, 8, 2], "loss_mask": [0, 1, 1]},
    ]
    path = write_rows(tmp_path, "jsonl", answers)
    first, second = load_rows([path], tokenizer, max_length=None).rows
    assert first == {"input_ids": [7, 7, 1, 2], "loss_mask": [0, 1, 1, 1], "source": "maths"}
    assert second == {"input_ids": [9, 8, 2], "loss_mask": [0, 1, 1], "source": path}


BAD_ROWS = [
    {"question": "?"},
    {"messages": []},
    {"messages": [{"role": "user", "content": "x"}]},
    {"input_ids": [1, 2, 3], "loss_mask": [1]},
    {"messages": [{"role": "user", "content": "long " * 80}, {"role": "assistant", "content": "Too late."}]},
]
BAD_REASONS = {
    "unknown format": 1,
    "no assistant turn": 2,
    "wrong loss mask": 1,
    "nothing supervised": 1,
    "not valid JSON": 1,
    "not an object": 1,
}


def write_mixed_rows(folder) -> str:
    """Two good rows, one that is cut, and bad ones, in lines with different keys."""
    long = chat("a", 2)
    long["messages"][1]["content"] = "long " * 80
    lines = [json.dumps(row) for row in (*chats("a", 2), *BAD_ROWS, long)]
    folder.joinpath("rows.jsonl").write_text("\n".join([*lines, "{broken", "[1]"]))
    return str(folder / "rows.jsonl")


def test_bad_rows_are_left_out_counted_and_named_in_one_warning(tokenizer, tmp_path, warnings):
    path = write_mixed_rows(tmp_path)
    loaded = load_rows([path], tokenizer, max_length=64)
    assert texts_of(loaded.rows, tokenizer)[:2] == texts_of(
        [encode_row(c, tokenizer) for c in chats("a", 2)], tokenizer
    )
    assert len(loaded.rows) == 3 and len(loaded.rows[2]["input_ids"]) == 64
    (report,) = loaded.reports
    assert report.bad == BAD_REASONS and (report.rows, report.cut) == (10, 1)
    (warning,) = warnings
    assert f"{path}: 3 of 10 rows are good" in warning
    assert "2 left out: no assistant turn (row 3: the roles are [])" in warning
    assert "1 left out: unknown format (row 2: the row has ['question'];" in warning
    assert "1 left out: not valid JSON (row 8: the line is '{broken'" in warning
    assert "1 rows cut at `max_length`" in warning
    summary = loaded.summary()
    assert json.loads(json.dumps(summary)) == summary and summary["sources"][0]["report"]["bad"] == BAD_REASONS


def test_bad_rows_of_a_stream_are_counted_as_they_come(tokenizer, tmp_path, warnings):
    loaded = load_rows([write_mixed_rows(tmp_path)], tokenizer, max_length=64, streaming=True)
    assert loaded.reports[0].rows == 0
    assert len(list(loaded.rows)) == 3
    (report,) = loaded.reports
    assert report.bad == BAD_REASONS and (report.rows, report.cut) == (10, 1)
    # The first bad row and the first cut one.
    assert len(warnings) == 2 and all("Streamed rows so far" in warning for warning in warnings)
    assert "unknown format (row 2" in warnings[0] and "1 rows cut" in warnings[1]


@pytest.mark.parametrize("streaming", [False, True])
def test_source_without_a_good_row_is_an_error(streaming, tokenizer, tmp_path):
    good = write_rows(tmp_path / "good", "jsonl", chats("a", 2))
    bad = write_rows(tmp_path / "bad", "jsonl", [{"question": "?"}] * 3)
    with pytest.raises(ValueError, match=r"No row of this source(.|\n)*bad/rows.jsonl: 0 of 3(.|\n)*unknown format"):
        load_rows([good, bad], tokenizer, max_length=64, streaming=streaming)


def test_long_stream_of_bad_rows_is_given_up(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(sources_module, "_HOPELESS_ROWS", 20)
    path = write_rows(tmp_path, "jsonl", [{"question": "?"}] * 30 + chats("a", 1))
    with pytest.raises(ValueError, match=r"None of the first rows(.|\n)*0 of 20"):
        load_rows([path], tokenizer, max_length=64, streaming=True)
    with_one_good = write_rows(tmp_path, "jsonl", chats("a", 1) + [{"question": "?"}] * 30)
    assert len(list(load_rows([with_one_good], tokenizer, max_length=64, streaming=True).rows)) == 1


def test_turns_that_are_not_supervised_are_reported(tmp_path, warnings):
    messages = [*chat("a", 0)["messages"], *chat("a", 1)["messages"]]
    path = write_rows(tmp_path, "jsonl", [{"messages": messages}])
    loaded = load_rows([path], qwen3_tokenizer(), max_length=None, enable_thinking=False)
    assert loaded.template_mode == loaded.summary()["template_mode"] == "no thinking"
    assert loaded.reports[0].skipped_turns == 1 and "1 assistant turns not supervised" in warnings[0]
    with pytest.raises(ValueError, match="No row of this source(.|\n)*adds '<think>"):
        load_rows([path], qwen3_tokenizer(), max_length=None, enable_thinking=True)


@pytest.mark.parametrize("streaming", [False, True])
def test_sources_without_weights_follow_each_other(streaming, tokenizer, tmp_path):
    paths = [write_rows(tmp_path / name, kind, chats(name, 2)) for name, kind in (("a", "jsonl"), ("b", "parquet"))]
    rows = load_rows(paths, tokenizer, max_length=64, streaming=streaming).rows
    assert [row["source"] for row in rows] == [paths[0]] * 2 + [paths[1]] * 2


@pytest.mark.parametrize("streaming", [False, True])
def test_weights_are_shares_of_the_mixture_and_no_row_comes_twice(streaming, tokenizer, tmp_path, warnings):
    big, small = (write_rows(tmp_path / name, "jsonl", chats(name, count)) for name, count in (("a", 120), ("b", 120)))
    entries = [f"{big},weight=3", {"path": small, "weight": 1}]
    rows = list(load_rows(entries, tokenizer, max_length=64, streaming=streaming, seed=3).rows)
    counts = Counter(row["source"] for row in rows)
    # The bigger share runs out first.
    assert counts[big] == 120 and 25 < counts[small] < 56
    assert len(set(texts_of(rows, tokenizer))) == len(rows)
    again = list(load_rows(entries, tokenizer, max_length=64, streaming=streaming, seed=3).rows)
    other = list(load_rows(entries, tokenizer, max_length=64, streaming=streaming, seed=4).rows)
    assert rows == again and rows != other


def test_shuffled_stream_has_the_same_rows_in_another_order_every_epoch(tokenizer, tmp_path):
    path = write_rows(tmp_path, "jsonl", chats("a", 30))
    plain = texts_of(load_rows([path], tokenizer, max_length=64, streaming=True).rows, tokenizer)
    stream = load_rows([f"{path},limit=30"], tokenizer, max_length=64, streaming=True, shuffle_buffer=10).rows
    first = texts_of(stream, tokenizer)
    stream.set_epoch(1)
    second = texts_of(stream, tokenizer)
    assert sorted(first) == sorted(second) == sorted(plain) and len({*map(tuple, (first, second, plain))}) == 3


def test_weights_for_some_sources_only_and_no_source_are_errors(tokenizer, tmp_path):
    path = write_rows(tmp_path, "jsonl", chats("a", 2))
    with pytest.raises(ValueError, match=r"Some sources have a `weight`, but \['.*rows.jsonl'\] have none"):
        load_rows([f"{path},weight=1", path], tokenizer, max_length=64)
    with pytest.raises(ValueError, match="No source of rows is given. Where rows come from"):
        load_rows([], tokenizer, max_length=64)


def test_fingerprint_is_that_of_the_tokens_and_masks_whatever_the_files(tokenizer, tmp_path):
    def fingerprint(kind: str, rows: list[dict]) -> str:
        path = write_rows(tmp_path / kind.replace(" ", "_"), kind, rows)
        return load_rows([path], tokenizer, max_length=64).fingerprint

    raw = chats("a", 4)
    tokens = [{key: row[key] for key in ("input_ids", "loss_mask")} for row in (encode_row(c, tokenizer) for c in raw)]
    prints = [fingerprint("jsonl", raw), fingerprint("parquet", raw), fingerprint("json", tokens)]
    # Bad rows in between leave no trace.
    prints.append(fingerprint("json lines", [raw[0], {"question": "?"}, *raw[1:]]))
    assert len(set(prints)) == 1
    other_mask = [{**tokens[0], "loss_mask": [0, *tokens[0]["loss_mask"][1:-1], 0]}, *tokens[1:]]
    others = [
        fingerprint("saved", raw[:3]),
        fingerprint("saved splits", raw[::-1]),
        fingerprint("hub copy", other_mask),
    ]
    assert len({*prints, *others}) == 4
    borders = [
        [{"input_ids": ids, "loss_mask": [1] * len(ids)} for ids in rows]
        for rows in ([[5, 6, 7], [8, 9]], [[5, 6], [7, 8, 9]])
    ]
    assert fingerprint("jsonl", borders[0]) != fingerprint("jsonl", borders[1])


def test_fingerprint_of_a_stream_is_that_of_its_settings(tokenizer, tmp_path):
    path = write_rows(tmp_path, "jsonl", chats("a", 2))

    def fingerprint(entry=path, **changes) -> str:
        settings = {"max_length": 64, "streaming": True} | changes
        return load_rows([entry], tokenizer, **settings).fingerprint

    assert fingerprint() == fingerprint()
    assert len({fingerprint(), fingerprint(f"{path},limit=1"), fingerprint(max_length=60), fingerprint(seed=1)}) == 4


def test_encoded_rows_are_kept_between_runs_until_the_settings_or_the_code_change(tokenizer, tmp_path, monkeypatch):
    path = write_rows(tmp_path, "jsonl", chats("a", 3))
    calls = []
    encode = sources_module._RowEncoder.__call__

    def counting(self, row, number):
        calls.append(number)
        return encode(self, row, number)

    monkeypatch.setattr(sources_module._RowEncoder, "__call__", counting)
    first = load_rows([path], tokenizer, max_length=64)
    assert len(calls) == 3
    again = load_rows([path], tokenizer, max_length=64)
    assert len(calls) == 3 and again.reports == first.reports and again.fingerprint == first.fingerprint
    load_rows([path], tokenizer, max_length=60)
    assert len(calls) == 6
    monkeypatch.setattr(sources_module, "_code_hash", lambda: "other rules")
    load_rows([path], tokenizer, max_length=64)
    assert len(calls) == 9


def test_several_processes_encode_the_same_rows(tokenizer, tmp_path, monkeypatch):
    path = write_rows(tmp_path, "jsonl", chats("a", 6))
    processes = tmp_path / "processes"
    encode = sources_module._RowEncoder.__call__

    def recording(self, row, number):
        with open(processes, "a") as file:
            file.write(f"{os.getpid()}\n")
        return encode(self, row, number)

    monkeypatch.setattr(sources_module._RowEncoder, "__call__", recording)
    shared = load_rows([path], tokenizer, max_length=64, num_proc=2)
    assert len(set(processes.read_text().split()) - {str(os.getpid())}) == 2
    alone = load_rows([write_rows(tmp_path / "copy", "jsonl", chats("a", 6))], tokenizer, max_length=64)
    assert texts_of(shared.rows, tokenizer) == texts_of(alone.rows, tokenizer)
    assert shared.fingerprint == alone.fingerprint


def test_arrow_tool_calls_with_different_arguments_read_like_the_originals(tmp_path):
    """Parquet gives every call the keys of all; the empty ones must not reach the template."""

    def row(arguments: dict) -> dict:
        call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "Look."}
        return {"messages": [{"role": "user", "content": "Sky?"}, answer]}

    raw = [row({"at": "sky"}), row({"until": 5})]
    tokenizer = qwen3_tokenizer()
    path = str(tmp_path / "rows.parquet")
    datasets.Dataset.from_list(raw).to_parquet(path)
    rows = load_rows([path], tokenizer, max_length=None).rows
    assert texts_of(rows, tokenizer) == texts_of([encode_row(original, tokenizer) for original in raw], tokenizer)
