"""Arguments of [`DFlashTrainer`]; the defaults that differ from Transformers' are the paper's (appendix A.1)."""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainingArguments

from dflash_hf.trainer.block_mask import ATTENTION_FORMS
from dflash_hf.trainer.objectives import LABEL_SOURCES, OBJECTIVES

_CHOICES = {
    "attention": ATTENTION_FORMS,
    "objective": OBJECTIVES,
    "label_source": LABEL_SOURCES,
    "matrix_optimizer": ("adamw", "muon"),
}


@dataclass
class DFlashTrainingArguments(TrainingArguments):
    """[`TrainingArguments`] with the paper's defaults and the options of block-diffusion training.

    Other defaults than Transformers': `learning_rate` 6e-4, cosine schedule with 4% warm-up, `max_grad_norm` 1.0,
    6 epochs, no weight decay. Shapes (block size, layers, tapped layers) belong to [`DFlashConfig`].
    """

    learning_rate: float = field(default=6e-4, metadata={"help": "Peak learning rate. Paper: 6e-4."})
    num_train_epochs: float = field(default=6.0, metadata={"help": "Passes over the data. Paper: 6."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Schedule. Paper: cosine."})
    warmup_steps: float = field(default=0.04, metadata={"help": "Steps, or a share of all steps if below 1."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "Gradient clipping. Paper: 1.0."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Must stay off: rows carry a loss mask."})
    hub_strategy: str = field(default="end", metadata={"help": "Must stay 'end': the finished drafter is pushed."})
    use_cache: bool = field(
        default=True,
        metadata={"help": "Training uses no cache; True keeps the Trainer from writing False into the config."},
    )
    num_anchors: int = field(default=512, metadata={"help": "Anchors per row, drawn anew every epoch. Paper: 512."})
    loss_decay: float | None = field(
        default=None,
        metadata={"help": "Gamma of the loss weights; default by block size as in the paper (16: 7, 10: 5, 8: 4)."},
    )
    head_chunk_size: int = field(default=256, metadata={"help": "Slots that pass the head together."})
    sampled_negatives: int | None = field(
        default=None,
        metadata={
            "help": "Estimate the softmax over this many random tokens and the batch's labels instead of the whole "
            "vocabulary (sampled softmax, arXiv 1412.2007; not in the paper). Default: the whole vocabulary."
        },
    )
    attention: str = field(
        default="blocks",
        metadata={
            "help": "How blocks attend while training: 'blocks' (only the scores that count, every device), 'sdpa' or "
            "'eager' (a dense mask), 'flex_attention' (needs a GPU to be fast). All compute the same."
        },
    )
    objective: str = field(
        default="cross_entropy",
        metadata={"help": "'cross_entropy' (the paper's), 'kl' or 'tv' (against the target's distribution)."},
    )
    label_source: str = field(
        default="data", metadata={"help": "'data': the rows' tokens; 'target': the target's most likely tokens."}
    )
    d_pace_alpha: float | None = field(
        default=None,
        metadata={"help": "Smoothing of D-PACE weights, which then replace the fading ones; usually 0.5."},
    )
    pad_tokens_to_multiple_of: int = field(
        default=1, metadata={"help": "Pads rows, so that compiled code meets few lengths."}
    )
    pad_anchors_to_multiple_of: int = field(
        default=1, metadata={"help": "Pads the anchors of a batch, so that compiled code meets few widths."}
    )
    cache_features: str | None = field(
        default=None,
        metadata={"help": "Folder for the target's features: written before training, shared by processes and runs."},
    )
    cache_answers_only: bool = field(
        default=False,
        metadata={
            "help": "Store features from the first supervised token on only. Blocks then see no prompt in training, "
            "though they do in generation."
        },
    )
    matrix_optimizer: str = field(
        default="adamw", metadata={"help": "'adamw' for all weights (the paper's), or 'muon' for the matrices."}
    )
    ema_decay: float | None = field(
        default=None,
        metadata={"help": "Keeps an average of the weights with this decay; it is evaluated and shipped."},
    )
    live_prompts: int = field(
        default=0, metadata={"help": "Held-out rows whose prompts are decoded in every evaluation, for the live tau."}
    )
    live_max_new_tokens: int = field(default=64, metadata={"help": "Longest live answer, in tokens."})

    def __post_init__(self):
        # Batches hold flat indices and rows of documents, which must not be cut apart along their first dimension.
        self.accelerator_config = _without_dispatch(getattr(self, "accelerator_config", None))
        if getattr(self, "ddp_find_unused_parameters", None) is None:
            self.ddp_find_unused_parameters = False  # every batch reaches every weight, also one without supervision
        super().__post_init__()
        if self.remove_unused_columns:
            raise ValueError("`remove_unused_columns` must be False: rows carry `loss_mask`, which no forward takes.")
        if self.dataloader_persistent_workers:
            raise ValueError(
                "`dataloader_persistent_workers` must be False: workers that outlive an epoch would keep its anchors."
            )
        if self.push_to_hub and self.hub_strategy != "end":
            raise ValueError(
                f"`hub_strategy` is {self.hub_strategy}; it must be 'end': checkpoints hold pickles and optimizer "
                "states, which do not belong on the Hub."
            )
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` is {getattr(self, name)!r}; choose from {allowed}.")
        for name in (
            "num_anchors",
            "head_chunk_size",
            "pad_tokens_to_multiple_of",
            "pad_anchors_to_multiple_of",
            "live_max_new_tokens",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}; it must be at least 1.")
        if self.sampled_negatives is not None and self.sampled_negatives < 1:
            raise ValueError(
                f"`sampled_negatives` is {self.sampled_negatives}; give a positive number or leave it out."
            )
        if self.d_pace_alpha is not None and not 0 < self.d_pace_alpha <= 1:
            raise ValueError(f"`d_pace_alpha` is {self.d_pace_alpha}; it must be above 0 and at most 1 (paper: 0.5).")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ValueError(f"`ema_decay` is {self.ema_decay}; it must lie between 0 and 1, such as 0.999.")
        if self.sampled_negatives is not None and self.needs_teacher:
            raise ValueError(
                "`sampled_negatives` estimates a softmax over a few tokens; `objective` "
                f"{self.objective!r} with `label_source` {self.label_source!r} needs the whole vocabulary."
            )
        if self.cache_answers_only and self.cache_features is None:
            raise ValueError("`cache_answers_only` needs a `cache_features` folder.")

    @property
    def device(self) -> torch.device:
        """As in [`TrainingArguments`], but a CPU has no index: it is the process's rank there, and Transformers
        5.15 cannot map a checkpoint to "cpu:1" on a resume."""
        device = super().device
        return torch.device("cpu") if device.type == "cpu" else device

    @property
    def needs_teacher(self) -> bool:
        """Whether the loss reads the target's own logits."""
        return self.objective != "cross_entropy" or self.label_source == "target"


def _without_dispatch(config: Any) -> Any:
    if config is None:
        return {"dispatch_batches": False}
    if isinstance(config, dict) and config.get("dispatch_batches") is None:
        return {**config, "dispatch_batches": False}
    return config
