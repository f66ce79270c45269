"""Context features for training, from the frozen target in the same process or from a store of its outputs."""

import torch
from transformers import PreTrainedModel

from dflash_hf.target_dflash import TargetTaps, text_config
from dflash_hf.trainer.feature_store import FeatureStore, batches_of_like_length, refuse_constant


class TargetFeatures:
    """Runs the target up to its last layer, without its head, and returns the tapped layers' outputs.

    The documents of a packed row pass the target one under the other, never as one text: that is exact for every
    architecture, recurrent layers included.

    Args:
        target ([`PreTrainedModel`]): The target; it is frozen and set to eval mode.
        layer_ids (`list[int]`): Tapped layers.
        with_final_hidden (`bool`): Whether the last hidden state, after the final norm, follows the tapped layers.
    """

    def __init__(self, target: PreTrainedModel, layer_ids: list[int], *, with_final_hidden: bool = False):
        self.target = target.eval().requires_grad_(False)
        self.layer_ids = list(layer_ids)
        self.with_final_hidden = with_final_hidden
        self._is_checked = False

    def __call__(self, input_ids: torch.LongTensor, document_lengths: torch.LongTensor | None = None) -> torch.Tensor:
        """Features of rows that are padded on the right.

        Args:
            input_ids (`torch.LongTensor`): Shape (batch, tokens).
            document_lengths (`torch.LongTensor`, *optional*): Tokens of the documents in each row, shape (batch, D);
                None where each row is one document.
        Returns:
            `torch.Tensor` of shape (batch, tokens, width), in the target's dtype.
        Raises:
            ValueError: If a tapped layer gives the same value everywhere, so that nothing could be learned from it.
        """
        if document_lengths is None or document_lengths.shape[1] == 1:
            return self._forward(input_ids)
        places = document_places(document_lengths)
        lengths = {i: end - start for i, (_, _, start, end) in enumerate(places)}
        features: torch.Tensor | None = None
        for batch in batches_of_like_length(lengths, input_ids.numel()):
            texts = [input_ids[places[i][0], places[i][2] : places[i][3]] for i in batch]
            values = self._forward(torch.nn.utils.rnn.pad_sequence(texts, batch_first=True))
            if features is None:
                features = values.new_zeros(*input_ids.shape, values.shape[-1])
            for i, document_values in zip(batch, values, strict=True):
                row, _, start, end = places[i]
                features[row, start:end] = document_values[: end - start]
        assert features is not None  # a batch has at least one document
        return features

    def stored(
        self,
        input_ids: torch.LongTensor,
        document_lengths: torch.LongTensor,
        rows: torch.LongTensor,
        store: FeatureStore,
    ) -> torch.Tensor:
        """The same from a store; tokens that it leaves out have features 0.

        Args:
            rows (`torch.LongTensor`): The documents' numbers in the store, shape (batch, D).
        """
        schema = store.schema
        features = torch.zeros(*input_ids.shape, schema.width, dtype=schema.torch_dtype)
        numbers = rows.tolist()
        for row, slot, start, end in document_places(document_lengths):
            first, values = store.read(numbers[row][slot])
            features[row, start + first : end] = values
        return features.to(input_ids.device, non_blocking=True)

    def _forward(self, input_ids: torch.LongTensor) -> torch.Tensor:
        # Attention is causal and padding is on the right, so real tokens never see it and need no mask.
        with TargetTaps(self.target, self.layer_ids) as taps:
            with torch.inference_mode():
                output = self.target.get_decoder()(input_ids=input_ids.to(self.target.device), use_cache=False)
            # Outside of inference mode, because autograd cannot keep tensors made inside.
            features = taps.take()
        if not self._is_checked:
            refuse_constant(features, self.layer_ids, "this batch")
            self._is_checked = True
        if self.with_final_hidden:
            features = torch.cat([features, output.last_hidden_state.to(features)], dim=-1)
        return features.to(input_ids.device)


def document_places(document_lengths: torch.LongTensor) -> list[tuple[int, int, int, int]]:
    """(row, slot in the row, first column, column behind the last) of every document."""
    places = []
    for row, lengths in enumerate(document_lengths.tolist()):
        start = 0
        for slot, length in enumerate(lengths):
            if length:
                places.append((row, slot, start, start + length))
                start += length
    return places


def target_logits(target: PreTrainedModel, final_hidden: torch.Tensor) -> torch.Tensor:
    """The target's own logits, rebuilt from its last hidden states.

    Args:
        final_hidden (`torch.Tensor`): Hidden states after the final norm, shape (..., D).
    Returns:
        `torch.Tensor` of shape (..., vocab), without gradient.
    """
    config = text_config(target)
    head = target.get_output_embeddings()
    with torch.inference_mode():
        logits = head(final_hidden)
        for name in ("logit_scale", "lm_head_multiplier"):
            if getattr(config, name, None) is not None:
                logits = logits * getattr(config, name)
        if getattr(config, "logits_scaling", None) is not None:
            logits = logits / config.logits_scaling
        cap = getattr(config, "final_logit_softcapping", None)
        logits = cap * torch.tanh(logits / cap) if cap else logits
    return logits.clone()  # outside of inference mode, so that autograd may keep it


def input_device(target: PreTrainedModel) -> torch.device:
    """Where token ids go; a target that is off-loaded whole has no device of its own."""
    return torch.device("cpu") if target.device.type == "meta" else target.device


@torch.no_grad()
def check_rebuilt_logits(target: PreTrainedModel) -> None:
    """Refuses a target whose logits [`target_logits`] does not rebuild.

    Raises:
        ValueError: If they differ from those of the target's own forward; objectives without a teacher still work.
    """
    rows = target.get_input_embeddings().weight.shape[0]
    input_ids = torch.arange(1, 9, device=target.device)[None] % rows
    expected = target(input_ids=input_ids, use_cache=False).logits.float()
    hidden = target.get_decoder()(input_ids=input_ids, use_cache=False).last_hidden_state
    found = target_logits(target, hidden).float()
    scale = expected.abs().max().clamp(min=1.0)
    worst = ((found - expected).abs().max() / scale).item()
    if not worst < 1e-2:
        raise ValueError(
            f"The logits of {type(target).__name__} cannot be rebuilt from its last hidden states (relative "
            f"difference {worst:.3g}). Use `objective` 'cross_entropy' with `label_source` 'data' for this target."
        )
