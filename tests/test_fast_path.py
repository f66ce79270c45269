"""Verification through a compiled forward gives the tokens and accepted lengths of the eager one."""

import copy
import gc
import logging
import weakref

import pytest
import torch
from generation_material import (
    BATCH,
    BATCH_PATTERNS,
    BLOCK,
    MIXED,
    NEW,
    PATTERNS,
    PROMPT,
    cache_argument,
    cache_of,
    compile_config,
    fast,
    generate,
    generate_batch,
    make_batch_oracle,
    make_drafter,
    make_oracle,
    make_small_vocabulary_pair,
    make_target,
)
from oracle_drafters import RecordingDrafter, always_right, expected_lengths, never_right, right_for
from torch._dynamo.utils import counters
from transformers import GenerationConfig, StaticCache

from dflash_hf import DFlashDraftModel, compilation_dflash, fast_path_dflash
from dflash_hf.compilation_dflash import known_forwards
from dflash_hf.fast_path_dflash import roomy_cache
from dflash_hf.target_cache_dflash import TargetCache
from dflash_hf.tree_dflash import TokenTree
from dflash_hf.verification_dflash import Verifier

SHALLOW = {"num_hidden_layers": 3}  # tracing takes its time


@pytest.fixture
def llama():
    return make_target("llama")


@pytest.fixture
def runs_eagerly():
    """All code of the fast path runs, but what it compiles runs as it is, which takes no time."""
    with torch.compiler.set_stance("force_eager"):
        yield


def count_graphs():
    return counters["stats"]["unique_graphs"]


# Static code that nothing compiles


@pytest.mark.parametrize("max_new_tokens", [1, 2, 9, NEW])
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_static_code_gives_the_plain_text_and_accepts_the_same_proposals(llama, runs_eagerly, pattern, max_new_tokens):
    drafter = make_oracle(llama, pattern, max_new_tokens=max_new_tokens)
    output = generate(llama, assistant_model=drafter, max_new_tokens=max_new_tokens, **fast())
    assert output.tolist() == generate(llama, max_new_tokens=max_new_tokens).tolist()
    assert drafter.accepted_lengths == expected_lengths(pattern, max_new_tokens, BLOCK)


@pytest.mark.parametrize("kind", ["qwen3", "mixtral", "gpt2"])
def test_static_code_reads_other_targets(runs_eagerly, kind):
    target = make_target(kind)
    drafter = make_oracle(target, MIXED)
    assert generate(target, assistant_model=drafter, **fast()).tolist() == generate(target).tolist()
    assert drafter.accepted_lengths == expected_lengths(MIXED, NEW, BLOCK)
    assert known_forwards(target).is_in_use


@pytest.mark.parametrize("patterns", [BATCH_PATTERNS, [always_right, never_right, MIXED]])
def test_padded_rows_keep_their_own_paths(llama, runs_eagerly, patterns):
    drafter = make_batch_oracle(llama, patterns)
    assert generate_batch(llama, assistant_model=drafter, **fast()).tolist() == generate_batch(llama).tolist()
    assert drafter.all_accepted_lengths == [expected_lengths(pattern, NEW, BLOCK) for pattern in patterns]
    assert known_forwards(llama).is_in_use


def test_gaps_of_rows_are_closed_only_when_room_is_short(llama, runs_eagerly, monkeypatch):
    free = []
    align = TargetCache._align_rows

    def recorded(self, num_rejected):
        free.append(self.num_free_columns)
        align(self, num_rejected)

    monkeypatch.setattr(TargetCache, "_align_rows", recorded)
    patterns = [always_right, right_for(0, 7), MIXED]
    drafter = make_batch_oracle(llama, patterns, max_new_tokens=120)
    output = generate_batch(llama, assistant_model=drafter, max_new_tokens=120, **fast())
    assert output.tolist() == generate_batch(llama, max_new_tokens=120).tolist()
    assert drafter.all_accepted_lengths == [expected_lengths(pattern, 120, BLOCK) for pattern in patterns]
    # Those of a cache that may be handed out are closed at the end, too.
    assert 1 <= len(free) <= len(drafter.all_accepted_lengths[1]) // 2 and max(free[:-1], default=free[0]) < BLOCK


