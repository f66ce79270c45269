import math

import pytest
import reference_dflash
import torch
from torch import nn

from dflash_hf.trainer.loss import decay_for_block_size, decay_weights, dflash_loss, sample_candidates

VOCABULARY, WIDTH = 50, 12
PAPER_WEIGHTS = {
    (16, 7): [1, 0.867, 0.751, 0.651, 0.565, 0.490, 0.424, 0.368, 0.319, 0.276, 0.240, 0.208, 0.180, 0.156, 0.135],
    (10, 5): [1, 0.819, 0.670, 0.549, 0.449, 0.368, 0.301, 0.247, 0.202],
    (8, 4): [1, 0.779, 0.607, 0.472, 0.368, 0.287, 0.223],
}


@pytest.fixture
def head() -> nn.Linear:
    return nn.Linear(WIDTH, VOCABULARY, bias=False).requires_grad_(False)


@pytest.fixture
def slots() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states (2, 3, 5, D), labels and weights, of which a third is 0."""
    shape = (2, 3, 5)
    weights = torch.rand(shape) * (torch.rand(shape) > 0.33)
    return 3 * torch.randn(*shape, WIDTH), torch.randint(VOCABULARY, shape), weights


@pytest.mark.parametrize(("block_size", "gamma"), PAPER_WEIGHTS)
def test_decay_weights_are_the_papers(block_size, gamma):
    weights = decay_weights(block_size, gamma)
    assert weights.shape == (block_size,) and weights.dtype == torch.float32
    assert weights[0] == 0 and weights[1] == 1
    torch.testing.assert_close(weights[1:], torch.tensor(PAPER_WEIGHTS[block_size, gamma]), rtol=0, atol=5.1e-4)
    expected = [reference_dflash.decay_weight(slot, gamma) for slot in range(block_size)]
    torch.testing.assert_close(weights, torch.tensor(expected))


def test_infinite_gamma_weighs_all_proposals_alike():
    assert decay_weights(4, math.inf).tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize(("block_size", "gamma"), [(8, 0.0), (8, -1.0), (1, 4.0)])
def test_decay_weights_refuse_what_has_no_meaning(block_size, gamma):
    with pytest.raises(ValueError, match="gamma.*block_size"):
        decay_weights(block_size, gamma)


def test_decay_for_block_size_is_the_papers_and_raises_elsewhere():
    assert [decay_for_block_size(size) for size in (16, 10, 8)] == [7, 5, 4]
    with pytest.raises(ValueError, match="`block_size` 12.*loss_decay"):
        decay_for_block_size(12)


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 512])
def test_chunked_loss_equals_the_plain_twin_in_value_and_gradient(head, slots, chunk_size):
    hidden_states, labels, weights = slots
    ours, plain = hidden_states.clone().requires_grad_(), hidden_states.clone().requires_grad_()
    output = dflash_loss(ours, labels, weights, head, chunk_size=chunk_size)
    loss_sum, weight_sum, is_correct = reference_dflash.weighted_loss(plain, labels, weights, head)
    torch.testing.assert_close(output.loss_sum, loss_sum)
    torch.testing.assert_close(output.weight_sum, weight_sum)
    assert torch.equal(output.is_correct.flatten(), is_correct)
    assert output.acceptance is None
    # The factor stands for the division by the step's weights, which comes after.
    (0.37 * output.loss_sum).backward()
    (0.37 * loss_sum).backward()
    torch.testing.assert_close(ours.grad, plain.grad)


def test_slots_without_weight_have_exactly_zero_gradient_and_no_hit(head, slots):
    hidden_states, _, weights = slots
    labels = head(hidden_states).argmax(dim=-1)
    hidden_states.requires_grad_()
    output = dflash_loss(hidden_states, labels, weights, head, chunk_size=4)
    output.loss_sum.backward()
    has_weight = weights > 0
    assert 0 < has_weight.sum() < has_weight.numel()
    assert (hidden_states.grad[~has_weight] == 0).all()
    assert (hidden_states.grad[has_weight].abs().sum(dim=-1) > 0).all()
    assert torch.equal(output.is_correct, has_weight)


def test_labels_of_slots_without_weight_do_not_matter(head, slots):
    hidden_states, labels, weights = slots
    before = dflash_loss(hidden_states, labels, weights, head)
    after = dflash_loss(hidden_states, labels.masked_fill(weights == 0, 49), weights, head)
    assert torch.equal(before.loss_sum, after.loss_sum)
    assert torch.equal(before.is_correct, after.is_correct)


def test_head_sees_supervised_slots_only_and_never_more_than_a_chunk(head, slots):
    hidden_states, labels, weights = slots
    sizes = []

    def counting_head(chunk):
        sizes.append(chunk.shape[0])
        return head(chunk)

    dflash_loss(hidden_states.requires_grad_(), labels, weights, counting_head, chunk_size=4).loss_sum.backward()
    assert max(sizes) <= 4
    assert sum(sizes) == int((weights > 0).sum())


def test_frozen_head_gets_no_gradient_even_if_it_requires_one(head, slots):
    hidden_states, labels, weights = slots
    head.requires_grad_()
    dflash_loss(hidden_states.requires_grad_(), labels, weights, head).loss_sum.backward()
    assert head.weight.grad is None
    assert hidden_states.grad.abs().sum() > 0


@pytest.mark.parametrize("num_blocks", [0, 3])
def test_batch_without_supervision_has_zero_loss_and_a_zero_gradient(head, num_blocks):
    hidden_states = torch.randn(1, num_blocks, 4, WIDTH, requires_grad=True)
    labels, weights = torch.zeros(1, num_blocks, 4, dtype=torch.long), torch.zeros(1, num_blocks, 4)
    output = dflash_loss(hidden_states, labels, weights, head)
    output.loss_sum.backward()
    assert output.loss_sum == 0 and output.weight_sum == 0
    assert output.is_correct.shape == labels.shape and not output.is_correct.any()
    assert torch.equal(hidden_states.grad, torch.zeros_like(hidden_states))


def test_loss_without_gradient_has_the_same_value(head, slots):
    hidden_states, labels, weights = slots
    expected = dflash_loss(hidden_states.clone().requires_grad_(), labels, weights, head, chunk_size=4)
    with torch.no_grad():
        output = dflash_loss(hidden_states, labels, weights, head, chunk_size=4)
    assert not output.loss_sum.requires_grad
    torch.testing.assert_close(output.loss_sum, expected.loss_sum.detach())


@pytest.mark.parametrize("num_negatives", [VOCABULARY, 10 * VOCABULARY])
def test_sampled_loss_with_every_negative_drawn_is_the_full_loss(head, slots, num_negatives):
    hidden_states, labels, weights = slots
    ours, full = hidden_states.clone().requires_grad_(), hidden_states.clone().requires_grad_()
    candidates, new_labels, offset = sample_candidates(
        labels, VOCABULARY, num_negatives, generator=torch.Generator().manual_seed(0)
    )
    assert sorted(candidates.tolist()) == list(range(VOCABULARY))
    assert torch.equal(offset, torch.zeros(VOCABULARY))
    rows = head.weight[candidates]
    sampled = dflash_loss(ours, new_labels, weights, lambda chunk: chunk @ rows.T, logit_offset=offset)
    expected = dflash_loss(full, labels, weights, head)
    torch.testing.assert_close(sampled.loss_sum, expected.loss_sum)
    assert torch.equal(sampled.is_correct, expected.is_correct)
    sampled.loss_sum.backward()
    expected.loss_sum.backward()
    torch.testing.assert_close(ours.grad, full.grad)


def test_candidates_hold_every_label_once_and_new_labels_point_at_them():
    labels = torch.tensor([[7, 3, 3], [9, 7, 0]])
    candidates, new_labels, offset = sample_candidates(
        labels, VOCABULARY, 20, generator=torch.Generator().manual_seed(0)
    )
    assert torch.equal(candidates[new_labels], labels)
    assert len(set(candidates.tolist())) == len(candidates)
    num_negatives = len(candidates) - 4
    assert (offset[:4] == 0).all()
    torch.testing.assert_close(offset[4:], torch.full((num_negatives,), math.log(46 / num_negatives)))


def test_sampled_denominator_is_unbiased():
    draws, labels, logits = 4000, torch.tensor([3, 8, 8, 21]), torch.randn(VOCABULARY)
    generator = torch.Generator().manual_seed(0)
    estimates = []
    for _ in range(draws):
        candidates, _, offset = sample_candidates(labels, VOCABULARY, 25, generator=generator)
        estimates.append((logits[candidates] + offset).double().exp().sum())
    estimates = torch.stack(estimates)
    standard_error = estimates.std() / draws**0.5
    full = logits.double().exp().sum()
    assert standard_error < 0.01 * full
    assert (estimates.mean() - full).abs() < 4 * standard_error
