"""Tiny seeded targets and drafters shared by the tests."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dflash_hf import DFlashConfig, DFlashDraftModel, create_drafter_config

MASK_TOKEN_ID = 97


@pytest.fixture(autouse=True)
def seeded_single_thread():
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture
def tiny_target() -> LlamaForCausalLM:
    """Llama with 8 layers, hidden 32, vocabulary 100, in float32 and eval mode."""
    return make_tiny_target()


@pytest.fixture
def tiny_config(tiny_target) -> DFlashConfig:
    """Two draft layers, three tapped layers, block 8, for `tiny_target`."""
    return create_drafter_config(
        tiny_target.config,
        num_hidden_layers=2,
        num_target_features=3,
        block_size=8,
        mask_token_id=MASK_TOKEN_ID,
    )


@pytest.fixture
def tiny_drafter(tiny_config) -> DFlashDraftModel:
    """A random drafter for `tiny_target`, in float32 and eval mode."""
    return DFlashDraftModel(tiny_config).eval()


def make_tiny_target(**overrides) -> LlamaForCausalLM:
    torch.manual_seed(1)
    fields = {
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": 0,
        "eos_token_id": None,
        "pad_token_id": 1,
        "initializer_range": 0.2,
    }
    return LlamaForCausalLM(LlamaConfig(**(fields | overrides))).eval()