def test_drawn_tokens_are_those_of_plain_decoding(llama, runs_eagerly):
    sampling = {"do_sample": True, "temperature": 0.8}
    torch.manual_seed(5)
    expected = generate(llama, **sampling)
    drafter = make_drafter(llama, num_hidden_layers=1)
    torch.manual_seed(5)
    assert generate(llama, assistant_model=drafter, **sampling, **fast()).tolist() == expected.tolist()


def test_drawn_proposals_are_kept_as_on_the_eager_path(runs_eagerly):
    target, drafter = make_small_vocabulary_pair()
    outputs = []
    for options in ({"cache_implementation": "static"}, fast()):
        drafted = {"custom_generate": drafter.decode, "sample_drafts": True, "do_sample": True}
        torch.manual_seed(5)
        outputs.append(generate(target, PROMPT % 8, **drafted, **options).tolist())
    assert outputs[0] == outputs[1] and known_forwards(target).is_in_use


def test_columns_of_a_static_cache_are_counted_without_asking_the_device(llama):
    cache = StaticCache(config=llama.config, max_cache_len=60)
    prompts = torch.cat([PROMPT, PROMPT.flip(1)])
    kwargs = {cache_argument(llama): cache, "attention_mask": torch.ones_like(prompts), "use_cache": True}
    sizes = {"num_rows": 2, "num_prompt": 6, "max_length": 60}
    with torch.no_grad():
        verifier = Verifier(llama, [0], GenerationConfig(), kwargs, **sizes)
        verifier.read_prompt(prompts)
        expected = 6
        for paths, num_kept in (([[0], [0, 1]], 2), ([[0, 1], [0]], 1), ([[0, 1], [0, 1]], 2)):
            chain = TokenTree.chain(torch.tensor([[5, 6, 7], [8, 9, 10]]))
            verifier.verify(chain)
            verifier.keep_nodes(chain, paths)
            expected += num_kept  # rows that were behind catch up
            assert verifier.cache.num_columns == expected == int(cache.get_seq_length())
            assert verifier.cache.num_free_columns == 60 - expected


def test_scores_are_those_of_the_eager_path(llama, runs_eagerly):
    recorded = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    drafter = make_oracle(llama, MIXED)
    output = generate(llama, assistant_model=drafter, **recorded, **fast())
    expected = generate(llama, **recorded)
    for name in ("scores", "logits"):
        torch.testing.assert_close(getattr(output, name), getattr(expected, name), atol=1e-4, rtol=1e-4)
    assert int(cache_of(output).get_seq_length()) == output.sequences.shape[1] - 1


# Trees


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("num_tree_nodes", [1, 7, 31, "auto"])
def test_trees_give_the_plain_text_and_accept_what_the_eager_path_accepts(
    runs_eagerly, num_tree_nodes, implementation
):
    for call, prompts in ((generate, PROMPT % 8), (generate_batch, BATCH % 8)):
        lengths = []
        for options in ({}, fast()):
            target, drafter = make_small_vocabulary_pair()  # chances of nodes are learned from call to call
            target.set_attn_implementation(implementation)
            arguments = {"input_ids": prompts, "max_new_tokens": 60}
            output = call(target, **arguments, assistant_model=drafter, num_tree_nodes=num_tree_nodes, **options)
            assert output.tolist() == call(target, **arguments).tolist()
            lengths.append(drafter.all_accepted_lengths)
        assert known_forwards(target).is_in_use and known_forwards(drafter).is_in_use
        if num_tree_nodes != "auto":  # which follows the clock
            assert lengths[0] == lengths[1] and max(map(max, lengths[0])) > 1


def test_tokens_drawn_along_trees_are_those_of_plain_decoding(llama, runs_eagerly):
    sampling = {"do_sample": True, "temperature": 0.8}
    drafter = make_drafter(llama, num_hidden_layers=1)
    texts = []
    for drafted in ({}, {"assistant_model": drafter, "num_tree_nodes": 15, **fast()}):
        torch.manual_seed(5)
        texts.append(generate_batch(llama, **sampling, **drafted).tolist())
    assert texts[0] == texts[1]


