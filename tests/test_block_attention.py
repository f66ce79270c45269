import copy

import pytest
import reference_dflash
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo import config as compiler_config
from torch.nn.attention import flex_attention as torch_flex
from transformers.integrations import flex_attention as transformers_flex

from dflash_hf import DFlashDraftModel
from dflash_hf.trainer import block_attention as block_attention_file
from dflash_hf.trainer import block_mask
from dflash_hf.trainer.block_attention import BLOCK_ATTENTION, attention_implementation, block_attention
from dflash_hf.trainer.block_mask import (
    ATTENTION_FORMS,
    attention_masks,
    block_layout,
    block_mask_dense,
    block_mask_flex,
    block_positions,
)
from dflash_hf.trainer.loss import dflash_loss

# Overlapping blocks, one at position 0, one past the end, unused ones; 13 is no multiple of the block.
ANCHORS = torch.tensor([[3, 5, 6, 12], [0, 7, 0, 0]])
IS_VALID = torch.tensor([[True, True, True, True], [True, True, False, False]])
# Documents begin at columns 0, 5 and 9, and at 0 and 6.
CONTEXT_STARTS = torch.tensor([[0, 5, 5, 9], [0, 6, 0, 0]])
DOCUMENT_POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 6]])
CONTEXT, BLOCK, HIDDEN, VOCABULARY = 13, 4, 32, 30
RULES = [(None, False), (None, True), (3, False), (3, True), (50, True)]


@pytest.fixture(params=["narrow pieces", "wide pieces"])
def pieces(request, monkeypatch) -> str:
    """Pieces as on a CPU, of at most two blocks, or as on a GPU, of one block."""
    monkeypatch.setattr(block_attention_file, "_CPU_SLOTS", 2 * BLOCK)
    monkeypatch.setattr(block_attention_file, "_DEVICE_SCORES", 1)
    if request.param == "wide pieces":
        wide = block_attention_file._wide_pieces
        monkeypatch.setattr(block_attention_file, "_narrow_pieces", lambda layout: wide(layout, 1))
    return request.param


def dense_attention(query, key, value, mask, scaling):
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None], scale=scaling)
    return output.transpose(1, 2)


def sparse_attention(query, key, value, layout, scaling):
    return block_attention(None, query, key, value, layout, scaling=scaling)[0]


def random_states(heads: int, key_heads: int, dtype=torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_slots = ANCHORS.shape[1] * BLOCK
    query = torch.randn(2, heads, num_slots, 6, dtype=dtype)
    key, value = torch.randn(2, 2, key_heads, CONTEXT + num_slots, 6, dtype=dtype)
    return query, key, value


def output_and_gradients(attention, states, mask) -> list[torch.Tensor]:
    tensors = [tensor.clone().requires_grad_() for tensor in states]
    output = attention(*tensors, mask, 0.3)
    output_gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(5)).to(output.dtype)
    return [output, *torch.autograd.grad(output, tensors, output_gradient)]


@pytest.mark.parametrize("context_starts", [None, CONTEXT_STARTS], ids=["one document", "packed"])
@pytest.mark.parametrize(("sliding_window", "is_causal"), RULES)
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (6, 2), (3, 1)])
def test_block_attention_equals_dense_attention_in_output_and_gradients(
    pieces, heads, key_heads, sliding_window, is_causal, context_starts
):
    rule = {"sliding_window": sliding_window, "is_causal": is_causal, "context_starts": context_starts}
    states = random_states(heads, key_heads)
    sparse = output_and_gradients(sparse_attention, states, block_layout(ANCHORS, IS_VALID, CONTEXT, BLOCK, **rule))
    dense = output_and_gradients(dense_attention, states, block_mask_dense(ANCHORS, IS_VALID, CONTEXT, BLOCK, **rule))
    for ours, expected in zip(sparse, dense, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("is_autocast", [False, True])
def test_bfloat16_stays_near_the_exact_output_and_gradients(pieces, is_autocast):
    states = random_states(6, 2, torch.float32)
    layout = block_layout(ANCHORS, IS_VALID, CONTEXT, BLOCK)
    exact = output_and_gradients(sparse_attention, states, layout)
    if not is_autocast:
        states = [state.bfloat16() for state in states]
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        coarse = output_and_gradients(sparse_attention, states, layout)
    assert coarse[0].dtype == torch.bfloat16
    assert {gradient.dtype for gradient in coarse[1:]} == {torch.float32 if is_autocast else torch.bfloat16}
    for ours, expected in zip(coarse, exact, strict=True):
        torch.testing.assert_close(ours.float(), expected, rtol=0, atol=0.02 * expected.abs().max().item())


def test_large_scores_neither_overflow_nor_leak_through_the_mask(pieces):
    query, key, value = random_states(2, 2, torch.float32)
    layout = block_layout(ANCHORS, IS_VALID, CONTEXT, BLOCK)
    output = sparse_attention(300 * query, 300 * key, value, layout, 1.0)
    expected = dense_attention(300 * query, 300 * key, value, block_mask_dense(ANCHORS, IS_VALID, CONTEXT, BLOCK), 1.0)
    torch.testing.assert_close(output, expected)


def test_nothing_of_the_size_of_the_scores_is_kept_for_the_backward():
    states = [state.requires_grad_() for state in random_states(6, 2)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()), lambda _: None):
        output = sparse_attention(*states, block_layout(ANCHORS, IS_VALID, CONTEXT, BLOCK), 0.3)
    assert sorted(kept) == sorted([output.numel(), *(state.numel() for state in states)])


