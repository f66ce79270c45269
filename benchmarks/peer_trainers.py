"""Adapters that train our drafter's weights with two other DFlash trainers: SpecForge 0.2.0 and speculators 0.9.0.

Neither is a dependency. Their wheels go into a folder of their own, without their dependencies, and that folder into
PYTHONPATH:

    pip install --no-deps --target peers specforge==0.2.0 speculators==0.9.0 hs-connectors==0.9.0 \
        openai sniffio loguru

Both modules name their tensors as the z-lab layout does, so weights go in and out without renaming. Both are built for
GPUs; on a CPU they run with `attention="sdpa"` and speculators' eager losses.
"""

import importlib.metadata
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import PreTrainedModel, Qwen3Config

from dflash_hf import DFlashConfig, create_drafter_config
from dflash_hf.hub_configs.embedded_target import EMBEDDED_TARGET
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target_dflash import TargetTaps, decoder_layers
from dflash_hf.trainer.loss import decay_for_block_size

# A row: `input_ids` and `loss_mask` of shape (T,), `features` (T, layers * D), `last_hidden` (T, D), the last decoder
# layer's output before the target's final norm.
Row = dict[str, torch.Tensor]


@torch.no_grad()
def row_with_features(
    target: PreTrainedModel, layer_ids: Sequence[int], input_ids: torch.LongTensor, loss_mask: torch.Tensor
) -> Row:
    """A row as both peers take it, after one forward of the target; `input_ids` and `loss_mask` have shape (T,)."""
    last_layer = len(decoder_layers(target)) - 1
    with TargetTaps(target, [*layer_ids, last_layer]) as taps:
        target.get_decoder()(input_ids=input_ids[None], use_cache=False)
        states = taps.take()[0]
    features, last_hidden = states.tensor_split([-target.config.hidden_size], dim=1)
    # Clones: a saved view would carry the whole tensor along.
    return {
        "input_ids": input_ids,
        "loss_mask": loss_mask,
        "features": features.clone(),
        "last_hidden": last_hidden.clone(),
    }


@dataclass
class DrafterShape:
    """The options that say which drafter a benchmark trains."""

    target: str = field(default=EMBEDDED_TARGET, metadata={"help": "Hub id, folder, or the embedded target."})
    mask_token_id: int = field(default=16, metadata={"help": "Unused row of the target's embedding."})
    num_hidden_layers: int = field(default=2, metadata={"help": "Draft layers."})
    num_target_features: int = field(default=5, metadata={"help": "Tapped layers."})
    block_size: int = field(default=8, metadata={"help": "Tokens per block, anchor included."})

    def config_for(self, target: PreTrainedModel) -> DFlashConfig:
        """The drafter's config for a loaded target."""
        return create_drafter_config(
            target.config,
            num_hidden_layers=self.num_hidden_layers,
            num_target_features=self.num_target_features,
            block_size=self.block_size,
            mask_token_id=self.mask_token_id,
        )


class GivenFeatures:
    """Stands in for our trainer's `target_features`: finds the features of rows, as a store does, by their tokens."""

    def __init__(self, rows: Sequence[Row]):
        self._features = {_key(row["input_ids"]): row["features"] for row in rows}

    def __call__(self, input_ids: torch.LongTensor, *_) -> torch.Tensor:
        """Shape (batch, tokens, width); rows are padded on the right with 0, which no row may end with."""
        return nn.utils.rnn.pad_sequence([self._features[_key(row)] for row in input_ids], batch_first=True)


def _key(input_ids: torch.LongTensor) -> bytes:
    return input_ids[: int(input_ids.nonzero().max()) + 1].numpy().tobytes()


def peer_versions() -> dict[str, str]:
    """Installed versions of the two trainers."""
    return {name: importlib.metadata.version(name) for name in ("specforge", "speculators")}


