"""Arguments of [`DFlashTrainer`]; the defaults that differ from Transformers' are the paper's (appendix A.1)."""

from dataclasses import dataclass, field

from transformers import TrainingArguments


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
    use_cache: bool = field(
        default=True,
        metadata={"help": "Training uses no cache; True keeps the Trainer from writing False into the config."},
    )
    num_anchors: int = field(default=512, metadata={"help": "Anchors per row, drawn anew every epoch. Paper: 512."})
    loss_decay: float | None = field(
        default=None,
        metadata={"help": "Gamma of the loss weights; default by block size as in the paper (16: 7, 10: 5, 8: 4)."},
    )
    head_chunk_size: int = field(default=512, metadata={"help": "Slots that pass the head together."})
    sampled_negatives: int | None = field(
        default=None,
        metadata={
            "help": "Estimate the softmax over this many random tokens and the batch's labels instead of the whole "
            "vocabulary (sampled softmax, arXiv 1412.2007; not in the paper). Default: the whole vocabulary."
        },
    )
    cache_features: str | None = field(
        default=None,
        metadata={"help": "Folder for the target's features, written in the first epoch and shared by all processes."},
    )

    def __post_init__(self):
        super().__post_init__()
        if self.remove_unused_columns:
            raise ValueError("`remove_unused_columns` must be False: rows carry `loss_mask`, which no forward takes.")
        if self.dataloader_persistent_workers:
            raise ValueError(
                "`dataloader_persistent_workers` must be False: workers that outlive an epoch would keep its anchors."
            )
        for name in ("num_anchors", "head_chunk_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}; it must be at least 1.")
        if self.sampled_negatives is not None and self.sampled_negatives < 1:
            raise ValueError(
                f"`sampled_negatives` is {self.sampled_negatives}; give a positive number or leave it out."
            )
