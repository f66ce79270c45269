"""`DFlashTrainer`: orders data, target features, blocks and loss inside Transformers' training loop."""

import copy
import math
import os
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from huggingface_hub import HfApi
from torch import nn
from torch.utils.data import IterableDataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer
from transformers.utils import logging

from dflash_hf.hub_configs.card import render_card
from dflash_hf.hub_configs.folder import build_hub_folder
from dflash_hf.hub_configs.push import PushResult, push_drafter
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target_dflash import check_drafter_fits, embed_tokens
from dflash_hf.trainer.adapters import merged_drafter
from dflash_hf.trainer.batches import AnchorCollator
from dflash_hf.trainer.block_attention import attention_implementation
from dflash_hf.trainer.block_mask import attention_masks, block_positions
from dflash_hf.trainer.callbacks import AverageUpdater, EpochSetter
from dflash_hf.trainer.data import StreamedRows, TokenRows
from dflash_hf.trainer.ema import WeightAverage
from dflash_hf.trainer.feature_store import FeatureStore
from dflash_hf.trainer.head_loss import head_loss
from dflash_hf.trainer.live_tau import decode_live, live_metrics, live_prompts
from dflash_hf.trainer.loss import DFlashLossOutput, decay_for_block_size, decay_weights
from dflash_hf.trainer.metrics import BlockMetrics
from dflash_hf.trainer.optimizers import MuonWithAdamW
from dflash_hf.trainer.packing import PackedRows, PackedStream
from dflash_hf.trainer.provenance import run_record, write_json
from dflash_hf.trainer.stored_features import fill_feature_store, open_feature_store, training_documents
from dflash_hf.trainer.target_features import TargetFeatures, check_rebuilt_logits
from dflash_hf.trainer.training_args import DFlashTrainingArguments

logger = logging.get_logger(__name__)

# Real text is not predictable to 0.05 nats a token by a fresh drafter; a block that sees its own answers is.
_LEAK_BOUND = 0.05
_LEAK_STEPS = 10
_AVERAGE_FILE = "average.safetensors"
_ROW_CLASSES = (TokenRows, PackedRows, StreamedRows, PackedStream)


