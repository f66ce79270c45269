import pytest
import torch

from dflash_hf.eval.forced_acceptance import ForcedProposals, forced_options
from dflash_hf.eval.methods import decoder

NEW = 41


@pytest.fixture
def inputs():
    input_ids = torch.tensor([[5, 17, 3, 42, 8, 29]])
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}


@pytest.mark.parametrize("accept_length", [1, 4, 8])
def test_forced_acceptance_gives_exactly_that_tau_and_the_plain_answer(
    accept_length, tiny_target, tiny_drafter, inputs
):
    plain = decoder("plain", tiny_target)(inputs, NEW, 0.0)
    forced = decoder("forced", tiny_target, tiny_drafter, simulate_accept_len=accept_length)
    answer = forced(inputs, NEW, 0.0, plain.token_ids)
    assert answer.tau == accept_length
    assert answer.token_ids == plain.token_ids
    # Whole blocks, until less than one is left of the answer.
    assert [n for n in answer.num_proposals if n < 7] == list(range(6, -1, -1))[accept_length - 1 :: accept_length]


def test_known_proposals_are_accepted_by_verification_itself(tiny_target, tiny_drafter, inputs, monkeypatch):
    monkeypatch.setattr("dflash_hf.eval.forced_acceptance.ForcedChain.child", _child_of_a_plain_tree)
    plain = decoder("plain", tiny_target)(inputs, NEW, 0.0)
    answer = decoder("forced", tiny_target, tiny_drafter, simulate_accept_len=4)(inputs, NEW, 0.0, plain.token_ids)
    assert answer.token_ids == plain.token_ids
    assert min(answer.accepted_lengths) == 4


def _child_of_a_plain_tree(self, row, node, token):
    return self._children[row].get((node, token))


def test_lengths_between_whole_numbers_alternate_to_the_right_mean(tiny_target, tiny_drafter, inputs):
    answer = decoder("forced", tiny_target, tiny_drafter, simulate_accept_len=2.5)(inputs, 41, 0.0)
    assert answer.accepted_lengths == [2, 3] * 8


def test_without_a_known_answer_the_length_is_forced_all_the_same(tiny_target, tiny_drafter, inputs):
    assert decoder("whole_block", tiny_target, tiny_drafter)(inputs, NEW, 0.0).tau < 2
    assert decoder("forced", tiny_target, tiny_drafter, simulate_accept_len=4)(inputs, NEW, 0.0).tau == 4


@pytest.mark.parametrize("accept_length", [0.5, 8.5])
def test_a_length_that_no_block_gives_is_an_error(accept_length, tiny_drafter):
    with pytest.raises(ValueError, match=f"is {accept_length}, but a block of 8"):
        forced_options(tiny_drafter, accept_length)


def test_the_proposals_come_from_the_answer_at_the_place_reached():
    builder = ForcedProposals(3, block_size=4, answer=[10, 11, 12, 13, 14, 15])
    logits = torch.zeros(1, 3, 20)
    assert builder(logits, torch.tensor([[10]])).tokens.tolist() == [[10, 11, 12, 0]]
    assert builder(logits, torch.tensor([[13]])).tokens.tolist() == [[13, 14, 15, 0]]
