import pytest
import torch

from dflash_hf.trainer.feature_store import FeatureStore, features_fingerprint
from dflash_hf.trainer.target_features import TargetFeatures

LAYER_IDS = [0, 2, 6]


def count_forwards(target) -> list[int]:
    """A list that grows by the number of rows with every forward of the target's first layer."""
    calls: list[int] = []
    target.get_decoder().layers[0].register_forward_hook(lambda module, args, output: calls.append(args[0].shape[0]))
    return calls


@torch.no_grad()
def hidden_state_features(target, input_ids: torch.Tensor, layer_ids=LAYER_IDS) -> torch.Tensor:
    hidden_states = target(input_ids, output_hidden_states=True).hidden_states
    return torch.cat([hidden_states[layer_id + 1] for layer_id in layer_ids], dim=-1)


def test_features_are_the_outputs_of_the_named_layers(tiny_target):
    input_ids = torch.randint(100, (2, 15))
    for layer_ids in ([0], [3], [6], LAYER_IDS):
        features = TargetFeatures(tiny_target, layer_ids)(input_ids)
        assert torch.equal(features, hidden_state_features(tiny_target, input_ids, layer_ids))


def test_padding_on_the_right_leaves_real_tokens_unchanged(tiny_target):
    tiny_target.double()
    lengths = [9, 15, 4]
    input_ids = torch.randint(3, 100, (3, 15))
    target_features = TargetFeatures(tiny_target, LAYER_IDS)
    together = target_features(input_ids)
    for row, length in enumerate(lengths):
        padded = input_ids[row : row + 1].clone()
        padded[:, length:] = 0
        alone = target_features(input_ids[row : row + 1, :length])[0]
        torch.testing.assert_close(target_features(padded)[0, :length], alone, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(together[row, :length], alone, rtol=1e-10, atol=1e-10)


def test_target_is_frozen_and_the_features_carry_no_gradient(tiny_target):
    tiny_target.train()
    features = TargetFeatures(tiny_target, LAYER_IDS)(torch.randint(100, (1, 6)))
    assert not tiny_target.training
    assert not any(parameter.requires_grad for parameter in tiny_target.parameters())
    assert not features.requires_grad


def test_nothing_stays_hooked_to_the_target(tiny_target):
    TargetFeatures(tiny_target, LAYER_IDS)(torch.randint(100, (1, 6)))
    assert not any(layer._forward_hooks for layer in tiny_target.get_decoder().layers)


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_constant_or_broken_features_are_refused_by_layer(tiny_target, value):
    def break_output(module, arguments, output):
        is_tuple = isinstance(output, tuple)
        broken = torch.full_like(output[0] if is_tuple else output, value)
        return (broken, *output[1:]) if is_tuple else broken

    # Hooks run in the order in which they were made, so the taps see the broken output.
    tiny_target.get_decoder().layers[2].register_forward_hook(break_output)
    with pytest.raises(ValueError, match="Layer 2 of the target gives constant or non-finite features"):
        TargetFeatures(tiny_target, LAYER_IDS)(torch.randint(100, (1, 6)))


def make_store(folder, target, rows, layer_ids=LAYER_IDS) -> FeatureStore:
    fingerprint = features_fingerprint(target, layer_ids, rows)
    return FeatureStore(folder, [len(row) for row in rows], 32 * len(layer_ids), target.dtype, fingerprint)


def padded_batch(rows, row_ids) -> tuple[torch.Tensor, list[int]]:
    lengths = [len(rows[row]) for row in row_ids]
    input_ids = torch.zeros(len(row_ids), max(lengths), dtype=torch.long)
    for i, row in enumerate(row_ids):
        input_ids[i, : lengths[i]] = torch.tensor(rows[row])
    return input_ids, lengths


@pytest.fixture
def token_rows() -> list[list[int]]:
    return [torch.randint(3, 100, (length,)).tolist() for length in (7, 12, 3, 9)]


def test_stored_features_equal_fresh_ones_and_run_the_target_once_a_row(tiny_target, token_rows, tmp_path):
    target_features = TargetFeatures(tiny_target.double(), LAYER_IDS)
    expected = [hidden_state_features(tiny_target, torch.tensor([row]))[0] for row in token_rows]
    store = make_store(tmp_path, tiny_target, token_rows)
    calls = count_forwards(tiny_target)
    for row_ids in ([2, 0], [0, 1, 2], [3, 1], [1, 0, 3, 2]):
        input_ids, lengths = padded_batch(token_rows, row_ids)
        features = target_features.stored(input_ids, lengths, row_ids, store)
        assert features.shape == (*input_ids.shape, 96) and features.dtype == tiny_target.dtype
        for i, row in enumerate(row_ids):
            torch.testing.assert_close(features[i, : lengths[i]], expected[row], rtol=1e-10, atol=1e-10)
            assert (features[i, lengths[i] :] == 0).all()
    assert calls == [2, 1, 1]


def test_stored_features_survive_a_restart(tiny_target, token_rows, tmp_path):
    input_ids, lengths = padded_batch(token_rows, [1, 3])
    store = make_store(tmp_path, tiny_target, token_rows)
    before = TargetFeatures(tiny_target, LAYER_IDS).stored(input_ids, lengths, [1, 3], store)
    del store
    calls = count_forwards(tiny_target)
    reopened = make_store(tmp_path, tiny_target, token_rows)
    assert [row in reopened for row in range(4)] == [False, True, False, True]
    after = TargetFeatures(tiny_target, LAYER_IDS).stored(input_ids, lengths, [1, 3], reopened)
    assert torch.equal(before, after)
    assert calls == []


def test_bf16_features_are_stored_without_loss(tiny_target, token_rows, tmp_path):
    tiny_target.to(torch.bfloat16)
    target_features = TargetFeatures(tiny_target, LAYER_IDS)
    store = make_store(tmp_path, tiny_target, token_rows)
    input_ids = torch.tensor([token_rows[1]])
    first = target_features.stored(input_ids, [12], [1], store)
    assert first.dtype == torch.bfloat16
    assert torch.equal(first, target_features(input_ids))
    assert torch.equal(first, target_features.stored(input_ids, [12], [1], store))


def test_store_of_another_target_layers_or_rows_is_refused(tiny_target, token_rows, tmp_path):
    make_store(tmp_path, tiny_target, token_rows)
    with pytest.raises(ValueError, match="fingerprint"):
        make_store(tmp_path, tiny_target, token_rows[:3] + [token_rows[3][:-1] + [1]])
    with pytest.raises(ValueError, match="fingerprint"):
        make_store(tmp_path, tiny_target, token_rows, layer_ids=[0, 2, 5])
    with torch.no_grad():
        tiny_target.get_input_embeddings().weight[0, 0] += 1
    with pytest.raises(ValueError, match="fingerprint"):
        make_store(tmp_path, tiny_target, token_rows)


def test_store_says_how_much_disk_it_needs_before_it_takes_it(tiny_target, token_rows, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 1000}))
    with pytest.raises(OSError, match=r"only 0\.00 GB are free"):
        make_store(tmp_path, tiny_target, token_rows)
    assert list(tmp_path.iterdir()) == []


def test_store_takes_exactly_its_values_and_one_byte_a_row(tiny_target, token_rows, tmp_path):
    make_store(tmp_path, tiny_target, token_rows)
    sizes = {file.name: file.stat().st_size for file in tmp_path.iterdir()}
    assert sizes["values.bin"] == sum(map(len, token_rows)) * 96 * 4
    assert sizes["done.bin"] == 4
