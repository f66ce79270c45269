"""Blocks see only the newest context features, and older ones cost neither time nor memory."""

from pathlib import Path

import pytest
import torch
from generation_material import (
    BLOCK,
    generate,
    generate_batch,
    make_drafter,
    make_small_vocabulary_pair,
    make_target,
)

from dflash_hf import DFlashDraftModel, context_cache_dflash
from dflash_hf.context_dflash import BlockDrafter, context_windows

SLIDING, FULL = "sliding_attention", "full_attention"
DRAFTERS = {
    "full": {},
    "full and causal": {"is_causal": True},
    "mixed": {"layer_types": [SLIDING, FULL], "sliding_window": 6},
    "sliding": {"layer_types": [SLIDING] * 2, "sliding_window": 6},
    "sliding and not causal": {"layer_types": [SLIDING] * 2, "sliding_window": 6, "is_causal": False},
    "sliding by one": {"layer_types": [SLIDING] * 2, "sliding_window": 1},
}
WIDTH = 3 * 32
# Context tokens that each round brings to each row: prompts, then accepted lengths.
ROUNDS = [[30, 9, 2], *[[1, 8, 3], [8, 1, 2], [2, 1, 8], [5, 5, 5]] * 3]
NUM_UNSEEN = [0, 2, 5]


@pytest.fixture
def target():
    return make_target("llama")


@pytest.fixture
def tight(monkeypatch):
    """Buffers without much slack, so that few tokens fill them."""
    monkeypatch.setattr(context_cache_dflash, "_MIN_CAPACITY", 12)


def is_visible(slot, key, length, *, draft_window, sliding_window, is_causal):
    """Whether a slot sees a key of a row; keys are `length` context tokens, then the block."""
    distance = length + slot - key
    if key < length and draft_window is not None and key < length - draft_window:
        return False
    if key >= length and is_causal and distance < 0:
        return False
    return sliding_window is None or abs(distance) < sliding_window


@torch.no_grad()
def plain_logits(drafter, target, features, anchor, *, num_unseen, draft_window):
    """Draft logits of one row by a forward over all of its features, with a mask made key by key."""
    length = features.shape[0]
    masks = {}
    for layer in drafter.layers:
        rule = {
            "draft_window": draft_window,
            "sliding_window": layer.self_attn.sliding_window,
            "is_causal": layer.self_attn.is_causal,
        }
        rows = [[is_visible(slot, key, length, **rule) for key in range(length + BLOCK)] for slot in range(BLOCK)]
        masks[drafter.config.layer_types[layer.self_attn.layer_idx]] = torch.tensor(rows)[None, None]
    block = torch.full((1, BLOCK), drafter.config.mask_token_id)
    block[0, 0] = anchor
    hidden_states = drafter(
        noise_embeds=target.get_input_embeddings()(block).to(drafter.dtype),
        context_hidden_states=features[None].to(drafter.dtype),
        attention_mask=masks,
        position_ids=torch.arange(num_unseen, num_unseen + length + BLOCK)[None],
    ).last_hidden_state
    return target.get_output_embeddings()(hidden_states[:, 1:].to(target.dtype))[0]


class Text:
    """Random features of each row, handed to a block drafter as a decoding call does, and to the plain twin."""

    def __init__(self, drafter, target, draft_window, num_unseen=NUM_UNSEEN, num_tokens=200):
        self.drafter, self.target, self.draft_window = drafter, target, draft_window
        self.block_drafter = BlockDrafter(drafter, target, list(num_unseen), draft_window)
        self.num_unseen = list(num_unseen)
        self.features = torch.randn(len(num_unseen), num_tokens, WIDTH)
        self.lengths = [0] * len(num_unseen)

    def add(self, num_new):
        pieces = torch.full((len(num_new), max(num_new), WIDTH), 99.0)  # what must not be read
        for row, (start, new) in enumerate(zip(self.lengths, num_new, strict=True)):
            pieces[row, :new] = self.features[row, start : start + new]
        self.lengths = [start + new for start, new in zip(self.lengths, num_new, strict=True)]
        self.block_drafter.add_features(pieces, list(num_new))

    def select_rows(self, rows):
        self.block_drafter.select_rows(rows)
        self.num_unseen = [self.num_unseen[row] for row in rows]
        self.lengths = [self.lengths[row] for row in rows]
        self.features = self.features[rows]

    def check(self, atol=1e-5):
        anchors = torch.randint(97, (len(self.lengths), 1))
        found = self.block_drafter.logits(anchors, BLOCK - 1)
        for row, (length, num_unseen) in enumerate(zip(self.lengths, self.num_unseen, strict=True)):
            expected = plain_logits(
                self.drafter,
                self.target,
                self.features[row, :length],
                int(anchors[row, 0]),
                num_unseen=num_unseen,
                draft_window=self.draft_window,
            )
            torch.testing.assert_close(found[row], expected, atol=atol, rtol=atol)

    @property
    def num_moved(self) -> int:
        return max(max(columns.num_moved) for columns in self.block_drafter._cache.columns)

    def buffer_columns(self) -> list[int]:
        return [keys.shape[2] for keys in self.block_drafter._cache._keys]


