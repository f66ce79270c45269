"""Tiny seeded targets, one for each kind of model that a drafter may meet."""

import contextlib
import importlib.util
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

MASK_TOKEN_ID = 97
IMAGE_TOKEN_ID, VISION_START_ID, VISION_END_ID, VIDEO_TOKEN_ID = 90, 91, 92, 93
NUM_IMAGE_TOKENS = 4
PROMPTS = ([5, 17, 3, 42, 8, 29, 61, 33, 12], [11, 4, 77, 20, 9, 51], [30, 2, 66, 71], [52, 19, 83, 36, 7])
WINDOW = 12
TEXT = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 1,
    "initializer_range": 0.4,  # or the texts repeat themselves
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GEMMA_LAYERS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "query_pre_attn_scalar": 8}
HYBRID_LAYERS = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


@dataclass(frozen=True)
class Family:
    """A kind of target.

    Args:
        build (`Callable`): Makes the target, always the same; keywords override fields of its text config.
        prepare (`Callable`, *optional*): What is done to the built target, such as quantising it.
        drafter_fields (`dict`): What the drafter's config needs beyond the target's.
        has_window (`bool`): Whether layers have a sliding window.
        add_image (`Callable`, *optional*): From a row count and ids, whose image tokens are in place, to the inputs
            that go with them.
        during_calls (`Callable`): From the target to the context in which it generates.
        refusal (`str`, *optional*): Pattern of the text with which every drafted call is refused.
        package (`str`, *optional*): Needed package.
        may_be_slow (`bool`): Whether a warning may come in place of accepted proposals.
    """

    build: Callable[..., PreTrainedModel]
    prepare: Callable[[PreTrainedModel], Any] | None = None
    drafter_fields: dict = field(default_factory=dict)
    has_window: bool = False
    add_image: Callable[[torch.Tensor], dict] | None = None
    during_calls: Callable[[Any], Any] = lambda target: contextlib.nullcontext()
    refusal: str | None = None
    package: str | None = None
    may_be_slow: bool = False

    def inputs(self, num_rows: int = 1) -> dict[str, torch.Tensor]:
        """Prompts of different lengths, padded on the left, with an image each if the family has eyes."""
        image = [VISION_START_ID, *[IMAGE_TOKEN_ID] * NUM_IMAGE_TOKENS, VISION_END_ID] if self.add_image else []
        rows = [[*prompt[:2], *image, *prompt[2:]] for prompt in PROMPTS[:num_rows]]
        longest = max(map(len, rows))
        ids = torch.tensor([[TEXT["pad_token_id"]] * (longest - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        return {"input_ids": ids, "attention_mask": mask} | (self.add_image(ids) if self.add_image else {})

    def missing(self) -> str | None:
        """What this machine lacks for the family."""
        if self.package is not None and importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        return None


def _seeded(model_class: str, config_class: str, seed: int = 2, **fields) -> Callable[..., PreTrainedModel]:
    def build(**overrides):
        torch.manual_seed(seed)
        config = getattr(transformers, config_class)(**(fields | overrides))
        return getattr(transformers, model_class)(config).eval()

    return build


def _text_model(prefix: str, **fields) -> Callable[..., PreTrainedModel]:
    return _seeded(f"{prefix}ForCausalLM", f"{prefix}Config", **(TEXT | fields))


def _gemma(build: Callable[..., PreTrainedModel]) -> Callable[..., PreTrainedModel]:
    def build_with_large_norms(**overrides):
        target = build(**overrides)
        with torch.no_grad():  # or the tied head would only repeat the last token
            for name, parameter in target.named_parameters():
                if "post_" in name and "layernorm" in name and "vision" not in name:
                    parameter += 4.0
                if "mm_input_projection" in name:  # zero, which would hide the image
                    parameter.normal_(std=0.4)
        return target

    return build_with_large_norms


def _two_part_model(prefix: str, vision: dict, text: dict, **fields) -> Callable[..., PreTrainedModel]:
    def build(**overrides):
        text_config = TEXT | text | overrides
        build_seeded = _seeded(f"{prefix}ForConditionalGeneration", f"{prefix}Config", **fields)
        return build_seeded(text_config=text_config, vision_config=vision)

    return build


def _qwen_image(patch_width: int) -> Callable[[torch.Tensor], dict]:
    def add_image(input_ids):
        rows = input_ids.shape[0]
        generator = torch.Generator().manual_seed(4)
        return {
            "pixel_values": torch.randn(rows * 4 * NUM_IMAGE_TOKENS, patch_width, generator=generator),
            "image_grid_thw": torch.tensor([[1, 4, 4]] * rows),
            "mm_token_type_ids": (input_ids == IMAGE_TOKEN_ID).int(),
        }

    return add_image


def _gemma_image(input_ids: torch.Tensor) -> dict:
    generator = torch.Generator().manual_seed(4)
    return {
        "pixel_values": torch.randn(input_ids.shape[0], 3, 16, 16, generator=generator),
        "token_type_ids": (input_ids == IMAGE_TOKEN_ID).long(),
    }


def _padded_vocabulary(**overrides) -> PreTrainedModel:
    target = _text_model("Llama", vocab_size=128)(**overrides)
    with torch.no_grad():
        target.lm_head.weight[100:] = 0.0
    return target


def _add_lora(target: PreTrainedModel) -> Any:
    import peft

    torch.manual_seed(5)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(target, config).eval()


class _Int8Linear(nn.Module):
    """A linear layer without a floating weight, like those of quantised targets on other hardware."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states @ (self.weight * self.scale).T


def _make_int8(target: PreTrainedModel) -> PreTrainedModel:
    for name, module in list(target.named_modules()):
        if isinstance(module, nn.Linear):
            target.set_submodule(name, _Int8Linear(module))
    return target


def _quantise_with_torchao(target: PreTrainedModel) -> PreTrainedModel:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(target, Int8WeightOnlyConfig())
    return target


def _offload_to_memory(target: PreTrainedModel) -> PreTrainedModel:
    import accelerate

    return accelerate.cpu_offload(target, execution_device=torch.device("cpu"))


def _offload_to_disk(target: PreTrainedModel) -> PreTrainedModel:
    import accelerate

    folder = tempfile.TemporaryDirectory()
    target.offload_folder = folder  # lives as long as the target
    return accelerate.disk_offload(target, folder.name, execution_device=torch.device("cpu"))


def _compile(target: PreTrainedModel) -> PreTrainedModel:
    # Hooks, guards and graph breaks are the same with every backend; this one needs no C++ compiler.
    target.forward = torch.compile(target.forward, backend="eager", dynamic=True)
    return target


_NO_ROPE = {"rope_theta": 10000.0}
_LLAMA = _text_model("Llama")
_GPT2_NAMES = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range")
_GPT2 = {name: TEXT[name] for name in _GPT2_NAMES} | {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 256}
_FALCON = {name: value for name, value in TEXT.items() if name not in ("head_dim", "num_key_value_heads")}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_QWEN_VISION = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "in_channels": 3}
_QWEN_VISION |= {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32}
_VISION_IDS = {
    "image_token_id": IMAGE_TOKEN_ID,
    "video_token_id": VIDEO_TOKEN_ID,
    "vision_start_token_id": VISION_START_ID,
    "vision_end_token_id": VISION_END_ID,
}
_GEMMA_VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_GEMMA_VISION |= {"image_size": 16, "patch_size": 4, "vision_use_head": False}
_GEMMA_IDS = {"image_token_id": IMAGE_TOKEN_ID, "boi_token_id": VISION_START_ID, "eoi_token_id": VISION_END_ID}

FAMILIES = {
    "Qwen2": Family(_text_model("Qwen2")),
    "Qwen3": Family(_text_model("Qwen3")),
    "Qwen3-MoE": Family(_text_model("Qwen3Moe", **EXPERTS)),
    "Llama": Family(_LLAMA),
    "Llama, tied head": Family(_text_model("Llama", tie_word_embeddings=True)),
    "Llama, padded vocabulary": Family(_padded_vocabulary, drafter_fields={"mask_token_id": 120}),
    "Mistral": Family(_text_model("Mistral", sliding_window=WINDOW), has_window=True),
    "Mixtral": Family(_text_model("Mixtral", num_local_experts=4, num_experts_per_tok=2)),
    "Gemma 2": Family(
        _gemma(_text_model("Gemma2", sliding_window=WINDOW, tie_word_embeddings=True, **GEMMA_LAYERS)),
        has_window=True,
    ),
    "Gemma 3": Family(
        _gemma(
            _seeded(
                "Gemma3ForCausalLM",
                "Gemma3TextConfig",
                **(TEXT | GEMMA_LAYERS | {"sliding_window": WINDOW, "final_logit_softcapping": 20.0}),
            )
        ),
        drafter_fields=_NO_ROPE,
        has_window=True,
    ),
    "Phi-3": Family(_text_model("Phi3", sliding_window=WINDOW), has_window=True),
    "GPT-2": Family(
        _seeded("GPT2LMHeadModel", "GPT2Config", **_GPT2), drafter_fields=_NO_ROPE | {"intermediate_size": 64}
    ),
    "OPT": Family(
        _text_model("OPT", ffn_dim=64, word_embed_proj_dim=32, init_std=0.4),
        drafter_fields=_NO_ROPE | {"intermediate_size": 64},
    ),
    "GPT-NeoX": Family(_text_model("GPTNeoX", rotary_pct=0.5)),
    "Falcon": Family(
        _seeded("FalconForCausalLM", "FalconConfig", seed=6, **_FALCON), drafter_fields={"intermediate_size": 64}
    ),
    "Falcon, alibi": Family(
        _seeded("FalconForCausalLM", "FalconConfig", seed=6, **_FALCON, alibi=True),
        drafter_fields=_NO_ROPE | {"intermediate_size": 64},
    ),
    "OLMo-2": Family(_text_model("Olmo2")),
    "GPT-OSS": Family(
        _text_model(
            "GptOss",
            sliding_window=WINDOW,
            num_local_experts=4,
            num_experts_per_tok=2,
            layer_types=["sliding_attention", "full_attention"] * 2,
            attn_implementation="eager",
        ),
        has_window=True,
    ),
    "Qwen3-Next": Family(
        _text_model("Qwen3Next", shared_expert_intermediate_size=16, **EXPERTS, **HYBRID_LAYERS),
    ),
    "Qwen3.5": Family(_seeded("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", **(TEXT | HYBRID_LAYERS))),
    "Mamba": Family(
        _seeded("MambaForCausalLM", "MambaConfig", **TEXT, state_size=4),
        drafter_fields=_NO_ROPE,
        # The second from Transformers 5.15, where its cache is no `Cache`.
        refusal="'mamba' keep a recurrent state that cannot|has no cache that rejected tokens can be",
    ),
    "Qwen2.5-VL": Family(
        _two_part_model(
            "Qwen2_5_VL",
            _QWEN_VISION | {"window_size": 16, "fullatt_block_indexes": [1]},
            {"rope_parameters": _MROPE},
            **_VISION_IDS,
        ),
        add_image=_qwen_image(3 * 2 * 4 * 4),
    ),
    "Qwen3-VL": Family(
        _two_part_model(
            "Qwen3VL",
            _QWEN_VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
            {"rope_parameters": _MROPE},
            **_VISION_IDS,
        ),
        add_image=_qwen_image(3 * 2 * 4 * 4),
    ),
    "Gemma 3, image": Family(
        _gemma(
            _two_part_model(
                "Gemma3",
                _GEMMA_VISION,
                GEMMA_LAYERS | {"sliding_window": WINDOW},
                mm_tokens_per_image=NUM_IMAGE_TOKENS,
                seed=11,
                **_GEMMA_IDS,
            )
        ),
        drafter_fields=_NO_ROPE,
        has_window=True,
        add_image=_gemma_image,
    ),
    "T5": Family(
        _seeded(
            "T5ForConditionalGeneration",
            "T5Config",
            **{"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 4, "num_heads": 4},
            **{"decoder_start_token_id": 0, "pad_token_id": 1, "eos_token_id": None},
        ),
        refusal="encoder-decoder model; DFlash needs a decoder-only target",
    ),
    "Llama, LoRA": Family(_LLAMA, _add_lora, package="peft"),
    "Llama, LoRA disabled": Family(
        _LLAMA, _add_lora, package="peft", during_calls=lambda target: target.disable_adapter()
    ),
    "Llama, LoRA merged": Family(_LLAMA, lambda target: _add_lora(target).merge_and_unload(), package="peft"),
    "Llama, int8": Family(_LLAMA, _make_int8),
    "Llama, torchao int8": Family(_LLAMA, _quantise_with_torchao, package="torchao"),
    "Llama, off-loaded to memory": Family(_LLAMA, _offload_to_memory),
    "Llama, off-loaded to disk": Family(_LLAMA, _offload_to_disk),
    "Llama, compiled": Family(_LLAMA, _compile, may_be_slow=True),
}