@pytest.mark.parametrize("num_spare", [0, 3, 40])
@pytest.mark.parametrize("compiles", [False, True])
def test_trees_fill_a_given_cache_to_its_last_place(runs_eagerly, num_spare, compiles):
    target, drafter = make_small_vocabulary_pair()
    cache = StaticCache(config=target.config, max_cache_len=PROMPT.shape[1] + NEW - 1 + num_spare)
    given = {cache_argument(target): cache} | ({"compile_config": compile_config()} if compiles else {})
    output = generate(target, PROMPT % 8, assistant_model=drafter, num_tree_nodes=20, **given)
    assert output.tolist() == generate(target, PROMPT % 8).tolist()
    assert int(cache.get_seq_length()) == PROMPT.shape[1] + NEW - 1
    assert max(drafter.accepted_lengths) > 1 and known_forwards(target).is_in_use == compiles


def test_target_without_tree_masks_verifies_chains(runs_eagerly, llama, monkeypatch):
    monkeypatch.setattr(Verifier, "takes_trees", False)
    drafter = make_oracle(llama, MIXED)
    output = generate(llama, assistant_model=drafter, num_tree_nodes=20, **fast())
    assert output.tolist() == generate(llama).tolist() and known_forwards(llama).is_in_use
    assert drafter.accepted_lengths == expected_lengths(MIXED, NEW, BLOCK)


def test_sizes_of_trees_are_rounded_up_to_a_menu_of_graphs(llama, compiled_widths):
    drafter = make_drafter(llama, DFlashDraftModel)
    sizes = []
    verify = Verifier.verify

    def recorded(self, tree):
        sizes.append(tree.num_nodes)
        return verify(self, tree)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Verifier, "verify", recorded)
        for _ in range(3):
            generate(llama, assistant_model=drafter, num_tree_nodes="auto", max_new_tokens=100, **fast())
    assert set(sizes) <= {1, 8, 16, 32, 64, 128} and len(set(compiled_widths)) == len(compiled_widths)
    assert set(compiled_widths) <= set(sizes)


def test_menu_of_widths_follows_the_block_and_the_tree():
    assert fast_path_dflash.tree_widths(16, "auto") == [1, 16, 32, 64, 128]
    assert fast_path_dflash.tree_widths(10, "auto") == [1, 10, 20, 40, 80]
    assert fast_path_dflash.tree_widths(8, 15) == [1, 16]
    assert fast_path_dflash.tree_widths(8, None) == fast_path_dflash.tree_widths(8, 0) == []


@pytest.fixture
def compiled_widths(monkeypatch, runs_eagerly):
    """Widths of the graphs that are made, in order."""
    widths = []
    original = compilation_dflash._with_own_code

    def recorded(function, width):
        if function is fast_path_dflash._tapped_forward:
            widths.append(width)
        return original(function, width)

    monkeypatch.setattr(compilation_dflash, "_with_own_code", recorded)
    return widths


def test_graphs_are_made_for_whole_blocks_also_near_the_end_of_the_text(llama, compiled_widths):
    for _ in range(5):
        generate(llama, assistant_model=make_oracle(llama, MIXED), **fast())
    assert compiled_widths == [BLOCK]
    generate(llama, assistant_model=make_oracle(llama, MIXED), num_assistant_tokens=3, **fast())
    assert compiled_widths == [BLOCK, 4]


def test_narrow_graph_is_made_when_many_rounds_are_narrow(llama, compiled_widths):
    class FailingDrafter(RecordingDrafter):
        def forward(self, *arguments, **kwargs):
            raise RuntimeError("drafts nothing")

    drafter = make_drafter(llama, FailingDrafter)
    assert generate(llama, assistant_model=drafter, **fast()).tolist() == generate(llama).tolist()
    assert compiled_widths == [1]


def test_given_cache_without_room_for_a_block_is_filled_to_the_last_place(llama, runs_eagerly):
    cache = StaticCache(config=llama.config, max_cache_len=PROMPT.shape[1] + NEW - 1)
    drafter = make_oracle(llama, MIXED)
    given = {cache_argument(llama): cache, "compile_config": compile_config()}
    assert generate(llama, assistant_model=drafter, **given).tolist() == generate(llama).tolist()
    assert drafter.accepted_lengths == expected_lengths(MIXED, NEW, BLOCK)
    assert int(cache.get_seq_length()) == PROMPT.shape[1] + NEW - 1


