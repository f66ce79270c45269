"""Answers written by the target itself: the on-policy training data that DFlash needs (paper, section 5)."""

import hashlib
import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from dflash_hf.hub_configs.embedded_target import EMBEDDED_TARGET, load_target
from dflash_hf.trainer.command_line import parse_options
from dflash_hf.trainer.data import read_json_lines
from dflash_hf.trainer.grouped_attention import register_grouped_attention


@dataclass
class RegenerateOptions:
    """Options of `dflash-regenerate`."""

    prompts: str = field(metadata={"help": "JSONL file; each row has `messages` that end with a user turn."})
    output: str = field(metadata={"help": "JSONL file to write; a rerun continues it."})
    target: str = field(default=EMBEDDED_TARGET, metadata={"help": "Hub id, folder, or the embedded target."})
    max_new_tokens: int = field(default=160, metadata={"help": "Longest answer, in tokens."})
    max_prompts: int | None = field(default=None, metadata={"help": "Answer only the first prompts of the file."})
    max_prompt_length: int = field(default=320, metadata={"help": "Longer prompts are skipped, in tokens."})
    batch_size: int = field(default=96, metadata={"help": "Prompts decoded together."})
    temperature: float = field(default=0.0, metadata={"help": "0 decodes greedily."})
    dtype: str = field(default="bfloat16", metadata={"help": "Dtype of the target."})
    seed: int = field(default=0, metadata={"help": "Seed when the temperature is above 0."})
    shard: int = field(default=0, metadata={"help": "Which shard of the prompts this process answers."})
    num_shards: int = field(
        default=1, metadata={"help": "Processes that share the prompts, each with its own output."}
    )


def regenerate(options: RegenerateOptions) -> int:
    """Writes one row per prompt to `options.output` and returns how many rows the file has.

    A row is `{"id", "source", "input_ids", "prompt_length", "finish_reason"}`: the very token ids that the target read
    and wrote, never re-rendered text. `finish_reason` is `"stop"` or `"length"`. A killed run is continued: finished
    rows stay, a half-written last line is removed, and other settings than the first run's are refused.

    Raises:
        ValueError: If the settings differ from those that began `options.output`, or a row does not end with a user
            turn.
    """
    output = Path(options.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    _check_settings(options, output.with_name(output.name + ".settings.json"))
    finished = _finished_ids(output)
    rows = [row for row in _prompt_rows(options) if row["id"] not in finished]
    if not rows:
        return len(finished)
    target, tokenizer = load_target(options.target, dtype=getattr(torch, options.dtype))
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # masked in the prompt and cut off behind the answer
    if target.device.type == "cpu" and target.config._attn_implementation == "sdpa":
        target.set_attn_implementation(register_grouped_attention())
    encoded = list(_encode(rows, tokenizer, options.max_prompt_length))
    # Prompts of like length share a batch, so that little is padding; sorting inside windows keeps an early part of
    # the file a fair sample of the whole.
    window = 8 * options.batch_size
    encoded = [
        row
        for start in range(0, len(encoded), window)
        for row in sorted(encoded[start : start + window], key=lambda row: -len(row["prompt_ids"]))
    ]
    written = len(finished)
    with open(output, "a", encoding="utf-8") as file, tqdm(total=len(encoded), unit="answer") as progress:
        for start in range(0, len(encoded), options.batch_size):
            batch = encoded[start : start + options.batch_size]
            for row in answer_batch(target, tokenizer, batch, options):
                file.write(json.dumps(row) + "\n")
                written += 1
            file.flush()
            os.fsync(file.fileno())
            progress.update(len(batch))
    return written


@torch.inference_mode()
def answer_batch(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: list[dict], options: RegenerateOptions
) -> Iterator[dict[str, Any]]:
    """The target's answers to `batch` (rows with `id` and `prompt_ids`), one row each."""
    inputs = tokenizer.pad(
        {"input_ids": [row["prompt_ids"] for row in batch]}, padding_side="left", return_tensors="pt"
    )
    set_seed(options.seed + batch[0]["index"])
    sampling = (
        {"do_sample": True, "temperature": options.temperature} if options.temperature > 0 else {"do_sample": False}
    )
    sequences = target.generate(**inputs.to(target.device), max_new_tokens=options.max_new_tokens, **sampling)
    end_ids = target.generation_config.eos_token_id
    end_ids = set(end_ids if isinstance(end_ids, list) else [end_ids])
    for row, sequence in zip(batch, sequences[:, inputs.input_ids.shape[1] :].tolist(), strict=True):
        length = next((i + 1 for i, token in enumerate(sequence) if token in end_ids), len(sequence))
        yield {
            "id": row["id"],
            "source": row.get("source", ""),
            "input_ids": row["prompt_ids"] + sequence[:length],
            "prompt_length": len(row["prompt_ids"]),
            "finish_reason": "stop" if sequence[length - 1] in end_ids else "length",
        }


def _check_settings(options: RegenerateOptions, settings_file: Path) -> None:
    settings = {
        name: value for name, value in asdict(options).items() if name not in ("output", "batch_size", "max_prompts")
    }
    if not settings_file.exists():
        temporary = settings_file.with_name(settings_file.name + ".tmp")
        temporary.write_text(json.dumps(settings, indent=2))
        os.replace(temporary, settings_file)
        return
    before = json.loads(settings_file.read_text())
    changed = sorted(name for name in settings if before.get(name) != settings[name])
    if changed:
        differences = ", ".join(f"`{name}` was {before.get(name)!r}, now {settings[name]!r}" for name in changed)
        raise ValueError(
            f"{options.output} was begun with other settings: {differences}. Use the first ones or another `--output`."
        )


def _finished_ids(output: Path) -> set[str]:
    """Ids already answered; cuts off a last line that a kill left half written."""
    if not output.exists():
        return set()
    content = output.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) != len(content):
        os.truncate(output, len(whole))
    return {row["id"] for row in read_json_lines(output)}


def _prompt_rows(options: RegenerateOptions) -> Iterator[dict[str, Any]]:
    for index, row in enumerate(itertools.islice(read_json_lines(options.prompts), options.max_prompts)):
        if index % options.num_shards != options.shard:
            continue
        messages = row.get("messages")
        if not messages or messages[-1]["role"] != "user":
            raise ValueError(
                f"{options.prompts}, row {index}: `messages` must end with a user turn, got {messages!r}."
            )
        identity = hashlib.sha1(json.dumps([index, messages], sort_keys=True).encode()).hexdigest()[:16]
        yield {"id": identity, "index": index, "source": row.get("source", ""), "messages": messages}


def _encode(rows: list[dict], tokenizer: PreTrainedTokenizerBase, max_prompt_length: int) -> Iterator[dict[str, Any]]:
    skipped = 0
    for row in rows:
        text = tokenizer.apply_chat_template(row["messages"], tokenize=False, add_generation_prompt=True)
        prompt_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(prompt_ids) > max_prompt_length:
            skipped += 1
            continue
        yield {**row, "prompt_ids": prompt_ids}
    if skipped:
        print(f"{skipped} prompts are longer than --max_prompt_length {max_prompt_length} and were skipped.")


def main() -> None:
    (options,) = parse_options(RegenerateOptions, description="Let the target answer prompts, as training data.")
    print(f"{regenerate(options)} answers in {options.output}")


if __name__ == "__main__":
    main()
