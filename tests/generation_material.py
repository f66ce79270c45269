"""Tiny targets, prompts, drafters and calls shared by the tests of generation."""

import functools
import inspect
import itertools

import pytest
import torch
from conftest import MASK_TOKEN_ID, make_tiny_target
from oracle_drafters import OracleDrafter, Pattern, RecordingDrafter, always_right, never_right, right_at, right_for
from transformers import (
    CompileConfig,
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.generation.utils import GenerationMixin

from dflash_hf import create_drafter_config

PROMPT = torch.tensor([[5, 17, 3, 42, 8, 29]])
# Three prompts of 6, 4 and 1 tokens, padded on the left.
BATCH = torch.tensor([[5, 17, 3, 42, 8, 29], [1, 1, 11, 4, 60, 7], [1, 1, 1, 1, 1, 23]])
BATCH_MASK = (BATCH != 1).long()
BLOCK = 8
NEW = 40
LAYERS = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 1,
    "initializer_range": 0.4,
}
TARGETS = ("llama", "qwen3", "gemma3", "mixtral", "gpt2")
MIXED = right_for(2, 0, 6, 7, 1, 5)
PATTERNS = {
    "always": always_right,
    "never": never_right,
    "slots 1 and 3": right_at(1, 3),
    "all but slot 2": lambda round_index, slot: slot != 2,
    "per round": MIXED,
}
BATCH_PATTERNS = [MIXED, right_for(7, 1, 0), right_at(1, 3)]
# Drafters of the small vocabulary, which are right now and then.
DRAFTERS = {
    "full attention": {},
    "sliding attention": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
    "all causal": {"is_causal": True},
    "multiplier and soft cap": {"output_multiplier": 0.5, "final_logit_softcapping": 2.0},
    "scaled embedding": {"input_embedding_scale": 3.0},
    "one feature": {"num_target_features": 1},
    "block of 2": {"block_size": 2},
    "block of 16": {"block_size": 16},
}


def compile_config(backend="eager", **options):
    config = CompileConfig(backend=backend, **({} if backend == "inductor" else {"mode": None}), **options)
    config._compile_all_devices = True
    return config


def fast(backend="eager", **options):
    """Keyword arguments that ask for a compiled forward, as plain `generate` takes them."""
    return {"cache_implementation": "static", "compile_config": compile_config(backend, **options)}


def make_target(kind, **overrides):
    torch.manual_seed(2)
    fields = LAYERS | overrides
    if kind == "llama":
        return make_tiny_target(**({"initializer_range": 0.4} | overrides))
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**fields)).eval()
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**fields, num_local_experts=4, num_experts_per_tok=2)).eval()
    if kind == "gpt2":
        names = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range")
        fields = {name: fields[name] for name in names}
        return GPT2LMHeadModel(GPT2Config(**fields, n_embd=32, n_layer=6, n_head=4, n_positions=512)).eval()
    if kind == "qwen3_next":
        linear = {f"linear_{name}": 8 for name in ("key_head_dim", "value_head_dim")}
        linear |= {"linear_num_value_heads": 2, "linear_num_key_heads": 2}
        moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        fields |= linear | moe | {"layer_types": ["linear_attention", "full_attention"] * 3}
        return Qwen3NextForCausalLM(Qwen3NextConfig(**fields, shared_expert_intermediate_size=16)).eval()
    fields = {"sliding_window": 8, "query_pre_attn_scalar": 8} | fields
    config = Gemma3TextConfig(**fields, layer_types=["sliding_attention", "full_attention"] * 3)
    target = Gemma3ForCausalLM(config).eval()
    with torch.no_grad():  # or its tied head would only repeat the last token
        for name, parameter in target.named_parameters():
            if "post_" in name:
                parameter += 4.0
    return target


def make_config(target, **overrides):
    fields = {"num_hidden_layers": 2, "num_target_features": 3, "block_size": BLOCK, "mask_token_id": MASK_TOKEN_ID}
    if target.config.model_type in ("gemma3_text", "gpt2"):
        fields["rope_theta"] = 10000.0
    if target.config.model_type == "gpt2":
        fields["intermediate_size"] = 64
    return create_drafter_config(target.config, **(fields | overrides))