def test_rounds_that_were_compiled_or_stood_in_for_are_known(llama, runs_eagerly, monkeypatch):
    flags = []
    verify = Verifier.verify

    def recorded(self, tree):
        outputs = verify(self, tree)
        flags.append((tree.num_nodes, self.is_warming_up))
        return outputs

    monkeypatch.setattr(Verifier, "verify", recorded)
    for calls in range(2):
        flags.clear()
        generate(llama, assistant_model=make_oracle(llama, always_right), **fast())
        is_warming_up = [flag for num_nodes, flag in flags if num_nodes > 1]
        # The check of the hidden states, then the first run of the graph; later calls have neither.
        assert is_warming_up == ([True, True] if calls == 0 else [False, False]) + [False] * (len(is_warming_up) - 2)
        assert all(flag for num_nodes, flag in flags if num_nodes == 1)
    flags.clear()
    generate(llama, assistant_model=make_oracle(llama, always_right))
    assert flags and not any(flag for _, flag in flags)


# What switches it on


@pytest.mark.parametrize(
    "options",
    [
        {"compile_config": compile_config()},  # a dynamic cache
        {"cache_implementation": "static"},  # a CPU
        fast() | {"disable_compile": True},
        fast() | {"return_dict_in_generate": True, "output_hidden_states": True},
    ],
    ids=["dynamic cache", "no compile_config", "disable_compile", "hidden states"],
)
def test_calls_that_plain_decoding_does_not_compile_stay_eager(llama, options):
    drafter = make_oracle(llama, MIXED)
    output = generate(llama, assistant_model=drafter, **options)
    assert getattr(output, "sequences", output).tolist() == generate(llama).tolist()
    assert not known_forwards(llama).functions


def test_static_cache_of_a_sliding_window_stays_eager(runs_eagerly):
    target = make_target("gemma3", sliding_window=PROMPT.shape[1] + NEW)
    drafter = make_oracle(target, MIXED)
    assert generate(target, assistant_model=drafter, **fast()).tolist() == generate(target).tolist()
    assert not known_forwards(target).functions


def test_compile_options_are_those_of_the_call_with_static_shapes(llama):
    for dynamic, expected in ((None, False), (False, False), (True, True)):
        config = copy.deepcopy(llama.generation_config)
        config.compile_config = compile_config("aot_eager", dynamic=dynamic, fullgraph=True)
        options = compilation_dflash.compile_options(llama, config)
        assert options["dynamic"] is expected and options["backend"] == "aot_eager" and options["fullgraph"]
    config.compile_config = None
    assert compilation_dflash.compile_options(llama, config)["mode"] == "reduce-overhead"


def test_static_caches_have_few_lengths_and_room_for_a_block(llama):
    lengths = []
    for needed in range(1024, 2048):
        cache = StaticCache(config=llama.config, max_cache_len=needed)
        lengths.append(roomy_cache(llama, cache, 16).layers[0].max_cache_len)
        assert needed + 16 <= lengths[-1] <= 1.13 * (needed + 16)
    assert len(set(lengths)) <= 10


def test_each_graph_has_a_code_object_of_its_own():
    def add(left, right):
        return left + right

    first, second = (compilation_dflash._with_own_code(add, 4) for _ in range(2))
    assert first.__code__ is not second.__code__ and first.__code__ is not add.__code__
    assert first(1, 2) == second(1, 2) == 3


# Compiled


def test_compiled_forward_gives_the_plain_text_and_is_compiled_once():
    target = make_target("llama", **SHALLOW)
    drafter = make_drafter(target, DFlashDraftModel, num_target_features=1)
    texts, graphs = [], []
    for prompt in (PROMPT, PROMPT.flip(1), PROMPT[:, :4]):
        before = count_graphs()
        options = fast(fullgraph=True) | {"num_assistant_tokens": BLOCK - 1}
        texts.append(generate(target, prompt, assistant_model=drafter, **options).tolist())
        graphs.append(count_graphs() - before)
        assert texts[-1] == generate(target, prompt).tolist()
    assert graphs == [2, 0, 0] and known_forwards(target).is_in_use and known_forwards(drafter).is_in_use


