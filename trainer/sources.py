"""Training rows from files, folders and the Hub: loaded, encoded, mixed, and bad rows counted by name."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import datasets
import transformers
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from dflash_hf.trainer import conversations, messages
from dflash_hf.trainer.conversations import encode_row, template_mode
from dflash_hf.trainer.messages import BadRow, parse_json
from dflash_hf.trainer.source_files import SOURCES_HELP, RowSource, open_source

logger = logging.get_logger(__name__)

_FEATURES = datasets.Features(
    {
        "input_ids": datasets.Sequence(datasets.Value("int32")),
        "loss_mask": datasets.Sequence(datasets.Value("int8")),
        "source": datasets.Value("string"),
        "row": datasets.Value("int64"),
        "reason": datasets.Value("string"),
        "detail": datasets.Value("string"),
        "is_cut": datasets.Value("bool"),
        "skipped_turns": datasets.Value("int32"),
    }
)
_ROW_COLUMNS = ["input_ids", "loss_mask", "source"]
# A stream of which so many rows are bad and none is good is given up.
_HOPELESS_ROWS = 1000
_STREAM_BATCH = 16


@dataclass
class SourceReport:
    """What became of a source's rows; counts by reason, with the first row of each as an example."""

    source: str
    rows: int = 0
    cut: int = 0
    skipped_turns: int = 0
    bad: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)

    @property
    def num_bad(self) -> int:
        return sum(self.bad.values())

    @property
    def has_news(self) -> bool:
        """Whether anything but good, whole rows came."""
        return bool(self.bad or self.cut or self.skipped_turns)

    def add(self, row: Mapping[str, Any]) -> bool:
        """Counts one encoded row and returns whether it is good."""
        self.rows += 1
        self.cut += row["is_cut"]
        self.skipped_turns += row["skipped_turns"]
        reason = row["reason"]
        if reason:
            self.bad[reason] = self.bad.get(reason, 0) + 1
            self.examples.setdefault(reason, f"row {row['row']}: {row['detail']}")
        return not reason

    def __str__(self) -> str:
        lines = [f"{self.source}: {self.rows - self.num_bad:,} of {self.rows:,} rows are good"]
        lines += [f"  {count:,} left out: {reason} ({self.examples[reason]})" for reason, count in self.bad.items()]
        if self.cut:
            lines.append(f"  {self.cut:,} rows cut at `max_length`")
        if self.skipped_turns:
            lines.append(f"  {self.skipped_turns:,} assistant turns not supervised (see `encode_conversation`)")
        return "\n".join(lines)


@dataclass
class LoadedRows:
    """Rows for training, with what there is to tell about them.

    Args:
        rows: `input_ids`, `loss_mask` and `source` of each row.
        fingerprint (`str`): Hash over the token ids and masks; over all settings if the rows are streamed.
        sources: Where they come from.
        reports: What became of each source; those of a stream grow as this process reads it.
        template_mode (`str`): See [`template_mode`].
    """

    rows: datasets.Dataset | datasets.IterableDataset
    fingerprint: str
    sources: list[RowSource]
    reports: list[SourceReport]
    template_mode: str

    def summary(self) -> dict[str, Any]:
        """All but the rows, for the record of a run."""
        sources = [
            asdict(source) | {"report": asdict(report)}
            for source, report in zip(self.sources, self.reports, strict=True)
        ]
        return {"fingerprint": self.fingerprint, "template_mode": self.template_mode, "sources": sources}


