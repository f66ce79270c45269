"""Options of drafted calls: by keyword, generation config or `custom_generate`; checked, and never left behind."""

import copy

import pytest
import torch
from generation_material import (
    BLOCK,
    PROMPT,
    fast,
    generate,
    generate_batch,
    make_batch_oracle,
    make_drafter,
    make_oracle,
    make_small_vocabulary_pair,
    make_target,
    stock_loop,
)
from oracle_drafters import always_right
from transformers import GenerationConfig

from dflash_hf import context_dflash, static_draft_dflash
from dflash_hf.call_options_dflash import CallOptions


@pytest.fixture
def llama():
    return make_target("llama")


def sizes(drafter):
    """Proposals of each round but those near the end, which have room for fewer slots."""
    return {len(proposals) for proposals in drafter.proposals[:3]}


CALLS = {
    "keyword": lambda drafter, nodes: {"assistant_model": drafter, "num_tree_nodes": nodes},
    "generation config": lambda drafter, nodes: {
        "assistant_model": drafter,
        "generation_config": GenerationConfig(num_tree_nodes=nodes),
    },
    "custom_generate": lambda drafter, nodes: {"custom_generate": drafter.decode, "num_tree_nodes": nodes},
    "custom_generate and config": lambda drafter, nodes: {
        "custom_generate": drafter.decode,
        "generation_config": GenerationConfig(num_tree_nodes=nodes),
    },
}


@pytest.mark.parametrize("nodes", [3, 12])
@pytest.mark.parametrize("name", CALLS)
def test_number_of_nodes_arrives_by_every_way(llama, name, nodes):
    drafter = make_drafter(llama)
    saved = copy.deepcopy(llama.generation_config.to_dict())
    output = generate(llama, **CALLS[name](drafter, nodes), max_new_tokens=20)
    assert sizes(drafter) == {nodes}
    assert output.tolist() == generate(llama, max_new_tokens=20).tolist()
    assert llama.generation_config.to_dict() == saved and "num_tree_nodes" not in vars(llama.generation_config)


def test_folder_of_a_drafter_takes_the_options_too(llama, tmp_path):
    drafter = make_drafter(llama)
    drafter.save_pretrained(tmp_path)
    # The recording subclass is no class of the checkpoint's own code.
    options = {"custom_generate": str(tmp_path), "trust_remote_code": True, "assistant_model": drafter}
    output = generate(llama, max_new_tokens=20, num_tree_nodes=5, **options)
    assert sizes(drafter) == {5} and output.tolist() == generate(llama, max_new_tokens=20).tolist()


def test_models_own_generation_config_may_hold_the_option_and_plain_calls_ignore_it(llama):
    llama.generation_config.num_tree_nodes = 6
    drafter = make_drafter(llama)
    assert generate(llama, assistant_model=drafter).tolist() == generate(llama).tolist()
    assert sizes(drafter) == {6}
    generate(llama, assistant_model=drafter, num_tree_nodes=None)
    assert sizes(drafter) == {BLOCK - 1}


@pytest.mark.parametrize("nodes", [None, 0])
def test_no_nodes_mean_a_chain(llama, nodes):
    drafter = make_drafter(llama)
    generate(llama, assistant_model=drafter, num_tree_nodes=nodes)
    assert sizes(drafter) == {BLOCK - 1}
    assert generate(llama, num_tree_nodes=nodes).tolist() == generate(llama).tolist()  # asks for nothing


@pytest.mark.parametrize("nodes", [-1, 2.0, True, "many", [3]], ids=str)
def test_other_values_are_refused(llama, nodes):
    for call in CALLS.values():
        with pytest.raises(ValueError, match=r"`num_tree_nodes` is .*must be a whole number .*'auto', or None"):
            generate(llama, **call(make_drafter(llama), nodes))


@pytest.mark.parametrize("option", [{"num_tree_nodes": 7}, {"num_tree_nodes": "auto"}, {"draft_window": 64}], ids=str)
def test_options_without_a_drafter_that_takes_part_are_refused(llama, option):
    (name,) = option
    drafter = make_drafter(llama)
    for call in (
        {},
        {"assistant_model": make_target("llama")},
        {"prompt_lookup_num_tokens": 3},
        {"assistant_model": drafter, "num_beams": 2},
        {"assistant_model": drafter, "speculation_type": "dflash"},
        {"custom_generate": stock_loop(drafter)},
    ):
        with pytest.raises(ValueError, match=f"`{name}` .* and this call has none that takes part"):
            generate(llama, **call, **option)