def test_trees_of_all_shapes_share_one_graph_without_breaks():
    target = make_target("llama", vocab_size=8, pad_token_id=None, **SHALLOW)
    drafter = make_drafter(target, DFlashDraftModel, num_target_features=1, mask_token_id=7)
    before = count_graphs()
    options = fast(fullgraph=True) | {"num_tree_nodes": 9}
    for prompt in (PROMPT % 8, PROMPT.flip(1) % 8):
        output = generate(target, prompt, assistant_model=drafter, **options)
        assert output.tolist() == generate(target, prompt).tolist()
    assert count_graphs() - before == 2 and known_forwards(target).is_in_use and known_forwards(drafter).is_in_use


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"num_assistant_tokens": BLOCK - 1}, {"num_tree_nodes": 12}], ids=["chain", "tree"]
)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_backends_give_the_plain_text(backend, options):
    target = make_target("llama", **SHALLOW)
    drafter = make_drafter(target, DFlashDraftModel, num_target_features=1)
    output = generate(target, assistant_model=drafter, **options, **fast(backend))
    assert output.tolist() == generate(target).tolist()
    assert known_forwards(target).is_in_use and known_forwards(drafter).is_in_use


# What goes wrong


def no_backend(graph, inputs):
    raise NotImplementedError("no compiler")


def test_failed_compilation_falls_back_with_one_warning_for_each_model(caplog):
    target = make_target("llama", **SHALLOW)
    drafter = make_drafter(target, DFlashDraftModel, num_target_features=1)
    expected = generate(target)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            options = fast(no_backend) | {"num_assistant_tokens": BLOCK - 1}
            assert generate(target, assistant_model=drafter, **options).tolist() == expected.tolist()
    warnings = [record for record in caplog.records if "cannot be compiled" in record.getMessage()]
    assert [record.getMessage().split()[0] for record in warnings] == ["DFlashDraftModel", "LlamaForCausalLM"]
    assert all("no compiler" in record.getMessage() for record in warnings)
    assert not known_forwards(target).is_in_use and not known_forwards(drafter).is_in_use


@pytest.mark.parametrize("call", [generate, generate_batch])
@pytest.mark.parametrize("options", [{}, {"num_tree_nodes": 12}], ids=["chain", "tree"])
def test_forwards_that_fail_halfway_leave_nothing_in_the_caches(llama, runs_eagerly, monkeypatch, call, options):
    def fails_at_its_end(function, width):
        def failing(*arguments):
            function(*arguments)
            raise RuntimeError("out of graphs")

        return failing

    drafter = make_drafter(llama, DFlashDraftModel)
    options = options or {"num_assistant_tokens": BLOCK - 1}
    expected = call(llama, assistant_model=drafter, **options)
    monkeypatch.setattr(compilation_dflash, "_with_own_code", fails_at_its_end)
    output = call(llama, assistant_model=drafter, **options, **fast(), return_dict_in_generate=True)
    assert output.sequences.tolist() == expected.tolist() == call(llama).tolist()
    assert known_forwards(llama).failed and known_forwards(drafter).failed


def test_target_whose_hidden_states_are_no_layer_outputs_stays_eager(llama, caplog, runs_eagerly, monkeypatch):
    original = fast_path_dflash._tapped_forward

    def shifted(*arguments):
        logits, features = original(*arguments)
        return logits, features + 1.0

    monkeypatch.setattr(fast_path_dflash, "_tapped_forward", shifted)
    for _ in range(2):
        drafter = make_oracle(llama, MIXED)
        with caplog.at_level(logging.WARNING):
            assert generate(llama, assistant_model=drafter, **fast()).tolist() == generate(llama).tolist()
        assert drafter.accepted_lengths == expected_lengths(MIXED, NEW, BLOCK)
    assert sum("not the outputs of its layers" in record.getMessage() for record in caplog.records) == 1
    assert not known_forwards(llama).functions


def test_our_hooks_are_gone_and_the_target_is_not_held(runs_eagerly):
    target = make_target("llama")
    generate(target, assistant_model=make_oracle(target, MIXED), **fast())
    hooks = [hook for module in target.modules() for hook in module._forward_hooks.values()]
    assert not any("dflash" in hook.__module__ for hook in hooks)
    gone = weakref.ref(target)
    del target, hooks
    gc.collect()
    assert gone() is None
