import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dflash_hf.trainer.target_features import (
    TargetFeatures,
    check_rebuilt_logits,
    document_places,
    target_logits,
)

LAYER_IDS = [0, 2, 6]


def count_forwards(target) -> list[int]:
    """A list that grows by the number of rows with every forward of the target's first layer."""
    calls: list[int] = []
    target.get_decoder().layers[0].register_forward_hook(lambda module, args, output: calls.append(args[0].shape[0]))
    return calls


def make_family_target(family: str):
    """A tiny target of an architecture that scales or caps its logits."""
    sizes = {
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    extra = {
        "llama": {},
        "gemma2": {"final_logit_softcapping": 2.0},
        "granite": {"logits_scaling": 3.0},
        "cohere": {"logit_scale": 0.25},
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **sizes, **extra[family], pad_token_id=0, bos_token_id=1, eos_token_id=2)
    target = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    torch.nn.init.normal_(target.get_output_embeddings().weight, std=1.0)  # far enough for a cap to matter
    return target


@torch.no_grad()
def hidden_state_features(target, input_ids: torch.Tensor, layer_ids=LAYER_IDS) -> torch.Tensor:
    hidden_states = target(input_ids, output_hidden_states=True).hidden_states
    return torch.cat([hidden_states[layer_id + 1] for layer_id in layer_ids], dim=-1)


def test_features_are_the_outputs_of_the_named_layers(tiny_target):
    input_ids = torch.randint(100, (2, 15))
    for layer_ids in ([0], [3], [6], LAYER_IDS):
        features = TargetFeatures(tiny_target, layer_ids)(input_ids)
        assert torch.equal(features, hidden_state_features(tiny_target, input_ids, layer_ids))


def test_padding_on_the_right_leaves_real_tokens_unchanged(tiny_target):
    tiny_target.double()
    lengths = [9, 15, 4]
    input_ids = torch.randint(3, 100, (3, 15))
    target_features = TargetFeatures(tiny_target, LAYER_IDS)
    together = target_features(input_ids)
    for row, length in enumerate(lengths):
        padded = input_ids[row : row + 1].clone()
        padded[:, length:] = 0
        alone = target_features(input_ids[row : row + 1, :length])[0]
        torch.testing.assert_close(target_features(padded)[0, :length], alone, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(together[row, :length], alone, rtol=1e-10, atol=1e-10)


def test_target_is_frozen_and_the_features_carry_no_gradient(tiny_target):
    tiny_target.train()
    features = TargetFeatures(tiny_target, LAYER_IDS)(torch.randint(100, (1, 6)))
    assert not tiny_target.training
    assert not any(parameter.requires_grad for parameter in tiny_target.parameters())
    assert not features.requires_grad


def test_nothing_stays_hooked_to_the_target(tiny_target):
    TargetFeatures(tiny_target, LAYER_IDS)(torch.randint(100, (1, 6)))
    assert not any(layer._forward_hooks for layer in tiny_target.get_decoder().layers)


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_constant_or_broken_features_are_refused_by_layer(tiny_target, value):
    def break_output(module, arguments, output):
        is_tuple = isinstance(output, tuple)
        broken = torch.full_like(output[0] if is_tuple else output, value)
        return (broken, *output[1:]) if is_tuple else broken

    # Hooks run in the order in which they were made, so the taps see the broken output.
    tiny_target.get_decoder().layers[2].register_forward_hook(break_output)
    with pytest.raises(ValueError, match="Layer 2 of the target gives constant or non-finite features"):
        TargetFeatures(tiny_target, LAYER_IDS)(torch.randint(100, (1, 6)))


def test_documents_of_a_packed_row_have_the_features_that_they_have_alone(tiny_target):
    tiny_target.double()
    documents = [[torch.randint(3, 100, (n,)).tolist() for n in lengths] for lengths in ((7, 12, 4), (9, 1), (20,))]
    input_ids = torch.zeros(3, 24, dtype=torch.long)
    lengths = torch.zeros(3, 3, dtype=torch.long)
    for row, texts in enumerate(documents):
        flat = sum(texts, [])
        input_ids[row, : len(flat)] = torch.tensor(flat)
        lengths[row, : len(texts)] = torch.tensor([len(text) for text in texts])
    for with_final_hidden in (False, True):
        target_features = TargetFeatures(tiny_target, LAYER_IDS, with_final_hidden=with_final_hidden)
        packed = target_features(input_ids, lengths)
        assert packed.shape == (3, 24, 32 * (3 + with_final_hidden))
        for row, _, start, end in document_places(lengths):
            alone = target_features(input_ids[row : row + 1, start:end])[0]
            torch.testing.assert_close(packed[row, start:end], alone, rtol=1e-10, atol=1e-10)
    assert [(row, slot) for row, slot, _, _ in document_places(lengths)] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
        (2, 0),
    ]


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "cohere"])
def test_target_logits_are_rebuilt_from_the_last_hidden_states(family):
    target = make_family_target(family)
    input_ids = torch.randint(3, 90, (2, 11))
    target_features = TargetFeatures(target, [0, 1], with_final_hidden=True)
    final_hidden = target_features(input_ids)[..., -32:]
    with torch.no_grad():
        expected = target(input_ids).logits
    torch.testing.assert_close(target_logits(target, final_hidden), expected, rtol=1e-5, atol=1e-5)
    check_rebuilt_logits(target)


def test_target_whose_logits_cannot_be_rebuilt_is_refused(tiny_target):
    def scale_logits(module, arguments, output):
        output.logits *= 1.5

    tiny_target.register_forward_hook(scale_logits)
    with pytest.raises(ValueError, match="cannot be rebuilt"):
        check_rebuilt_logits(tiny_target)


def test_features_can_be_trained_on(tiny_target):
    features = TargetFeatures(tiny_target, LAYER_IDS, with_final_hidden=True)(torch.randint(100, (1, 6)))
    weight = torch.ones(features.shape[-1], requires_grad=True)
    (features @ weight).sum().backward()
    torch.testing.assert_close(weight.grad, features.sum(dim=(0, 1)))
