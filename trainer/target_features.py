"""Context features for training, from the frozen target in the same process."""

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from dflash_hf.target_dflash import TargetTaps

logger = logging.get_logger(__name__)


class TargetFeatures:
    """Runs the target up to its last layer, without its head, and returns the tapped layers' outputs.

    Args:
        target ([`PreTrainedModel`]): The target; it is frozen and set to eval mode.
        layer_ids (`list[int]`): Tapped layers.
        keep_in_memory (`bool`): Keep each row's features in CPU memory, in the target's dtype, so that later epochs
            do not run the target again. Needs 2 * len(layer_ids) * D bytes a token in bf16.
    """

    def __init__(self, target: PreTrainedModel, layer_ids: list[int], *, keep_in_memory: bool = False):
        self.target = target.eval().requires_grad_(False)
        self.layer_ids = layer_ids
        self._rows: dict[int, torch.Tensor] | None = {} if keep_in_memory else None
        self._is_checked = False

    def __call__(
        self, input_ids: torch.LongTensor, lengths: list[int], row_ids: list[int] | None = None
    ) -> torch.Tensor:
        """Features of shape (batch, tokens, len(layer_ids) * D) of rows that are padded on the right.

        Args:
            input_ids (`torch.LongTensor`): Shape (batch, tokens).
            lengths (`list[int]`): Real tokens of each row; features behind them are 0 or arbitrary.
            row_ids (`list[int]`, *optional*): Identity of each row, for `keep_in_memory`.
        Raises:
            ValueError: If a tapped layer gives the same value everywhere, so that nothing could be learned from it.
        """
        rows = self._rows
        if rows is None or row_ids is None:
            return self._run(input_ids)
        unseen = [i for i, row in enumerate(row_ids) if row not in rows]
        if unseen:
            width = max(lengths[i] for i in unseen)
            features = self._run(input_ids[unseen, :width])
            for i, row_features in zip(unseen, features, strict=True):
                rows[row_ids[i]] = row_features[: lengths[i]].cpu().clone()
        kept = [rows[row] for row in row_ids]
        padded = kept[0].new_zeros(len(kept), input_ids.shape[1], kept[0].shape[1])
        for i, row_features in enumerate(kept):
            padded[i, : row_features.shape[0]] = row_features
        return padded.to(input_ids.device)

    @torch.no_grad()
    def _run(self, input_ids: torch.LongTensor) -> torch.Tensor:
        # Attention is causal and padding is on the right, so real tokens never see it and need no mask.
        with TargetTaps(self.target, self.layer_ids) as taps:
            self.target.get_decoder()(input_ids=input_ids.to(self.target.device), use_cache=False)
            features = taps.take()
        if not self._is_checked:
            _refuse_constant(features, self.layer_ids)
            self._is_checked = True
        return features


def _refuse_constant(features: torch.Tensor, layer_ids: list[int]) -> None:
    for layer_id, feature in zip(layer_ids, features.chunk(len(layer_ids), dim=-1), strict=True):
        spread = feature.float().std().item()
        if not spread > 0:  # also catches NaN
            raise ValueError(
                f"Layer {layer_id} of the target gives constant or non-finite features (standard deviation {spread}). "
                "A drafter trained on them would learn nothing; check the target's weights and dtype."
            )