class DFlashTrainer(Trainer):
    """Trains a DFlash drafter against its frozen target.

    Args:
        model ([`DFlashDraftModel`]): The drafter, in float32, or a `PeftModel` around one; `args.bf16` adds autocast.
        target_model ([`PreTrainedModel`]): The target, in the same process. It is frozen and never saved.
        args ([`DFlashTrainingArguments`]): Training options.
        train_dataset, eval_dataset: Rows with `input_ids` and `loss_mask` (1 = supervised) or `prompt_length`; a
            stream of such rows; or [`PackedRows`] or [`PackedStream`] of them.
        processing_class ([`PreTrainedTokenizerBase`], *optional*): The target's tokenizer; its special ids are checked
            against the mask token.
        provenance (`dict`, *optional*): Facts for `run.json` in every checkpoint.
        card (`dict`, *optional*): Values of the model card, see [`build_hub_folder`]; `push_to_hub` needs them.
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
        provenance: dict[str, Any] | None = None,
        card: dict[str, Any] | None = None,
        **kwargs,
    ):
        drafter = _drafter(model)
        config = drafter.config
        check_drafter_fits(config, target_model)
        _check_mask_token(config.mask_token_id, processing_class)
        self.card = card
        if args.push_to_hub and card is not None:
            render_card(config, card)  # a missing value should not come up after the training
        if args.n_gpu > 1:
            raise ValueError(
                f"One process sees {args.n_gpu} GPUs, which Trainer would use by splitting batches. Start one process "
                "per GPU with `accelerate launch` or `torchrun`, or show it one with CUDA_VISIBLE_DEVICES."
            )
        drafter.set_attn_implementation(attention_implementation(args.attention))
        super().__init__(
            model=model,
            args=args,
            train_dataset=_token_rows(train_dataset),
            eval_dataset=_evaluation_rows(eval_dataset),
            data_collator=AnchorCollator(
                args.num_anchors,
                _slot_weights(config.block_size, args),
                args.seed,
                hides_prompt=args.cache_answers_only,
                token_multiple=args.pad_tokens_to_multiple_of,
                anchor_multiple=args.pad_anchors_to_multiple_of,
            ),
            # The tokenizer is the target's; a drafter folder does not carry it.
            **kwargs,
        )
        if self.is_fsdp_enabled and (args.ema_decay is not None or drafter is not model):
            raise ValueError("`ema_decay` and LoRA do not work with FSDP; a drafter that small fits without: use DDP.")
        # compute_loss divides by the weights of the whole optimizer step, which the loop hands over.
        self.model_accepts_loss_kwargs = True
        is_placed = getattr(target_model, "hf_device_map", None) or getattr(target_model, "is_quantized", False)
        self.target_model = target_model if is_placed else target_model.to(self.args.device)
        self.target_features = TargetFeatures(
            self.target_model, config.target_layer_ids, with_final_hidden=args.needs_teacher
        )
        if args.needs_teacher:
            check_rebuilt_logits(self.target_model)
        self._store: FeatureStore | None = None
        if self.train_dataset is not None:
            self.add_callback(EpochSetter(self.train_dataset))
        self.weight_average = None if args.ema_decay is None else WeightAverage(self.model, args.ema_decay)
        if self.weight_average is not None:
            self.add_callback(AverageUpdater(self.weight_average))
        self.provenance = run_record(**(provenance or {}))
        self.train_metrics = BlockMetrics(config.block_size)
        self.eval_metrics = BlockMetrics(config.block_size)

    def create_accelerator_and_postprocess(self) -> None:
        """As in [`Trainer`]; FSDP also cuts weights over processes on CPUs."""
        state = PartialState()
        wants_fsdp = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
        if wants_fsdp and state.distributed_type == DistributedType.MULTI_CPU:
            # Accelerate (1.15) reads FSDP settings for accelerators only and would train with DDP without a word. To
            # be removed once `AcceleratorState` lists MULTI_CPU among the types that it turns into FSDP.
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        super().create_accelerator_and_postprocess()

    def train(self, *args, **kwargs) -> Any:
        """As [`Trainer.train`], after filling the store of features if `args.cache_features` names one."""
        if self.args.cache_features is not None and self._store is None:
            store = self.feature_store()
            fill_feature_store(store, training_documents(self.train_dataset), self.target_features, self.accelerator)
            self._store = store
        return super().train(*args, **kwargs)

    def feature_store(self) -> FeatureStore:
        """The store of all training documents' features, with what its folder holds now; nothing is written."""
        return open_feature_store(
            self.args.cache_features,
            training_documents(self.train_dataset),
            self.target_features,
            answers_only=self.args.cache_answers_only,
        )

    def _features(
        self, inputs: dict[str, torch.Tensor], is_training: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Context features and, if the loss needs them, the target's final hidden states, (B, T, width)."""
        input_ids, lengths = inputs["input_ids"], inputs["document_lengths"]
        if self._store is not None and is_training:
            states = self.target_features.stored(input_ids, lengths, inputs["rows"], self._store)
        else:
            states = self.target_features(input_ids, lengths)
        if not self.args.needs_teacher:
            return states, None
        width = len(self.target_features.layer_ids) * _drafter(self.model).config.hidden_size
        return states[..., :width], states[..., width:]

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
        config = _drafter(self.accelerator.unwrap_model(model)).config
        input_ids, anchors = inputs["input_ids"], inputs["anchors"]
        features, final_hidden = self._features(inputs, model.training)
        block_ids = torch.full_like(inputs["labels"], config.mask_token_id)
        block_ids[:, :, 0] = input_ids.gather(1, anchors)
        with torch.no_grad():
            noise_embeds = embed_tokens(self.target_model, block_ids.flatten(1), config)
        dtype = next(model.parameters()).dtype
        hidden_states = model(
            noise_embeds=noise_embeds.to(dtype),
            context_hidden_states=features.to(dtype),
            attention_mask=attention_masks(
                self.args.attention,
                config,
                anchors,
                inputs["is_valid"],
                input_ids.shape[1],
                context_starts=inputs["context_starts"],
                dtype=dtype,
            ),
            position_ids=block_positions(anchors, inputs["positions"], config.block_size),
        ).last_hidden_state
        hidden_states = hidden_states.unflatten(1, anchors.shape[1:] + (-1,))
        # Evaluation takes the whole vocabulary, so that its figures compare.
        return head_loss(
            self.target_model,
            hidden_states,
            inputs,
            config,
            self.args,
            final_hidden=final_hidden,
            sampling_key=(self.state.global_step, self.args.process_index) if model.training else None,
        )

    def _check_leak(self, output: DFlashLossOutput) -> None:
        if not self.model.training or self.state.global_step >= _LEAK_STEPS:
            return
        mean = output.loss_sum.item() / max(output.weight_sum.item(), 1e-9)
        is_leak = self.args.objective == "cross_entropy" and self.args.d_pace_alpha is None and mean < _LEAK_BOUND
        if output.weight_sum > 0 and (is_leak or math.isnan(mean)):
            raise ValueError(
                f"The loss is {mean:.4f} nats at step {self.state.global_step}. This early, below {_LEAK_BOUND} "
                "(or NaN) means that blocks see their answers or that the data is constant; training on would be "
                "useless."
            )

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[torch.Tensor, None, None]:
        """Loss of a batch; hits are summed in `eval_metrics`."""
        with torch.no_grad():
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
        return loss.detach(), None, None

    def evaluate(self, eval_dataset: Any | None = None, *args, **kwargs) -> dict[str, float]:
        """As [`Trainer.evaluate`], with fixed anchors, plus teacher-forced and live figures.

        Returns:
            Trainer's metrics; `eval_teacher_forced_tau`, `eval_accuracy_slot_k` and `eval_acceptance_slot_k` as in
            [`BlockMetrics`]; with `args.live_prompts` also `eval_live_tau` and `eval_live_acceptance_slot_k` from real
            decoding, as in [`live_metrics`]. With `args.ema_decay` all are those of the averaged weights.
        """
        self.eval_metrics.reset()
        average = nullcontext() if self.weight_average is None else self.weight_average.applied_to(self.model)
        with average:
            metrics = super().evaluate(_evaluation_rows(eval_dataset), *args, **kwargs)
            if self.args.live_prompts:
                live = {
                    f"eval_{name}": round(value, 4)
                    for name, value in self.live_metrics(eval_dataset or self.eval_dataset).items()
                }
                self.log(dict(live))
                metrics.update(live)
        return metrics

    def live_metrics(self, eval_dataset: Any) -> dict[str, float]:
        """Live tau of the drafter as it is now, on the first `args.live_prompts` rows; see [`live_metrics`]."""
        rows = _evaluation_rows(eval_dataset)
        rows = getattr(rows, "documents", rows)
        if not isinstance(rows, TokenRows):
            raise ValueError("`live_prompts` needs evaluation rows that can be counted, not a stream.")
        prompts = live_prompts(rows, self.args.live_prompts)
        rank, world_size = self.args.process_index, self.args.world_size
        if self.is_fsdp_enabled:
            drafter, prompts = self._gathered_drafter(), prompts if rank == 0 else []
        else:
            drafter, prompts = self.drafter, prompts[rank::world_size]
        sums = torch.zeros(drafter.config.block_size + 1, dtype=torch.float64)
        if prompts:
            sums = decode_live(self.target_model, drafter, prompts, self.args.live_max_new_tokens)
        return live_metrics(self.accelerator.reduce(sums.float().to(self.args.device), reduction="sum"))

    @property
    def drafter(self) -> DFlashDraftModel:
        """The drafter itself, unwrapped; with PEFT its adapters are in its layers."""
        return _drafter(self.accelerator.unwrap_model(self.model))

    def shipped_drafter(self) -> DFlashDraftModel:
        """A copy of the model to ship, whole in the main process: averaged weights if there are any, adapters merged.

        Every process must call it.
        """
        if self.is_fsdp_enabled:
            return self._gathered_drafter()
        model = copy.deepcopy(self.accelerator.unwrap_model(self.model, keep_torch_compile=False))
        if self.weight_average is not None:
            self.weight_average.copy_to(model)
        return merged_drafter(model)

    def _gathered_drafter(self) -> DFlashDraftModel:
        """A whole copy of a sharded drafter in the main process, which others help to gather."""
        state = self.accelerator.get_state_dict(self.model)
        config = copy.deepcopy(self.drafter.config)
        drafter = DFlashDraftModel(config)
        if self.is_world_process_zero():
            drafter.load_state_dict(state)
        return drafter.to(self.args.device)

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        """Adds teacher-forced figures to the log."""
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

    def create_optimizer(self, *args, **kwargs) -> torch.optim.Optimizer:
        """As [`Trainer.create_optimizer`], or [`MuonWithAdamW`] if `args.matrix_optimizer` says so."""
        optimizer: torch.optim.Optimizer | None = getattr(self, "optimizer", None)
        if optimizer is None and self.args.matrix_optimizer == "muon":
            if self.is_fsdp_enabled:
                raise ValueError("Muon needs whole matrices, and FSDP cuts them apart; leave one of them out.")
            self.optimizer = MuonWithAdamW(
                self.model,
                lr=self.args.learning_rate,
                weight_decay=self.args.weight_decay,
                betas=(self.args.adam_beta1, self.args.adam_beta2),
                eps=self.args.adam_epsilon,
            )
        return super().create_optimizer(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """A folder that loads as a drafter, however the weights are sharded, with `run.json` beside them.

        With `args.ema_decay`, `average/` in it is the drafter with the averaged weights.
        """
        folder = Path(output_dir or self.args.output_dir)
        if self.is_fsdp_enabled:
            # Trainer leaves sharded checkpoints without weights that `from_pretrained` reads, and would send the code
            # files of FSDP's class along.
            drafter = self._gathered_drafter()
            if self.args.should_save:
                drafter.save_pretrained(folder)
        else:
            super().save_model(str(folder), _internal_call)
        if not self.args.should_save:
            return
        if self.weight_average is not None:
            self.weight_average.save(folder / _AVERAGE_FILE)
            with self.weight_average.applied_to(self.model):
                self.accelerator.unwrap_model(self.model).save_pretrained(folder / "average")
        write_json(folder / "run.json", {**self.provenance, "step": self.state.global_step, "epoch": self.state.epoch})

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Only notes the repository's name: the push makes it, private unless `hub_private_repo` is False."""
        self.hub_model_id = self.args.hub_model_id or Path(self.args.output_dir).absolute().name
        self.push_in_progress = None

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs,
    ) -> Any:
        """Uploads the drafter as [`push_drafter`] does: a folder that loads, with its card, and nothing else.

        Raises:
            ValueError: If the trainer was made without a `card`.
        """
        drafter = self.shipped_drafter()  # every process helps to gather it
        if not self.is_world_process_zero():
            return None
        if self.card is None:
            raise ValueError("`push_to_hub` needs a model card: give `card` to the trainer, see `build_hub_folder`.")
        with tempfile.TemporaryDirectory() as parent:
            folder = build_hub_folder(drafter, Path(parent) / "drafter", card=self.card)
            return self.push_folder(folder, message=commit_message, token=token, revision=revision)

    def push_folder(
        self, folder: Path, *, message: str | None = None, token: str | None = None, revision: str | None = None
    ) -> PushResult:
        """Uploads a drafter's folder to the repository of the training arguments; see [`push_drafter`]."""
        if self.hub_model_id is None:
            self.init_hf_repo()
        return push_drafter(
            folder,
            self.hub_model_id,
            yes=True,
            message=message or "End of training",
            private=self.args.hub_private_repo is not False,
            branch=revision or self.args.hub_revision,
            api=HfApi(token=token or self.args.hub_token),
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self.weight_average is not None:
            self.weight_average.load(Path(resume_from_checkpoint) / _AVERAGE_FILE)


def _drafter(model: nn.Module) -> Any:
    """The drafter itself, also when PEFT has wrapped it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _slot_weights(block_size: int, args: DFlashTrainingArguments) -> torch.Tensor:
    gamma = args.loss_decay
    if gamma is None:
        gamma = math.inf if args.d_pace_alpha is not None else decay_for_block_size(block_size)
    logger.warning(
        f"Loss: {args.objective} with labels from {args.label_source}, weights fading with gamma {gamma} over blocks "
        f"of {block_size}" + (f", D-PACE with alpha {args.d_pace_alpha}." if args.d_pace_alpha is not None else ".")
    )
    return decay_weights(block_size, gamma)


def _token_rows(rows: Any | None) -> Any | None:
    if rows is None or isinstance(rows, _ROW_CLASSES):
        return rows
    # `datasets` streams are iterable datasets, too.
    return StreamedRows(rows) if isinstance(rows, IterableDataset) or not hasattr(rows, "__len__") else TokenRows(rows)


def _evaluation_rows(rows: Any | None) -> Any | None:
    # A copy, because the evaluation's dataloader sets epoch 0, which must not reach training rows.
    return copy.copy(_token_rows(rows))


def _check_mask_token(mask_token_id: int, tokenizer: PreTrainedTokenizerBase | None) -> None:
    for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
        if tokenizer is not None and getattr(tokenizer, name, None) == mask_token_id:
            raise ValueError(
                f"The drafter's `mask_token_id` {mask_token_id} is the tokenizer's `{name}`, which occurs in text. "
                "Choose a reserved or unused row of the target's embedding."
            )
