"""What is borrowed from a target: tapped layers, embedding, head; and the check that a drafter fits."""

import gc
import threading
import weakref

import pytest
import torch
from conftest import make_tiny_target
from torch import nn
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaModel,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from dflash_hf import create_drafter_config
from dflash_hf.target_dflash import (
    TargetTaps,
    check_drafter_fits,
    decoder_layers,
    draft_logits,
    embed_tokens,
    text_config,
)

DEPTH = 6
VOCAB = 100
IDS = torch.arange(2, 13)[None]
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": DEPTH, "num_attention_heads": 4}
LLAMA_LIKE = SIZES | {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2}
GEMMA = LLAMA_LIKE | {
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"] * (DEPTH // 2),
    "query_pre_attn_scalar": 8,
    "final_logit_softcapping": 3.0,
    "pad_token_id": 0,
}


def make_llama():
    return make_tiny_target(num_hidden_layers=DEPTH)


def make_gemma():
    return Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA))


def make_multi_modal_gemma():
    # The vision tower is as deep as the language model, and comes first.
    vision = {"num_hidden_layers": DEPTH, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=GEMMA | {"final_logit_softcapping": None},  # this class of Transformers would ignore the cap
        vision_config=vision | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=99,
        boi_token_index=98,
        eoi_token_index=97,
    )
    return Gemma3ForConditionalGeneration(config)


def make_mixtral():
    return MixtralForCausalLM(MixtralConfig(**LLAMA_LIKE, num_local_experts=DEPTH))


def make_gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=DEPTH, n_head=4, initializer_range=0.2))


def make_opt():
    return OPTForCausalLM(OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=64))


def make_gpt_neox():
    return GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, intermediate_size=48))


def make_falcon():
    return FalconForCausalLM(FalconConfig(**SIZES))


# Family: (target, its decoder layers, its final norm).
FAMILIES = {
    "llama": (make_llama, "model.layers", "model.norm"),
    "gemma3": (make_gemma, "model.layers", "model.norm"),
    "gemma3_multi_modal": (make_multi_modal_gemma, "model.language_model.layers", "model.language_model.norm"),
    "mixtral": (make_mixtral, "model.layers", "model.norm"),
    "gpt2": (make_gpt2, "transformer.h", "transformer.ln_f"),
    "opt": (make_opt, "model.decoder.layers", "model.decoder.final_layer_norm"),
    "gpt_neox": (make_gpt_neox, "gpt_neox.layers", "gpt_neox.final_layer_norm"),
    "falcon": (make_falcon, "transformer.h", "transformer.ln_f"),
}


def make_target(family: str) -> PreTrainedModel:
    torch.manual_seed(1)
    return FAMILIES[family][0]().eval()


def drafter_config(target: PreTrainedModel, **overrides):
    fields = {"intermediate_size": 48, "rope_theta": 1e4, "target_layer_ids": [0, 2, 4], "mask_token_id": 96}
    return create_drafter_config(target.config, **(fields | overrides))


def count_hooks(target: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in target.modules())


# Decoder layers


@pytest.mark.parametrize("family", FAMILIES)
def test_decoder_layers_are_found(family):
    target = make_target(family)
    assert decoder_layers(target) is target.get_submodule(FAMILIES[family][1])


def test_lists_inside_a_layer_are_not_taken_for_the_layers(tiny_target):
    depth = len(tiny_target.model.layers)
    for layer in tiny_target.model.layers:
        layer.mlp.experts = nn.ModuleList(nn.Identity() for _ in range(depth))
    assert decoder_layers(tiny_target) is tiny_target.model.layers


def test_target_without_a_matching_list_is_refused(tiny_target):
    tiny_target.config.num_hidden_layers = 5
    with pytest.raises(ValueError, match="no list of 5 decoder layers in LlamaForCausalLM"):
        decoder_layers(tiny_target)


def test_text_config_of_a_multi_modal_target_is_the_language_models():
    target = make_target("gemma3_multi_modal")
    assert text_config(target) is target.config.text_config
    gemma = make_target("gemma3")
    assert text_config(gemma) is gemma.config


