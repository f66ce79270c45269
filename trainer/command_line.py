"""One way to read a command's options: a dataclass per command, from flags, from a YAML file, or both."""

import argparse
import dataclasses
import sys
from typing import Any

import yaml
from transformers import HfArgumentParser


def parse_options(
    *option_classes: type,
    arguments: list[str] | None = None,
    description: str | None = None,
    with_words: str | None = None,
) -> list:
    """One filled instance per dataclass in `option_classes`, and with `with_words` the list of words without a flag.

    `--config FILE` reads a YAML file whose keys are the flags' names; flags on the command line win over the file.

    Args:
        option_classes: Dataclasses whose fields are the command's flags.
        arguments (`list[str]`, *optional*): Defaults to the command line.
        description (`str`, *optional*): Shown by `--help`.
        with_words (`str`, *optional*): Name of the words without a flag in `--help`.
    Raises:
        ValueError: If the YAML file has a key that no dataclass has.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = HfArgumentParser(list(option_classes), description=description)
    parser.add_argument("--config", help="YAML file with the same names as the flags; flags win.")
    if with_words is not None:
        parser.add_argument("words", nargs="*", metavar=with_words)
    finder = argparse.ArgumentParser(add_help=False)
    finder.add_argument("--config")
    config_file = finder.parse_known_args(arguments)[0].config
    if config_file is not None:
        _set_defaults(parser, _read_yaml(config_file), config_file, option_classes)
    *options, namespace = parser.parse_args_into_dataclasses(args=arguments)
    return options if with_words is None else [*options, namespace.words]


def _read_yaml(config_file: str) -> dict[str, Any]:
    with open(config_file) as file:
        values = yaml.safe_load(file) or {}
    if not isinstance(values, dict):
        raise ValueError(f"{config_file} must hold `name: value` lines, not a {type(values).__name__}.")
    return values


def _set_defaults(
    parser: argparse.ArgumentParser, values: dict[str, Any], config_file: str, option_classes: tuple[type, ...]
) -> None:
    known = {field.name for option_class in option_classes for field in dataclasses.fields(option_class) if field.init}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(f"{config_file} has unknown names {unknown}. Allowed: {sorted(known)}.")
    for action in parser._actions:
        if action.dest in values:
            # argparse converts string defaults with the option's type; other YAML values already have theirs,
            # except numbers such as 6e-4, which YAML reads as text.
            value = values[action.dest]
            is_one_of_many = action.nargs in ("+", "*") and isinstance(value, str)
            action.default = [value] if is_one_of_many else value
            action.required = False
