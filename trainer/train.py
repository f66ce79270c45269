"""`dflash-train`: from a target and its answers to a Hub-ready drafter folder."""

import contextlib
import json
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from dflash_hf.configuration_dflash import DFlashConfig
from dflash_hf.hub_configs import build_hub_folder, load_hub_config
from dflash_hf.hub_configs.embedded_target import EMBEDDED_TARGET, load_target
from dflash_hf.initialization_dflash import create_drafter
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target_dflash import check_drafter_fits
from dflash_hf.trainer.adapters import add_lora, load_target_adapter
from dflash_hf.trainer.card import training_card
from dflash_hf.trainer.command_line import parse_options
from dflash_hf.trainer.data import StreamedRows, TokenRows
from dflash_hf.trainer.dflash_trainer import DFlashTrainer
from dflash_hf.trainer.packing import PackedRows, PackedStream
from dflash_hf.trainer.plan import training_plan
from dflash_hf.trainer.show_batch import show_batch
from dflash_hf.trainer.source_files import SOURCES_HELP
from dflash_hf.trainer.sources import LoadedRows, load_rows
from dflash_hf.trainer.training_args import DFlashTrainingArguments

logger = logging.get_logger(__name__)


@dataclass
class TrainOptions:
    """Options of `dflash-train` beside those of [`DFlashTrainingArguments`]."""

    train_data: list[str] = field(metadata={"help": SOURCES_HELP})
    eval_data: list[str] | None = field(
        default=None, metadata={"help": "Held-out rows; default: the last `eval_rows` of the training data."}
    )
    eval_rows: int = field(default=64, metadata={"help": "Most rows for evaluation; 0 evaluates nothing."})
    streaming: bool = field(default=False, metadata={"help": "Read rows as they come; needs `max_steps`."})
    shuffle_buffer: int | None = field(default=None, metadata={"help": "Streamed rows are drawn from so many."})
    num_proc: int | None = field(default=None, metadata={"help": "Processes that encode rows."})
    packing: bool = field(default=False, metadata={"help": "Several documents in a row of `max_length` tokens."})
    max_length: int = field(default=3072, metadata={"help": "Longest row, in tokens. Paper: 3072."})
    enable_thinking: bool | None = field(
        default=None, metadata={"help": "Given to the chat template; default: the template's own."}
    )
    target: str = field(default=EMBEDDED_TARGET, metadata={"help": "Hub id, folder, or the embedded target."})
    target_revision: str | None = field(default=None, metadata={"help": "Hub revision of the target."})
    target_dtype: str = field(default="bfloat16", metadata={"help": "Dtype of the frozen target."})
    target_device_map: str | None = field(default=None, metadata={"help": "'auto' spreads a big target over devices."})
    target_adapter: str | None = field(
        default=None, metadata={"help": "LoRA adapter of the target: folder or Hub id."}
    )
    drafter_config: str | None = field(default=None, metadata={"help": "Shipped config name, JSON file or folder."})
    drafter: str | None = field(default=None, metadata={"help": "Folder or Hub id of a drafter to go on training."})
    drafter_revision: str | None = field(default=None, metadata={"help": "Hub revision of `drafter`."})
    block_size: int | None = field(
        default=None, metadata={"help": "Another block size than the drafter's config has."}
    )
    init: str = field(default="target", metadata={"help": "Weights of a new drafter: 'target' or 'random'."})
    lora_rank: int | None = field(default=None, metadata={"help": "Train a LoRA adapter of this rank on `drafter`."})
    lora_alpha: int | None = field(default=None, metadata={"help": "Scale of the adapter; default: twice the rank."})
    lora_modules: list[str] | None = field(default=None, metadata={"help": "Linear layers with LoRA; default: all."})
    num_threads: int | None = field(default=None, metadata={"help": "CPU threads of torch."})
    plan: bool = field(default=False, metadata={"help": "Print what the run would take, and stop."})
    show_batch: bool = field(
        default=False, metadata={"help": "Print a batch with its mask, anchors and blocks, and stop."}
    )


def train(options: TrainOptions, args: DFlashTrainingArguments) -> Path | None:
    """Trains, or goes on from the last checkpoint in `args.output_dir`, and returns the Hub-ready folder.

    With `options.plan` or `options.show_batch` it prints and returns None; nothing is written.

    Raises:
        ValueError: If options clash or the data has too few rows.
    """
    _check_options(options, args)
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    transformers.set_seed(args.seed)
    target, tokenizer = load_target(
        options.target,
        dtype=getattr(torch, options.target_dtype),
        device_map=options.target_device_map,
        revision=options.target_revision,
    )
    if options.target_adapter is not None:
        target = load_target_adapter(target, options.target_adapter)
    drafter = make_drafter(options, target)
    with args.main_process_first(desc="encoding rows"):  # the others find the encoded rows in the cache
        train_rows, eval_rows, loaded = _datasets(options, args, tokenizer)
    drafter.config.dflash_config["template_mode"] = loaded.template_mode
    model = drafter
    if options.lora_rank is not None:
        alpha = 2 * options.lora_rank if options.lora_alpha is None else options.lora_alpha
        model = add_lora(drafter, rank=options.lora_rank, alpha=alpha, modules=options.lora_modules)
    trainer = DFlashTrainer(
        model=model,
        target_model=target,
        args=args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer,
        provenance={"options": asdict(options), "seed": args.seed, "data": loaded.summary()},
    )
    if options.show_batch:
        print(show_batch(next(iter(trainer.get_train_dataloader())), tokenizer, drafter.config.block_size))
        return None
    if options.plan:
        print(training_plan(trainer))
        return None
    checkpoint = last_whole_checkpoint(args.output_dir)
    if checkpoint is not None:
        print(f"Going on from {checkpoint}.")
    trainer.train(resume_from_checkpoint=checkpoint)
    results = trainer.evaluate() if eval_rows is not None else {}
    return _write_folder(options, trainer, loaded, results)


