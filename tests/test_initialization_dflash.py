"""create_drafter: what a new drafter takes from its target, and when it refuses."""

import pytest
import torch
from conftest import MASK_TOKEN_ID, make_tiny_target
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dflash_hf import DFlashConfig, create_drafter, create_drafter_config, initialization_dflash
from dflash_hf.target_dflash import decoder_layers

DEPTH = 8
SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
}
GEMMA_LAYERS = {"layer_types": ["sliding_attention", "full_attention"] * (DEPTH // 2), "sliding_window": 16}
FAMILIES = {
    "llama": lambda: make_tiny_target(),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "gemma1": lambda: GemmaForCausalLM(GemmaConfig(**SIZES)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **GEMMA_LAYERS)),
    "gemma4": lambda: Gemma4ForCausalLM(
        Gemma4TextConfig(
            **SIZES,
            **GEMMA_LAYERS,
            global_head_dim=8,
            num_global_key_value_heads=2,
            num_kv_shared_layers=0,
            hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=100,
        )
    ),
}


def make_target(family: str) -> PreTrainedModel:
    """A target whose norm weights and biases are random, too."""
    torch.manual_seed(1)
    target = FAMILIES[family]().eval()
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return target


def make_config(target: PreTrainedModel, **overrides) -> DFlashConfig:
    """Two draft layers; the last tapped layer is the one below them."""
    fields = {"num_hidden_layers": 2, "target_layer_ids": [1, 3, 5], "block_size": 8, "rope_theta": 1e4}
    return create_drafter_config(target.config, mask_token_id=MASK_TOKEN_ID, **(fields | overrides))


def recorded_output(module: torch.nn.Module) -> list[torch.Tensor]:
    outputs: list[torch.Tensor] = []
    module.register_forward_hook(lambda module, args, output: outputs.append(output))
    return outputs


# Copies


@pytest.mark.parametrize("family", FAMILIES)
def test_draft_layers_are_the_targets_last_layers(family):
    target = make_target(family)
    drafter = create_drafter(target, make_config(target))
    assert {parameter.dtype for parameter in drafter.parameters()} == {torch.float32}
    for ours, theirs in zip(drafter.layers, decoder_layers(target)[-2:], strict=True):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            assert torch.equal(getattr(ours.self_attn, name).weight, getattr(theirs.self_attn, name).weight)
        for name in ("gate_proj", "up_proj", "down_proj"):
            assert torch.equal(getattr(ours.mlp, name).weight, getattr(theirs.mlp, name).weight)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_norms_act_as_the_targets_norms_do(family):
    target = make_target(family)
    drafter = create_drafter(target, make_config(target))
    states = torch.randn(5, 32) * 3
    sources = decoder_layers(target)[-2:]
    for ours, theirs in zip(drafter.layers, sources, strict=True):
        mlp_norm = getattr(theirs, "pre_feedforward_layernorm", theirs.post_attention_layernorm)
        torch.testing.assert_close(ours.input_layernorm(states), theirs.input_layernorm(states))
        torch.testing.assert_close(ours.post_attention_layernorm(states), mlp_norm(states))
        if hasattr(theirs.self_attn, "q_norm"):
            heads = torch.randn(5, 4, 8)
            torch.testing.assert_close(ours.self_attn.k_norm(heads), theirs.self_attn.k_norm(heads))
            queries = ours.self_attn.q_norm(heads) * ours.self_attn.scaling
            torch.testing.assert_close(queries, theirs.self_attn.q_norm(heads) * theirs.self_attn.scaling)
    torch.testing.assert_close(drafter.norm(states), target.model.norm(states))
    torch.testing.assert_close(drafter.hidden_norm(states), sources[0].input_layernorm(states))


@pytest.mark.parametrize(("family", "offset"), [("llama", 0), ("gemma1", 1), ("gemma3", 1), ("gemma4", 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_norms_stored_minus_one_get_one_added(family, offset, dtype):
    target = make_target(family).to(dtype)
    drafter = create_drafter(target, make_config(target))
    expected = (decoder_layers(target)[-2].input_layernorm.weight + offset).float()
    torch.testing.assert_close(drafter.layers[0].input_layernorm.weight.data, expected.detach())


@torch.no_grad()
def test_context_keys_of_the_first_draft_layer_are_the_targets_own():
    target = make_target("llama")
    # Without the noise of a fresh projection the context is exactly the last tapped layer.
    drafter = create_drafter(target, make_config(target, initializer_range=0.0)).eval()
    input_ids = torch.randint(2, 97, (1, 12))
    hidden_states = target(input_ids, output_hidden_states=True).hidden_states
    features = torch.cat([hidden_states[layer_id + 1] for layer_id in (1, 3, 5)], dim=-1)
    first_copied = target.model.layers[6]
    normed = first_copied.input_layernorm(hidden_states[6])
    for name in ("k_proj", "v_proj"):
        ours = recorded_output(getattr(drafter.layers[0].self_attn, name))
        drafter(torch.randn(1, 8, 32), features)
        by_hand = normed @ getattr(first_copied.self_attn, name).weight.T
        torch.testing.assert_close(ours[0][:, :12], by_hand)


@torch.no_grad()
def test_normed_context_keys_are_the_targets_if_it_has_key_norms():
    target = make_target("qwen3")
    drafter = create_drafter(target, make_config(target, initializer_range=0.0)).eval()
    theirs = recorded_output(target.model.layers[6].self_attn.k_norm)
    ours = recorded_output(drafter.layers[0].self_attn.k_norm)
    hidden_states = target(torch.randint(2, 97, (1, 12)), output_hidden_states=True).hidden_states
    features = torch.cat([hidden_states[layer_id + 1] for layer_id in (1, 3, 5)], dim=-1)
    drafter(torch.randn(1, 8, 32), features)
    torch.testing.assert_close(ours[0][:, :12], theirs[0])


@torch.no_grad()
def test_context_projection_is_the_last_tapped_layer_plus_small_noise():
    target = make_target("llama")
    config = make_config(target)
    weight = create_drafter(target, config).fc.weight.clone()
    weight[:, -32:] -= torch.eye(32)
    noise = weight.std().item()
    assert noise == pytest.approx(config.initializer_range / 3, rel=0.1)
    assert weight.abs().max() < 0.05


@torch.no_grad()
def test_query_and_key_norms_restore_the_size_of_a_target_without_them():
    target = make_target("llama")
    for layer in target.model.layers:
        layer.self_attn.q_proj.weight.mul_(3.0)
    drafter = create_drafter(target, make_config(target)).eval()
    source, ours = target.model.layers[6].self_attn, drafter.layers[0].self_attn
    queries, keys = recorded_output(source.q_proj), recorded_output(source.k_proj)
    target(torch.randint(0, 100, (4, 64)))
    for norm, states in ((ours.q_norm, queries[0]), (ours.k_norm, keys[0])):
        assert norm.weight.unique().numel() == 1
        size = states.square().mean().sqrt().item()
        normed = norm(states.unflatten(-1, (-1, 8)))
        assert normed.square().mean().sqrt().item() == pytest.approx(size, rel=0.1)
    assert ours.q_norm.weight[0] > 2.0  # so the restored size is not just the default


def test_biases_are_copied_if_the_drafter_has_them_and_else_reported(monkeypatch):
    torch.manual_seed(1)
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
    target = Qwen2ForCausalLM(Qwen2Config(**sizes)).eval()
    for layer in target.model.layers:
        torch.nn.init.normal_(layer.self_attn.k_proj.bias)
    with_bias = create_drafter(target, make_config(target, attention_bias=True))
    ours, theirs = with_bias.layers[0].self_attn, target.model.layers[6].self_attn
    assert torch.equal(ours.k_proj.bias, theirs.k_proj.bias) and ours.k_proj.bias.abs().max() > 0
    assert not ours.o_proj.bias.any()
    messages: list[str] = []
    monkeypatch.setattr(initialization_dflash.logger, "info", messages.append)
    create_drafter(target, make_config(target))
    assert any("`k_proj` bias is left out" in message for message in messages)


def test_narrower_mlp_keeps_the_strongest_neurons_in_order():
    target = make_target("llama")
    strongest = [3, 11, 12, 40, 63]
    with torch.no_grad():
        for layer in target.model.layers:
            layer.mlp.down_proj.weight[:, strongest] *= 20.0
            layer.mlp.up_proj.weight[strongest] *= 20.0
    drafter = create_drafter(target, make_config(target, intermediate_size=5))
    for ours, theirs in zip(drafter.layers, target.model.layers[-2:], strict=True):
        assert torch.equal(ours.mlp.gate_proj.weight, theirs.mlp.gate_proj.weight[strongest])
        assert torch.equal(ours.mlp.up_proj.weight, theirs.mlp.up_proj.weight[strongest])
        assert torch.equal(ours.mlp.down_proj.weight, theirs.mlp.down_proj.weight[:, strongest])


@pytest.mark.parametrize("init", ["target", "random"])
def test_target_is_left_as_it_was(init):
    target = make_target("llama").train()
    target.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    drafter = create_drafter(target, make_config(target), init=init)
    assert target.training and not any(parameter.requires_grad for parameter in target.parameters())
    assert not any(module._forward_hooks for module in target.modules())
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(1.0)  # nothing is shared
    after = target.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert all(parameter.requires_grad for parameter in drafter.parameters())


@pytest.mark.parametrize("init", ["target", "random"])
def test_half_precision_target_gives_a_float32_drafter(init):
    target = make_target("llama").to(torch.bfloat16)
    drafter = create_drafter(target, make_config(target), init=init)
    assert {parameter.dtype for parameter in drafter.parameters()} == {torch.float32}


def test_same_seed_gives_the_same_drafter():
    target = make_target("llama")
    for init in ("target", "random"):
        torch.manual_seed(7)
        first = create_drafter(target, make_config(target), init=init)
        torch.manual_seed(7)
        second = create_drafter(target, make_config(target), init=init)
        for name, tensor in first.state_dict().items():
            assert torch.equal(tensor, second.state_dict()[name]), name


# Refusals


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_key_value_heads": 4}, r"`k_proj` is \(32, 32\), the target's \(16, 32\).*`init='random'`"),
        ({"head_dim": 16}, r"`q_proj` is \(64, 32\), the target's \(32, 32\)"),
        ({"intermediate_size": 65}, "`intermediate_size` 65 is larger than the target's 64.*`init='random'`"),
        ({"num_hidden_layers": 9}, "has 9 layers, the target only 8"),
    ],
)
def test_shapes_that_cannot_be_copied_are_refused_and_work_at_random(overrides, message):
    target = make_target("llama")
    config = make_config(target, **overrides)
    with pytest.raises(ValueError, match=message):
        create_drafter(target, config)
    assert not any(module._forward_hooks for module in target.modules())
    assert len(create_drafter(target, config, init="random").layers) == config.num_hidden_layers


@pytest.mark.parametrize("init", ["target", "random"])
def test_config_of_another_target_is_refused(init):
    config = make_config(make_target("llama"))
    with pytest.raises(ValueError, match="`num_target_layers` 8, but LlamaForCausalLM has 10"):
        create_drafter(make_tiny_target(num_hidden_layers=10), config, init=init)


def test_unknown_start_is_refused():
    target = make_target("llama")
    with pytest.raises(ValueError, match="`init` is 'teacher'; it must be 'target' or 'random'"):
        create_drafter(target, make_config(target), init="teacher")


@pytest.mark.parametrize(
    ("make_other", "missing"),
    [
        (
            lambda: GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=32, n_layer=DEPTH, n_head=4)),
            "GPT2LMHeadModel's layers have no self_attn.q_proj",
        ),
        (
            lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2)),
            "MixtralForCausalLM's layers have no mlp.gate_proj",
        ),
    ],
    ids=["gpt2", "mixtral"],
)
def test_target_of_another_make_is_refused_and_works_at_random(make_other, missing):
    target = make_other()
    config = make_config(target, intermediate_size=48)
    with pytest.raises(ValueError, match=f"{missing}.*Use `init='random'`"):
        create_drafter(target, config)
    drafter = create_drafter(target, config, init="random").eval()
    with torch.no_grad():
        output = drafter(torch.randn(1, 8, 32), torch.randn(1, 5, 96)).last_hidden_state
    assert output.shape == (1, 8, 32) and output.isfinite().all()


def test_random_start_copies_nothing():
    target = make_target("llama")
    drafter = create_drafter(target, make_config(target), init="random")
    assert not torch.equal(drafter.layers[0].self_attn.q_proj.weight, target.model.layers[6].self_attn.q_proj.weight)
    assert torch.equal(drafter.layers[0].input_layernorm.weight, torch.ones(32))
    assert drafter.fc.weight.std().item() == pytest.approx(drafter.config.initializer_range, rel=0.1)
