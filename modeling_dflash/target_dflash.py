"""What a drafter borrows from its target: layer outputs, embedding, head. None of it enters the drafter's weights."""

import threading
import weakref

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


class TargetTaps:
    """Outputs of the tapped decoder layers in the target's forwards; no other layer's output is kept.

    Hooks work on every architecture and Transformers version alike, and see a layer's output before the final norm.
    They act only in the thread that made them, and go away with this object.

    Args:
        target ([`PreTrainedModel`]): The target.
        layer_ids (`list[int]`): 0-based decoder layers.
    Attributes:
        max_tokens (`int`, *optional*): Of what was run since the last `take`, only this many of the newest tokens are
            kept; None: all of them.
    Raises:
        ValueError: If the target's decoder layers cannot be found.
    """

    max_tokens: int | None = None

    def __init__(self, target: PreTrainedModel, layer_ids: list[int]):
        layers = decoder_layers(target)
        tapped = [layers[layer_id] for layer_id in layer_ids]
        self.layer_ids = layer_ids
        self._given: torch.Tensor | None = None
        self._outputs: list[list[torch.Tensor]] = [[] for _ in layer_ids]
        self._thread = threading.get_ident()
        handles = [
            layer.register_forward_hook(_make_hook(weakref.ref(self), slot)) for slot, layer in enumerate(tapped)
        ]
        self.remove = weakref.finalize(self, _remove_hooks, handles)

    def take(self) -> torch.Tensor:
        """Context features of shape (batch, tokens, len(layer_ids) * D), released here.

        Several forwards since the last call, as of a prompt read in pieces, follow each other.

        Raises:
            RuntimeError: If the target has not run a forward since the last call.
        """
        if self._given is not None:
            features, self._given = self._given, None
            return features
        outputs, self._outputs = self._outputs, [[] for _ in self._outputs]
        if not all(outputs):
            raise RuntimeError(
                "The target ran no forward in this thread that hooks on its layers could see (a compiled forward "
                "ignores hooks that came later)."
            )
        device = outputs[0][0].device
        layers = [self._newest(torch.cat(pieces, dim=1) if len(pieces) > 1 else pieces[0]) for pieces in outputs]
        return torch.cat([layer.to(device) for layer in layers], dim=-1)

    def _newest(self, states: torch.Tensor) -> torch.Tensor:
        if self.max_tokens is None or states.shape[1] <= self.max_tokens:
            return states
        # A copy, or the older tokens would stay in memory with it.
        return states[:, states.shape[1] - self.max_tokens :].clone()

    def put(self, features: torch.Tensor) -> None:
        """Takes in the context features of a forward that hooks could not see into."""
        self._given = features

    def discard(self) -> None:
        """Releases outputs that nobody asked for."""
        self._given = None
        self._outputs = [[] for _ in self._outputs]

    def __enter__(self) -> "TargetTaps":
        return self

    def __exit__(self, *exception) -> None:
        self.remove()


def decoder_layers(target: PreTrainedModel) -> nn.ModuleList:
    """The target's list of decoder layers.

    Raises:
        ValueError: If no module list of the target has as many entries as its text config has layers.
    """
    depth = text_config(target).num_hidden_layers
    decoder = target.get_decoder() if hasattr(target, "get_decoder") else None
    for root in (decoder, target):
        for module in root.modules() if root is not None else ():
            # Parents come before children, so the layers come before lists inside a layer, such as experts.
            if isinstance(module, nn.ModuleList) and len(module) == depth:
                return module
    raise ValueError(
        f"Found no list of {depth} decoder layers in {type(target).__name__}, so its hidden states cannot be tapped. "
        "DFlash needs a decoder-only target."
    )


def text_config(target: PreTrainedModel) -> PretrainedConfig:
    """The config of the target's language model, also for multi-modal targets."""
    return target.config.get_text_config(decoder=True)


def embed_tokens(target: PreTrainedModel, input_ids: torch.LongTensor, config: PretrainedConfig) -> torch.Tensor:
    """The target's embeddings of `input_ids`, as its first layer would read them.

    The target's own module is called, so off-loaded, quantised or scaled embeddings work. A drafter that states
    `input_embedding_scale` gets raw rows times that scale, whatever the module multiplies by.

    Args:
        input_ids (`torch.LongTensor`): Shape (batch, tokens).
        config ([`DFlashConfig`]): The drafter's config.
    Returns:
        `torch.Tensor` of shape (batch, tokens, D).
    """
    module = target.get_input_embeddings()
    embeddings = module(input_ids)
    scale = config.input_embedding_scale
    if scale is None:
        return embeddings
    # Gemma's embedding module multiplies by `embed_scale` itself.
    module_scale = getattr(module, "scalar_embed_scale", None)
    if module_scale is None:
        module_scale = float(getattr(module, "embed_scale", 1.0))
    return embeddings if scale == module_scale else embeddings * (scale / module_scale)


def draft_logits(target: PreTrainedModel, hidden_states: torch.Tensor, config: PretrainedConfig) -> torch.Tensor:
    """Logits of draft hidden states through the target's head, with the drafter's multiplier and soft cap.

    Args:
        hidden_states (`torch.Tensor`): Shape (..., D).
        config ([`DFlashConfig`]): The drafter's config.
    Returns:
        `torch.Tensor` of shape (..., vocab_size).
    """
    head = target.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.is_floating_point() and weight.device.type != "meta":
        hidden_states = hidden_states.to(weight.device, weight.dtype)
    return shape_logits(head(hidden_states), config)


def shape_logits(logits: torch.Tensor, config: PretrainedConfig) -> torch.Tensor:
    """Applies the drafter's `output_multiplier`, then its `final_logit_softcapping`, to raw logits of the head."""
    if config.output_multiplier != 1.0:
        logits = logits * config.output_multiplier
    cap = config.final_logit_softcapping
    return cap * torch.tanh(logits / cap) if cap else logits


def check_drafter_fits(config: PretrainedConfig, target: PreTrainedModel) -> None:
    """Raises a `ValueError` that names the first way in which a drafter's config does not fit the target."""
    name = type(target).__name__
    if target.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder model; DFlash needs a decoder-only target.")
    target_config = text_config(target)
    for field, needed, found in (
        ("hidden_size", config.hidden_size, target_config.hidden_size),
        ("num_target_layers", config.num_target_layers, target_config.num_hidden_layers),
    ):
        if needed != found:
            raise ValueError(
                f"This drafter was made for a target with `{field}` {needed}, but {name} has {found}. "
                "Load the drafter that belongs to this target, or train one for it."
            )
    rows = target.get_input_embeddings().weight.shape[0]
    if config.mask_token_id >= rows:
        raise ValueError(
            f"The drafter's `mask_token_id` {config.mask_token_id} has no row in the target's embedding ({rows} rows)."
        )
    if target.get_output_embeddings() is None:
        raise ValueError(f"{name} has no output embedding (head) to read draft tokens with.")


def _make_hook(taps: "weakref.ref[TargetTaps]", slot: int):
    def keep_output(module, arguments, output):
        owner = taps()
        if owner is not None and owner._thread == threading.get_ident():
            owner._outputs[slot].append(owner._newest(output[0] if isinstance(output, tuple) else output))

    return keep_output


def _remove_hooks(handles: list) -> None:
    for handle in handles:
        handle.remove()