def make_drafter(options: TrainOptions, target: PreTrainedModel) -> DFlashDraftModel:
    """A new drafter or the one to go on with, in float32, with the block size asked for.

    Raises:
        ValueError: If the drafter does not fit the target, or `init` is unknown.
    """
    if options.drafter is not None:
        drafter = DFlashDraftModel.from_pretrained(
            options.drafter, dtype=torch.float32, revision=options.drafter_revision or "main"
        )
        check_drafter_fits(drafter.config, target)
        _override(drafter.config, options)
        return drafter
    config = load_hub_config(options.drafter_config or "")
    _override(config, options)
    return create_drafter(target, config, init=options.init)


def _override(config: DFlashConfig, options: TrainOptions) -> None:
    if options.block_size is not None and options.block_size != config.block_size:
        logger.warning(f"The drafter's block size becomes {options.block_size}; it was {config.block_size}.")
        config.block_size = options.block_size
    if options.max_length > config.max_position_embeddings:
        logger.warning(
            f"The drafter's `max_position_embeddings` becomes {options.max_length} (`max_length`); it was "
            f"{config.max_position_embeddings}."
        )
        config.max_position_embeddings = options.max_length


def last_whole_checkpoint(output_dir: str | Path) -> str | None:
    """The newest checkpoint that was written to its end; a kill may have left a newer part of one."""
    folders = Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
    numbered = ((folder.name.rpartition("-")[2], folder) for folder in folders)
    steps = {int(step): folder for step, folder in numbered if step.isdigit()}
    for _, folder in sorted(steps.items(), reverse=True):
        with contextlib.suppress(OSError, json.JSONDecodeError):
            json.loads((folder / TRAINER_STATE_NAME).read_text())  # Trainer writes it last
            return str(folder)
        logger.warning(f"{folder} was not written to its end, so it is passed over.")
    return None


def _check_options(options: TrainOptions, args: DFlashTrainingArguments) -> None:
    if (options.drafter_config is None) == (options.drafter is None):
        raise ValueError("Give either `drafter_config` (a new drafter) or `drafter` (one to go on training).")
    if options.lora_rank is not None and options.drafter is None:
        raise ValueError("`lora_rank` adapts a trained drafter: give `drafter`, not `drafter_config`.")
    if options.block_size is not None and options.block_size < 2:
        raise ValueError(f"`block_size` is {options.block_size}; it must be at least 2: the anchor and one proposal.")
    if options.streaming and args.max_steps <= 0:
        raise ValueError("A stream has no length: give `max_steps`.")
    if options.streaming and options.eval_data is None and options.eval_rows:
        raise ValueError("A stream has no last rows to hold out: give `eval_data`, or `eval_rows` 0.")


def _datasets(
    options: TrainOptions, args: DFlashTrainingArguments, tokenizer: PreTrainedTokenizerBase
) -> tuple[Any, TokenRows | None, LoadedRows]:
    """Training rows, evaluation rows (None if there are none) and where they came from."""
    load = partial(
        load_rows,
        tokenizer=tokenizer,
        max_length=options.max_length,
        enable_thinking=options.enable_thinking,
        num_proc=options.num_proc,
        seed=args.seed,
    )
    loaded = load(options.train_data, streaming=options.streaming, shuffle_buffer=options.shuffle_buffer)
    rows: Any = loaded.rows
    held_out: Any = None
    if options.eval_rows and options.eval_data is not None:
        found = load(options.eval_data)
        held_out = found.rows.select(range(min(options.eval_rows, len(found.rows))))
    elif options.eval_rows:
        if len(rows) <= options.eval_rows:
            raise ValueError(
                f"{options.train_data} hold {len(rows)} rows; more than `eval_rows` {options.eval_rows} needed."
            )
        split = len(rows) - options.eval_rows
        rows, held_out = rows.select(range(split)), rows.select(range(split, len(rows)))
    train_rows: Any
    if options.streaming:
        stream = StreamedRows(rows, options.max_length)
        train_rows = PackedStream(stream) if options.packing else stream
    else:
        documents = TokenRows(rows, options.max_length)
        train_rows = PackedRows(documents) if options.packing else documents
    return train_rows, None if held_out is None else TokenRows(held_out, options.max_length), loaded


def _write_folder(
    options: TrainOptions, trainer: DFlashTrainer, loaded: LoadedRows, results: dict[str, float]
) -> Path:
    """The drafter that is shipped: adapters merged, averaged weights if there are any."""
    folder = Path(trainer.args.output_dir) / "drafter"
    shipped = trainer.shipped_drafter()
    if trainer.is_world_process_zero():
        if options.lora_rank is not None:
            trainer.accelerator.unwrap_model(trainer.model).save_pretrained(folder.with_name("adapter"))
        card = training_card(options, trainer, loaded, results)
        build_hub_folder(shipped, folder, card=card)
        if trainer.args.push_to_hub:
            print(f"Pushed to {trainer.hub_model_id} at {trainer.push_folder(folder).revision}.")
    trainer.accelerator.wait_for_everyone()
    return folder


def main() -> None:
    options, args = parse_options(TrainOptions, DFlashTrainingArguments, description="Train a DFlash drafter.")
    folder = train(options, args)
    if folder is not None:
        print(f"Drafter in {folder}")


if __name__ == "__main__":
    main()
