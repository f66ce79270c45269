"""Context features of a training set on disk: sharded safetensors, written once, shared by all processes and runs."""

import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.utils import logging

logger = logging.get_logger(__name__)

_SHARD_BYTES = 512 * 2**20
_FORMAT = 1


@dataclass(frozen=True)
class FeatureSchema:
    """What each token of a store holds; the drafter's config decides it, and every file carries it in its header.

    Args:
        layer_ids (`list[int]`): Tapped layers, in the order of their values.
        hidden_size (`int`): Values per layer.
        dtype (`str`): Dtype of the values, such as `"bfloat16"`.
        has_final_hidden (`bool`): Whether the target's last hidden state, after its final norm, follows the layers.
        answers_only (`bool`): Whether tokens before a document's first supervised one are left out.
        fingerprint (`str`): Identity of target and documents, see [`features_fingerprint`].
    """

    layer_ids: list[int]
    hidden_size: int
    dtype: str
    has_final_hidden: bool
    answers_only: bool
    fingerprint: str

    @property
    def width(self) -> int:
        """Values per token."""
        return (len(self.layer_ids) + self.has_final_hidden) * self.hidden_size

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def bytes_per_token(self) -> int:
        return self.width * self.torch_dtype.itemsize


class FeatureStore:
    """Features of documents in files `features-00000-of-00012.safetensors`, each a tensor (tokens, width).

    Files are written whole under a temporary name and renamed, so a killed run leaves only finished ones, and a rerun
    writes those that are missing.

    Args:
        folder (`str` or `Path`): Where the files lie; made if needed.
        schema ([`FeatureSchema`]): What the store must hold.
        spans (`list[tuple[int, int]]`): First stored token and number of tokens of each document.
        shard_bytes (`int`): A file is closed once it holds this many bytes.
    Raises:
        ValueError: If a file holds something else than `schema` asks for, or damaged, constant or non-finite values.
    """

    def __init__(
        self,
        folder: str | Path,
        schema: FeatureSchema,
        spans: Sequence[tuple[int, int]],
        *,
        shard_bytes: int = _SHARD_BYTES,
    ):
        self.folder = Path(folder)
        self.schema = schema
        self._sizes = [length - first for first, length in spans]
        self._firsts = [first for first, _ in spans]
        self._shards = _shards(self._sizes, max(1, shard_bytes // schema.bytes_per_token))
        self._places: dict[int, tuple[int, int]] = {}  # document: (shard, first row in it)
        for number, documents in enumerate(self._shards):
            start = 0
            for document in documents:
                self._places[document] = (number, start)
                start += self._sizes[document]
        self._files: dict[int, Any] = {}
        there = sorted(self.folder.glob("features-*.safetensors"))
        if there:
            _open_file(there[0], schema)
        for number in range(len(self._shards)):
            if self._path(number).exists():
                self._open(number)
        if len(there) != len(self._files):
            raise ValueError(
                f"{self.folder} holds features of other documents (another number of files than the "
                f"{len(self._shards)} needed). Give another `cache_features` folder or delete this one."
            )

    @cached_property
    def missing_bytes(self) -> int:
        """Disk that the files still to be written will take."""
        missing = (documents for number, documents in enumerate(self._shards) if number not in self._files)
        return sum(self._sizes[document] for documents in missing for document in documents) * (
            self.schema.bytes_per_token
        )

    def check_room(self) -> None:
        """Says how much disk the missing files will take.

        Raises:
            OSError: If the disk has too little room; the message gives both sizes.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.folder).free
        if self.missing_bytes:
            logger.warning(
                f"Features will take {self.missing_bytes / 1e9:.2f} GB in {self.folder}; {free / 1e9:.1f} GB are free."
            )
        if self.missing_bytes > 0.95 * free:
            raise OSError(
                f"Features need {self.missing_bytes / 1e9:.2f} GB in {self.folder}, but only {free / 1e9:.2f} GB are "
                "free. Choose another folder, or leave `cache_features` out to compute features anew in every epoch."
            )

    def fill(
        self,
        compute: Callable[[list[int]], list[torch.Tensor]],
        *,
        process_index: int = 0,
        num_processes: int = 1,
        batch_tokens: int = 8192,
    ) -> None:
        """Computes and writes this process's share of the missing files.

        Args:
            compute: Maps document numbers to their features, each of shape (tokens of the document, width).
            process_index, num_processes (`int`): Every process writes each `num_processes`-th missing file.
            batch_tokens (`int`): Documents of like length are computed together, up to this many padded tokens.
        Raises:
            ValueError: If a tapped layer gives constant or non-finite values.
        """
        missing = [number for number in range(len(self._shards)) if number not in self._files]
        mine = missing[process_index::num_processes]
        total = sum(len(self._shards[number]) for number in mine)
        with tqdm(total=total, unit="document", desc="features", disable=not mine) as progress:
            for number in mine:
                self._write(number, compute, batch_tokens, progress)

    def open_all(self) -> None:
        """Opens what other processes have written.

        Raises:
            FileNotFoundError: If a file is still missing.
        """
        for number in range(len(self._shards)):
            if number not in self._files:
                if not self._path(number).exists():
                    raise FileNotFoundError(
                        f"{self._path(number)} was not written. Is the folder shared by all hosts?"
                    )
                self._open(number)

    def read(self, document: int) -> tuple[int, torch.Tensor]:
        """First stored token of a document and the values from there on, shape (tokens, width)."""
        number, start = self._places[document]
        values = self._files[number].get_slice("features")[start : start + self._sizes[document]]
        return self._firsts[document], values

    def _path(self, number: int) -> Path:
        return self.folder / f"features-{number:05d}-of-{len(self._shards):05d}.safetensors"

    def _write(
        self, number: int, compute: Callable[[list[int]], list[torch.Tensor]], batch_tokens: int, progress: tqdm
    ) -> None:
        documents = self._shards[number]
        lengths = {document: self._firsts[document] + self._sizes[document] for document in documents}
        tokens = sum(self._sizes[document] for document in documents)
        values = torch.empty(tokens, self.schema.width, dtype=self.schema.torch_dtype)
        for batch in batches_of_like_length(lengths, batch_tokens):
            for document, features in zip(batch, compute(batch), strict=True):
                start = self._places[document][1]
                values[start : start + self._sizes[document]] = features[self._firsts[document] :]
            progress.update(len(batch))
        self._refuse_constant(values, number)
        path = self._path(number)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        header = {"dflash_features": json.dumps({"format": _FORMAT, **asdict(self.schema)})}
        save_file({"features": values}, temporary, metadata=header)
        os.replace(temporary, path)
        self._open(number)

    def _open(self, number: int) -> None:
        path = self._path(number)
        file = _open_file(path, self.schema)
        values = file.get_slice("features")
        shape = [sum(self._sizes[document] for document in self._shards[number]), self.schema.width]
        if list(values.get_shape()) != shape:
            raise ValueError(f"{path} holds values of shape {values.get_shape()}, not {shape}. Delete it.")
        self._refuse_constant(values[:64], number)
        self._files[number] = file

    def _refuse_constant(self, values: torch.Tensor, number: int) -> None:
        tapped = values[:, : len(self.schema.layer_ids) * self.schema.hidden_size]
        refuse_constant(tapped, self.schema.layer_ids, str(self._path(number)))


def _open_file(path: Path, schema: FeatureSchema) -> Any:
    """The opened file, whose header is that of `schema`."""
    try:
        file = safe_open(str(path), framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}). Delete it; a rerun writes it anew.") from error
    found = json.loads((file.metadata() or {}).get("dflash_features", "{}"))
    expected = {"format": _FORMAT, **asdict(schema)}
    changed = sorted(name for name in expected if found.get(name) != expected[name])
    if changed:
        differences = ", ".join(f"`{name}` is {found.get(name)!r}, not {expected[name]!r}" for name in changed)
        raise ValueError(
            f"{path} holds features of another target, other layers or other documents: {differences}. "
            "Give another `cache_features` folder or delete this one."
        )
    return file


def features_fingerprint(target: PreTrainedModel, documents: Iterable[Sequence[int]]) -> str:
    """A hash that changes with the target's config and weights and with the documents' token ids."""
    digest = hashlib.sha256(target.config.to_json_string().encode())
    parameters = list(target.parameters())
    for parameter in parameters[:: max(1, len(parameters) // 16)]:
        digest.update(repr(parameter.detach().flatten()[:64].float().cpu().tolist()).encode())
    for input_ids in documents:
        digest.update(array("q", input_ids).tobytes() + b"|")
    return digest.hexdigest()


def refuse_constant(values: torch.Tensor, layer_ids: Sequence[int], place: str) -> None:
    """Raises a `ValueError` if a layer's values, a part of the last dimension, are all equal or not finite."""
    width = values.shape[-1] // len(layer_ids)
    for slot, layer_id in enumerate(layer_ids):
        spread = values[..., slot * width : (slot + 1) * width].float().std().item() if values.numel() else 1.0
        if not 0 < spread < float("inf"):  # also catches NaN
            raise ValueError(
                f"Layer {layer_id} of the target gives constant or non-finite features in {place} (standard deviation "
                f"{spread}). A drafter trained on them would learn nothing; check the target's weights and dtype."
            )


def batches_of_like_length(lengths: dict[int, int], batch_tokens: int) -> list[list[int]]:
    """The keys of `lengths`, longest first, in batches of at most `batch_tokens` tokens once padded (or one key)."""
    batches: list[list[int]] = []
    for key in sorted(lengths, key=lambda key: (-lengths[key], key)):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= batch_tokens:
            batches[-1].append(key)
        else:
            batches.append([key])
    return batches


def _shards(sizes: Sequence[int], shard_tokens: int) -> list[list[int]]:
    shards: list[list[int]] = []
    tokens = shard_tokens
    for document, size in enumerate(sizes):
        if tokens >= shard_tokens:
            shards.append([])
            tokens = 0
        shards[-1].append(document)
        tokens += size
    return shards