class SpecForgeStep:
    """SpecForge's `OnlineDFlashModel`: cross-entropy on the row's tokens, rows padded to a batch.

    Args:
        drafter ([`DFlashDraftModel`]): Gives the config and the initial weights; it is not changed.
        target ([`PreTrainedModel`]): Embedding and head are shared with it.
        num_anchors (`int`): Anchors per row.
        chunk_blocks (`int`): Blocks of every row that pass the head together; 0 keeps all logits at once and does not
            recompute them. 128 is SpecForge's default.
    """

    def __init__(
        self, drafter: DFlashDraftModel, target: PreTrainedModel, num_anchors: int, *, chunk_blocks: int = 128
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns that flash_attn is missing
            from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
            from specforge.modeling.draft.dflash import DFlashDraftModel as SpecForgeDraftModel

        config = _layer_config(drafter)
        self.module = SpecForgeDraftModel(config).float().train()
        self.module.load_state_dict(drafter.state_dict())
        self.model = OnlineDFlashModel(
            self.module,
            target.get_output_embeddings(),
            target.get_input_embeddings(),
            drafter.config.mask_token_id,
            block_size=drafter.config.block_size,
            attention_backend="sdpa",
            num_anchors=num_anchors,
            # Its recipes give the paper's gamma; without one it would weigh all slots alike.
            loss_decay_gamma=decay_for_block_size(drafter.config.block_size),
            objective_chunk_blocks=chunk_blocks,
        )

    def batch(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        """The arguments of its forward: rows padded on the right."""
        pad = nn.utils.rnn.pad_sequence
        return {
            "input_ids": pad([row["input_ids"] for row in rows], batch_first=True),
            "hidden_states": pad([row["features"].float() for row in rows], batch_first=True),
            "loss_mask": pad([row["loss_mask"].float() for row in rows], batch_first=True),
        }

    def loss(
        self, batch: dict[str, torch.Tensor], anchors: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Its loss of the batch, with its own anchors or with `(anchors, is_valid)` of shape (batch, N)."""
        fixed = mock.patch.object(self.model, "_sample_anchor_positions", lambda *_: anchors)
        with nullcontext() if anchors is None else fixed:
            return self.model(**batch)[0]


class SpeculatorsStep:
    """speculators' `DFlashDraftModel`: cross-entropy on the target's most likely tokens, rows packed into one.

    Args:
        drafter ([`DFlashDraftModel`]): Gives the config and the initial weights; it is not changed.
        target ([`PreTrainedModel`]): Must come from a folder or the Hub: its weights are read again from there.
        num_anchors (`int`): Anchors per row; a packed batch draws them from all its rows together.
        slot_weights (`str`): `"dpace"`, its default for DFlash, or `"fixed-exp-decay"`, the paper's.
    """

    def __init__(
        self, drafter: DFlashDraftModel, target: PreTrainedModel, num_anchors: int, *, slot_weights: str = "dpace"
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from loguru import logger
            from speculators.models.dflash import core
        logger.disable("speculators")

        config = drafter.config
        self.module = core.DFlashDraftModel.from_training_args(
            _layer_config(drafter),
            draft_vocab_size=config.vocab_size,
            block_size=config.block_size,
            mask_token_id=config.mask_token_id,
            target_layer_ids=[layer_id + 1 for layer_id in config.target_layer_ids],  # it counts the embedding
            verifier_name_or_path=target.config._name_or_path,
            draft_attn_impl="sdpa",
        ).train()
        _, unexpected = self.module.load_state_dict(drafter.state_dict(), strict=False)
        if unexpected:
            raise ValueError(f"speculators' module has no {unexpected}; this script is written for version 0.9.0.")
        # Autocast would cast the frozen heads anew in every forward.
        self.module.lm_head.to(target.dtype)
        self.module.verifier_lm_head.to(target.dtype)
        self._core = core
        self._num_anchors = num_anchors
        self._options, _ = core.DFlashDraftModel.get_trainer_kwargs(
            loss_fn="ce",
            loss_implementation="eager",
            dflash_decay_gamma=decay_for_block_size(config.block_size),
            per_position_loss_weight=slot_weights,
        )

    def batch(self, rows: Sequence[Row]) -> dict[str, Any]:
        """The arguments of its forward: all rows one after the other."""
        lengths = torch.tensor([len(row["input_ids"]) for row in rows])
        return {
            "input_ids": torch.cat([row["input_ids"] for row in rows])[None],
            "hidden_states": torch.cat([row["features"].float() for row in rows])[None],
            "loss_mask": torch.cat([row["loss_mask"] for row in rows])[None],
            "verifier_last_hidden_states": torch.cat([row["last_hidden"] for row in rows])[None],
            "document_ids": torch.arange(len(rows)).repeat_interleave(lengths)[None],
            "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
            "max_anchors": self._num_anchors * len(rows),
        }

    def loss(self, batch: dict[str, Any], anchors: tuple[torch.Tensor, torch.Tensor] | None = None) -> torch.Tensor:
        """Its loss of the batch, with its own anchors or with `(anchors, is_valid)` of shape (N,)."""
        fixed = mock.patch.object(self._core, "select_anchors", lambda *_: anchors)
        with nullcontext() if anchors is None else fixed:
            return self.module(**{**self._options, **batch})[1]


def load_peer_weights(drafter: DFlashDraftModel, module: nn.Module) -> None:
    """Puts a peer's trained weights into our drafter, whose `save_pretrained` writes the z-lab layout."""
    theirs = module.state_dict()
    drafter.load_state_dict({name: theirs[name] for name in drafter.state_dict()})


def _layer_config(drafter: DFlashDraftModel) -> Qwen3Config:
    config = Qwen3Config(**drafter.config.to_dict())
    config._attn_implementation = "sdpa"
    return config