def test_proposals_of_ones_own_and_trees_exclude_each_other(llama):
    drafter = make_drafter(llama)
    for other in ({"sample_drafts": True}, {"tree_builder": lambda logits, anchors: None}):
        (name,) = other
        with pytest.raises(ValueError, match=f"`num_tree_nodes` is 7, but `{name}` makes proposals of its own"):
            generate(llama, custom_generate=drafter.decode, num_tree_nodes=7, **other)


def test_transformers_own_loop_takes_no_trees(llama):
    drafter, config = make_drafter(llama), GenerationConfig(num_tree_nodes=7)
    with pytest.raises(ValueError, match="Transformers' own loop verifies chains"):
        generate(llama, custom_generate=stock_loop(drafter), generation_config=config)


def test_arguments_win_over_the_generation_config():
    config = GenerationConfig(num_tree_nodes=7, draft_window=50)
    assert CallOptions.of_call(config) == CallOptions(7, 50)
    assert CallOptions.of_call(config, num_tree_nodes="auto", draft_window=None) == CallOptions("auto", 50)
    assert CallOptions.of_call(GenerationConfig()) == CallOptions()


@pytest.mark.parametrize("options", [{}, fast()], ids=["eager", "fast path"])
def test_draft_window_reaches_the_drafter(llama, monkeypatch, options):
    windows = []
    original = context_dflash.context_windows

    def recorded(drafter, draft_window):
        windows.append(draft_window)
        return original(drafter, draft_window)

    for module in (context_dflash, static_draft_dflash):
        monkeypatch.setattr(module, "context_windows", recorded)
    drafter = make_oracle(llama)
    with torch.compiler.set_stance("force_eager"):
        for call in ({"assistant_model": drafter}, {"custom_generate": drafter.decode}):
            assert generate(llama, draft_window=9, **call, **options).tolist() == generate(llama).tolist()
        generate(llama, assistant_model=drafter, **options)
    assert windows == [9, 9, None]
    with pytest.raises(ValueError, match="`draft_window` is 0"):
        generate(llama, assistant_model=drafter, draft_window=0)


@pytest.mark.parametrize("depth", [1, 3])
def test_number_of_assistant_tokens_bounds_the_depth_of_trees(llama, depth):
    drafter = make_oracle(llama, always_right)
    for nodes in (20, "auto"):
        output = generate(llama, assistant_model=drafter, num_tree_nodes=nodes, num_assistant_tokens=depth)
        assert output.tolist() == generate(llama).tolist()
        assert max(drafter.accepted_lengths) == depth + 1
    drafter = make_batch_oracle(llama, [always_right] * 3)
    output = generate_batch(llama, assistant_model=drafter, num_tree_nodes=9, num_assistant_tokens=depth)
    assert output.tolist() == generate_batch(llama).tolist()
    assert {max(lengths) for lengths in drafter.all_accepted_lengths} == {depth + 1}


@pytest.mark.parametrize("nodes", [7, 31, "auto"])
def test_trees_follow_side_paths_that_a_chain_cannot(nodes):
    target, drafter = make_small_vocabulary_pair()
    prompt = PROMPT % 8
    plain = generate(target, prompt)
    generate(target, prompt, assistant_model=drafter)
    num_rounds = len(drafter.accepted_lengths)
    assert generate(target, prompt, assistant_model=drafter, num_tree_nodes=nodes).tolist() == plain.tolist()
    if nodes != "auto":
        assert len(drafter.accepted_lengths) < num_rounds


@pytest.mark.parametrize(
    "kwargs",
    [
        {"repetition_penalty": 1.3},
        {"bad_words_ids": [[7], [43], [24, 21]]},
        {"suppress_tokens": [7, 43, 56]},
        {"no_repeat_ngram_size": 2},
        {"do_sample": True, "temperature": 1.3, "top_p": 0.9, "repetition_penalty": 1.1},
    ],
    ids=str,
)
def test_processors_act_along_the_paths_of_a_tree(kwargs):
    target = make_target("llama", initializer_range=0.2)
    torch.manual_seed(4)
    plain = generate(target, **kwargs)
    torch.manual_seed(4)
    drafter = make_oracle(target, **kwargs)
    for nodes in (15, "auto"):
        torch.manual_seed(4)
        assert generate(target, assistant_model=drafter, num_tree_nodes=nodes, **kwargs).tolist() == plain.tolist()
