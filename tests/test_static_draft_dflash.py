"""Drafts of fixed shapes over a static context are those of the growing one."""

import pytest
import torch
from generation_material import BLOCK, make_drafter, make_target
from test_context_dflash import DRAFTERS, ROUNDS

from dflash_hf import DFlashDraftModel, compilation_dflash
from dflash_hf.context_dflash import BlockDrafter
from dflash_hf.static_draft_dflash import StaticBlockDrafter, StaticContext, can_be_static

OPTIONS = {"backend": "eager", "dynamic": False}
NUM_UNSEEN = [0, 2, 5]
# The last ones bring more than a block has slots, as after a pause, and more than a window holds.
MANY_ROUNDS = [*ROUNDS, [1, 1, 1], [0, 3, 1], [BLOCK, 2, 5], [20, 3, 9], [1, 30, 1], [7, 7, 7]]
MAX_CONTEXT = 90


@pytest.fixture
def target():
    return make_target("llama")


@pytest.fixture(autouse=True)
def runs_eagerly():
    with torch.compiler.set_stance("force_eager"):
        yield


def make_pair(drafter, target, draft_window=None, num_unseen=NUM_UNSEEN):
    """The growing drafter and the static one."""
    return [
        BlockDrafter(drafter, target, list(num_unseen), draft_window),
        StaticBlockDrafter(drafter, target, list(num_unseen), draft_window, max_context=MAX_CONTEXT, options=OPTIONS),
    ]


def drafts(block_drafters, rounds, num_slots=BLOCK - 1):
    """Draft logits of each round, one list for each drafter."""
    torch.manual_seed(7)
    num_rows = len(rounds[0])
    found = [[] for _ in block_drafters]
    for num_new in rounds:
        features = torch.randn(num_rows, max(num_new), 3 * 32)
        for row, new in enumerate(num_new):
            features[row, new:] = 99.0  # must not be read
        anchors = torch.randint(97, (num_rows, 1))
        for block_drafter, logits in zip(block_drafters, found, strict=True):
            block_drafter.add_features(features.clone(), num_new)
            logits.append(block_drafter.logits(anchors, num_slots))
    return found


@pytest.mark.parametrize("draft_window", [None, 1, 4, 12])
@pytest.mark.parametrize("name", DRAFTERS)
@torch.no_grad()
def test_drafts_are_those_of_the_growing_context(name, draft_window, target):
    drafter = make_drafter(target, DFlashDraftModel, **DRAFTERS[name])
    growing, static = drafts(make_pair(drafter, target, draft_window), MANY_ROUNDS)
    torch.testing.assert_close(static, growing, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["full", "causal and sliding"])
