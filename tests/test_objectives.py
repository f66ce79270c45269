import pytest
import reference_dflash
import torch
from torch import nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from dflash_hf.trainer.loss import dflash_loss, sample_candidates
from dflash_hf.trainer.objectives import d_pace_weights, slot_losses

VOCABULARY, WIDTH, BLOCK = 40, 12, 5
OBJECTIVES = ("cross_entropy", "kl", "tv")


@pytest.fixture
def head() -> nn.Linear:
    return nn.Linear(WIDTH, VOCABULARY, bias=False).requires_grad_(False)


@pytest.fixture
def blocks(head) -> dict[str, torch.Tensor]:
    """Two rows of three blocks whose supervised slots are 1 to 4, 1, 1 to 2 / none, 1 to 4, 1 to 3."""
    lengths = torch.tensor([[4, 1, 2], [0, 4, 3]])
    slots = torch.arange(BLOCK)
    weights = torch.tensor([0.0, 1.0, 0.7, 0.5, 0.4]) * (slots <= lengths[..., None])
    return {
        "hidden_states": 2 * torch.randn(2, 3, BLOCK, WIDTH),
        "labels": torch.randint(VOCABULARY, (2, 3, BLOCK)),
        "weights": weights,
        "teacher_logits": 2 * torch.randn(2, 3, BLOCK, VOCABULARY),
    }


def teacher_of(blocks):
    flat = blocks["teacher_logits"].flatten(0, 2)
    return lambda index: flat[index]


def run_loss(blocks, head, *, needs_teacher=True, **options):
    states = blocks["hidden_states"].clone().requires_grad_()
    teacher = teacher_of(blocks) if needs_teacher else None
    output = dflash_loss(states, blocks["labels"], blocks["weights"], head, teacher=teacher, **options)
    output.loss_sum.backward()
    return output, states.grad


@pytest.mark.parametrize("d_pace_alpha", [None, 0.5])
@pytest.mark.parametrize("label_source", ["data", "target"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_objective_equals_its_plain_twin_in_value_and_gradient(head, blocks, objective, label_source, d_pace_alpha):
    options = {"objective": objective, "label_source": label_source, "d_pace_alpha": d_pace_alpha}
    # A target that the drafter is near, so that they sometimes agree.
    blocks["teacher_logits"] = 0.3 * blocks["teacher_logits"] + head(blocks["hidden_states"])
    plain = blocks["hidden_states"].clone().requires_grad_()
    loss_sum, weight_sum, is_correct = reference_dflash.weighted_loss(
        plain, blocks["labels"], blocks["weights"], head, teacher_logits=blocks["teacher_logits"], **options
    )
    loss_sum.backward()
    for chunk_size in (1, 3, 512):
        output, gradient = run_loss(blocks, head, chunk_size=chunk_size, **options)
        torch.testing.assert_close(output.loss_sum, loss_sum)
        torch.testing.assert_close(output.weight_sum, weight_sum)
        torch.testing.assert_close(gradient, plain.grad, rtol=1e-4, atol=1e-6)
        assert torch.equal(output.is_correct.flatten(), is_correct)
    if label_source == "target":
        assert 0 < is_correct.sum() < (blocks["weights"] > 0).sum()


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_gradient_in_the_logits_is_autograds(objective, scale):
    logits = (scale * torch.randn(7, VOCABULARY, dtype=torch.float64)).requires_grad_()
    teacher_logits = scale * torch.randn(7, VOCABULARY, dtype=torch.float64)
    labels = torch.randint(VOCABULARY, (7,))
    slots, gradient = slot_losses(objective, logits.detach(), labels, teacher_logits)
    losses = torch.stack(
        [
            reference_dflash.slot_loss(objective, *row)
            for row in zip(logits, labels.tolist(), teacher_logits, strict=True)
        ]
    )
    torch.testing.assert_close(slots.losses, losses.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(losses.sum(), logits)[0])


def test_large_logits_neither_overflow_nor_underflow():
    logits, teacher_logits = torch.tensor([[300.0, 0.0, -300.0]]), torch.tensor([[0.0, 300.0, -300.0]])
    for objective, loss in (("cross_entropy", 300.0), ("kl", 300.0), ("tv", 1.0)):
        slots, gradient = slot_losses(objective, logits, torch.tensor([1]), teacher_logits)
        torch.testing.assert_close(slots.losses, torch.tensor([loss]))
        assert gradient.isfinite().all()
        assert slots.acceptance == 0 and slots.label_probability == 0


def test_objectives_are_zero_and_flat_where_the_drafter_is_the_target():
    logits = 3 * torch.randn(6, VOCABULARY)
    for objective in ("kl", "tv"):
        slots, gradient = slot_losses(objective, logits, torch.zeros(6, dtype=torch.long), logits.clone())
        torch.testing.assert_close(slots.losses, torch.zeros(6), rtol=0, atol=1e-6)
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-6)
        torch.testing.assert_close(slots.acceptance, torch.ones(6))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_acceptance_is_that_of_speculative_sampling_and_never_of_slots_without_weight(head, blocks, objective):
    output, _ = run_loss(blocks, head, objective=objective, chunk_size=4)
    logits = head(blocks["hidden_states"])
    for place in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(BLOCK)).tolist():
        place = tuple(place)
        expected = 0.0
        if blocks["weights"][place] > 0:
            expected = reference_dflash.acceptance(logits[place], blocks["teacher_logits"][place])
        assert output.acceptance[place].item() == pytest.approx(expected, abs=1e-6)
    assert output.acceptance.max() > 0.01


