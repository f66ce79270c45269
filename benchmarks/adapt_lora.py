"""A LoRA adapter for one kind of text: live tau on that kind and on the others, before and after.

    OMP_NUM_THREADS=1 python benchmarks/adapt_lora.py --output runs/adapt

The kind is "turn this note into JSON", which the shipped drafter was not trained on. Prompts are made from seeded
lists, the target answers them (`dflash-regenerate`), `dflash-train --lora_rank` adapts the shipped drafter, and real
decoding of held-out prompts gives tau, tokens per verify forward over all rounds with whole blocks verified. Every
part goes on where it was stopped.
"""

import itertools
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dflash_hf import DFlashDraftModel
from dflash_hf.eval.decode import encode_prompt
from dflash_hf.eval.prompts import held_out_prompts
from dflash_hf.hub_configs import shipped_drafter_folder
from dflash_hf.hub_configs.embedded_target import EMBEDDED_TARGET, load_target
from dflash_hf.trainer.command_line import parse_options
from dflash_hf.trainer.data import write_json_lines
from dflash_hf.trainer.live_tau import decode_live, live_metrics
from dflash_hf.trainer.provenance import run_record, write_json
from dflash_hf.trainer.regenerate import RegenerateOptions, regenerate
from dflash_hf.trainer.train import TrainOptions, train
from dflash_hf.trainer.training_args import DFlashTrainingArguments

_NAMES = (
    "Anna Bruno Chiara David Elena Farid Greta Hugo Irene Jonas Keiko Liam Marta Nils Olga Pablo Rosa Sven".split()
)
_CITIES = "Oslo Madrid Kyoto Lima Prague Accra Dublin Turin Perth Lyon Quito Riga Hanoi Bergen".split()
_JOBS = "baker nurse plumber teacher pilot gardener lawyer painter farmer chemist".split()
_ITEMS = "lamp chair kettle bicycle tent guitar printer camera jacket backpack mirror carpet".split()
_NOTES = (
    "{name} is {age} years old, lives in {city} and works as a {job}.",
    "{name} from {city} ordered {count} {item}s for {price} dollars each.",
    "The {item} of {name} was sent to {city} on day {count} and cost {price} dollars.",
    "{name}, a {job}, will travel to {city} with {count} colleagues and pay {price} dollars.",
)
_REQUESTS = (
    "Turn this note into a JSON object: {note}",
    "Extract all facts from the following text as JSON.\n\n{note}",
    "Return only JSON with the fields of this sentence: {note}",
)


@dataclass
class AdaptOptions:
    """Options of the benchmark."""

    output: str = field(metadata={"help": "Folder for prompts, answers and the adapted drafter; a rerun goes on."})
    num_prompts: int = field(default=320, metadata={"help": "Training prompts of the new kind."})
    max_new_tokens: int = field(default=96, metadata={"help": "Longest answer, in tokens."})
    lora_rank: int = field(default=16, metadata={"help": "Rank of the adapter."})
    learning_rate: float = field(default=2e-3, metadata={"help": "Peak learning rate."})
    steps: int = field(default=200, metadata={"help": "Steps of 4 rows."})
    prompts_per_kind: int = field(default=16, metadata={"help": "Held-out prompts of each kind."})
    seed: int = field(default=0, metadata={"help": "Seed of prompts and training."})


def json_prompts(count: int, seed: int) -> list[str]:
    """Different prompts of the kind, in seeded order."""
    generator = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        note = generator.choice(_NOTES).format(
            name=generator.choice(_NAMES),
            city=generator.choice(_CITIES),
            job=generator.choice(_JOBS),
            item=generator.choice(_ITEMS),
            age=generator.randint(18, 80),
            count=generator.randint(2, 30),
            price=generator.randint(5, 400),
        )
        found[generator.choice(_REQUESTS).format(note=note)] = None
    return list(found)


def main() -> None:
    (options,) = parse_options(AdaptOptions, description=__doc__)
    torch.set_num_threads(1)
    folder = Path(options.output)
    prompts = json_prompts(options.num_prompts + options.prompts_per_kind, options.seed)
    trained_on, held_out = prompts[: options.num_prompts], prompts[options.num_prompts :]
    rows = ({"messages": [{"role": "user", "content": prompt}], "source": "json"} for prompt in trained_on)
    write_json_lines(folder / "prompts.jsonl", rows)
    answers = str(folder / "answers.jsonl")
    regenerate(
        RegenerateOptions(str(folder / "prompts.jsonl"), answers, max_new_tokens=options.max_new_tokens, batch_size=64)
    )
    start = time.perf_counter()
    adapted = train(
        TrainOptions(
            train_data=[answers],
            drafter=shipped_drafter_folder(),
            lora_rank=options.lora_rank,
            eval_rows=16,
            num_threads=1,
        ),
        DFlashTrainingArguments(
            output_dir=str(folder / "run"),
            use_cpu=True,
            bf16=True,
            report_to="none",
            per_device_train_batch_size=4,
            num_anchors=32,
            sampled_negatives=2000,
            learning_rate=options.learning_rate,
            max_steps=options.steps,
            save_steps=100,
            logging_steps=20,
            seed=options.seed,
        ),
    )
    minutes = (time.perf_counter() - start) / 60
    kinds: dict[str, list[str]] = {"json": held_out}
    for row in held_out_prompts(options.prompts_per_kind):
        kinds.setdefault(row["kind"], []).append(row["prompt"])
    target, tokenizer = load_target(EMBEDDED_TARGET, dtype=torch.bfloat16)
    taus: dict[str, dict[str, float]] = {}
    for (kind, texts), (name, path) in itertools.product(
        kinds.items(), {"shipped": shipped_drafter_folder(), "adapted": str(adapted)}.items()
    ):
        drafter = DFlashDraftModel.from_pretrained(path, dtype=torch.bfloat16).eval()
        ids = [encode_prompt(tokenizer, text, target.device)["input_ids"][0].tolist() for text in texts]
        sums = decode_live(target, drafter, ids, options.max_new_tokens)
        taus.setdefault(kind, {})[name] = live_metrics(sums)["live_tau"]
        print(f"{kind}, {name}: {taus[kind][name]:.3f}", flush=True)
    record = run_record(options=vars(options), training_minutes=round(minutes, 2), taus=taus)
    write_json(folder / "adapt.json", record)
    print(f"\n| kind | shipped | adapted |\n|---|---|---|\n{_lines(taus)}\n\nTraining took {minutes:.1f} minutes.")


def _lines(taus: dict[str, dict[str, float]]) -> str:
    return "\n".join(f"| {kind} | {row['shipped']:.2f} | {row['adapted']:.2f} |" for kind, row in taus.items())


if __name__ == "__main__":
    main()