def test_on_a_device_nothing_depends_on_values():
    """Meta tensors have no values: whatever would read one, as a GPU's queue would have to stop for, raises."""
    layout = block_layout(ANCHORS.to("meta"), IS_VALID.to("meta"), CONTEXT, BLOCK, sliding_window=3)
    states = [state.to("meta").requires_grad_() for state in random_states(6, 2)]
    output = sparse_attention(*states, layout, 0.3)
    gradients = torch.autograd.grad(output.sum(), states)
    assert [gradient.shape for gradient in gradients] == [state.shape for state in states]


def test_dropout_is_refused_instead_of_left_out():
    layout = block_layout(ANCHORS, IS_VALID, CONTEXT, BLOCK)
    with pytest.raises(ValueError, match="`attention_dropout` is 0.1.*'sdpa'"):
        block_attention(None, *random_states(2, 2), layout, scaling=1.0, dropout=0.1)


def test_unknown_form_is_refused_and_known_ones_have_an_implementation():
    assert [attention_implementation(form) for form in ATTENTION_FORMS] == [
        BLOCK_ATTENTION,
        "sdpa",
        "eager",
        "flex_attention",
    ]
    with pytest.raises(ValueError, match="`attention` is 'flash'.*blocks.*flex_attention"):
        attention_implementation("flash")