# Taps


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_taps_equal_output_hidden_states_of_every_layer_but_the_last(family):
    target = make_target(family)
    with TargetTaps(target, list(range(DEPTH))) as taps:
        hidden_states = target(IDS, output_hidden_states=True).hidden_states
        features = taps.take().unflatten(-1, (DEPTH, -1))
    assert len(hidden_states) == DEPTH + 1
    for layer_id in range(DEPTH - 1):
        assert torch.equal(features[:, :, layer_id], hidden_states[layer_id + 1])
    assert not torch.allclose(features[:, :, -1], hidden_states[-1], atol=1e-3)  # that one is after the final norm


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_can_be_rebuilt_from_the_last_layers_tap(family):
    target = make_target(family)
    with TargetTaps(target, [DEPTH - 1]) as taps:
        logits = target(IDS).logits
        last = target.get_submodule(FAMILIES[family][2])(taps.take())
    rebuilt = target.get_output_embeddings()(last)
    if family == "gemma3":
        rebuilt = 3.0 * torch.tanh(rebuilt / 3.0)
    torch.testing.assert_close(rebuilt, logits, atol=1e-4, rtol=0)


@torch.no_grad()
def test_taps_come_in_the_order_asked_for(tiny_target):
    with TargetTaps(tiny_target, [4, 1]) as taps:
        hidden_states = tiny_target(IDS, output_hidden_states=True).hidden_states
        assert torch.equal(taps.take(), torch.cat([hidden_states[5], hidden_states[2]], dim=-1))


@torch.no_grad()
def test_only_tapped_layers_stay_in_memory(tiny_target):
    alive = []
    for layer in tiny_target.model.layers:
        layer.register_forward_hook(lambda module, args, output: alive.append(weakref.ref(output)))
    taps = TargetTaps(tiny_target, [1, 3, 5])
    tiny_target(IDS)
    gc.collect()
    assert [index for index, reference in enumerate(alive) if reference() is not None] == [1, 3, 5]
    taps.take()
    gc.collect()
    assert not any(reference() is not None for reference in alive)


@torch.no_grad()
def test_forwards_follow_each_other_and_discarded_ones_are_gone(tiny_target):
    with TargetTaps(tiny_target, [2]) as taps:
        tiny_target(IDS)
        taps.discard()
        first = tiny_target(IDS, output_hidden_states=True).hidden_states[3]
        second = tiny_target(IDS + 1, output_hidden_states=True).hidden_states[3]
        assert torch.equal(taps.take(), torch.cat([first, second], dim=1))


def test_hooks_go_with_the_object(tiny_target):
    assert count_hooks(tiny_target) == 0
    taps = TargetTaps(tiny_target, [1, 3])
    assert count_hooks(tiny_target) == 2
    del taps
    assert count_hooks(tiny_target) == 0


def test_hooks_go_at_the_end_of_the_with_block_also_after_an_error(tiny_target):
    with pytest.raises(KeyError), TargetTaps(tiny_target, [1, 3]):
        raise KeyError("the target failed")
    assert count_hooks(tiny_target) == 0


def test_failed_construction_leaves_no_hook(tiny_target):
    with pytest.raises(IndexError):
        TargetTaps(tiny_target, [1, 99])
    gc.collect()
    assert count_hooks(tiny_target) == 0


def run_in_thread(work) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@torch.no_grad()
def test_forwards_of_other_threads_are_ignored(tiny_target):
    def forward_elsewhere():
        with torch.no_grad():
            tiny_target(IDS + 5)

    with TargetTaps(tiny_target, [2]) as taps:
        run_in_thread(forward_elsewhere)
        with pytest.raises(RuntimeError, match="ran no forward in this thread"):
            taps.take()
        expected = tiny_target(IDS, output_hidden_states=True).hidden_states[3]
        run_in_thread(forward_elsewhere)
        assert torch.equal(taps.take(), expected)