def load_rows(
    specifications: Sequence[str | Mapping[str, Any] | RowSource],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None,
    enable_thinking: bool | None = None,
    streaming: bool = False,
    shuffle_buffer: int | None = None,
    seed: int = 0,
    num_proc: int | None = None,
) -> LoadedRows:
    """Rows of all sources, encoded, without the bad ones.

    Sources without weights follow each other. With weights a source is drawn for each row, and the mixture ends when
    the first source has run out, so that no row comes twice. Rows that cannot be trained on are left out; one warning
    counts them by reason and names an example of each.

    Args:
        specifications: Text forms, mappings or [`RowSource`]s, see `SOURCES_HELP`.
        tokenizer: The target's.
        max_length (`int`, *optional*): Longer rows are cut at the end, in tokens, and counted.
        enable_thinking (`bool`, *optional*): Given to the chat template; None keeps its default.
        streaming (`bool`): Read and encode rows as they are asked for.
        shuffle_buffer (`int`, *optional*): Streamed rows are drawn at random from so many; None keeps their order.
        seed (`int`): Of the mixture and of the shuffling.
        num_proc (`int`, *optional*): Processes that encode rows; not for streams.
    Raises:
        ValueError: If a specification is wrong, a source cannot be found, or no row of a source can be trained on.
    """
    sources = [RowSource.parse(entry) for entry in specifications]
    weights = _weights(sources)
    mode = template_mode(tokenizer, enable_thinking)
    options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    parts, reports = [], [SourceReport(str(source)) for source in sources]
    for source, report in zip(sources, reports, strict=True):
        raw, is_json_lines = open_source(source, streaming=streaming)
        encoder = _RowEncoder(tokenizer, options, max_length, source.path, is_json_lines, _code_hash())
        if streaming:
            parts.append(_encode_stream(raw, encoder, report))
        else:
            parts.append(_encode_all(raw, encoder, report, num_proc))
    rows = _mix(parts, weights, seed)
    if streaming:
        if shuffle_buffer is not None:
            rows = rows.shuffle(seed=seed, buffer_size=shuffle_buffer)
        settings = [sources, str(tokenizer.chat_template), options, max_length, shuffle_buffer, seed]
        return LoadedRows(rows, _hash(repr(settings).encode()), sources, reports, mode)
    log = logger.warning if any(report.has_news for report in reports) else logger.info
    mixture = f"\nThe mixture has {len(rows):,} rows, until the first source runs out." if weights else ""
    log("Rows to train on:\n" + "\n".join(map(str, reports)) + mixture)
    return LoadedRows(rows, _content_hash(rows), sources, reports, mode)


@dataclass(frozen=True)
class _RowEncoder:
    """Encodes one raw row; a bad one becomes an empty row with `reason` and `detail`.

    `datasets` keeps the encoded rows of earlier runs, found by a hash of this object: `code_hash` makes it notice a
    change of the rules, which the hash of a function would not.
    """

    tokenizer: PreTrainedTokenizerBase
    template_options: dict[str, Any]
    max_length: int | None
    source: str
    is_json_lines: bool
    code_hash: str

    def __call__(self, row: Mapping[str, Any], number: int) -> dict[str, Any]:
        report = {"row": number, "reason": "", "detail": ""}
        try:
            if self.is_json_lines:
                row = parse_json("the line", row["text"])
                if not isinstance(row, Mapping):
                    raise BadRow("not an object", f"the line is {str(row)[:60]!r}")
            encoded = encode_row(
                row, self.tokenizer, template_options=self.template_options, max_length=self.max_length
            )
            own_source = row.get("source")
            source = own_source if isinstance(own_source, str) and own_source else self.source
            return {**encoded, **report, "source": source}
        except BadRow as problem:
            report |= {"reason": problem.reason, "detail": problem.detail[:300]}
            nothing = {"input_ids": [], "loss_mask": [], "is_cut": False, "skipped_turns": 0}
            return {**nothing, **report, "source": self.source}


def _encode_all(
    raw: datasets.Dataset, encoder: _RowEncoder, report: SourceReport, num_proc: int | None
) -> datasets.Dataset:
    encoded = raw.map(
        encoder,
        with_indices=True,
        remove_columns=raw.column_names,
        features=_FEATURES,
        num_proc=num_proc,
        desc=f"Encoding {encoder.source}",
    )
    columns = encoded.remove_columns(_ROW_COLUMNS)[:]
    rows = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
    good = [number for number, row in enumerate(rows) if report.add(row)]
    if not good:
        raise ValueError(f"No row of this source can be trained on.\n{report}")
    return encoded.select_columns(_ROW_COLUMNS).select(good)


