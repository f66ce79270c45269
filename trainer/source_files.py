"""Where training rows come from: a file, a folder or the Hub, and how it is written on a command line."""

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import datasets

SOURCES_HELP = (
    "Where rows come from, one or more: a JSONL, JSON or Parquet file (or a glob of them), a folder of `datasets` "
    "(`save_to_disk`, or data files), or a Hub id. Settings follow behind commas: `split=` (default train), `name=` "
    "(configuration), `revision=`, `limit=` (first rows only), `weight=` (share in the mixture; for all or none). "
    "Example: answers.jsonl,weight=0.8 org/chats,split=train_sft,weight=0.2. In YAML also mappings with these keys "
    "and `path`."
)


@dataclass(frozen=True)
class RowSource:
    """Where rows come from.

    Args:
        path (`str`): File, glob, folder or Hub id.
        name (`str`, *optional*): Configuration of a Hub data set.
        split (`str`, *optional*): Defaults to `train`.
        revision (`str`, *optional*): Of a Hub data set; pin it for published figures.
        weight (`float`, *optional*): Share in the mixture, relative to the other sources' weights.
        limit (`int`, *optional*): Only the first rows.
    Raises:
        ValueError: If the path is empty, or `weight` or `limit` is not above 0.
    """

    path: str
    name: str | None = None
    split: str | None = None
    revision: str | None = None
    weight: float | None = None
    limit: int | None = None

    def __post_init__(self):
        if not self.path:
            raise ValueError(f"A source needs a path, got {self}.")
        for key in ("weight", "limit"):
            value = getattr(self, key)
            if value is not None and not value > 0:
                raise ValueError(f"Source {self.path}: `{key}` is {value}; it must be above 0.")

    def __str__(self) -> str:
        settings = [f"{key}={value}" for key, value in vars(self).items() if key != "path" and value is not None]
        return ",".join([self.path, *settings])

    @classmethod
    def parse(cls, entry: "str | Mapping[str, Any] | RowSource") -> "RowSource":
        """A source from its text form `path,key=value,...`, or from a mapping with these keys.

        Raises:
            ValueError: If a key is unknown or a value is no number where one is needed.
        """
        if isinstance(entry, RowSource):
            return entry
        values = _read_text_form(entry) if isinstance(entry, str) else dict(entry)
        allowed = [field.name for field in fields(cls)]
        unknown = sorted(values.keys() - set(allowed))
        if unknown or "path" not in values:
            problem = f"unknown keys {unknown}" if unknown else "no `path`"
            raise ValueError(f"Source {entry!r} has {problem}. Allowed: {allowed}.")
        for key, number in (("weight", float), ("limit", int)):
            if values.get(key) is not None:
                try:
                    values[key] = number(values[key])
                except (TypeError, ValueError) as error:
                    raise ValueError(
                        f"Source {entry!r}: `{key}` is {values[key]!r}; it must be a number ({number.__name__})."
                    ) from error
        return cls(**values)


def _read_text_form(entry: str) -> dict[str, Any]:
    path, *settings = entry.split(",")
    values = {"path": path.removeprefix("path=")}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(
                f"Source {entry!r}: {setting!r} is no `key=value`. Write path,key=value,... or, if the path has a "
                "comma, a mapping in YAML."
            )
        values[key.strip()] = value.strip()
    return values


def open_source(source: RowSource, *, streaming: bool) -> tuple[Any, bool]:
    """The raw rows of a source, and whether each of them is a line of JSON under `text`.

    JSONL is read line by line as text, so that a broken line is one bad row, and rows need not have the same keys.

    Returns:
        A `datasets.Dataset`, or with `streaming` a `datasets.IterableDataset`, and a `bool`.
    Raises:
        ValueError: If the source cannot be found or read, or has settings that do not fit its kind.
    """
    path = Path(source.path)
    files = [source.path] if path.is_file() else sorted(glob.glob(source.path, recursive=True))
    is_saved = any((path / name).exists() for name in ("state.json", "dataset_dict.json"))
    kind = "" if path.is_dir() or not files else _kind(source, files)
    if source.revision and files or source.name and (kind or is_saved):
        raise ValueError(
            f"Source {source.path} is a local path, where `revision` and `name` mean nothing; leave them out."
        )
    split = source.split or "train"
    try:
        if is_saved:
            rows = _load_saved(source, streaming)
        elif kind:
            features = datasets.Features({"text": datasets.Value("string")}) if kind == "text" else None
            rows = datasets.load_dataset(kind, data_files=files, split=split, streaming=streaming, features=features)
        else:
            rows = datasets.load_dataset(
                source.path, source.name, split=split, revision=source.revision, streaming=streaming
            )
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        where = "a local path" if files else "no file or folder here, so a Hub id"
        raise ValueError(f"Source {source.path} ({where}) cannot be read: {error}") from error
    if source.limit is not None:
        rows = rows.take(source.limit) if streaming else rows.select(range(min(source.limit, len(rows))))
    return rows, kind == "text"


def _load_saved(source: RowSource, streaming: bool) -> Any:
    """What `save_to_disk` wrote: one data set, or one per split."""
    saved = datasets.load_from_disk(source.path)
    if isinstance(saved, datasets.DatasetDict):
        split = source.split or "train"
        if split not in saved:
            raise ValueError(f"it has no split {split!r}, but {sorted(saved)}")
        saved = saved[split]
    elif source.split is not None:
        raise ValueError("it holds one data set without splits; leave `split` out")
    return saved.to_iterable_dataset() if streaming else saved


def _kind(source: RowSource, files: Sequence[str]) -> str:
    """The loader of `datasets` that reads these files."""
    kinds = {_kind_of_file(file) for file in files}
    if len(kinds) > 1 or "" in kinds:
        raise ValueError(
            f"Source {source.path}: {files[0]} and {len(files) - 1} more must be all JSON lines (.jsonl, .jsonl.gz, "
            ".json), all JSON lists (.json) or all Parquet (.parquet)."
        )
    return kinds.pop()


def _kind_of_file(file: str) -> str:
    if file.endswith((".jsonl", ".jsonl.gz")):
        return "text"
    if file.endswith(".parquet"):
        return "parquet"
    if not file.endswith(".json"):
        return ""
    with open(file, encoding="utf-8") as text:
        return "json" if text.read(64).lstrip().startswith("[") else "text"