@torch.no_grad()
def test_eager_attention_gives_the_same_drafts(name, target):
    drafter = make_drafter(target, DFlashDraftModel, **DRAFTERS[name])
    drafter.set_attn_implementation("eager")
    growing, static = drafts(make_pair(drafter, target), MANY_ROUNDS)
    torch.testing.assert_close(static, growing, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_context_may_fill_its_buffers_to_the_last_column(target):
    drafter = make_drafter(target, DFlashDraftModel)
    growing, static = drafts(make_pair(drafter, target, num_unseen=[3]), [[MAX_CONTEXT - 2], [1], [1]])
    torch.testing.assert_close(static, growing, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_fewer_slots_are_the_first_of_a_whole_draft(target):
    drafter = make_drafter(target, DFlashDraftModel)
    few, whole = (drafts(make_pair(drafter, target), ROUNDS, num_slots)[1] for num_slots in (3, BLOCK - 1))
    torch.testing.assert_close(few, [logits[:, :3] for logits in whole])


@torch.no_grad()
def test_features_of_several_forwards_are_read_by_the_next_draft(target):
    drafter = make_drafter(target, DFlashDraftModel, **DRAFTERS["sliding and full"])
    features, anchors = torch.randn(3, 9, 3 * 32), torch.tensor([[4], [5], [6]])
    found = []
    for block_drafter in make_pair(drafter, target):
        block_drafter.add_features(features, [9, 7, 1], [2, 0, 1])
        block_drafter.add_features(features[:, :1], [1, 1, 1])
        block_drafter.add_features(features[:, :4], [4, 0, 2])
        found.append(block_drafter.logits(anchors, BLOCK - 1))
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_buffers_stay_where_they_are_and_are_as_long_as_what_is_seen(target):
    drafter = make_drafter(target, DFlashDraftModel, **DRAFTERS["sliding and full"])
    _, static = make_pair(drafter, target)
    context = static._context
    addresses = [buffer.data_ptr() for buffer in (*context.keys, *context.values)]
    drafts([static], MANY_ROUNDS)
    assert [buffer.data_ptr() for buffer in (*context.keys, *context.values)] == addresses
    # Two layers, keys and values of 2 heads of 8 float32 numbers, 3 rows; a window of 5 hides what is 5 tokens back.
    assert static.num_held_bytes == 2 * 3 * 2 * 8 * 4 * (4 + BLOCK + MAX_CONTEXT + BLOCK)


@torch.no_grad()
def test_draft_that_fails_is_made_up_for_by_the_next(target, monkeypatch):
    drafter = make_drafter(target, DFlashDraftModel, **DRAFTERS["sliding and full"])
    pair = make_pair(drafter, target)
    drafts(pair, ROUNDS)
    features, anchors = torch.randn(3, 3, 3 * 32), torch.tensor([[4], [5], [6]])
    for block_drafter in pair:
        block_drafter.add_features(features, [3, 1, 2])

    def fail(states):
        raise ArithmeticError("after the layers have written their keys")

    with monkeypatch.context() as patch:
        patch.setattr(drafter.norm, "forward", fail)
        with pytest.raises(ArithmeticError):
            pair[1].logits(anchors, BLOCK - 1)
    torch.testing.assert_close(
        pair[1].logits(anchors, BLOCK - 1), pair[0].logits(anchors, BLOCK - 1), atol=1e-4, rtol=1e-4
    )


@torch.no_grad()
def test_drafts_of_a_block_share_one_graph_and_longer_ones_are_not_compiled(target, monkeypatch):
    runs = []
    original = compilation_dflash.CompiledRuns.run

    def recorded(self, width, *arguments):
        runs.append(width)
        return original(self, width, *arguments)

    monkeypatch.setattr(compilation_dflash.CompiledRuns, "run", recorded)
    drafter = make_drafter(target, DFlashDraftModel)
    _, static = make_pair(drafter, target)
    warming_up = []
    for num_new in MANY_ROUNDS:
        drafts([static], [num_new])
        warming_up.append(static.is_warming_up)
    is_long = [max(num_new) > BLOCK for num_new in MANY_ROUNDS]
    assert runs == [BLOCK] * is_long.count(False)
    # Times of long drafts say as little as that of the first.
    assert warming_up == [True, *is_long[1:]]
    assert len(compilation_dflash.known_forwards(drafter).functions) == 1


@torch.no_grad()
def test_draft_that_overflows_in_float16_is_named(target):
    drafter = make_drafter(target, DFlashDraftModel)
    drafter.norm.weight.fill_(6e4)
    _, static = make_pair(drafter.half(), target)
    with pytest.raises(RuntimeError, match="overflows in float16"):
        drafts([static], ROUNDS)


def test_draft_without_new_features_is_refused(target):
    _, static = make_pair(make_drafter(target), target)
    with pytest.raises(RuntimeError, match="no context features"):
        static.logits(torch.tensor([[3], [4], [5]]), 2)


@pytest.mark.parametrize("draft_window", [0, -1, 2.5, True])
def test_window_is_checked(target, draft_window):
    with pytest.raises(ValueError, match="draft_window"):
        StaticBlockDrafter(make_drafter(target), target, [0], draft_window, max_context=9, options=OPTIONS)


def test_attention_that_takes_no_mask_stays_eager(target):
    drafter = make_drafter(target)
    assert can_be_static(drafter, target)
    drafter.config._attn_implementation = "flex_attention"
    assert not can_be_static(drafter, target)


def test_buffers_are_in_the_drafters_dtype(target):
    context = StaticContext(make_drafter(target).bfloat16(), 2, 10, [None, 4])
    assert {buffer.dtype for buffer in (*context.keys, *context.values)} == {torch.bfloat16}
    assert [buffer.shape[2] for buffer in context.keys] == [10 + BLOCK, 4 + BLOCK]