def _encode_stream(
    raw: datasets.IterableDataset, encoder: _RowEncoder, report: SourceReport
) -> datasets.IterableDataset:
    def encoded(counts: SourceReport) -> datasets.IterableDataset:
        rows = raw.map(
            _StreamEncoder(encoder, counts),
            with_indices=True,
            batched=True,
            batch_size=_STREAM_BATCH,
            remove_columns=raw.column_names,
            features=datasets.Features({name: _FEATURES[name] for name in _ROW_COLUMNS}),
        )
        return rows.select_columns(_ROW_COLUMNS)  # a stream of JSON does not know its columns beforehand

    first_rows = SourceReport(report.source)
    if next(iter(encoded(first_rows)), None) is None:
        raise ValueError(f"No row of this source can be trained on.\n{first_rows}")
    return encoded(report)


@dataclass
class _StreamEncoder:
    """Encodes raw rows and leaves out the bad ones. A stream has no end to report at, so it warns as counts grow."""

    encoder: _RowEncoder
    report: SourceReport

    def __call__(self, batch: Mapping[str, list[Any]], numbers: list[int]) -> dict[str, list[Any]]:
        raw_rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        encoded = [self.encoder(row, number) for row, number in zip(raw_rows, numbers, strict=True)]
        good = [row for row in encoded if self._count(row)]
        return {name: [row[name] for row in good] for name in _ROW_COLUMNS}

    def _count(self, row: Mapping[str, Any]) -> bool:
        digits = self._digits()
        is_good = self.report.add(row)
        if self._digits() != digits:
            logger.warning_once(f"Streamed rows so far:\n{self.report}")
        if self.report.num_bad == self.report.rows == _HOPELESS_ROWS:
            raise ValueError(f"None of the first rows of this stream can be trained on.\n{self.report}")
        return is_good

    def _digits(self) -> list[int]:
        counts = (self.report.num_bad, self.report.cut, self.report.skipped_turns)
        return [len(str(count)) if count else 0 for count in counts]

    def __deepcopy__(self, memo: dict) -> "_StreamEncoder":
        return self  # streams copy themselves at every step, but a tokenizer is big and the report is the caller's


def _mix(parts: list[Any], weights: list[float] | None, seed: int) -> Any:
    if weights:
        return datasets.interleave_datasets(
            parts, probabilities=weights, seed=seed, stopping_strategy="first_exhausted"
        )
    return datasets.concatenate_datasets(parts)


def _content_hash(rows: datasets.Dataset) -> str:
    """Hash over lengths, token ids and masks, whatever files they came from."""
    digest = hashlib.blake2b(digest_size=16)
    for table in rows.with_format("arrow").iter(batch_size=1000):
        for name in ("input_ids", "loss_mask"):
            column = table[name].combine_chunks()
            digest.update(column.value_lengths().to_numpy(zero_copy_only=False).tobytes())
            digest.update(column.flatten().to_numpy(zero_copy_only=False).tobytes())
    return digest.hexdigest()


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _code_hash() -> str:
    """Hash of the code that turns rows into tokens."""
    ours = b"".join(Path(str(module.__file__)).read_bytes() for module in (conversations, messages))
    return _hash(ours + transformers.__version__.encode())


def _weights(sources: Sequence[RowSource]) -> list[float] | None:
    """Shares that add up to 1, or None without a mixture."""
    if not sources:
        raise ValueError("No source of rows is given. " + SOURCES_HELP)
    weights = [source.weight for source in sources if source.weight is not None]
    if len(weights) not in (0, len(sources)):
        missing = [source.path for source in sources if source.weight is None]
        raise ValueError(f"Some sources have a `weight`, but {missing} have none. Give one to all or to none.")
    return [weight / sum(weights) for weight in weights] or None
