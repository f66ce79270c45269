"""Fixed and measured sizes of trees with every kind of target: the ids are those of plain `generate`."""

import pytest
import torch
from generation_material import fast
from oracle_drafters import always_right, right_for
from target_cells import CUT_TREES, NEW, REFUSALS, SAMPLING, SOMETIMES, assert_same_ids, make_case
from target_families import FAMILIES

SIZES = (1, 7, 31, 127, "auto")
BUDGETED = [
    name for name, family in FAMILIES.items() if family.refusal is None and name not in CUT_TREES | {"Llama, compiled"}
]
BATCH_PATTERNS = [SOMETIMES, always_right, right_for(1, 4, 0), right_for(0, 3)]


def skip_without_package(name):
    if (missing := FAMILIES[name].missing()) is not None:
        pytest.skip(missing)


def oracle_of(case, inputs, text, patterns, decoy=None):
    num_pads = (1 - inputs["attention_mask"]).sum(dim=1).tolist()
    rows = [row[num_pad:].tolist() for row, num_pad in zip(text, num_pads, strict=True)]
    drafter = case.oracle(rows, patterns)
    drafter.decoy = decoy
    return drafter


@pytest.mark.parametrize("name", BUDGETED)
def test_every_size_gives_the_greedy_text(name):
    skip_without_package(name)
    case = make_case(name)
    inputs = case.family.inputs()
    text = case.text(inputs)
    # A token that the draft always takes for likelier than the right one, which is then on a side path.
    drafter = oracle_of(case, inputs, text, [always_right], decoy=50)
    longest = []
    for size in SIZES:
        output = case.drafted(inputs, drafter, num_warnings=None, num_tree_nodes=size)
        assert_same_ids(output, text[:, : inputs["input_ids"].shape[1] + NEW])
        longest.append(max(drafter.accepted_lengths))
    if not case.family.may_be_slow:
        assert longest[0] < longest[3] >= 3, longest


@pytest.mark.parametrize("name", BUDGETED)
def test_every_size_gives_every_row_of_a_batch_its_greedy_text(name):
    skip_without_package(name)
    case = make_case(name)
    inputs = case.family.inputs(4)
    text = case.text(inputs)
    drafter = oracle_of(case, inputs, text, BATCH_PATTERNS)
    for size in SIZES:
        output = case.drafted(inputs, drafter, num_warnings=None, num_tree_nodes=size)
        assert_same_ids(output, text[:, : inputs["input_ids"].shape[1] + NEW])
    assert max(map(max, drafter.all_accepted_lengths)) > 3


@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize("name", [name for name in BUDGETED if (name, "static cache") not in REFUSALS])
def test_static_caches_take_trees_with_and_without_compiled_forwards(name, num_rows):
    skip_without_package(name)
    case = make_case(name)
    inputs = case.family.inputs(num_rows)
    text = case.text(inputs)
    drafter = oracle_of(case, inputs, text, BATCH_PATTERNS[:num_rows], decoy=50)
    with torch.compiler.set_stance("force_eager"):
        for options in ({"cache_implementation": "static"}, fast()):
            output = case.drafted(inputs, drafter, num_warnings=None, num_tree_nodes=15, **options)
            assert_same_ids(output, text[:, : inputs["input_ids"].shape[1] + NEW])
            if not case.family.may_be_slow:
                assert max(map(max, drafter.all_accepted_lengths)) > 1  # on side paths


@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize("name", ["Qwen3", "Gemma 3", "GPT-OSS"])
def test_every_size_gives_the_ids_that_plain_sampling_draws(name, num_rows):
    case = make_case(name)
    inputs = case.family.inputs(num_rows)
    text = case.text(inputs, **SAMPLING)
    drafter = oracle_of(case, inputs, text, BATCH_PATTERNS[:num_rows])
    for size in SIZES:
        output = case.drafted(inputs, drafter, num_warnings=None, num_tree_nodes=size, **SAMPLING)
        assert_same_ids(output, text[:, : inputs["input_ids"].shape[1] + NEW])


@pytest.mark.parametrize("name", sorted(CUT_TREES))
def test_target_that_takes_no_tree_verifies_chains_and_says_so(name):
    case = make_case(name)
    inputs = case.family.inputs()
    text = case.text(inputs)
    drafter = case.oracle(text, always_right)
    output = case.drafted(inputs, drafter, num_warnings=1, num_tree_nodes=31)
    assert_same_ids(output, text[:, : inputs["input_ids"].shape[1] + NEW])
    assert max(map(len, drafter.proposals)) == drafter.config.block_size - 1 < 31
    assert torch.equal(output, case.drafted(inputs, drafter, num_tree_nodes=0))