@torch.no_grad()
def test_every_thread_has_its_own_taps(tiny_target):
    found = {}

    def tap(offset: int):
        with torch.no_grad(), TargetTaps(tiny_target, [2]) as taps:
            start.wait()
            tiny_target(IDS + offset)
            start.wait()
            found[offset] = taps.take()

    start = threading.Barrier(2)
    threads = [threading.Thread(target=tap, args=(offset,)) for offset in (0, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for offset in (0, 5):
        expected = tiny_target(IDS + offset, output_hidden_states=True).hidden_states[3]
        assert torch.equal(found[offset], expected)


@torch.no_grad()
def test_taking_without_a_new_forward_raises(tiny_target):
    with TargetTaps(tiny_target, [1, 3]) as taps:
        with pytest.raises(RuntimeError, match="ran no forward"):
            taps.take()
        tiny_target(IDS)
        taps.take()
        with pytest.raises(RuntimeError, match="ran no forward"):
            taps.take()


# Embedding


@pytest.mark.parametrize("family", ["gemma3", "gemma3_multi_modal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("states_scale", [True, False])
@torch.no_grad()
def test_gemma_embeddings_are_what_its_first_layer_reads(family, dtype, states_scale):
    target = make_target(family).to(dtype)
    config = drafter_config(target, **({} if states_scale else {"input_embedding_scale": None}))
    assert config.input_embedding_scale == (32**0.5 if states_scale else None)
    read = []
    decoder_layers(target)[0].register_forward_pre_hook(lambda module, args: read.append(args[0]))
    target(IDS)
    assert torch.equal(embed_tokens(target, IDS, config), read[0])


@torch.no_grad()
def test_llama_embeddings_are_what_its_first_layer_reads(tiny_target):
    read = []
    tiny_target.model.layers[0].register_forward_pre_hook(lambda module, args: read.append(args[0]))
    tiny_target(IDS)
    assert torch.equal(embed_tokens(tiny_target, IDS, drafter_config(tiny_target)), read[0])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@torch.no_grad()
def test_stated_scale_multiplies_raw_rows_whatever_the_module_does(family):
    target = make_target(family)
    rows = target.get_input_embeddings().weight[IDS]
    for scale in (1.0, 2.5):
        embeddings = embed_tokens(target, IDS, drafter_config(target, input_embedding_scale=scale))
        torch.testing.assert_close(embeddings, rows * scale)


# Head


@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma3_multi_modal", "gpt2"])
@torch.no_grad()
def test_draft_logits_of_the_targets_own_states_are_its_logits(family):
    target = make_target(family)
    output = target(IDS, output_hidden_states=True)
    logits = draft_logits(target, output.hidden_states[-1], drafter_config(target))
    torch.testing.assert_close(logits, output.logits, atol=1e-5, rtol=0)


@torch.no_grad()
def test_multiplier_acts_before_the_soft_cap(tiny_target):
    hidden_states = torch.randn(2, 3, 32)
    raw = hidden_states @ tiny_target.lm_head.weight.T
    for multiplier, cap in ((1.0, None), (0.25, None), (1.0, 2.0), (0.25, 2.0)):
        settings = {"output_multiplier": multiplier, "final_logit_softcapping": cap}
        logits = draft_logits(tiny_target, hidden_states, drafter_config(tiny_target, **settings))
        expected = raw * multiplier
        expected = expected if cap is None else cap * torch.tanh(expected / cap)
        torch.testing.assert_close(logits, expected)
    assert logits.abs().max() < 2.0


@torch.no_grad()
def test_head_gets_states_in_its_own_dtype(tiny_target):
    tiny_target.to(torch.bfloat16)
    hidden_states = torch.randn(1, 3, 32)
    logits = draft_logits(tiny_target, hidden_states, drafter_config(tiny_target))
    assert torch.equal(logits, tiny_target.lm_head(hidden_states.bfloat16()))


# Fit


@pytest.mark.parametrize("family", FAMILIES)
def test_config_made_for_a_target_fits_it(family):
    target = make_target(family)
    check_drafter_fits(drafter_config(target), target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 48}, "`hidden_size` 48, but LlamaForCausalLM has 32.*Load the drafter that belongs"),
        ({"num_target_layers": 36}, "`num_target_layers` 36, but LlamaForCausalLM has 8"),
        ({"vocab_size": 200, "mask_token_id": 150}, r"`mask_token_id` 150 has no row .*\(100 rows\)"),
    ],
)
def test_drafter_of_another_target_is_refused(tiny_target, changes, message):
    with pytest.raises(ValueError, match=message):
        check_drafter_fits(drafter_config(tiny_target, **changes), tiny_target)


def test_targets_that_cannot_be_drafted_for_are_refused(tiny_target):
    config = drafter_config(tiny_target)
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=100, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4))
    with pytest.raises(ValueError, match="T5ForConditionalGeneration is an encoder-decoder model"):
        check_drafter_fits(config, t5)
    with pytest.raises(ValueError, match="LlamaModel has no output embedding"):
        check_drafter_fits(config, LlamaModel(tiny_target.config))


def test_mask_may_be_a_padding_row_of_the_embedding(tiny_target):
    tiny_target.resize_token_embeddings(128)
    check_drafter_fits(drafter_config(tiny_target, vocab_size=128, mask_token_id=127), tiny_target)