def make_drafter(target, kind=RecordingDrafter, **overrides):
    torch.manual_seed(3)
    return kind(make_config(target, **({"initializer_range": 0.3} | overrides))).eval()


def make_small_vocabulary_pair(**overrides):
    """A random drafter for eight tokens is right now and then."""
    target = make_target("llama", vocab_size=8, pad_token_id=None)
    drafter = make_drafter(target, mask_token_id=7, **overrides)
    return target, drafter


def generate(target, input_ids=PROMPT, *, max_new_tokens=NEW, do_sample=False, **kwargs):
    return target.generate(input_ids, max_new_tokens=max_new_tokens, do_sample=do_sample, **kwargs)


def generate_batch(target, *, input_ids=BATCH, attention_mask=BATCH_MASK, **kwargs):
    return generate(target, input_ids, attention_mask=attention_mask, **kwargs)


def make_oracle(target, pattern: Pattern = always_right, input_ids=PROMPT, decoy=None, **kwargs):
    """A drafter that knows what `generate(target, input_ids, **kwargs)` gives, and one block more."""
    kwargs["max_new_tokens"] = kwargs.get("max_new_tokens", NEW) + BLOCK
    text = generate(target, input_ids, **kwargs)
    return OracleDrafter(make_config(target), target, text, pattern, decoy)


def make_batch_oracle(target, patterns: list[Pattern] | None = None, **kwargs):
    """A drafter that knows what `generate_batch(target, **kwargs)` gives, and one block more."""
    kwargs["max_new_tokens"] = kwargs.get("max_new_tokens", NEW) + BLOCK
    texts = generate_batch(target, **kwargs)
    num_padding = (1 - BATCH_MASK).sum(dim=1).tolist()
    rows = [text[padding:].tolist() for text, padding in zip(texts, num_padding, strict=True)]
    return OracleDrafter(make_config(target), target, rows, patterns or BATCH_PATTERNS)


def new_tokens(output, input_ids=PROMPT, row=0) -> list[int]:
    return output[row, input_ids.shape[1] :].tolist()


def stock_loop(drafter, **kwargs):
    """For `custom_generate`: Transformers' own assisted decoding with this drafter's candidates."""
    assisted_decoding = GenerationMixin._assisted_decoding.__wrapped__
    return functools.partial(assisted_decoding, assistant_model=drafter, **kwargs)


def count_hooks(target) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in target.modules())


def cache_argument(target) -> str:
    """Transformers renamed the argument between 5.22 and 5.24."""
    return "cache" if "cache" in inspect.signature(target.forward).parameters else "past_key_values"


def cache_of(output):
    return output["cache"] if "cache" in output else output.past_key_values


@torch.no_grad()
def read_prefix(target, num_tokens, input_ids=PROMPT, cache=None, **kwargs):
    """Keyword argument with a cache that holds the first tokens of the prompt."""
    cache = DynamicCache(config=target.config) if cache is None else cache
    target(input_ids[:, :num_tokens], use_cache=True, **{cache_argument(target): cache}, **kwargs)
    assert cache.get_seq_length() == num_tokens
    return {cache_argument(target): cache}


def load_authors_twin(drafter):
    """The authors' module with the weights of `drafter`, as their own code would load it from a saved folder."""
    authors = pytest.importorskip("dflash.model")
    config = Qwen3Config(**drafter.config.to_dict())
    twin = authors.DFlashDraftModel(config).eval()
    twin.load_state_dict(drafter.state_dict())
    return authors, twin


def ragged_ends(target, **kwargs) -> tuple[list[int], list[int]]:
    """Two tokens that end the rows of `generate_batch` far from each other, and the new tokens of each row then."""
    texts = generate_batch(target, **kwargs)[:, BATCH.shape[1] :].tolist()
    for ends in itertools.combinations(sorted({token for text in texts for token in text}), 2):
        lengths = [next((i + 1 for i, token in enumerate(text) if token in ends), NEW) for text in texts]
        first, second, third = sorted(lengths)
        if first >= 4 and second >= first + 5 and third >= second + 5:
            return list(ends), lengths
    raise AssertionError("These texts do not end far from each other; build the target with another seed.")
