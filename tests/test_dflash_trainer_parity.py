"""Training and generation mean the same: hidden states of single blocks, and acceptance of a learned drafter."""

import contextlib
import copy
import itertools
from collections.abc import Iterator

import pytest
import reference_dflash
import torch
from conftest import make_tiny_target
from tiny_material import make_drafter_config, make_text_rows, make_trainer

from dflash_hf import DFlashDraftModel
from dflash_hf.decoding_dflash import DecodeCall
from dflash_hf.trainer.block_mask import block_positions

BLOCK, PROMPT = 8, 11


@pytest.fixture
def rounds(monkeypatch) -> list[tuple[int, list[int]]]:
    """Anchor and proposals of every round of `generate()` that drafts."""
    found: list[tuple[int, list[int]]] = []
    propose = DecodeCall._propose

    def recording(self):
        tree, scores = propose(self)
        if tree.num_nodes > 1:
            found.append((self.text.length(0) - 1, tree.tokens[0, 1:].tolist()))
        return tree, scores

    monkeypatch.setattr(DecodeCall, "_propose", recording)
    return found


@contextlib.contextmanager
def record_hidden_states(drafter) -> Iterator[list[torch.Tensor]]:
    found: list[torch.Tensor] = []
    hook = drafter.register_forward_hook(lambda module, args, output: found.append(output.last_hidden_state.detach()))
    yield found
    hook.remove()


def generate(target, drafter, prompt: list[int], num_tokens: int) -> list[int]:
    input_ids = torch.tensor([prompt])
    output = target.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        assistant_model=drafter,
        num_assistant_tokens=BLOCK - 1,
        max_new_tokens=num_tokens,
        do_sample=False,
    )
    return output[0].tolist()


def batch_at(trainer, row: dict, anchors: list[int]) -> dict[str, torch.Tensor]:
    """A batch of one row with the given anchors, in place of random ones."""
    batch = trainer.data_collator([row])
    loss_mask = [1] * len(row["input_ids"])
    targets = [
        reference_dflash.block_targets(row["input_ids"], loss_mask, anchor, [0.0] + [1.0] * (BLOCK - 1))
        for anchor in anchors
    ]
    batch["anchors"] = torch.tensor([anchors])
    batch["is_valid"] = torch.ones(1, len(anchors), dtype=torch.bool)
    batch["labels"] = torch.tensor([[[label or 0 for label in labels] for labels, _ in targets]])
    batch["weights"] = torch.tensor([[weights for _, weights in targets]])
    batch["context_starts"] = torch.zeros(1, len(anchors), dtype=torch.long)
    batch["active"] = batch["weights"].flatten().nonzero()[:, 0]
    return batch


def script_proposals(monkeypatch, text: list[int]) -> None:
    """Replaces proposals so that 0, 1, 2, ... of them are right; the drafter still runs and fills its cache."""
    choose_proposals = DecodeCall._choose_proposals
    counts = itertools.cycle(range(BLOCK))

    def scripted(self, logits):
        proposals, scores = choose_proposals(self, logits)
        first, num_right = self.text.length(0), next(counts)
        for slot in range(proposals.shape[1]):
            right = text[first + slot]
            proposals[0, slot] = right if slot < num_right else (right + 1) % 90
        return proposals, scores

    monkeypatch.setattr(DecodeCall, "_choose_proposals", scripted)


RULES = {
    "full": {"layer_types": ["full_attention"] * 2},
    "causal": {"layer_types": ["full_attention"] * 2, "is_causal": True},
    "sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5},
    "wide sliding": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 12},
    "bidirectional sliding": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5, "is_causal": False},
}


@pytest.mark.parametrize("rule", RULES)
def test_training_forward_at_an_anchor_equals_generations_forward_there(tmp_path, monkeypatch, rounds, rule):
    target = make_tiny_target()
    config = make_drafter_config(target, num_hidden_layers=2, num_target_features=3, **RULES[rule])
    row = make_text_rows(target, 1, prompt_length=PROMPT, answer_length=40)[0]
    trainer = make_trainer(tmp_path, [row], target=target, config=config, init="random")
    drafter = DFlashDraftModel(copy.deepcopy(config)).eval()
    drafter.load_state_dict(trainer.model.state_dict())
    drafter.set_attn_implementation("sdpa")

    script_proposals(monkeypatch, row["input_ids"])
    with record_hidden_states(drafter) as drafted:
        assert generate(target, drafter, row["input_ids"][:PROMPT], 40) == row["input_ids"]
    anchors = [anchor for anchor, _ in rounds]
    # The first answer token is an anchor, and rounds commit different numbers of tokens.
    assert anchors[0] == PROMPT
    assert len(set(map(int.__sub__, anchors[1:], anchors[:-1]))) > 4
    assert len(drafted) == len(anchors)

    trainer.model.eval()
    with torch.no_grad(), record_hidden_states(trainer.model) as trained:
        trainer.block_loss(trainer.model, batch_at(trainer, trainer.train_dataset[0], anchors))
    (trained_blocks,) = trained
    trained_blocks = trained_blocks.view(len(anchors), BLOCK, -1)
    head = target.get_output_embeddings()
    for anchor, trained_block, drafted_block in zip(anchors, trained_blocks, drafted, strict=True):
        torch.testing.assert_close(trained_block, drafted_block[0], rtol=0, atol=1e-4)
        torch.testing.assert_close(head(trained_block), head(drafted_block[0]), rtol=0, atol=1e-4)
        plain, _ = reference_dflash.draft_block(drafter, target, torch.tensor([row["input_ids"]]), anchor)
        torch.testing.assert_close(drafted_block[0], plain, rtol=0, atol=1e-4)


