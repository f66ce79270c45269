"""The GPU benchmark measures every cell on tiny shapes, goes on where it stopped, and drops nothing silently."""

import json
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def benchmarks_are_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))


def tiny_options(folder, **overrides):
    from cycle_on_gpu import CycleOptions

    fields = {"num_rounds": 3, "num_warm_up": 2, "compile_backend": "eager", "device": "cpu"} | overrides
    return CycleOptions(tiny=True, output_dir=str(folder), **fields)


@pytest.fixture
def runs_eagerly():
    with torch.compiler.set_stance("force_eager"):
        yield


def test_tiny_run_measures_every_cell_and_goes_on_where_it_stopped(tmp_path, runs_eagerly):
    from cycle_on_gpu import METHODS, Bench, ordered_cells, run

    options = tiny_options(tmp_path)
    results = run(options)
    assert not results["errors"] and not results["left_out"]
    cells = {str(cell): set(METHODS) for cell in ordered_cells(options)}
    assert {cell: set(found) for cell, found in results["cells"].items()} == cells and len(cells) == 2
    for found in results["cells"].values():
        for method, row in found.items():
            assert 0 < row["low_ms"] <= row["round_ms"] <= row["high_ms"] and row["floor_ms"] > 0
            tokens = row["tokens_per_second"] * row["round_ms"] / 1000
            batch_size = 2 if found is results["cells"]["tiny, context 24, batch 2"] else 1
            assert tokens == pytest.approx(batch_size * (6.5 if "cycle" in method else 1.0))
    text = (tmp_path / "cycle_on_gpu.md").read_text()
    assert text.count("| fast cycle |") == 2 and text.count("fast cycle at least 40% of the floor") == 2

    def measure(self, cell, method):
        raise AssertionError(f"{cell}: {method} is measured again")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bench, "measure", measure)
        assert run(options)["cells"] == results["cells"]


def test_what_does_not_fit_or_fails_is_listed(tmp_path, monkeypatch):
    from cycle_on_gpu import Bench, run

    assert len(run(tiny_options(tmp_path, time_budget=0.0))["left_out"]) == 8

    def measure(self, cell, method):
        raise torch.OutOfMemoryError("too much")

    monkeypatch.setattr(Bench, "measure", measure)
    results = run(tiny_options(tmp_path))
    assert len(results["errors"]) == 8 and not results["left_out"]
    saved = json.loads((tmp_path / "cycle_on_gpu.json").read_text())
    assert saved["errors"] == results["errors"]
    text = (tmp_path / "cycle_on_gpu.md").read_text()
    assert "Failed:" in text and "- tiny, context 24, batch 2: fast cycle: OutOfMemoryError: too much" in text


@pytest.mark.parametrize("condition", ["verification_dflash.is_fast", "decoding_dflash.can_be_static"])
def test_fast_cycle_that_was_not_compiled_is_a_failure(tmp_path, monkeypatch, runs_eagerly, condition):
    from cycle_on_gpu import Bench, Cell

    monkeypatch.setattr(f"dflash_hf.{condition}", lambda *arguments: False)
    with pytest.raises(RuntimeError, match="was not compiled"):
        Bench(tiny_options(tmp_path)).measure(Cell("tiny", 24, 1), "fast cycle")


def test_shapes_are_those_of_the_drafter_configs():
    from cycle_on_gpu import SHAPES

    from dflash_hf.hub_configs import load_hub_config

    for model in SHAPES.keys() - {"tiny"}:
        config, shape = load_hub_config(model), SHAPES[model]
        assert config.num_target_layers == shape["num_hidden_layers"]
        names = ["hidden_size", "vocab_size", "head_dim", "num_key_value_heads"]
        # The drafter of the small target is narrower inside.
        for name in names + ["intermediate_size"] * ("qwen3" in model):
            assert getattr(config, name) == shape[name]


def test_bytes_of_a_step_are_its_weights_and_its_context():
    from cycle_on_gpu import bytes_read
    from generation_material import make_drafter, make_target

    target = make_target("llama", num_hidden_layers=3, tie_word_embeddings=False)
    config = target.config
    num_weights = sum(parameter.numel() for parameter in target.parameters())
    embedding = head = config.vocab_size * config.hidden_size
    head_dim = config.hidden_size // config.num_attention_heads
    column = 2 * 3 * config.num_key_value_heads * head_dim
    config.head_dim = head_dim
    assert bytes_read(target, None, 10, 3) == 4 * (num_weights - embedding + 30 * column)
    drafter = make_drafter(target, num_target_features=1)
    drafted = sum(parameter.numel() for parameter in drafter.parameters()) + head
    draft_column = 2 * 2 * drafter.config.num_key_value_heads * drafter.config.head_dim
    assert bytes_read(target, drafter, 10, 3) == 4 * (num_weights - embedding + drafted + 30 * (column + draft_column))
    tied = make_target("llama", num_hidden_layers=3, tie_word_embeddings=True)
    tied.config.head_dim = head_dim
    assert bytes_read(tied, None, 0, 1) == 4 * sum(parameter.numel() for parameter in tied.parameters())
