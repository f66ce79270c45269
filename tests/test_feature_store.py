import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dflash_hf.trainer import feature_store
from dflash_hf.trainer.feature_store import FeatureSchema, FeatureStore, batches_of_like_length, features_fingerprint

SIZES = [7, 12, 3, 9, 15, 1]
SPANS = [(0, size) for size in SIZES]


def make_schema(**overrides) -> FeatureSchema:
    fields = {
        "layer_ids": [0, 2, 6],
        "hidden_size": 4,
        "dtype": "bfloat16",
        "has_final_hidden": False,
        "answers_only": False,
        "fingerprint": "f",
    }
    return FeatureSchema(**(fields | overrides))


def document_values(document: int, schema: FeatureSchema) -> torch.Tensor:
    generator = torch.Generator().manual_seed(document)
    return torch.randn(SIZES[document], schema.width, generator=generator).to(schema.torch_dtype)


def fill(store: FeatureStore, **options) -> list[list[int]]:
    """Fills the store and returns the batches that were computed."""
    batches: list[list[int]] = []

    def compute(documents):
        batches.append(documents)
        return [document_values(document, store.schema) for document in documents]

    store.fill(compute, **options)
    return batches


def small_store(folder, schema=None, spans=SPANS) -> FeatureStore:
    schema = schema or make_schema()
    return FeatureStore(folder, schema, spans, shard_bytes=16 * schema.bytes_per_token)


@pytest.mark.parametrize("has_final_hidden", [False, True])
def test_values_come_back_bit_for_bit_also_after_a_restart(tmp_path, has_final_hidden):
    schema = make_schema(has_final_hidden=has_final_hidden)
    store = small_store(tmp_path, schema)
    computed = fill(store)
    assert sorted(document for batch in computed for document in batch) == list(range(6))
    for opened in (store, small_store(tmp_path, schema)):
        for document in range(6):
            first, values = opened.read(document)
            assert first == 0 and torch.equal(values, document_values(document, schema))
    assert fill(small_store(tmp_path, schema)) == []


def test_files_are_safetensors_that_say_what_they_hold(tmp_path):
    fill(small_store(tmp_path))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"features-{i:05d}-of-00003.safetensors" for i in range(3)]
    with safe_open(str(tmp_path / names[0]), framework="pt") as file:
        header = json.loads(file.metadata()["dflash_features"])
        assert header["layer_ids"] == [0, 2, 6] and header["hidden_size"] == 4 and header["dtype"] == "bfloat16"
        assert file.get_tensor("features").shape == (19, 12)


