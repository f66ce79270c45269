from dataclasses import dataclass, field

import pytest

from dflash_hf.trainer.command_line import parse_options
from dflash_hf.trainer.train import TrainOptions
from dflash_hf.trainer.training_args import DFlashTrainingArguments


@dataclass
class ModelOptions:
    target: str = field(metadata={"help": "A required one."})
    layers: int = field(default=5, metadata={"help": "Number."})
    files: list[str] = field(default_factory=list, metadata={"help": "Several."})


@dataclass
class RunOptions:
    rate: float = field(default=1.0, metadata={"help": "Number with a point."})
    limit: int | None = field(default=None, metadata={"help": "May be missing."})
    is_fast: bool = field(default=False, metadata={"help": "Yes or no."})


def parse(*arguments: str) -> list:
    return parse_options(ModelOptions, RunOptions, arguments=list(arguments))


@pytest.fixture
def yaml_file(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_flags_alone_fill_the_dataclasses():
    assert parse("--target", "big", "--rate", "6e-4", "--files", "a", "b") == [
        ModelOptions("big", files=["a", "b"]),
        RunOptions(rate=6e-4),
    ]


def test_yaml_alone_fills_the_dataclasses_also_required_fields(yaml_file):
    path = yaml_file("target: big\nlayers: 2\nfiles: [a, b]\nrate: 0.5\nlimit: 7\nis_fast: true\n")
    assert parse("--config", path) == [ModelOptions("big", 2, ["a", "b"]), RunOptions(0.5, 7, True)]
    assert parse(f"--config={path}") == parse("--config", path)


def test_flags_win_over_yaml(yaml_file):
    path = yaml_file("target: big\nlayers: 2\nis_fast: true\nfiles: [a]\n")
    options = parse("--layers", "9", "--config", path, "--is_fast", "false", "--files", "c", "d")
    assert options == [ModelOptions("big", 9, ["c", "d"]), RunOptions(is_fast=False)]


@pytest.mark.parametrize("text", ["6e-4", "6.0e-4", "0.0006", "'6e-4'"])
def test_yaml_numbers_in_every_notation_are_numbers(yaml_file, text):
    (_, run) = parse("--config", yaml_file(f"target: big\nrate: {text}\n"))
    assert run.rate == 6e-4 and isinstance(run.rate, float)


def test_yaml_null_leaves_an_optional_field_empty(yaml_file):
    assert parse("--config", yaml_file("target: big\nlimit: null\n"))[1].limit is None


def test_yaml_single_value_for_a_list_is_a_list_of_one(yaml_file):
    assert parse("--config", yaml_file("target: big\nfiles: answers.jsonl\n"))[0].files == ["answers.jsonl"]


def test_unknown_names_in_yaml_raise_and_the_known_ones_are_listed(yaml_file):
    with pytest.raises(ValueError, match=r"recipe\.yaml has unknown names \['layer', 'speed'\].*'layers'"):
        parse("--config", yaml_file("target: big\nspeed: 3\nlayer: 2\n"))


def test_unknown_flags_raise(yaml_file):
    with pytest.raises(ValueError, match="--speed"):
        parse("--target", "big", "--speed", "3")


def test_missing_required_field_ends_the_program(yaml_file, capsys):
    with pytest.raises(SystemExit):
        parse("--config", yaml_file("layers: 2\n"))
    assert "--target" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["- a\n- b\n", "just text\n"])
def test_yaml_that_is_no_mapping_is_refused(yaml_file, text):
    with pytest.raises(ValueError, match=r"recipe\.yaml must hold `name: value` lines"):
        parse("--config", yaml_file(text))


def test_empty_yaml_changes_nothing(yaml_file):
    assert parse("--target", "big", "--config", yaml_file("# nothing\n")) == [ModelOptions("big"), RunOptions()]


def test_wrong_type_in_yaml_is_refused(yaml_file):
    with pytest.raises((SystemExit, ValueError)):
        parse("--config", yaml_file("target: big\nlayers: many\n"))


@pytest.mark.parametrize("arguments", ["why not", "why not --limit 3", "--limit 3 why not", "--is_fast true why not"])
def test_words_without_a_flag_are_returned_last(arguments):
    options, words = parse_options(RunOptions, arguments=arguments.split(), with_words="prompt")
    assert words == ["why", "not"]
    assert options.limit == (3 if "--limit" in arguments else None)


def test_no_words_are_an_empty_list():
    assert parse_options(RunOptions, arguments=[], with_words="prompt") == [RunOptions(), []]


def test_training_recipe_takes_options_and_training_arguments_from_one_file(yaml_file, tmp_path):
    path = yaml_file(
        f"train_data: [a.jsonl, b.jsonl]\ndrafter_config: tiny\nlearning_rate: 2e-3\nuse_cpu: true\n"
        f"output_dir: {tmp_path}\nmax_steps: 7\nreport_to: none\nnum_anchors: 3\n"
    )
    options, args = parse_options(
        TrainOptions, DFlashTrainingArguments, arguments=["--config", path, "--max_steps", "9"]
    )
    assert options.train_data == ["a.jsonl", "b.jsonl"] and options.drafter_config == "tiny"
    assert (args.learning_rate, args.max_steps, args.num_anchors, args.use_cpu) == (2e-3, 9, 3, True)
    # What the file leaves out keeps the paper's value.
    assert (args.num_train_epochs, args.max_grad_norm, args.weight_decay) == (6, 1.0, 0.0)
    assert args.lr_scheduler_type == "cosine" and args.warmup_steps == 0.04
