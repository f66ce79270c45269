"""A feature store of a training set: what it must hold, and how all processes fill it together."""

from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from dflash_hf.target_dflash import text_config
from dflash_hf.trainer.data import TokenRows, first_supervised
from dflash_hf.trainer.feature_store import FeatureSchema, FeatureStore, features_fingerprint
from dflash_hf.trainer.target_features import TargetFeatures


def training_documents(dataset: Any) -> TokenRows:
    """The documents of a training set, packed or not, which is what a store counts.

    Raises:
        ValueError: If the set is a stream.
    """
    documents = getattr(dataset, "documents", dataset)
    if not isinstance(documents, TokenRows):
        raise ValueError("`cache_features` needs rows that can be counted, not a stream: leave out one of them.")
    return documents


def open_feature_store(
    folder: str, documents: TokenRows, target_features: TargetFeatures, *, answers_only: bool
) -> FeatureStore:
    """The store of `documents` in `folder`, with the files that are there already.

    Args:
        answers_only (`bool`): Whether tokens before the first supervised one are left out.
    Raises:
        ValueError: If the folder holds something else; see [`FeatureStore`].
    """
    target = target_features.target
    spans: list[tuple[int, int]] = []

    def texts() -> Iterator[list[int]]:  # one pass, because a training set may not fit into memory as lists
        for number in range(len(documents)):
            row = documents[number]
            spans.append((first_supervised(row["loss_mask"]) if answers_only else 0, len(row["input_ids"])))
            yield row["input_ids"]

    schema = FeatureSchema(
        layer_ids=target_features.layer_ids,
        hidden_size=text_config(target).hidden_size,
        dtype=str(target.dtype).removeprefix("torch."),
        has_final_hidden=target_features.with_final_hidden,
        answers_only=answers_only,
        fingerprint=features_fingerprint(target, texts()),
    )
    return FeatureStore(folder, schema, spans)


def fill_feature_store(
    store: FeatureStore, documents: TokenRows, target_features: TargetFeatures, accelerator: Accelerator
) -> None:
    """Computes and writes what `store` lacks, each process its share.

    Raises:
        OSError: In every process, if the disk has too little room.
    """
    problem: list[OSError | None] = [None]
    if accelerator.is_main_process:
        try:
            store.check_room()
        except OSError as error:
            problem = [error]
    if accelerator.num_processes > 1:
        broadcast_object_list(problem)
    if problem[0] is not None:
        raise problem[0]

    def compute(numbers: list[int]) -> list[torch.Tensor]:
        texts = [torch.tensor(documents[number]["input_ids"]) for number in numbers]
        padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
        features = target_features(padded.to(accelerator.device)).cpu()
        return [values[: len(text)] for text, values in zip(texts, features, strict=True)]

    store.fill(compute, process_index=accelerator.process_index, num_processes=accelerator.num_processes)
    accelerator.wait_for_everyone()
    store.open_all()