@pytest.fixture
def flex_on_cpu(monkeypatch):
    """flex_attention as plain operations with their own backward, which PyTorch has but lets no CPU user reach."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None, raising=False)
    monkeypatch.setattr(
        transformers_flex,
        "compile_friendly_flex_attention",
        lambda query, key, value, training=False, **kwargs: torch_flex.flex_attention(query, key, value, **kwargs),
    )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("sliding_window", "is_causal"), RULES)
def test_flex_attention_equals_dense_attention_in_output_and_gradients(flex_on_cpu, sliding_window, is_causal):
    rule = {"sliding_window": sliding_window, "is_causal": is_causal, "context_starts": CONTEXT_STARTS}
    states = random_states(4, 2)
    flex = output_and_gradients(
        lambda query, key, value, mask, scaling: torch_flex.flex_attention(
            query, key, value, block_mask=mask, scale=scaling, enable_gqa=True
        ).transpose(1, 2),
        states,
        block_mask_flex(block_layout(ANCHORS, IS_VALID, CONTEXT, BLOCK, **rule)),
    )
    dense = output_and_gradients(dense_attention, states, block_mask_dense(ANCHORS, IS_VALID, CONTEXT, BLOCK, **rule))
    for ours, expected in zip(flex, dense, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


def make_drafter(config, **fields) -> DFlashDraftModel:
    fields = {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 3,
        "block_size": BLOCK,
    } | fields
    return DFlashDraftModel(type(config)(**config.to_dict() | fields))


def loss_and_gradients(drafter, hidden_states, features, loss) -> list[torch.Tensor]:
    parameters = list(drafter.parameters())
    loss_sum = loss(hidden_states)
    return [loss_sum, *torch.autograd.grad(loss_sum, [features, *parameters])]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("context_starts", [torch.zeros_like(ANCHORS), CONTEXT_STARTS], ids=["one document", "packed"])
@pytest.mark.parametrize("is_causal", [None, True, False])
@pytest.mark.parametrize("form", ATTENTION_FORMS)
def test_every_form_trains_as_blocks_that_run_alone(tiny_config, flex_on_cpu, form, is_causal, context_starts):
    """Loss, and gradients of every parameter and of the context features; the twin knows neither mask nor chunks."""
    drafter = make_drafter(tiny_config, is_causal=is_causal)
    plain = copy.deepcopy(drafter)
    drafter.set_attn_implementation(attention_implementation(form))
    plain.set_attn_implementation("sdpa")
    head = nn.Linear(HIDDEN, VOCABULARY).requires_grad_(False)
    noise_embeds = torch.randn(*ANCHORS.shape, BLOCK, HIDDEN)
    features = torch.randn(2, CONTEXT, 3 * HIDDEN, requires_grad=True)
    labels = torch.randint(VOCABULARY, (*ANCHORS.shape, BLOCK))
    weights = torch.tensor([0.0, 1.0, 0.8, 0.6]) * IS_VALID[..., None]
    weights[0, 3, 2:] = 0.0  # past the end
    is_packed = bool(context_starts.any())
    context_positions = DOCUMENT_POSITIONS if is_packed else torch.arange(CONTEXT).expand(2, -1)
    with torch.no_grad():
        masks = attention_masks(
            form, drafter.config, ANCHORS, IS_VALID, CONTEXT, context_starts=context_starts if is_packed else None
        )
    together = drafter(
        noise_embeds=noise_embeds.flatten(1, 2),
        context_hidden_states=features,
        attention_mask=masks,
        position_ids=block_positions(ANCHORS, context_positions, BLOCK),
    ).last_hidden_state
    assert together.isfinite().all()
    ours = loss_and_gradients(
        drafter,
        together.unflatten(1, (-1, BLOCK)),
        features,
        lambda states: dflash_loss(states, labels, weights, head, chunk_size=5).loss_sum,
    )
    alone = reference_dflash.draft_alone(plain, noise_embeds, features, ANCHORS, IS_VALID, context_starts)
    expected = loss_and_gradients(
        plain, alone, features, lambda states: reference_dflash.weighted_loss(states, labels, weights, head)[0]
    )
    for own, twin in zip(ours, expected, strict=True):
        torch.testing.assert_close(own, twin, rtol=1e-3, atol=1e-5)
    assert expected[1].abs().max() > 1e-3


@pytest.mark.long
def test_compiled_flex_attention_equals_dense_attention_and_is_compiled_once(monkeypatch):
    monkeypatch.setattr(block_mask, "is_flex_fused", lambda device: True)
    compiled = torch.compile(torch_flex.flex_attention)

    def compare(anchors, **rule):
        states = random_states(4, 2, torch.float32)
        mask = block_mask_flex(block_layout(anchors, IS_VALID, CONTEXT, BLOCK, **rule))
        output = compiled(*states, block_mask=mask, scale=0.3, enable_gqa=True).transpose(1, 2)
        expected = dense_attention(*states, block_mask_dense(anchors, IS_VALID, CONTEXT, BLOCK, **rule), 0.3)
        torch.testing.assert_close(output, expected)

    compare(ANCHORS)
    with compiler_config.patch(error_on_recompile=True):
        for sliding_window, is_causal in RULES:
            compare(ANCHORS // 2, sliding_window=sliding_window, is_causal=is_causal, context_starts=ANCHORS // 4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("form", ["blocks", "flex_attention"])
def test_on_a_gpu_every_form_trains_as_the_dense_one(tiny_config, form):
    drafter = make_drafter(tiny_config, sliding_window=40, head_dim=16).cuda()
    dense = copy.deepcopy(drafter)
    drafter.set_attn_implementation(attention_implementation(form))
    dense.set_attn_implementation("sdpa")
    anchors = torch.randint(1, 199, (2, 40), device="cuda").sort(dim=1).values
    is_valid = torch.ones_like(anchors, dtype=torch.bool)
    is_valid[1, 30:] = False
    inputs = {
        "noise_embeds": torch.randn(2, 40 * BLOCK, HIDDEN, device="cuda"),
        "context_hidden_states": torch.randn(2, 200, 3 * HIDDEN, device="cuda"),
        "position_ids": block_positions(anchors, torch.arange(200, device="cuda").expand(2, -1), BLOCK),
    }
    results = []
    for model, own_form in ((drafter, form), (dense, "sdpa")):
        masks = attention_masks(own_form, model.config, anchors, is_valid, 200)
        output = model(**inputs, attention_mask=masks).last_hidden_state
        results.append([output, *torch.autograd.grad(output.square().sum(), list(model.parameters()))])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-2, atol=1e-2 * expected.abs().max().item())


@pytest.mark.parametrize("layer_types", [["full_attention"] * 2, ["sliding_attention", "full_attention"]])
def test_drafter_set_up_for_training_still_takes_a_single_block_without_layout(tiny_config, layer_types):
    drafter = make_drafter(tiny_config, layer_types=layer_types).eval()
    plain = copy.deepcopy(drafter)
    drafter.set_attn_implementation(BLOCK_ATTENTION)
    plain.set_attn_implementation("sdpa")
    inputs = {"noise_embeds": torch.randn(1, BLOCK, HIDDEN), "context_hidden_states": torch.randn(1, 11, 3 * HIDDEN)}
    torch.testing.assert_close(drafter(**inputs).last_hidden_state, plain(**inputs).last_hidden_state)
