"""Context features of a training set in files, written as they are first computed and shared by all processes."""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

logger = logging.get_logger(__name__)


class FeatureStore:
    """Features of each row in one memory-mapped file, which survives a stop and is shared by the processes.

    Args:
        folder (`str` or `Path`): Where the files lie; made if needed.
        lengths (`list[int]`): Tokens of each row.
        width (`int`): Values per token: number of tapped layers times the target's hidden size.
        dtype (`torch.dtype`): Dtype of the values.
        fingerprint (`str`): Identity of target, layers and rows, see [`features_fingerprint`].
    Raises:
        ValueError: If the folder holds features of another target, other layers or other rows.
        OSError: If the disk has too little room; the message gives both sizes.
    """

    def __init__(self, folder: str | Path, lengths: Sequence[int], width: int, dtype: torch.dtype, fingerprint: str):
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        self._width = width
        num_values = self._starts[-1] * width
        values_file, done_file, settings_file = (folder / name for name in ("values.bin", "done.bin", "settings.json"))
        settings = {"fingerprint": fingerprint, "num_values": num_values, "dtype": str(dtype)}
        if settings_file.exists():
            _check_settings(json.loads(settings_file.read_text()), settings, folder)
        else:
            _check_room(folder, num_values * dtype.itemsize)
            temporary = settings_file.with_name(f"settings.json.{os.getpid()}.tmp")
            temporary.write_text(json.dumps(settings))
            os.replace(temporary, settings_file)
        self._values = torch.from_file(str(values_file), shared=True, size=num_values, dtype=dtype)
        self._done = torch.from_file(str(done_file), shared=True, size=len(lengths), dtype=torch.uint8)

    def __contains__(self, row: int) -> bool:
        return bool(self._done[row])

    def read(self, row: int) -> torch.Tensor:
        """Features of a row that is in the store, shape (tokens, width)."""
        return self._row(row)

    def write(self, row: int, features: torch.Tensor) -> None:
        """Stores a row's features, shape (tokens, width); the row counts as done only after its values are written."""
        self._row(row).copy_(features)
        self._done[row] = 1

    def _row(self, row: int) -> torch.Tensor:
        start, end = self._starts[row], self._starts[row + 1]
        return self._values[start * self._width : end * self._width].view(end - start, self._width)


def features_fingerprint(target: PreTrainedModel, layer_ids: Sequence[int], rows: Sequence[Sequence[int]]) -> str:
    """A hash that changes with the target's config and weights, the tapped layers and the rows' token ids."""
    digest = hashlib.sha256(target.config.to_json_string().encode())
    parameters = list(target.parameters())
    for parameter in parameters[:: max(1, len(parameters) // 16)]:
        digest.update(repr(parameter.detach().flatten()[:64].float().cpu().tolist()).encode())
    digest.update(repr(list(layer_ids)).encode())
    for input_ids in rows:
        digest.update(repr(list(input_ids)).encode())
    return digest.hexdigest()


def _check_settings(found: dict, expected: dict, folder: Path) -> None:
    changed = sorted(name for name in expected if found.get(name) != expected[name])
    if changed:
        raise ValueError(
            f"{folder} holds features of another target, other tapped layers or other rows ({changed} differ). "
            "Give another `cache_features` folder or delete this one."
        )


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    logger.warning(f"Features will take {needed / 1e9:.2f} GB in {folder}; {free / 1e9:.1f} GB are free.")
    if needed > 0.95 * free:
        raise OSError(
            f"Features need {needed / 1e9:.2f} GB in {folder}, but only {free / 1e9:.2f} GB are free. "
            "Choose another folder, or leave `cache_features` out to compute features anew in every epoch."
        )