def test_answers_only_leaves_out_what_comes_before(tmp_path):
    spans = [(size // 2, size) for size in SIZES]
    schema = make_schema(answers_only=True)
    store = small_store(tmp_path, schema, spans)
    fill(store)
    for document, (first, _) in enumerate(spans):
        found, values = store.read(document)
        assert found == first and torch.equal(values, document_values(document, schema)[first:])


def test_a_stopped_run_goes_on_with_the_missing_files(tmp_path):
    def stop_in_second_file(documents):
        if 2 in documents or 3 in documents:
            raise KeyboardInterrupt
        return [document_values(document, store.schema) for document in documents]

    store = small_store(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        store.fill(stop_in_second_file)
    assert [path.name for path in tmp_path.iterdir()] == ["features-00000-of-00003.safetensors"]
    again = small_store(tmp_path)
    assert again.missing_bytes == (3 + 9 + 15 + 1) * 12 * 2
    assert sorted(sum(fill(again), [])) == [2, 3, 4, 5]
    assert torch.equal(again.read(3)[1], document_values(3, again.schema))


def test_processes_share_the_work_and_see_each_others_files(tmp_path):
    stores = [small_store(tmp_path) for _ in range(2)]
    computed = [sorted(sum(fill(store, process_index=i, num_processes=2), [])) for i, store in enumerate(stores)]
    assert computed == [[0, 1, 5], [2, 3, 4]]
    for store in stores:
        store.open_all()
        assert all(torch.equal(store.read(i)[1], document_values(i, store.schema)) for i in range(6))


def test_file_that_another_process_never_wrote_is_named(tmp_path):
    store = small_store(tmp_path)
    fill(store, process_index=1, num_processes=2)
    with pytest.raises(FileNotFoundError, match="features-00000-of-00003.safetensors was not written"):
        store.open_all()


@pytest.mark.parametrize(
    "change",
    [
        {"fingerprint": "g"},
        {"layer_ids": [0, 2, 5]},
        {"dtype": "float32"},
        {"has_final_hidden": True},
        {"answers_only": True},
        {"hidden_size": 5},
    ],
)
def test_store_of_something_else_is_refused_and_left_alone(tmp_path, change):
    fill(small_store(tmp_path))
    (name,) = change
    with pytest.raises(ValueError, match=f"`{name}` is .*, not "):
        FeatureStore(tmp_path, make_schema(**change), SPANS, shard_bytes=16 * 24)
    assert fill(small_store(tmp_path)) == []


def test_store_of_other_documents_is_refused(tmp_path):
    fill(small_store(tmp_path))
    with pytest.raises(ValueError, match="features of other documents"):
        small_store(tmp_path, spans=SPANS * 2)
    with pytest.raises(ValueError, match=r"values of shape \[19, 12\], not \[18, 12\]"):
        small_store(tmp_path, spans=[(0, 6), *SPANS[1:]])


def test_damaged_file_is_named(tmp_path):
    fill(small_store(tmp_path))
    path = tmp_path / "features-00001-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match="features-00001-of-00003.safetensors is damaged"):
        small_store(tmp_path)


@pytest.mark.parametrize("value", [0.0, 1.5, float("nan"), float("inf")])
def test_constant_or_broken_layer_is_refused_when_written_and_when_opened(tmp_path, value):
    def compute(documents):
        found = [document_values(document, store.schema) for document in documents]
        for values in found:
            values[:, 4:8] = value
        return found

    store = small_store(tmp_path)
    with pytest.raises(ValueError, match="Layer 2 of the target gives constant or non-finite features"):
        store.fill(compute)
    assert list(tmp_path.iterdir()) == []
    fill(store)
    path = tmp_path / "features-00000-of-00003.safetensors"
    with safe_open(str(path), framework="pt") as file:
        header, values = file.metadata(), file.get_tensor("features")
    values[:, 4:8] = value
    save_file({"features": values}, path, metadata=header)
    with pytest.raises(ValueError, match="Layer 2"):
        small_store(tmp_path)


def test_disk_need_is_said_before_it_is_taken(tmp_path, monkeypatch, caplog):
    said: list[str] = []
    monkeypatch.setattr(feature_store.logger, "warning", said.append)
    store = small_store(tmp_path / "new")
    store.check_room()
    assert said[0].startswith("Features will take 0.00 GB in ")
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 1000}))
    with pytest.raises(OSError, match=r"only 0\.00 GB are free"):
        store.check_room()
    assert list((tmp_path / "new").iterdir()) == []


def test_fingerprint_changes_with_target_and_documents(tiny_target):
    documents = [[5, 6, 7], [8, 9]]
    first = features_fingerprint(tiny_target, documents)
    assert features_fingerprint(tiny_target, [list(document) for document in documents]) == first
    others = [features_fingerprint(tiny_target, changed) for changed in ([[5, 6], [7, 8, 9]], [[8, 9], [5, 6, 7]])]
    with torch.no_grad():
        tiny_target.get_input_embeddings().weight[0, 0] += 1
    others.append(features_fingerprint(tiny_target, documents))
    assert len({first, *others}) == 4


def test_batches_hold_documents_of_like_length_within_the_budget():
    lengths = dict(enumerate([7, 12, 3, 9, 15, 1]))
    assert batches_of_like_length(lengths, 24) == [[4], [1, 3], [0, 2, 5]]
    assert batches_of_like_length(lengths, 1) == [[4], [1], [3], [0], [2], [5]]
