"""A new drafter for a target, with random weights or born from the target's own last layers."""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from .configuration_dflash import DFlashConfig
from .modeling_dflash import DFlashDraftModel
from .target_dflash import check_drafter_fits, decoder_layers, text_config

logger = logging.get_logger(__name__)

_CALIBRATION_TOKENS = 256
_ATTENTION_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP_NAMES = ("gate_proj", "up_proj", "down_proj")


@torch.no_grad()
def create_drafter(target: PreTrainedModel, config: DFlashConfig, init: str = "target") -> DFlashDraftModel:
    """A float32 drafter, ready for training.

    With `init="target"` draft layer i starts as the target's i-th of the last `num_hidden_layers` layers: attention,
    MLP and norms are copied; the context projection starts as the identity on the last tapped layer, the context norm
    as the first copied layer's input norm, the final norm as the target's. A target without q/k norms gives norm
    weights that restore the size of its queries and keys, measured on random token ids. A narrower MLP keeps the
    target's strongest neurons. What is copied only in part is logged.

    Args:
        target ([`PreTrainedModel`]): The target.
        config ([`DFlashConfig`]): The drafter's configuration.
        init (`str`): `"target"` or `"random"`.
    Raises:
        ValueError: If `init` is neither, the config does not fit the target, or the target's layers are of another
            kind than the drafter's (no separate q, k, v projections or no gated MLP); use `init="random"` there.
    """
    if init not in ("target", "random"):
        raise ValueError(f"`init` is {init!r}; it must be 'target' or 'random'.")
    check_drafter_fits(config, target)
    drafter = DFlashDraftModel(config).float()
    if init == "random":
        return drafter
    layers = decoder_layers(target)
    sources = list(layers[-config.num_hidden_layers :])
    if len(sources) < config.num_hidden_layers:
        raise ValueError(
            f"The drafter has {config.num_hidden_layers} layers, the target only {len(sources)}. Use fewer draft "
            "layers or `init='random'`."
        )
    for source in sources:
        _require_parts(source, type(target).__name__)
    query_rms, key_rms = _query_key_rms(target, sources)
    for index, (source, layer) in enumerate(zip(sources, drafter.layers, strict=True)):
        _copy_attention(source.self_attn, layer.self_attn, query_rms[index], key_rms[index])
        _copy_mlp(source.mlp, layer.mlp)
        layer.input_layernorm.weight.copy_(_norm_weight(source.input_layernorm))
        # Gemma 2 and later norm the MLP's input by this name, and the attention's output by the other one's.
        mlp_norm = getattr(source, "pre_feedforward_layernorm", source.post_attention_layernorm)
        layer.post_attention_layernorm.weight.copy_(_norm_weight(mlp_norm))
    width = config.hidden_size
    drafter.fc.weight.normal_(std=config.initializer_range / len(config.target_layer_ids))
    drafter.fc.weight[:, -width:] += torch.eye(width)
    drafter.hidden_norm.weight.copy_(_norm_weight(sources[0].input_layernorm))
    final_norm = getattr(target.get_decoder(), "norm", None)
    if final_norm is not None:
        drafter.norm.weight.copy_(_norm_weight(final_norm))
    return drafter


def _require_parts(source: nn.Module, target_name: str) -> None:
    attention, mlp = getattr(source, "self_attn", None), getattr(source, "mlp", None)
    missing = [f"self_attn.{name}" for name in _ATTENTION_NAMES if not hasattr(attention, name)]
    missing += [f"mlp.{name}" for name in _MLP_NAMES if not hasattr(mlp, name)]
    missing += [name for name in ("input_layernorm", "post_attention_layernorm") if not hasattr(source, name)]
    if missing:
        raise ValueError(
            f"{target_name}'s layers have no {', '.join(missing)}, so a drafter cannot start from them. "
            "Use `init='random'`."
        )


def _query_key_rms(target: PreTrainedModel, sources: list[nn.Module]) -> tuple[list[float], list[float]]:
    """Root mean square of each source layer's queries and keys, on one row of random token ids."""
    recorded: dict[tuple[int, str], float] = {}

    def recorder(index: int, name: str):
        def record(module, arguments, output):
            recorded[index, name] = output.float().pow(2).mean().sqrt().item()

        return record

    handles = [
        getattr(source.self_attn, name).register_forward_hook(recorder(index, name))
        for index, source in enumerate(sources)
        for name in ("q_proj", "k_proj")
    ]
    try:
        generator = torch.Generator().manual_seed(0)
        input_ids = torch.randint(text_config(target).vocab_size, (1, _CALIBRATION_TOKENS), generator=generator)
        target.get_decoder()(input_ids=input_ids.to(target.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    indices = range(len(sources))
    return [recorded[i, "q_proj"] for i in indices], [recorded[i, "k_proj"] for i in indices]


def _copy_attention(source: nn.Module, attention: nn.Module, query_rms: float, key_rms: float) -> None:
    for name in _ATTENTION_NAMES:
        ours, theirs = getattr(attention, name), getattr(source, name)
        if ours.weight.shape != theirs.weight.shape:
            raise ValueError(
                f"The drafter's `{name}` is {tuple(ours.weight.shape)}, the target's {tuple(theirs.weight.shape)}. "
                "Give the config the target's heads and `head_dim`, or use `init='random'`."
            )
        ours.weight.copy_(theirs.weight)
        if ours.bias is not None:
            ours.bias.copy_(theirs.bias) if theirs.bias is not None else ours.bias.zero_()
        elif theirs.bias is not None:
            logger.info(f"The target's `{name}` bias is left out; `attention_bias=True` in the config would copy it.")
    for name, size in (("q_norm", query_rms), ("k_norm", key_rms)):
        ours, theirs = getattr(attention, name), getattr(source, name, None)
        if theirs is not None and theirs.weight.shape == ours.weight.shape:
            ours.weight.copy_(_norm_weight(theirs))
        else:
            ours.weight.fill_(size)
    # Some models, such as Gemma, scale their scores by something else than the head size.
    attention.q_norm.weight.mul_(getattr(source, "scaling", attention.scaling) / attention.scaling)


def _copy_mlp(source: nn.Module, mlp: nn.Module) -> None:
    width, source_width = mlp.gate_proj.out_features, source.gate_proj.out_features
    if width > source_width:
        raise ValueError(
            f"The drafter's `intermediate_size` {width} is larger than the target's {source_width}. Use at most that, "
            "or `init='random'`."
        )
    neurons = torch.arange(source_width)
    if width < source_width:
        strength = source.down_proj.weight.float().norm(dim=0) * source.up_proj.weight.float().norm(dim=1)
        neurons = strength.topk(width).indices.sort().values
        logger.info(f"The draft MLP keeps the {width} strongest of the target layer's {source_width} neurons.")
    mlp.gate_proj.weight.copy_(source.gate_proj.weight[neurons])
    mlp.up_proj.weight.copy_(source.up_proj.weight[neurons])
    mlp.down_proj.weight.copy_(source.down_proj.weight[:, neurons])


def _norm_weight(norm: nn.Module) -> torch.Tensor:
    """The factor that `norm` applies; some models, the first three Gemmas among them, store it minus one."""
    weight = norm.weight
    signs = torch.ones_like(weight)  # root mean square 1, mean 0
    signs[1::2] = -1
    return weight + (norm(signs) * signs - weight).mean().round()
