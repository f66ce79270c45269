"""DFlashDraftModel: parity with the authors' module, caches, attention kernels, RoPE, checkpoints and gradients."""

import contextlib
import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.attention.flex_attention import BlockMask
from transformers import GenerationConfig
from transformers.cache_utils import DFlashCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dflash_hf import DFlashCandidateGenerator, DFlashConfig, DFlashDraftModel
from dflash_hf.context_dflash import ContextCache
from dflash_hf.modeling_dflash import block_visibility

BLOCK = 8
WIDTH = 32
NUM_FEATURES = 3
WINDOW = 6
FULL = {"layer_types": ["full_attention", "full_attention"]}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
RULES = {
    "full": FULL,
    "full_with_biases": FULL | {"attention_bias": True},
    "full_causal": FULL | {"is_causal": True},
    "sliding_causal": SLIDING,
    "sliding_bidirectional": SLIDING | {"is_causal": False},
    "sliding_all_causal": SLIDING | {"is_causal": True},
}


def make_config(**changes) -> DFlashConfig:
    fields = {
        "vocab_size": 100,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "rope_theta": 1e4,
        "block_size": BLOCK,
        "num_target_layers": 8,
        "initializer_range": 0.2,
        "dflash_config": {"mask_token_id": 97, "target_layer_ids": [1, 3, 5]},
    }
    return DFlashConfig(**(fields | changes))


def make_drafter(implementation: str = "sdpa", **changes) -> DFlashDraftModel:
    """A drafter with random weights everywhere, norms and biases included."""
    torch.manual_seed(1)
    config = make_config(**changes)
    config._attn_implementation = implementation
    drafter = DFlashDraftModel(config).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return drafter