def test_first_round_of_generation_has_an_anchor_that_training_can_draw(tmp_path, rounds):
    target = make_tiny_target()
    row = make_text_rows(target, 1, prompt_length=PROMPT, answer_length=20)[0]
    trainer = make_trainer(tmp_path, [row], target=target, num_anchors=50)
    generate(target, trainer.model, row["input_ids"][:PROMPT], 20)
    batch = trainer.data_collator([trainer.train_dataset[0]])
    assert rounds[0][0] == PROMPT
    assert PROMPT in batch["anchors"][batch["is_valid"]].tolist()


def test_training_positions_are_those_that_generation_counts(tmp_path):
    target = make_tiny_target()
    row = make_text_rows(target, 1, prompt_length=PROMPT, answer_length=20)[0]
    trainer = make_trainer(tmp_path, [row], target=target)
    positions = []
    trainer.model.rotary_emb.register_forward_pre_hook(lambda module, args: positions.append(args[1].tolist()[0]))
    generate(target, trainer.model, row["input_ids"][:PROMPT], 2 * BLOCK)
    assert positions[0] == list(range(PROMPT + BLOCK))
    # In training the anchor is a column of the context, too, though its block does not see it.
    trained = block_positions(torch.tensor([[PROMPT]]), torch.arange(PROMPT + 1)[None], BLOCK)[0].tolist()
    assert trained[:PROMPT] + trained[PROMPT + 1 :] == positions[0]


def test_learned_drafter_is_accepted_live_as_often_as_it_was_right_in_training(tmp_path, rounds, record_property):
    """A drafter that has learned eight texts: live acceptance per slot against accuracy on the same texts."""
    target = make_tiny_target()
    config = make_drafter_config(target, num_hidden_layers=2, num_target_features=3)
    prompt_length, num_tokens = 6, 5 * BLOCK + 1
    rows = make_text_rows(target, 8, prompt_length=prompt_length, answer_length=num_tokens)
    trainer = make_trainer(
        tmp_path,
        rows,
        target=target,
        config=config,
        eval_rows=rows,
        per_device_train_batch_size=8,
        num_anchors=64,
        num_train_epochs=140,
        learning_rate=8e-3,
        logging_steps=40,
    )
    trainer.train()
    figures = trainer.evaluate()
    trained = torch.tensor([figures[f"eval_accuracy_slot_{slot}"] for slot in range(1, BLOCK)])

    live_hits, forced_hits, lengths = [], [], []
    trainer.model.eval()
    for index, row in enumerate(rows):
        rounds.clear()
        text = generate(target, trainer.model, row["input_ids"][:prompt_length], num_tokens)
        assert text == row["input_ids"]
        # The last rounds are cut by the length limit, as cut blocks are left out of the training figures.
        whole = [(anchor, proposals) for anchor, proposals in rounds if len(proposals) == BLOCK - 1]
        for anchor, proposals in whole:
            answer = text[anchor + 1 : anchor + BLOCK]
            live_hits.append([p == a for p, a in zip(proposals, answer, strict=True)])
            lengths.append(reference_dflash.accepted_length(proposals, answer))
        batch = batch_at(trainer, trainer.train_dataset[index], [anchor for anchor, _ in whole])
        with torch.no_grad():
            forced_hits += trainer.block_loss(trainer.model, batch).is_correct[0, :, 1:].tolist()
    live, forced = torch.tensor(live_hits).float(), torch.tensor(forced_hits).float()
    accepted = live.cumprod(dim=1).mean(dim=0)
    tau = sum(lengths) / len(lengths)
    record_property("training_accuracy", trained.tolist())
    record_property("live_hits", live.mean(dim=0).tolist())
    record_property("live_acceptance", accepted.tolist())
    record_property("tau", tau)
    print(f"\ntraining accuracy {trained.tolist()}\nlive hits {live.mean(dim=0).tolist()}")
    print(f"live acceptance {accepted.tolist()}\ntau {tau:.3f} over {len(lengths)} rounds")

    assert torch.equal(live, forced)
    torch.testing.assert_close(live.mean(dim=0), trained, rtol=0, atol=0.03)
    torch.testing.assert_close(accepted, trained, rtol=0, atol=0.03)
    assert tau >= 0.9 * BLOCK


def test_half_learned_drafter_is_right_live_exactly_where_training_says_so(tmp_path, rounds):
    target = make_tiny_target()
    rows = make_text_rows(target, 2, prompt_length=6, answer_length=60)
    trainer = make_trainer(
        tmp_path, rows, target=target, num_anchors=64, max_steps=60, learning_rate=8e-3, logging_steps=60
    )
    trainer.train()
    trainer.model.eval()
    shares = []
    for index, row in enumerate(rows):
        rounds.clear()
        text = generate(target, trainer.model, row["input_ids"][:6], 60)
        assert text == row["input_ids"]
        whole = [(anchor, proposals) for anchor, proposals in rounds if len(proposals) == BLOCK - 1]
        batch = batch_at(trainer, trainer.train_dataset[index], [anchor for anchor, _ in whole])
        with torch.no_grad():
            forced = trainer.block_loss(trainer.model, batch).is_correct[0, :, 1:]
        live = torch.tensor([[p == a for p, a in zip(ps, text[a0 + 1 :], strict=False)] for a0, ps in whole])
        assert torch.equal(live, forced)
        shares.append(live.float().mean().item())
    assert all(0.05 < share < 0.95 for share in shares)
