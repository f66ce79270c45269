"""Rows of a batch that accept different numbers of tokens: each fares as if it were alone."""

import functools

import pytest
import torch
from generation_material import BLOCK, make_config, make_target
from oracle_drafters import OracleDrafter, RecordingDrafter, expected_lengths, right_for

from dflash_hf.context_dflash import BlockDrafter
from dflash_hf.verification_dflash import _MARKS_GIVEN_CACHES

NEW = 72
ROWS = 16
KINDS = ("llama", "gemma3", "gpt2")
# Right proposals in each round, for each row; the first row is slow enough for 64 rounds.
PATTERNS = [right_for(*[0] * 7, 1)] + [
    right_for(*[(3 * row + step * step) % (2 + row % 7) for step in range(5 + row % 3)]) for row in range(1, ROWS)
]

rows_may_leave = pytest.mark.skipif(
    not _MARKS_GIVEN_CACHES,
    reason="this Transformers does not tell a given cache from its own, so all rows stay in it",
)


def make_prompts():
    """Prompts of 1 to 11 tokens; each of them twice, with different patterns."""
    generator = torch.Generator().manual_seed(21)
    return 2 * [torch.randint(2, 96, (1 + 7 * row % 11,), generator=generator).tolist() for row in range(ROWS // 2)]


def pad(prompts):
    longest = max(map(len, prompts))
    ids = torch.tensor([[1] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


@functools.cache
def material(kind):
    """A target, and each row's text from a plain run of its own, a block longer than is asked for; takes 5 seconds."""
    target = make_target(kind)
    texts = []
    for prompt in make_prompts()[: ROWS // 2]:
        ids, mask = pad([prompt])
        output = target.generate(ids, attention_mask=mask, max_new_tokens=NEW + BLOCK, do_sample=False)
        texts.append(output[0].tolist())
    return target, 2 * texts


def run(kind, rows, max_new_tokens=NEW, **kwargs):
    """New tokens of each row, and the drafter."""
    target, texts = material(kind)
    ids, mask = pad([make_prompts()[row] for row in rows])
    drafter = OracleDrafter(make_config(target), target, [texts[row] for row in rows], [PATTERNS[row] for row in rows])
    options = {"assistant_model": drafter, "max_new_tokens": max_new_tokens, "do_sample": False} | kwargs
    output = target.generate(ids, attention_mask=mask, **options)
    return output[:, ids.shape[1] :].tolist(), drafter


@pytest.mark.parametrize("num_rows", [1, 2, 5, ROWS])
@pytest.mark.parametrize("kind", KINDS)
def test_each_row_gives_the_text_and_accepted_lengths_of_its_own_run(kind, num_rows):
    _, texts = material(kind)
    rows = list(range(num_rows))
    tokens, drafter = run(kind, rows)
    for row in rows:
        start = len(make_prompts()[row])
        assert tokens[row] == texts[row][start : start + NEW], row
        assert drafter.all_accepted_lengths[row] == expected_lengths(PATTERNS[row], NEW, BLOCK), row
    assert len(drafter.accepted_lengths) >= 62
    if num_rows > 2:
        assert len({len(lengths) for lengths in drafter.all_accepted_lengths}) > 2


@pytest.mark.parametrize("kind", KINDS)
def test_accepted_lengths_of_a_batch_equal_those_of_single_runs(kind):
    rows = [3, 6, 11]
    _, drafter = run(kind, rows, max_new_tokens=40)
    for i, row in enumerate(rows):
        _, alone = run(kind, [row], max_new_tokens=40)
        assert drafter.all_accepted_lengths[i] == alone.accepted_lengths


def count_rows(target, seen):
    def keep(module, args, kwargs):
        seen.append(kwargs["input_ids"].shape[0])

    return target.register_forward_pre_hook(keep, with_kwargs=True)


@rows_may_leave
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_done_leave_the_batch(kind):
    target, _ = material(kind)
    seen: list[int] = []
    handle = count_rows(target, seen)
    run(kind, list(range(ROWS)))
    handle.remove()
    num_rounds = [len(expected_lengths(pattern, NEW, BLOCK)) for pattern in PATTERNS]
    expected = [sum(rounds > step for rounds in num_rounds) for step in range(max(num_rounds))]
    assert seen == [ROWS, *expected]
    assert expected[-1] < 3


@rows_may_leave
def test_rows_that_meet_the_end_token_leave_the_batch():
    target, texts = material("llama")
    rows = [1, 4, 7, 9]
    starts = [len(make_prompts()[row]) for row in rows]
    end = texts[rows[1]][starts[1] + 9]
    stops = []
    for row, start in zip(rows, starts, strict=True):
        new = texts[row][start : start + NEW]
        stops.append(new.index(end) + 1 if end in new else NEW)
    assert min(stops) < NEW
    seen: list[int] = []
    handle = count_rows(target, seen)
    tokens, drafter = run("llama", rows, eos_token_id=end)
    handle.remove()
    for i, row in enumerate(rows):
        lengths = expected_lengths(PATTERNS[row], NEW, BLOCK, stop_at=stops[i])
        assert tokens[i][: stops[i]] == texts[row][starts[i] : starts[i] + stops[i]]
        assert set(tokens[i][stops[i] :]) <= {1}
        assert drafter.all_accepted_lengths[i] == lengths
    rounds = [len(lengths) for lengths in drafter.all_accepted_lengths]
    assert seen == [4, *(sum(count > step for count in rounds) for step in range(max(rounds)))]


class HeldFeatures:
    """What a call's drafter holds of the target's states, looked at right before each draft."""

    def __init__(self, monkeypatch):
        self.num_tokens: list[list[int]] = []
        self.num_extra_bytes: list[int] = []
        self.widths: set[int] = set()
        original = BlockDrafter.logits

        def logits(drafter, *args):
            self.look(drafter._pending.pieces)
            result = original(drafter, *args)
            assert drafter._pending.pieces == []
            return result

        monkeypatch.setattr(BlockDrafter, "logits", logits)

    def look(self, pending):
        num_rows = len(pending[0][1])
        self.num_tokens.append([sum(num_new[row] for _, num_new in pending) for row in range(num_rows)])
        padded = sum(num_rows * max(num_new) * features.shape[-1] for features, num_new in pending)
        storages = {features.untyped_storage().data_ptr(): features.untyped_storage() for features, _ in pending}
        self.num_extra_bytes.append(sum(storage.nbytes() for storage in storages.values()) - 4 * padded)
        self.widths |= {features.shape[-1] for features, _ in pending}


@pytest.mark.parametrize("kind", KINDS)
def test_only_tapped_layers_of_accepted_tokens_are_held_for_the_drafter(kind, monkeypatch):
    target, _ = material(kind)
    held = HeldFeatures(monkeypatch)
    _, drafter = run(kind, [6], max_new_tokens=40)
    # The prompt, then what each round committed.
    expected = [[len(make_prompts()[6])]] + [[length] for length in drafter.accepted_lengths]
    assert held.num_tokens == expected[: len(held.num_tokens)]
    assert len(held.num_tokens) > 5
    assert held.widths == {3 * 32}
    assert set(held.num_extra_bytes) == {0}


@rows_may_leave
def test_rows_hold_their_own_accepted_tokens_and_no_rejected_ones(monkeypatch):
    held = HeldFeatures(monkeypatch)
    rows = [2, 5, 8, 13]
    _, drafter = run("llama", rows, max_new_tokens=40)
    lengths = [[len(make_prompts()[row])] + drafter.all_accepted_lengths[i] for i, row in enumerate(rows)]
    for step, num_tokens in enumerate(held.num_tokens):
        # A row has left once its last round is over.
        assert num_tokens == [row[step] for row in lengths if len(row) > step + 1]
    assert set(held.num_extra_bytes) == {0}


def test_features_of_rounds_without_a_draft_wait_for_the_next_one(monkeypatch):
    held = HeldFeatures(monkeypatch)
    original = RecordingDrafter.forward
    failing = iter([False, True] + [False] * 99)

    def forward(drafter, *args, **kwargs):
        if next(failing):
            raise RuntimeError("planned")
        return original(drafter, *args, **kwargs)

    monkeypatch.setattr(RecordingDrafter, "forward", forward)
    tokens, drafter = run("llama", [3], max_new_tokens=60)
    _, texts = material("llama")
    start = len(make_prompts()[3])
    assert tokens[0] == texts[3][start : start + 60]
    lengths = drafter.accepted_lengths
    next_draft = next(step for step, proposals in enumerate(drafter.proposals) if step > 1 and proposals)
    assert next_draft > 8
    assert held.num_tokens[:3] == [[start], [lengths[0]], [sum(lengths[:next_draft])]]