def test_teacher_is_asked_for_supervised_slots_once_and_never_for_more_than_a_chunk(head, blocks):
    asked = []

    def teacher(index):
        asked.append(index)
        return teacher_of(blocks)(index)

    states = blocks["hidden_states"].requires_grad_()
    dflash_loss(states, blocks["labels"], blocks["weights"], head, objective="kl", teacher=teacher, chunk_size=4)
    assert max(index.shape[0] for index in asked) <= 4
    assert torch.equal(torch.cat(asked), blocks["weights"].flatten().nonzero()[:, 0])


def test_d_pace_weights_by_hand():
    probability = torch.tensor([[0.9, 0.5, 0.2, 0.8], [0.9, 0.5, 0.2, 0.8]])
    is_supervised = torch.tensor([[False, True, True, True], [False, True, False, False]])
    weights = d_pace_weights(probability, is_supervised, alpha=0.5)
    # smoothed: 0.75, 0.6, 0.9; their products: 0.75, 0.45, 0.405
    expected = torch.tensor([[0.0, 1.605, 0.855, 0.405], [0.0, 0.75, 0.0, 0.0]])
    torch.testing.assert_close(weights, expected)


def test_d_pace_that_smooths_everything_away_counts_the_slots_that_follow():
    weights = d_pace_weights(torch.rand(6), torch.tensor([0, 1, 1, 1, 1, 1]).bool(), alpha=1.0)
    assert weights.tolist() == [0, 5, 4, 3, 2, 1]


@pytest.mark.parametrize("d_pace_alpha", [None, 0.5])
def test_sums_and_gradients_do_not_depend_on_how_blocks_are_split(head, blocks, d_pace_alpha):
    together, gradient = run_loss(blocks, head, d_pace_alpha=d_pace_alpha, chunk_size=7)
    parts = [
        run_loss({name: tensor[:, one : one + 1] for name, tensor in blocks.items()}, head, d_pace_alpha=d_pace_alpha)
        for one in range(3)
    ]
    torch.testing.assert_close(sum(output.loss_sum for output, _ in parts), together.loss_sum)
    torch.testing.assert_close(sum(output.weight_sum for output, _ in parts), together.weight_sum)
    torch.testing.assert_close(torch.cat([part for _, part in parts], dim=1), gradient)


