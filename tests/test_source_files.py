import gzip
import json

import datasets
import pytest

from dflash_hf.trainer.source_files import RowSource, open_source

ROWS = [{"id": number, "text": f"text {number}"} for number in range(5)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def write_rows(folder, kind: str, rows: list[dict]) -> str:
    """Writes `rows` to `folder` and returns the path that a source would name."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text(lines)
    elif kind == "jsonl.gz":
        with gzip.open(path, "wt") as file:
            file.write(lines)
    elif kind == "json":
        path.write_text("\n " + json.dumps(rows))
    elif kind == "json lines":
        path = folder / "rows.json"
        path.write_text(lines)
    elif kind == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    elif kind == "saved":
        datasets.Dataset.from_list(rows).save_to_disk(path)
    elif kind == "saved splits":
        parts = {"train": datasets.Dataset.from_list(rows), "held_out": datasets.Dataset.from_list(rows[:2])}
        datasets.DatasetDict(parts).save_to_disk(path)
    elif kind == "hub copy":
        (path / "data").mkdir(parents=True)
        datasets.Dataset.from_list(rows).to_parquet(path / "data" / "train-00000-of-00001.parquet")
        datasets.Dataset.from_list(rows[:2]).to_parquet(path / "data" / "held_out-00000-of-00001.parquet")
        splits = "".join(f"  - split: {name}\n    path: data/{name}-*\n" for name in ("train", "held_out"))
        (path / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{splits}---\n")
    return str(path)


KINDS = ["jsonl", "jsonl.gz", "json", "json lines", "parquet", "saved", "saved splits", "hub copy"]


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("a.jsonl", RowSource("a.jsonl")),
        ("path=a.jsonl,limit=9", RowSource("a.jsonl", limit=9)),
        ("date=2026/a.jsonl", RowSource("date=2026/a.jsonl")),
        (
            "org/chats,name=main,split=train[:10%],revision=abc,weight=0.25",
            RowSource("org/chats", "main", "train[:10%]", "abc", 0.25),
        ),
        ({"path": "a,b.jsonl", "weight": 2, "limit": None}, RowSource("a,b.jsonl", weight=2.0)),
        (RowSource("a.jsonl"), RowSource("a.jsonl")),
    ],
)
def test_text_and_mapping_give_the_same_source(entry, expected):
    source = RowSource.parse(entry)
    assert source == expected
    if "," not in source.path:
        assert RowSource.parse(str(source)) == source


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        ("a.jsonl,wieght=2", r"unknown keys \['wieght'\]. Allowed: \['path', 'name', 'split', 'revision', 'weight'"),
        ("a.jsonl,0.5", "'0.5' is no `key=value`"),
        ("a.jsonl,weight=much", r"`weight` is 'much'; it must be a number \(float\)"),
        ("a.jsonl,limit=1.5", r"`limit` is '1.5'; it must be a number \(int\)"),
        ({"path": "a.jsonl", "limit": [1]}, r"`limit` is \[1\]"),
        ("a.jsonl,weight=0", "`weight` is 0.0; it must be above 0"),
        ("a.jsonl,weight=nan", "`weight` is nan; it must be above 0"),
        ("a.jsonl,limit=-1", "`limit` is -1; it must be above 0"),
        (",limit=1", "needs a path"),
        ({"weight": 1}, "no `path`"),
    ],
)
def test_wrong_specifications_say_what_is_wrong(entry, error):
    with pytest.raises(ValueError, match=error):
        RowSource.parse(entry)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_source_gives_its_rows(kind, streaming, tmp_path):
    rows, is_json_lines = open_source(RowSource(write_rows(tmp_path, kind, ROWS)), streaming=streaming)
    assert isinstance(rows, datasets.IterableDataset if streaming else datasets.Dataset)
    assert is_json_lines == (kind in ("jsonl", "jsonl.gz", "json lines"))
    assert [json.loads(row["text"]) if is_json_lines else row for row in rows] == ROWS


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["jsonl", "saved", "hub copy"])
def test_limit_takes_the_first_rows(kind, streaming, tmp_path):
    path = write_rows(tmp_path, kind, ROWS)
    for limit, count in ((2, 2), (9, 5)):
        assert len(list(open_source(RowSource(path, limit=limit), streaming=streaming)[0])) == count


@pytest.mark.parametrize("kind", ["saved splits", "hub copy"])
def test_split_and_configuration_are_chosen(kind, tmp_path):
    name = "main" if kind == "hub copy" else None
    source = RowSource(write_rows(tmp_path, kind, ROWS), name=name, split="held_out")
    assert list(open_source(source, streaming=False)[0]) == ROWS[:2]


def test_glob_reads_its_files_in_the_order_of_their_names(tmp_path):
    for name in "ba":
        write_rows(tmp_path / name, "jsonl", [{"id": name}])
    rows, _ = open_source(RowSource(f"{tmp_path}/*/rows.jsonl"), streaming=False)
    assert [json.loads(row["text"])["id"] for row in rows] == ["a", "b"]


def test_lines_are_read_as_they_are(tmp_path):
    """Rows may have other keys and types, separators of other alphabets, and be no JSON at all."""
    lines = ['{"a": 1}', '{"a": "b\u2028c\x85d"}', "{broken", '{"messages": [{"content": null}]}']
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    assert [row["text"] for row in open_source(RowSource(str(path)), streaming=False)[0]] == lines


def test_changed_file_is_read_anew(tmp_path):
    path = write_rows(tmp_path, "jsonl", ROWS)
    assert len(open_source(RowSource(path), streaming=False)[0]) == 5
    write_rows(tmp_path, "jsonl", ROWS[:3])
    assert len(open_source(RowSource(path), streaming=False)[0]) == 3


def test_sources_that_cannot_be_read_say_why(tmp_path):
    def fail(error: str, path: str, **settings) -> None:
        with pytest.raises(ValueError, match=error):
            open_source(RowSource(path, **settings), streaming=False)

    fail("missing.jsonl .no file or folder here, so a Hub id. cannot be read", f"{tmp_path}/missing.jsonl")
    saved = write_rows(tmp_path, "saved", ROWS)
    fail("without splits; leave `split` out", saved, split="test")
    fail(r"no split 'test', but \['held_out', 'train'\]", write_rows(tmp_path, "saved splits", ROWS), split="test")
    fail(r'Unknown split "test"', write_rows(tmp_path, "hub copy", ROWS), split="test")
    fail("`revision` and `name` mean nothing", saved, name="main")
    fail("`revision` and `name` mean nothing", write_rows(tmp_path, "jsonl", ROWS), revision="main")
    (tmp_path / "rows.csv").write_text("a,b")
    fail("must be all JSON lines", f"{tmp_path}/rows.csv")
    write_rows(tmp_path / "mixed", "parquet", ROWS)
    write_rows(tmp_path / "mixed", "jsonl", ROWS)
    fail("rows.jsonl and 1 more must be", f"{tmp_path}/mixed/*")
    (tmp_path / "empty.jsonl").write_text("")
    fail("empty.jsonl .a local path. cannot be read", f"{tmp_path}/empty.jsonl")
    (tmp_path / "broken.parquet").write_text("no parquet")
    fail("broken.parquet .a local path. cannot be read", f"{tmp_path}/broken.parquet")