# Drafts


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("draft_window", [1, 4, 11, None])
@pytest.mark.parametrize("name", DRAFTERS)
@torch.no_grad()
def test_drafts_equal_those_of_all_features_under_a_mask(name, draft_window, implementation, target, tight):
    drafter = make_drafter(target, DFlashDraftModel, initializer_range=0.1, **DRAFTERS[name])
    drafter.set_attn_implementation(implementation)
    text = Text(drafter, target, draft_window)
    for num_new in ROUNDS:
        text.add(num_new)
        text.check()
    if context_windows(drafter, draft_window) not in ([None, None], [0, 0]):
        assert text.num_moved > 0


@pytest.mark.parametrize("name", ["full", "mixed"])
@torch.no_grad()
def test_one_row_needs_no_mask(name, target, tight):
    drafter = make_drafter(target, DFlashDraftModel, initializer_range=0.1, **DRAFTERS[name])
    text = Text(drafter, target, 4, num_unseen=[3])
    masks = []
    drafter.register_forward_pre_hook(
        lambda module, arguments, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
    )
    for num_new, _, _ in ROUNDS:
        text.add([num_new])
        text.block_drafter.logits(torch.tensor([[7]]), BLOCK - 1)
    assert masks == [None] * len(ROUNDS)


@pytest.mark.parametrize("name", ["full", "mixed", "sliding"])
@torch.no_grad()
def test_window_that_holds_the_whole_text_changes_no_bit(name, target):
    drafter = make_drafter(target, DFlashDraftModel, initializer_range=0.1, **DRAFTERS[name])
    drafters = [BlockDrafter(drafter, target, NUM_UNSEEN, window) for window in (None, 100)]
    for num_new in ROUNDS:
        features = torch.randn(3, max(num_new), WIDTH)
        for block_drafter in drafters:
            block_drafter.add_features(features, num_new)
        first, second = (block_drafter.logits(torch.tensor([[7], [8], [9]]), BLOCK - 1) for block_drafter in drafters)
        assert torch.equal(first, second)


@pytest.mark.parametrize("name", ["full", "mixed", "sliding"])
@torch.no_grad()
def test_rows_that_stay_are_drafted_as_before(name, target, tight):
    text = Text(make_drafter(target, DFlashDraftModel, initializer_range=0.1, **DRAFTERS[name]), target, 4)
    for num_new in ROUNDS[:4]:
        text.add(num_new)
        text.check()
    text.add([3, 8, 1])
    text.select_rows([2, 1])
    text.check()
    for num_new in ROUNDS[1:6]:
        text.add(num_new[:2])
        text.check()
    text.select_rows([1])
    for num_new in ROUNDS[1:6]:
        text.add(num_new[:1])
        text.check()


@pytest.mark.parametrize("name", ["full", "mixed"])
@torch.no_grad()
def test_draft_that_failed_between_two_layers_is_made_up_for(name, target, tight, monkeypatch):
    drafter = make_drafter(target, DFlashDraftModel, initializer_range=0.1, **DRAFTERS[name])
    text = Text(drafter, target, 4)
    whole_forward = drafter.layers[1].forward

    def fails(*args, **kwargs):
        raise MemoryError("planned")

    for index, num_new in enumerate(ROUNDS):
        text.add(num_new)
        if index % 3 == 1:
            monkeypatch.setattr(drafter.layers[1], "forward", fails)
            with pytest.raises(MemoryError, match="planned"):
                text.check()
            monkeypatch.setattr(drafter.layers[1], "forward", whole_forward)
        else:
            text.check()
    assert text.num_moved > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision_drafts_differ_by_rounding_only(dtype, target, tight):
    drafter = make_drafter(target, DFlashDraftModel, initializer_range=0.05).to(dtype)
    text = Text(drafter, target, 4)
    for num_new in ROUNDS:
        text.add(num_new)
        text.check(atol=0.05)
    assert text.block_drafter._cache._keys[0].dtype == dtype


@pytest.mark.parametrize("call", [generate, generate_batch])
def test_answers_stay_those_of_the_target(call):
    target, drafter = make_small_vocabulary_pair()
    prompts = torch.randint(7, (3, 20))
    mask = torch.ones_like(prompts)
    if call is generate_batch:
        mask[1, :9] = mask[2, :18] = 0
    kwargs = {"input_ids": prompts, "attention_mask": mask} if call is generate_batch else {"input_ids": prompts[:1]}
    assert call(target, assistant_model=drafter, draft_window=3, **kwargs).tolist() == call(target, **kwargs).tolist()
    assert drafter.calls[0].num_features == 3 and max(drafter.accepted_lengths) > 1


# Cost