def test_active_slots_may_be_given_and_then_nothing_depends_on_values(head, blocks):
    """Fake tensors have no values: whatever would read one, as a GPU's queue would have to stop for, raises."""
    active = blocks["weights"].flatten().nonzero()[:, 0]
    expected, gradient = run_loss(blocks, head, objective="kl", d_pace_alpha=0.5, chunk_size=4)
    output, own_gradient = run_loss(blocks, head, objective="kl", d_pace_alpha=0.5, chunk_size=4, active=active)
    assert torch.equal(output.loss_sum, expected.loss_sum) and torch.equal(gradient, own_gradient)
    for objective in OBJECTIVES:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = {name: mode.from_tensor(tensor) for name, tensor in blocks.items()}
            options = {"objective": objective, "label_source": "target", "d_pace_alpha": 0.5}
            output, _ = run_loss(fake, head, active=mode.from_tensor(active), **options)
            with pytest.raises(DynamicOutputShapeException):
                run_loss(fake, head, **options)
        assert output.loss_sum.shape == () and output.is_correct.shape == blocks["labels"].shape


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_batch_without_supervision_has_zero_loss_that_reaches_the_graph_and_asks_no_one(objective):
    def nobody(_):
        raise AssertionError("there is nothing to ask for")

    states = torch.randn(1, 2, BLOCK, WIDTH, requires_grad=True)
    labels, weights = torch.zeros(1, 2, BLOCK, dtype=torch.long), torch.zeros(1, 2, BLOCK)
    output = dflash_loss(states, labels, weights, nobody, objective=objective, teacher=nobody, d_pace_alpha=0.5)
    output.loss_sum.backward()
    assert output.loss_sum == 0 and torch.equal(states.grad, torch.zeros_like(states))
    assert not output.is_correct.any() and torch.equal(output.acceptance, weights)


def test_bfloat16_head_gives_float32_sums_near_the_exact_ones(head, blocks):
    coarse_head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=torch.bfloat16)
    coarse_head.load_state_dict(head.state_dict())
    for objective in OBJECTIVES:
        exact, gradient = run_loss(blocks, head, objective=objective)
        states = blocks["hidden_states"].clone().requires_grad_()
        output = dflash_loss(
            states,
            blocks["labels"],
            blocks["weights"],
            lambda chunk: coarse_head(chunk.bfloat16()),
            objective=objective,
            teacher=lambda index: teacher_of(blocks)(index).bfloat16(),
        )
        output.loss_sum.backward()
        assert output.loss_sum.dtype == torch.float32
        torch.testing.assert_close(output.loss_sum, exact.loss_sum, rtol=0.01, atol=0.0)
        torch.testing.assert_close(states.grad, gradient, rtol=0.1, atol=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "hinge"}, "`objective` is 'hinge'.*cross_entropy.*kl.*tv"),
        ({"label_source": "drafter"}, "`label_source` is 'drafter'.*data.*target"),
        ({"d_pace_alpha": 0.0}, "`d_pace_alpha` is 0.0.*above 0"),
        ({"d_pace_alpha": 1.5}, "`d_pace_alpha` is 1.5.*at most 1"),
        ({"objective": "kl"}, "`objective` 'kl' needs the target's logits.*`teacher`"),
        ({"label_source": "target"}, "`label_source` 'target' needs the target's logits.*`teacher`"),
    ],
)
def test_options_without_meaning_are_refused_by_name(head, blocks, options, message):
    with pytest.raises(ValueError, match=message):
        run_loss(blocks, head, needs_teacher=False, **options)


@pytest.mark.parametrize(
    ("options", "needs_teacher", "name"),
    [
        ({"objective": "kl"}, True, "`objective` 'kl'"),
        ({"objective": "tv", "label_source": "target"}, False, "`objective` 'tv'"),
        ({"label_source": "target"}, True, "`label_source` 'target'"),
        ({}, True, "`teacher`"),
    ],
)
def test_sampled_candidates_go_with_cross_entropy_on_the_datas_labels_only(head, blocks, options, needs_teacher, name):
    *_, offset = sample_candidates(blocks["labels"], VOCABULARY, 9, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match=f"{name} needs the whole vocabulary, but `logit_offset`"):
        run_loss(blocks, head, needs_teacher=needs_teacher, logit_offset=offset, **options)
