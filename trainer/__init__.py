"""Training of DFlash drafters."""

from dflash_hf.trainer.anchors import select_anchors
from dflash_hf.trainer.block_mask import block_mask_dense
from dflash_hf.trainer.dflash_trainer import DFlashTrainer
from dflash_hf.trainer.loss import decay_weights, dflash_loss
from dflash_hf.trainer.training_args import DFlashTrainingArguments

__all__ = [
    "DFlashTrainer",
    "DFlashTrainingArguments",
    "block_mask_dense",
    "decay_weights",
    "dflash_loss",
    "select_anchors",
]