@torch.no_grad()
def test_prompt_features_out_of_sight_never_enter_the_drafter(target):
    drafter = make_drafter(target)
    text = Text(drafter, target, 11, num_unseen=[0])
    text.add([150])
    ((held, num_held),) = text.block_drafter._pending.pieces
    assert num_held == [11] and held.untyped_storage().nbytes() == 11 * WIDTH * 4
    text.check()
    assert drafter.calls[0].num_features == 11
    assert drafter.calls[0].positions == list(range(139, 150 + BLOCK))


@torch.no_grad()
def test_features_that_were_left_out_are_counted(target):
    drafter = make_drafter(target, DFlashDraftModel)
    features, anchors = torch.randn(2, 30, WIDTH), torch.tensor([[3], [4]])
    whole, newest = (BlockDrafter(drafter, target, [0, 5], 6) for _ in range(2))
    assert whole.max_context == 6
    whole.add_features(features, [30, 20])
    newest.add_features(torch.stack([features[0, 24:30], features[1, 14:20]]), [6, 6], num_left_out=[24, 14])
    assert torch.equal(whole.logits(anchors, BLOCK - 1), newest.logits(anchors, BLOCK - 1))


@pytest.mark.parametrize("num_unseen", [[4], NUM_UNSEEN], ids=["one row", "batch"])
@torch.no_grad()
def test_features_that_wait_for_a_draft_do_not_pile_up(num_unseen, target):
    text = Text(make_drafter(target, DFlashDraftModel), target, 6, num_unseen)
    for num_new in [[2, 4, 1], [3, 1, 2]] * 15:
        text.add(num_new[: len(num_unseen)])
        assert sum(features.shape[1] for features, _ in text.block_drafter._pending.pieces) <= 12
    text.check()
    text.add([2, 1, 3][: len(num_unseen)])
    text.check()


@torch.no_grad()
def test_buffers_stop_growing_and_move_rarely(target):
    drafter = make_drafter(target, DFlashDraftModel)
    block_drafter = BlockDrafter(drafter, target, [0, 0], 256)
    addresses, columns = [], []
    for num_new in [[700, 300], *[[5, 3], [1, 5]] * 100]:
        block_drafter.add_features(torch.randn(2, max(num_new), WIDTH), num_new)
        block_drafter.logits(torch.tensor([[7], [8]]), 1)
        keys, _ = block_drafter._cache._keys
        addresses.append(keys.data_ptr())
        columns.append(keys.shape[2])
    assert set(columns) == {256 + 64 + BLOCK}
    # Up to 800 new tokens a row, 64 columns of slack.
    assert sum(before != after for before, after in zip(addresses, addresses[1:], strict=False)) <= 800 / 64


@pytest.mark.parametrize(
    ("name", "draft_window", "windows"),
    [
        ("full", None, [None, None]),
        ("full", 20, [20, 20]),
        ("mixed", None, [5, None]),
        ("mixed", 20, [5, 20]),
        ("sliding", None, [5, 5]),
        ("sliding", 3, [3, 3]),
    ],
)
@torch.no_grad()
def test_each_layer_holds_what_it_can_see(name, draft_window, windows, target, tight):
    drafter = make_drafter(target, DFlashDraftModel, initializer_range=0.1, **DRAFTERS[name])
    assert context_windows(drafter, draft_window) == windows
    text = Text(drafter, target, draft_window, num_unseen=[0])
    for num_new in (100, *[5] * 10):
        text.add([num_new])
        text.check()
    for window, columns in zip(windows, text.buffer_columns(), strict=True):
        assert columns >= 150 + BLOCK if window is None else columns <= window + max(window // 4, 12) + BLOCK
    # Keys and values, two heads of eight numbers each, four bytes a number.
    assert text.block_drafter.num_held_bytes == sum(text.buffer_columns()) * 2 * 2 * 8 * 4
    limits = [window for window in windows if window is not None]
    assert text.block_drafter.max_context == (max(limits) if len(limits) == 2 else None)


def test_benchmark_finds_the_same_memory_for_every_context(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    from draft_window import DraftWindowOptions, measure

    options = DraftWindowOptions(contexts=[256, 512], draft_window=100, cycles=2, hidden_size=64)
    with torch.compiler.set_stance("force_eager"):
        lines = measure(options)
    kinds = ["none", "100", "100, static"]
    assert [(line.context, line.kind) for line in lines] == [(256, kind) for kind in kinds] + [
        (512, kind) for kind in kinds
    ]
    assert all(len(line.cycle_seconds) == 2 and line.cycle_ms > 0 for line in lines)
    whole, windowed, static = ([line.block_drafter.num_held_bytes for line in lines[i::3]] for i in range(3))
    assert static[0] == static[1] < windowed[0] == windowed[1] < whole[0] < whole[1]


# Errors


@pytest.mark.parametrize("draft_window", [0, -4, 2.0, True, "64"])
def test_window_that_counts_no_tokens_is_refused(draft_window, target):
    with pytest.raises(ValueError, match="`draft_window` is .* an integer of at least 1"):
        BlockDrafter(make_drafter(target), target, [0], draft_window)
