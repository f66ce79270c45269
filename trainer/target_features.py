"""Context features for training, from the frozen target in the same process."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from dflash_hf.target_dflash import TargetTaps
from dflash_hf.trainer.feature_store import FeatureStore


class TargetFeatures:
    """Runs the target up to its last layer, without its head, and returns the tapped layers' outputs.

    Args:
        target ([`PreTrainedModel`]): The target; it is frozen and set to eval mode.
        layer_ids (`list[int]`): Tapped layers.
    """

    def __init__(self, target: PreTrainedModel, layer_ids: Sequence[int]):
        self.target = target.eval().requires_grad_(False)
        self.layer_ids = list(layer_ids)
        self._is_checked = False

    @torch.no_grad()
    def __call__(self, input_ids: torch.LongTensor) -> torch.Tensor:
        """Features of rows that are padded on the right.

        Args:
            input_ids (`torch.LongTensor`): Shape (batch, tokens).
        Returns:
            `torch.Tensor` of shape (batch, tokens, len(layer_ids) * D), in the target's dtype.
        Raises:
            ValueError: If a tapped layer gives the same value everywhere, so that nothing could be learned from it.
        """
        # Attention is causal and padding is on the right, so real tokens never see it and need no mask.
        with TargetTaps(self.target, self.layer_ids) as taps:
            self.target.get_decoder()(input_ids=input_ids.to(self.target.device), use_cache=False)
            features = taps.take()
        if not self._is_checked:
            _refuse_constant(features, self.layer_ids)
            self._is_checked = True
        return features

    def stored(
        self, input_ids: torch.LongTensor, lengths: Sequence[int], row_ids: Sequence[int], store: FeatureStore
    ) -> torch.Tensor:
        """The same through a store: rows that it lacks are computed and written, the others are read.

        Args:
            input_ids (`torch.LongTensor`): Shape (batch, tokens), padded on the right.
            lengths (`list[int]`): Real tokens of each row; features behind them are 0.
            row_ids (`list[int]`): Each row's number in the store.
        """
        missing = [i for i, row in enumerate(row_ids) if row not in store]
        if missing:
            width = max(lengths[i] for i in missing)
            for i, row_features in zip(missing, self(input_ids[missing, :width]), strict=True):
                store.write(row_ids[i], row_features[: lengths[i]])
        kept = [store.read(row) for row in row_ids]
        features = kept[0].new_zeros(len(kept), input_ids.shape[1], kept[0].shape[1])
        for i, row_features in enumerate(kept):
            features[i, : row_features.shape[0]] = row_features
        return features.to(input_ids.device)


def _refuse_constant(features: torch.Tensor, layer_ids: Sequence[int]) -> None:
    for layer_id, feature in zip(layer_ids, features.chunk(len(layer_ids), dim=-1), strict=True):
        spread = feature.float().std().item()
        if not spread > 0:  # also catches NaN
            raise ValueError(
                f"Layer {layer_id} of the target gives constant or non-finite features (standard deviation {spread}). "
                "A drafter trained on them would learn nothing; check the target's weights and dtype."
            )
