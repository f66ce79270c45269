"""`DFlashTrainer`: orders data, target features, blocks and loss inside Transformers' training loop."""

import copy
import math
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainerCallback
from transformers.utils import logging

from dflash_hf.target_dflash import check_drafter_fits, draft_logits, embed_tokens, shape_logits, text_config
from dflash_hf.trainer.anchors import row_generator
from dflash_hf.trainer.block_attention import BLOCK_ATTENTION
from dflash_hf.trainer.block_mask import block_layout, block_positions
from dflash_hf.trainer.data import AnchorCollator, TokenRows
from dflash_hf.trainer.feature_store import FeatureStore, features_fingerprint
from dflash_hf.trainer.loss import (
    DFlashLossOutput,
    decay_for_block_size,
    decay_weights,
    dflash_loss,
    sample_candidates,
)
from dflash_hf.trainer.metrics import BlockMetrics
from dflash_hf.trainer.target_features import TargetFeatures
from dflash_hf.trainer.training_args import DFlashTrainingArguments

logger = logging.get_logger(__name__)

# Real text is not predictable to 0.05 nats a token by a fresh drafter; a block that sees its own answers is.
_LEAK_BOUND = 0.05
_LEAK_STEPS = 10


class DFlashTrainer(Trainer):
    """Trains a DFlash drafter against its frozen target.

    Args:
        model ([`DFlashDraftModel`]): The drafter, in float32; `args.bf16` adds autocast.
        target_model ([`PreTrainedModel`]): The target, in the same process. It is frozen and never saved.
        args ([`DFlashTrainingArguments`]): Training options.
        train_dataset, eval_dataset: Rows with `input_ids` and `loss_mask` (1 = supervised) or `prompt_length`.
        processing_class ([`PreTrainedTokenizerBase`], *optional*): The target's tokenizer; its special ids are checked
            against the mask token.
        kwargs: Other arguments of [`Trainer`].
    Raises:
        ValueError: If drafter and target do not fit, the mask token is a special token, or nothing is supervised.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        target_model: PreTrainedModel,
        args: DFlashTrainingArguments,
        train_dataset: Any | None = None,
        eval_dataset: Any | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        **kwargs,
    ):
        check_drafter_fits(model.config, target_model)
        model.set_attn_implementation(BLOCK_ATTENTION)
        _check_mask_token(model.config.mask_token_id, processing_class)
        block_size = model.config.block_size
        gamma = decay_for_block_size(block_size) if args.loss_decay is None else args.loss_decay
        slot_weights = decay_weights(block_size, gamma)
        logger.warning(f"Loss weights fade with gamma {gamma} over blocks of {block_size}.")
        super().__init__(
            model=model,
            args=args,
            train_dataset=_token_rows(train_dataset),
            eval_dataset=_evaluation_rows(eval_dataset),
            data_collator=AnchorCollator(args.num_anchors, slot_weights, args.seed),
            # The tokenizer is the target's; a drafter folder does not carry it.
            **kwargs,
        )
        # compute_loss divides by the weights of the whole optimizer step, which the loop hands over.
        self.model_accepts_loss_kwargs = True
        self.target_model = target_model.to(self.args.device)
        self.target_features = TargetFeatures(self.target_model, model.config.target_layer_ids)
        self._store = None
        if args.cache_features is not None and self.train_dataset is not None:
            self._store = self._open_store(args.cache_features)
        if self.train_dataset is not None:
            self.add_callback(_EpochSetter(self.train_dataset))
        self.train_metrics = BlockMetrics(block_size)
        self.eval_metrics = BlockMetrics(block_size)

    def _open_store(self, folder: str) -> FeatureStore:
        rows = [self.train_dataset[i]["input_ids"] for i in range(len(self.train_dataset))]
        layer_ids = self.target_features.layer_ids
        width = len(layer_ids) * text_config(self.target_model).hidden_size
        fingerprint = features_fingerprint(self.target_model, layer_ids, rows)
        return FeatureStore(folder, [len(row) for row in rows], width, self.target_model.dtype, fingerprint)

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor | None:
        """Sum of loss weights over the optimizer step and all processes."""
        if not batch_samples:
            return None
        total = torch.stack([batch["weights"].sum() for batch in batch_samples]).sum().to(device)
        return self.accelerator.gather(total).sum() if self.args.world_size > 1 else total

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        """Weighted loss sum of this batch over the weight sum of the whole step; see [`dflash_loss`]."""
        output = self.block_loss(model, inputs)
        self._check_leak(output)
        metrics = self.train_metrics if model.training else self.eval_metrics
        metrics.add(output.is_correct, inputs["weights"])
        denominator = output.weight_sum if num_items_in_batch is None else num_items_in_batch
        # A batch without supervised slots gives a zero loss that still reaches every parameter's graph.
        loss = output.loss_sum / denominator.clamp(min=torch.finfo(torch.float32).tiny)
        if num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes  # DDP averages gradients over processes
        return (loss, {"is_correct": output.is_correct}) if return_outputs else loss

    def block_loss(self, model: nn.Module, inputs: dict[str, torch.Tensor]) -> DFlashLossOutput:
        """Loss sums of a batch from [`AnchorCollator`]: target features, blocks, drafter, head."""
        config = self.accelerator.unwrap_model(model).config
        input_ids, anchors = inputs["input_ids"], inputs["anchors"]
        if self._store is not None and model.training:
            row_ids, lengths = inputs["rows"].tolist(), inputs["lengths"].tolist()
            features = self.target_features.stored(input_ids, lengths, row_ids, self._store)
        else:
            features = self.target_features(input_ids)
        block_ids = torch.full_like(inputs["labels"], config.mask_token_id)
        block_ids[:, :, 0] = input_ids.gather(1, anchors)
        with torch.no_grad():
            noise_embeds = embed_tokens(self.target_model, block_ids.flatten(1), config)
        context_length = input_ids.shape[1]
        masks = {
            layer_type: block_layout(
                anchors,
                inputs["is_valid"],
                context_length,
                config.block_size,
                sliding_window=config.sliding_window if layer_type == "sliding_attention" else None,
                is_causal=config.layer_is_causal(config.layer_types.index(layer_type)),
            )
            for layer_type in set(config.layer_types)
        }
        dtype = next(model.parameters()).dtype
        hidden_states = model(
            noise_embeds=noise_embeds.to(dtype),
            context_hidden_states=features.to(dtype),
            attention_mask=masks,
            position_ids=block_positions(anchors, context_length, config.block_size),
        ).last_hidden_state
        return self._head_loss(hidden_states.unflatten(1, anchors.shape[1:] + (-1,)), inputs, config)

    def _head_loss(self, hidden_states: torch.Tensor, inputs: dict[str, torch.Tensor], config) -> DFlashLossOutput:
        labels, weights, chunk_size = inputs["labels"], inputs["weights"], self.args.head_chunk_size
        if self.args.sampled_negatives is None or not self.model.training:
            return dflash_loss(
                hidden_states,
                labels,
                weights,
                lambda chunk: draft_logits(self.target_model, chunk, config),
                chunk_size=chunk_size,
            )
        head = self.target_model.get_output_embeddings()
        generator = row_generator(self.args.seed, self.state.global_step, self.args.process_index)
        candidates, new_labels, offset = sample_candidates(
            labels, head.weight.shape[0], self.args.sampled_negatives, generator=generator
        )
        rows = head.weight[candidates]
        return dflash_loss(
            hidden_states,
            new_labels,
            weights,
            lambda chunk: shape_logits(nn.functional.linear(chunk.to(rows.dtype), rows), config),
            chunk_size=chunk_size,
            logit_offset=offset,
        )

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[torch.Tensor, None, None]:
        """Loss of a batch; hits are summed in `eval_metrics`."""
        with torch.no_grad():
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
        return loss.detach(), None, None

    def evaluate(self, eval_dataset: Any | None = None, *args, **kwargs) -> dict[str, float]:
        """As [`Trainer.evaluate`], plus teacher-forced accepted length and accuracy per slot, with fixed anchors."""
        self.eval_metrics.reset()
        return super().evaluate(_evaluation_rows(eval_dataset), *args, **kwargs)

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        """Adds teacher-forced accepted length and accuracy per slot to the log."""
        if "loss" in logs:
            logs.update(self._reduced(self.train_metrics, ""))
            self.train_metrics.reset()
        elif "eval_loss" in logs:
            logs.update(self._reduced(self.eval_metrics, "eval_"))
        super().log(logs, *args, **kwargs)

    def _reduced(self, metrics: BlockMetrics, prefix: str) -> dict[str, float]:
        sums = metrics.sums().float().to(self.args.device)
        sums = self.accelerator.reduce(sums, reduction="sum")
        return {prefix + name: round(value, 4) for name, value in metrics.compute(sums).items()}

    def _check_leak(self, output: DFlashLossOutput) -> None:
        if not self.model.training or self.state.global_step >= _LEAK_STEPS:
            return
        mean = output.loss_sum.item() / max(output.weight_sum.item(), 1e-9)
        if output.weight_sum > 0 and (mean < _LEAK_BOUND or math.isnan(mean)):
            raise ValueError(
                f"The loss is {mean:.4f} nats at step {self.state.global_step}. This early, below {_LEAK_BOUND} "
                "(or NaN) means that blocks see their answers or that the data is constant; training on would be "
                "useless."
            )


class _EpochSetter(TrainerCallback):
    """Tells the rows which epoch begins, because Accelerate's dataloader does so only in one process without skips.

    With several processes, or after a resume inside an epoch, `DataLoaderShard.set_epoch` (Accelerate 1.15) finds the
    inner sampler and leaves the dataset out: anchors would stay those of epoch 0.
    """

    def __init__(self, rows: TokenRows):
        self.rows = rows

    def on_epoch_begin(self, args, state, control, **kwargs) -> None:
        # After a resume `state.epoch` lies inside the epoch; a sum of steps may end a rounding error below a whole.
        self.rows.set_epoch(int(state.epoch + 1e-6))


def _token_rows(rows: Any | None) -> TokenRows | None:
    return rows if rows is None or isinstance(rows, TokenRows) else TokenRows(rows)


def _evaluation_rows(rows: Any | None) -> TokenRows | None:
    # A copy, because the evaluation's dataloader sets epoch 0, which must not reach training rows.
    return copy.copy(_token_rows(rows))


def _check_mask_token(mask_token_id: int, tokenizer: PreTrainedTokenizerBase | None) -> None:
    for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
        if tokenizer is not None and getattr(tokenizer, name, None) == mask_token_id:
            raise ValueError(
                f"The drafter's `mask_token_id` {mask_token_id} is the tokenizer's `{name}`, which occurs in text. "
                "Choose a reserved or unused row of the target's embedding."
            )