def make_inputs(num_context: int, batch: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise embeddings (batch, block, D) and context features (batch, context, features * D)."""
    torch.manual_seed(2)
    return torch.randn(batch, BLOCK, WIDTH), torch.randn(batch, num_context, NUM_FEATURES * WIDTH)


@torch.no_grad()
def run(drafter: DFlashDraftModel, noise_embeds: torch.Tensor, features: torch.Tensor, **kwargs) -> torch.Tensor:
    return drafter(noise_embeds, features, **kwargs).last_hidden_state


# Parity with the authors' module


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("num_context", [1, 4, 21])
def test_hidden_states_equal_the_authors(rule, num_context):
    authors = pytest.importorskip(
        "dflash.model", reason="needs the authors' wheel: pip install --no-deps dflash==0.1.0"
    )
    drafter = make_drafter(**RULES[rule])
    theirs = authors.DFlashDraftModel(copy.deepcopy(drafter.config)).eval()
    theirs.load_state_dict(drafter.state_dict(), strict=True)
    noise_embeds, features = make_inputs(num_context)
    positions = torch.arange(num_context + BLOCK)[None]
    with torch.no_grad():
        expected = theirs(position_ids=positions, noise_embedding=noise_embeds, target_hidden=features)
    torch.testing.assert_close(run(drafter, noise_embeds, features), expected, atol=1e-5, rtol=0)


def test_authors_module_sees_the_scale_fields_that_we_read():
    authors = pytest.importorskip(
        "dflash.model", reason="needs the authors' wheel: pip install --no-deps dflash==0.1.0"
    )
    config = make_config(output_multiplier=0.5, final_logit_softcapping=3.0, input_embedding_scale=4.0)
    for name in ("output_multiplier", "final_logit_softcapping", "input_embedding_scale"):
        assert authors._draft_value(config, name) == getattr(config, name)
    theirs = authors.DFlashDraftModel(config)
    assert (theirs.block_size, theirs.mask_token_id, theirs.target_layer_ids) == (BLOCK, 97, [1, 3, 5])


# Caches

ROUNDS = (5, 1, 3, 8, 2, 1)


@pytest.mark.parametrize("rule", RULES)
def test_context_cache_equals_the_whole_context_at_once(rule):
    drafter = make_drafter(**RULES[rule])
    _, features = make_inputs(sum(ROUNDS))
    cache = ContextCache(drafter.config.num_hidden_layers)
    length = 0
    for new in ROUNDS:
        noise_embeds = torch.randn(1, BLOCK, WIDTH)
        cache.expect([new])
        cached = run(drafter, noise_embeds, features[:, length : length + new], cache=cache)
        cache.keep_context()
        length += new
        assert cache.get_seq_length() == length
        torch.testing.assert_close(cached, run(drafter, noise_embeds, features[:, :length]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("cache_argument", ["cache", "past_key_values"])
def test_transformers_own_cache_and_loop_give_the_same_hidden_states(rule, cache_argument):
    drafter = make_drafter(**RULES[rule])
    _, features = make_inputs(sum(ROUNDS))
    cache = DFlashCache(config=drafter.config)
    cache.activate_past_recording()
    length = 0
    for new in ROUNDS:
        # As `DFlashTokenCandidateGenerator.get_candidates` does it: the old block goes, then new context comes.
        cache.set_previous_accepted_tokens(new)
        if length:
            cache.crop(-BLOCK)
        noise_embeds = torch.randn(1, BLOCK, WIDTH)
        cached = run(
            drafter,
            noise_embeds,
            features[:, length : length + new],
            position_ids=torch.arange(length, length + new + BLOCK)[None],
            attention_mask=torch.ones(1, length + new + BLOCK, dtype=torch.long),
            **{cache_argument: cache},
        )
        length += new
        torch.testing.assert_close(cached, run(drafter, noise_embeds, features[:, :length]), atol=1e-5, rtol=0)


def test_transformers_own_dflash_generation_drives_our_drafter(tiny_target, tiny_drafter):
    prompt = torch.randint(2, 97, (1, 9))
    plain = tiny_target.generate(prompt, max_new_tokens=24, do_sample=False)
    calls = []
    tiny_drafter.register_forward_pre_hook(lambda module, args, kwargs: calls.append(kwargs), with_kwargs=True)
    native = tiny_target.generate(
        prompt, max_new_tokens=24, do_sample=False, assistant_model=tiny_drafter, speculation_type="dflash"
    )
    assert native.tolist() == plain.tolist()
    caches = [call.get("cache", call.get("past_key_values")) for call in calls]
    assert caches and all(isinstance(cache, DFlashCache) for cache in caches)


# Attention kernels


def kernel(name: str) -> contextlib.AbstractContextManager:
    """Runs flex_attention unfused: compiling it takes longer than all tests here together."""
    return torch.compiler.set_stance("force_eager") if name == "flex_attention" else contextlib.nullcontext()


@pytest.mark.parametrize("implementation", ["eager", "flex_attention"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_attention_kernels_agree(implementation, rule, is_padded):
    noise_embeds, features = make_inputs(13, batch=2)
    mask = torch.ones(2, 13 + BLOCK, dtype=torch.long)
    mask[1, :4] = 0
    attention_mask = mask if is_padded else None
    reference = run(make_drafter("sdpa", **RULES[rule]), noise_embeds, features, attention_mask=attention_mask)
    with kernel(implementation):
        drafter = make_drafter(implementation, **RULES[rule])
        output = run(drafter, noise_embeds, features, attention_mask=attention_mask)
    torch.testing.assert_close(output, reference, atol=1e-5, rtol=0)


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "flex_attention"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_left_padding_changes_nothing(implementation, rule):
    drafter = make_drafter(implementation, **RULES[rule])
    noise_embeds, features = make_inputs(13, batch=2)
    mask = torch.ones(2, 13 + BLOCK, dtype=torch.long)
    mask[1, :4] = 0
    with kernel(implementation):
        padded = run(drafter, noise_embeds, features, attention_mask=mask)
        first = run(drafter, noise_embeds[:1], features[:1])
        second = run(drafter, noise_embeds[1:], features[1:, 4:])
    # RoPE is relative, so the second row's positions may start at 4.
    torch.testing.assert_close(padded, torch.cat([first, second]), atol=1e-5, rtol=0)


def test_flex_attention_gets_block_masks(monkeypatch):
    # An additive mask crashes its compiled CPU kernel, which the other tests here do not run.
    masks = []

    def attention(module, query, key, value, mask, **kwargs):
        masks.append(mask)
        return query.transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flex_attention", attention)
    run(make_drafter("flex_attention", **SLIDING), *make_inputs(13))
    assert isinstance(masks[0], BlockMask) and masks[0].shape == (1, 1, BLOCK, 13 + BLOCK)
    assert masks[1] is None


def test_padding_mask_reaches_sliding_layers_whose_cache_dropped_old_keys():
    drafter = make_drafter(**SLIDING)
    noise_embeds, features = make_inputs(14)
    mask = torch.ones(1, 14 + BLOCK, dtype=torch.long)
    mask[:, :9] = 0
    cache = DFlashCache(config=drafter.config)
    cache.activate_past_recording()
    run(drafter, noise_embeds, features[:, :12], cache=cache, attention_mask=mask[:, : 12 + BLOCK])
    cache.crop(-BLOCK)
    positions = torch.arange(12, 14 + BLOCK)[None]
    cached = run(drafter, noise_embeds, features[:, 12:], cache=cache, attention_mask=mask, position_ids=positions)
    torch.testing.assert_close(cached, run(drafter, noise_embeds, features[:, 9:]), atol=1e-5, rtol=0)


def test_rule_in_the_config_equals_the_same_rule_as_explicit_masks():
    drafter = make_drafter(**SLIDING)
    noise_embeds, features = make_inputs(13)
    masks = {
        "sliding_attention": block_visibility(BLOCK, 13 + BLOCK, WINDOW, True),
        "full_attention": torch.ones(1, 1, BLOCK, 13 + BLOCK, dtype=torch.bool),
    }
    expected = run(drafter, noise_embeds, features)
    torch.testing.assert_close(run(drafter, noise_embeds, features, attention_mask=masks), expected)
    wide_open = run(drafter, noise_embeds, features, attention_mask=masks["full_attention"])
    assert (wide_open - expected).abs().max() > 1e-2


# What a slot sees


@pytest.mark.parametrize("rule", ["sliding_all_causal", "full_causal"])
def test_causal_slots_ignore_later_slots(rule):
    drafter = make_drafter(**RULES[rule])
    noise_embeds, features = make_inputs(5)
    changed = noise_embeds.clone()
    changed[:, 4:] += 1.0
    before, after = run(drafter, noise_embeds, features), run(drafter, changed, features)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.equal(before[:, 4:], after[:, 4:])


@pytest.mark.parametrize("rule", ["full", "sliding_causal", "sliding_bidirectional"])
def test_first_proposal_reads_the_last_slot_unless_every_layer_is_causal(rule):
    drafter = make_drafter(**RULES[rule])
    noise_embeds, features = make_inputs(5)
    changed = noise_embeds.clone()
    changed[:, -1] += 1.0
    difference = (run(drafter, noise_embeds, features) - run(drafter, changed, features))[:, 1].abs().max()
    assert difference > 1e-4


def test_window_hides_far_context_and_its_absence_shows_it():
    sliding = {"layer_types": ["sliding_attention"] * 2, "sliding_window": WINDOW}
    noise_embeds, features = make_inputs(20)
    changed = features.clone()
    changed[:, : 20 - WINDOW + 1] += 1.0  # the anchor, at 20, sees keys from 15 on
    windowed = make_drafter(**sliding)
    assert torch.equal(run(windowed, noise_embeds, features), run(windowed, noise_embeds, changed))
    full = make_drafter()
    assert (run(full, noise_embeds, features) - run(full, noise_embeds, changed)).abs().max() > 1e-2
    just_inside = features.clone()
    just_inside[:, 20 - WINDOW + 1] += 1.0
    assert not torch.equal(run(windowed, noise_embeds, features), run(windowed, noise_embeds, just_inside))


def test_window_wider_than_everything_equals_full_attention():
    wide = make_drafter(layer_types=["sliding_attention"] * 2, sliding_window=1000, is_causal=False)
    inputs = make_inputs(20)
    torch.testing.assert_close(run(wide, *inputs), run(make_drafter(), *inputs), atol=1e-6, rtol=0)


@pytest.mark.parametrize("window", [None, 1, 3, 6, 50])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("num_slots", "num_keys"), [(1, 1), (1, 4), (4, 4), (4, 9), (5, 17)])
def test_block_visibility_equals_brute_force(window, is_causal, num_slots, num_keys):
    visible = block_visibility(num_slots, num_keys, window, is_causal)
    if window is None and not is_causal:
        assert visible is None
        return
    assert visible.shape == (1, 1, num_slots, num_keys) and visible.dtype == torch.bool
    for slot in range(num_slots):
        position = num_keys - num_slots + slot
        for key in range(num_keys):
            is_hidden_by_order = is_causal and key > position
            is_hidden_by_window = window is not None and abs(position - key) >= window
            assert visible[0, 0, slot, key].item() is not (is_hidden_by_order or is_hidden_by_window)


# RoPE

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e7},
    "linear": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128},
}


def rope_drafter(name: str) -> DFlashDraftModel:
    config = make_config().to_dict() | {"rope_parameters": ROPES[name]}
    return DFlashDraftModel(DFlashConfig.from_dict(config))


def assert_rope_is_fresh(drafter: DFlashDraftModel, name: str) -> None:
    fresh = rope_drafter(name).rotary_emb
    for buffer in ("inv_freq", "original_inv_freq"):
        frequencies = getattr(drafter.rotary_emb, buffer)
        assert frequencies.dtype == torch.float32
        assert torch.equal(frequencies, getattr(fresh, buffer))
    assert drafter.rotary_emb.attention_scaling == fresh.attention_scaling


@pytest.mark.parametrize("name", ROPES)
def test_rope_frequencies_survive_casts_in_float32(name):
    for cast in (
        lambda drafter: drafter.to(torch.bfloat16),
        lambda drafter: drafter.half(),
        lambda drafter: drafter.bfloat16().float(),
        lambda drafter: drafter.double().to(torch.bfloat16),
    ):
        drafter = cast(rope_drafter(name))
        assert_rope_is_fresh(drafter, name)
    assert drafter.fc.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}, {"device_map": "cpu"}])
def test_rope_frequencies_survive_loading_in_float32(tmp_path, name, options):
    rope_drafter(name).save_pretrained(tmp_path)
    loaded = DFlashDraftModel.from_pretrained(tmp_path, **options)
    assert_rope_is_fresh(loaded, name)
    assert loaded.fc.weight.dtype == options.get("dtype", torch.float32)


def test_rope_of_the_target_does_not_reach_the_drafter(tiny_target, tiny_drafter):
    inputs = torch.randn(1, BLOCK, WIDTH), torch.randn(1, 5, NUM_FEATURES * WIDTH)
    before = run(tiny_drafter, *inputs)
    tiny_target.config.rope_parameters = {"rope_type": "linear", "rope_theta": 7.0, "factor": 8.0}
    tiny_drafter.candidate_generator(tiny_target, generation_config=GenerationConfig(max_length=32))
    assert torch.equal(before, run(tiny_drafter, *inputs))


# Checkpoints


@pytest.mark.parametrize("rule", ["full_with_biases", "sliding_causal"])
@pytest.mark.parametrize("options", [{}, {"device_map": "cpu"}, {"device_map": {"": "cpu"}}])
def test_reloaded_drafter_gives_exactly_the_same_outputs(tmp_path, rule, options):
    drafter = make_drafter(**RULES[rule])
    drafter.save_pretrained(tmp_path)
    loaded = DFlashDraftModel.from_pretrained(tmp_path, **options)
    assert not loaded.training
    assert {n: b.tolist() for n, b in loaded.named_buffers()} == {n: b.tolist() for n, b in drafter.named_buffers()}
    inputs = make_inputs(13)
    assert torch.equal(run(loaded, *inputs), run(drafter, *inputs))


def expected_tensor_names(num_layers: int, has_biases: bool) -> set[str]:
    projections = ("q_proj", "k_proj", "v_proj", "o_proj")
    per_layer = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    per_layer += [f"self_attn.{name}.weight" for name in (*projections, "q_norm", "k_norm")]
    per_layer += [f"mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")]
    per_layer += [f"self_attn.{name}.bias" for name in projections if has_biases]
    names = {f"layers.{index}.{name}" for index in range(num_layers) for name in per_layer}
    return names | {"fc.weight", "hidden_norm.weight", "norm.weight"}


@pytest.mark.parametrize("has_biases", [False, True])
def test_checkpoint_has_the_published_tensor_names(tmp_path, has_biases):
    make_drafter(attention_bias=has_biases).save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == expected_tensor_names(2, has_biases)


@pytest.mark.parametrize(("num_layers", "num_tensors"), [(5, 58), (6, 69), (8, 91)])
def test_checkpoint_has_the_published_number_of_tensors(num_layers, num_tensors):
    with torch.device("meta"):
        drafter = DFlashDraftModel(make_config(num_hidden_layers=num_layers))
    assert len(drafter.state_dict()) == num_tensors


def test_borrowed_weights_never_enter_the_checkpoint(tmp_path, tiny_target, tiny_drafter):
    generator = tiny_drafter.candidate_generator(tiny_target, generation_config=GenerationConfig(max_length=32))
    tiny_target.generate(torch.tensor([[5, 6, 7]]), assistant_model=tiny_drafter, max_new_tokens=12, do_sample=False)
    assert isinstance(generator, DFlashCandidateGenerator)
    assert tiny_drafter.state_dict().keys() == expected_tensor_names(2, False)
    assert not {id(p) for p in tiny_drafter.parameters()} & {id(p) for p in tiny_target.parameters()}
    tiny_drafter.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == expected_tensor_names(2, False)


def saved_with_changed_tensors(folder, change) -> None:
    make_drafter().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["layers.1.mlp.up_proj.weight", "fc.weight", "hidden_norm.weight"])
def test_missing_tensors_raise_and_are_named(tmp_path, name):
    saved_with_changed_tensors(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=f"not a complete checkpoint.*missing_keys.*{name}"):
        DFlashDraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["embed_tokens.weight", "layers.0.self_attn.sinks", "encoder.fc.weight"])
def test_unknown_tensors_raise_and_are_named(tmp_path, name):
    saved_with_changed_tensors(tmp_path, lambda tensors: tensors.update({name: torch.zeros(4)}))
    with pytest.raises(ValueError, match=f"not a complete checkpoint.*unexpected_keys.*{name}"):
        DFlashDraftModel.from_pretrained(tmp_path)


def test_tensors_of_another_shape_raise_even_if_asked_to_ignore_them(tmp_path):
    saved_with_changed_tensors(tmp_path, lambda tensors: tensors.update({"fc.weight": torch.zeros(WIDTH, WIDTH)}))
    with pytest.raises(ValueError, match="mismatched_keys.*fc.weight"):
        DFlashDraftModel.from_pretrained(tmp_path, ignore_mismatched_sizes=True)


def test_loading_info_is_returned_if_asked(tmp_path):
    make_drafter().save_pretrained(tmp_path)
    loaded, info = DFlashDraftModel.from_pretrained(tmp_path, output_loading_info=True)
    assert isinstance(loaded, DFlashDraftModel) and not info["missing_keys"]


def test_drafter_ties_nothing():
    drafter = make_drafter()
    assert not drafter._tied_weights_keys and drafter.all_tied_weights_keys == {}


# Use


def test_generate_explains_that_the_target_generates():
    with pytest.raises(TypeError, match=r"target\.generate\(\*\*inputs, assistant_model=drafter\)"):
        make_drafter().generate(torch.tensor([[1, 2]]), max_new_tokens=4)


def gradients(drafter: DFlashDraftModel) -> dict[str, torch.Tensor]:
    noise_embeds, features = make_inputs(9, batch=2)
    features.requires_grad_()
    torch.manual_seed(3)
    drafter(noise_embeds, features).last_hidden_state.square().sum().backward()
    found = {name: parameter.grad for name, parameter in drafter.named_parameters()}
    return found | {"features": features.grad}


@pytest.mark.parametrize("use_reentrant", [None, False, True])
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")  # the name that 5.15 knows
def test_gradient_checkpointing_gives_the_same_gradients(use_reentrant):
    expected = gradients(make_drafter(**SLIDING).train())
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in expected.values())
    drafter = make_drafter(**SLIDING).train()
    options = None if use_reentrant is None else {"use_reentrant": use_reentrant}
    drafter.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    calls = []
    drafter.layers[0].mlp.register_forward_pre_hook(lambda *args: calls.append(1))
    found = gradients(drafter)
    assert len(calls) == 2  # forward, and again in the backward
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], msg=lambda text, name=name: f"{name}: {text}")
