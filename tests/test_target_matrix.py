"""Every kind of target with every feature of `generate` gives the plain answer, or is refused with its reason."""

import re
from pathlib import Path

import pytest
import torch
import transformers
from target_cells import CELLS, FEATURES, REFUSALS, make_case, run_cell
from target_families import FAMILIES
from target_matrix import count_line, render

DOCUMENT = Path(__file__).parents[1] / "docs" / "target-matrix.md"
IMPOSSIBLE_WITH_5_15 = {
    ("Gemma 3, image", "static cache"): "plain `generate` fails with an image and a static cache",
    ("Mamba", "given cache"): "its cache is no `Cache`",
}


def marks(family):
    # Tracing one target again for each new shape takes as long as all cells of seven others.
    return [pytest.mark.slow] if family == "Llama, compiled" else []


def skip_where_impossible(family, feature=None):
    if (missing := FAMILIES[family].missing()) is not None:
        pytest.skip(missing)
    if transformers.__version__.startswith("5.15.") and (family, feature) in IMPOSSIBLE_WITH_5_15:
        pytest.skip(f"Transformers 5.15: {IMPOSSIBLE_WITH_5_15[family, feature]}")


@pytest.mark.parametrize(
    "family, feature", [pytest.param(*cell, id=f"{cell[0]}-{cell[1]}", marks=marks(cell[0])) for cell in CELLS]
)
def test_drafted_call_is_exact_or_refused_as_listed(family, feature):
    skip_where_impossible(family, feature)
    result = run_cell(family, feature)
    reason = REFUSALS.get((family, feature))
    if reason is None:
        assert result == "exact"
    else:
        assert result.startswith("refused: ") and re.search(reason, result), result


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=marks(name)) for name in FAMILIES if FAMILIES[name].refusal is None]
)
def test_texts_do_not_repeat_themselves(family):
    skip_where_impossible(family)
    case = make_case(family)
    inputs = case.family.inputs()
    new = case.text(inputs)[0, inputs["input_ids"].shape[1] :].tolist()
    assert len(set(new)) >= 8


def plain_ids(family, inputs=None, **overrides):
    case = make_case(family, **overrides)
    return case.plain(inputs or case.family.inputs()).tolist()


@pytest.mark.parametrize("family", [name for name in FAMILIES if FAMILIES[name].has_window])
def test_texts_outgrow_the_window(family):
    assert plain_ids(family) != plain_ids(family, sliding_window=200)


@pytest.mark.parametrize("family", [name for name in FAMILIES if FAMILIES[name].add_image])
def test_texts_depend_on_the_image(family):
    inputs = FAMILIES[family].inputs()
    other = inputs | {"pixel_values": inputs["pixel_values"].flip(0, -1)}
    assert plain_ids(family, inputs) != plain_ids(family, other)


def test_adapter_acts_unless_it_is_disabled():
    skip_where_impossible("Llama, LoRA")
    assert plain_ids("Llama, LoRA") == plain_ids("Llama, LoRA merged") != plain_ids("Llama")
    assert plain_ids("Llama, LoRA disabled") == plain_ids("Llama")


def test_quantised_head_has_no_floating_weight_and_offloaded_weights_are_away():
    assert make_case("Llama, int8").target.lm_head.weight.dtype == torch.int8
    for family in ("Llama, off-loaded to memory", "Llama, off-loaded to disk"):
        assert all(parameter.device.type == "meta" for parameter in make_case(family).target.parameters())


# The document


def table_rows(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def test_document_lists_every_family_and_feature_and_counts_the_cells():
    text = DOCUMENT.read_text(encoding="utf-8")
    header, _, *rows = table_rows(text)
    assert header == ["target", *FEATURES]
    assert [row[0] for row in rows] == list(FAMILIES)
    assert count_line(len(CELLS), len(REFUSALS)) in text.splitlines()
    found = {(row[0], feature): cell for row in rows for feature, cell in zip(FEATURES, row[1:], strict=True) if cell}
    assert set(found) == set(CELLS)
    assert {cell for cell, result in found.items() if result != "exact"} == set(REFUSALS)


def test_document_is_rendered_from_results_alone():
    results = {cell: f"refused: {REFUSALS[cell]}" if cell in REFUSALS else "exact" for cell in CELLS}
    _, _, *rows = table_rows(render(results))
    numbers = {cell for row in rows for cell in row[1:] if cell.startswith("refused")}
    assert numbers == {f"refused ({number})" for number in range(1, len(set(REFUSALS.values())) + 1)}
