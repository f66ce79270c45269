"""`dflash-regenerate --server`, against loopback servers."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loopback_server import LoopbackServer
from regenerate_material import make_chat_tokenizer, rows_by_id, save_chat_target
from tiny_material import make_tokenizer, save_tiny_target
from transformers import AutoModelForCausalLM

from dflash_hf.trainer import regenerate as regenerate_module
from dflash_hf.trainer import server_connection
from dflash_hf.trainer.answer_server import AnswerServerError
from dflash_hf.trainer.data import write_json_lines
from dflash_hf.trainer.regenerate import RegenerateOptions, regenerate

NEW_TOKENS = 12
PROMPTS = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9 w10 w11", "w12 w13", "w20 w21 w22 w23", "w30 w31 w32 w33 w34"]


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Path:
    """A folder with prompts and a target that ends some of its answers before the limit."""
    folder = tmp_path_factory.mktemp("material")
    torch.manual_seed(0)
    write_json_lines(folder / "prompts.jsonl", [{"prompt": prompt, "source": "s"} for prompt in PROMPTS])
    endless = save_tiny_target(folder / "target")
    prompt = torch.tensor([make_tokenizer()(f"<bos> user {PROMPTS[0]} assistant")["input_ids"]])
    answer = endless.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, do_sample=False)
    save_tiny_target(folder / "target", eos_token_id=answer[0, -1].item())
    return folder


@pytest.fixture(scope="module")
def target(material):
    return AutoModelForCausalLM.from_pretrained(material / "target")


@pytest.fixture
def options(material, tmp_path, monkeypatch) -> RegenerateOptions:
    monkeypatch.setattr(server_connection, "_FIRST_WAIT", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return RegenerateOptions(
        prompts=str(material / "prompts.jsonl"),
        output=str(tmp_path / "answers.jsonl"),
        target=str(material / "target"),
        max_new_tokens=NEW_TOKENS,
        dtype="float32",
        concurrency=4,
        server="http://127.0.0.1:9/v1",
    )


def in_process(options: RegenerateOptions, **changes) -> dict[str, dict]:
    """The rows of a run without a server."""
    own = replace(options, output=options.output + ".own", server=None, server_model=None, retokenize=False, **changes)
    regenerate(own)
    return rows_by_id(own.output)


@pytest.mark.parametrize("kind", ["vllm", "sglang", "old sglang"])
def test_rows_equal_those_of_a_run_in_process_and_no_weights_are_loaded(options, target, kind, monkeypatch):
    expected = in_process(options)
    assert {row["finish_reason"] for row in expected.values()} == {"stop", "length"}
    monkeypatch.setattr(regenerate_module, "load_target", None)
    with LoopbackServer(target, make_tokenizer(), kind) as server:
        assert regenerate(replace(options, server=server.url)) == len(PROMPTS)
    assert rows_by_id(options.output) == expected


def test_conversations_are_answered_turn_by_turn_as_in_process(options, target, tmp_path):
    path = tmp_path / "chats.jsonl"
    chats = [[PROMPTS[0], "w2 w3", "w4"], ["w5"], [PROMPTS[0], "w8"], ["w9", "w10"]]
    write_json_lines(path, [{"messages": [{"role": "user", "content": text} for text in chat]} for chat in chats])
    folder = save_chat_target(options.target, tmp_path / "target")
    options = replace(options, prompts=str(path), target=folder, multi_turn=True)
    expected = in_process(options)
    with LoopbackServer(target, make_tokenizer()) as server:
        regenerate(replace(options, server=server.url))
    assert rows_by_id(options.output) == expected
    assert max(Counter(itertools.pairwise(row["loss_mask"]))[0, 1] for row in expected.values()) > 1


def test_text_of_a_server_without_token_ids_is_tokenised_only_on_demand(options, target, tmp_path):
    options = replace(options, target=save_chat_target(options.target, tmp_path / "target"))
    expected = in_process(options)
    with LoopbackServer(target, make_chat_tokenizer(), "text") as server:
        with pytest.raises(ValueError, match="--retokenize true"):
            regenerate(replace(options, server=server.url))
        assert regenerate(replace(options, server=server.url, retokenize=True)) == len(PROMPTS)
    rows = rows_by_id(options.output)
    assert all(row.pop("retokenized") is True for row in rows.values())
    # The tiny target also writes ids that have no text; text loses them, which is why token ids are asked for.
    with_text = {key for key, row in expected.items() if max(row["input_ids"]) < len(make_tokenizer())}
    assert with_text
    for key in with_text:
        assert rows[key] == expected[key]


def test_sampled_answers_depend_on_seed_and_row_but_not_on_the_others(options, target):
    options = replace(options, temperature=1.0, top_p=0.95, top_k=50)
    rows = []
    with LoopbackServer(target, make_tokenizer()) as server:
        for run, changes in enumerate(({"concurrency": 1}, {"concurrency": 6}, {"seed": 1}, {"num_shards": 2})):
            sampled = replace(options, output=f"{options.output}.{run}", server=server.url, **changes)
            regenerate(sampled)
            rows.append(rows_by_id(sampled.output))
    assert rows[0] == rows[1]
    assert rows[0].keys() == rows[2].keys() and rows[0] != rows[2]
    assert rows[3].items() < rows[0].items()


def test_unfinished_answers_are_counted_left_out_and_asked_again(options, target, capsys):
    faults = {2: "abort", 3: "content_filter", 4: "abort"}
    with LoopbackServer(target, make_tokenizer(), fault=lambda number, body: faults.get(number)) as server:
        options = replace(options, server=server.url, concurrency=1)
        assert regenerate(options) == len(PROMPTS) - 3
        assert "3 answers were not kept (2 abort, 1 content_filter); run again" in capsys.readouterr().out
        num_asked = len(server.bodies)
        assert regenerate(options) == len(PROMPTS)
        assert len(server.prompts(skip=num_asked)) == 3
    assert rows_by_id(options.output) == in_process(options)


def test_run_whose_answers_are_all_unfinished_is_an_error(options, target):
    with LoopbackServer(target, make_tokenizer(), fault=lambda number, _: "abort" if number > 1 else None) as server:
        with pytest.raises(ValueError, match=r"No answer was written .*6 answers were not kept \(6 abort\)"):
            regenerate(replace(options, server=server.url))


def test_server_may_move_between_runs_but_the_model_may_not_change(options, target):
    for address, models, num_rows in (("first", ("target",), 2), ("second", ("target",), 4), ("third", ("other",), 4)):
        with LoopbackServer(target, make_tokenizer(), models=models) as server:
            run = replace(options, server=server.url, max_prompts=num_rows + (address == "third"))
            if address == "third":
                with pytest.raises(ValueError, match="`server_model` was 'target', now 'other'"):
                    regenerate(run)
            else:
                assert regenerate(run) == num_rows
    with pytest.raises(ValueError, match="`server_model` was 'target', now None"):
        regenerate(replace(options, server=None))
    assert len(rows_by_id(options.output)) == 4
    settings = Path(options.output + ".settings.json").read_text()
    assert json.loads(settings)["server_model"] == "target" and "127.0.0.1" not in settings


def test_finished_run_needs_no_server(options, target):
    with LoopbackServer(target, make_tokenizer()) as server:
        regenerate(replace(options, server=server.url))
    before = Path(options.output).read_bytes()
    assert regenerate(options) == len(PROMPTS)
    assert Path(options.output).read_bytes() == before


def test_rows_before_a_fatal_refusal_are_kept(options, target):
    def refuse_fourth(number, body):
        return (400, {}) if number == 4 else None

    with LoopbackServer(target, make_tokenizer(), fault=refuse_fourth) as server:
        with pytest.raises(AnswerServerError, match="status 400"):
            regenerate(replace(options, server=server.url, concurrency=1))
        assert len(rows_by_id(options.output)) == 2
        assert regenerate(replace(options, server=server.url)) == len(PROMPTS)
    assert rows_by_id(options.output) == in_process(options)


def test_key_is_written_nowhere(options, target, monkeypatch, capfd):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    faults = {2: (500, {}), 3: "drop"}
    with LoopbackServer(
        target, make_tokenizer(), api_key="sk-very-secret", fault=lambda n, _: faults.get(n)
    ) as server:
        assert regenerate(replace(options, server=server.url)) == len(PROMPTS)
    printed = capfd.readouterr()
    written = "".join(path.read_text() for path in Path(options.output).parent.iterdir() if path.is_file())
    assert "sk-very" not in printed.out + printed.err + written


def test_killed_process_loses_and_repeats_nothing(options, target, tmp_path):
    prompts = [f"w{number} w{number + 1}" for number in range(40)]
    write_json_lines(tmp_path / "many.jsonl", [{"prompt": prompt} for prompt in prompts])
    output = Path(options.output)
    with LoopbackServer(target, make_tokenizer(), delay=0.05) as server:
        options = replace(options, prompts=str(tmp_path / "many.jsonl"), server=server.url)
        names = ("prompts", "output", "target", "server", "max_new_tokens", "dtype", "concurrency")
        flags = [word for name in names for word in (f"--{name}", str(getattr(options, name)))]
        with open(tmp_path / "log", "wb") as log:
            run = subprocess.Popen(
                [sys.executable, "-m", "dflash_hf.trainer.regenerate", *flags], stdout=log, stderr=log
            )
        while run.poll() is None and not (output.exists() and output.read_bytes().count(b"\n") >= 7):
            time.sleep(0.01)
        os.kill(run.pid, signal.SIGKILL)
        assert run.wait() == -signal.SIGKILL, (tmp_path / "log").read_text()
        finished = output.read_bytes()
        whole = finished[: finished.rfind(b"\n") + 1]
        assert 7 <= whole.count(b"\n") < len(prompts)
        output.write_bytes(whole + b'{"id": "0123", "input_i')
        time.sleep(0.2)  # the requests that were in flight
        num_asked = len(server.bodies)
        assert regenerate(options) == len(prompts)
        asked_again = server.prompts(skip=num_asked)
    assert output.read_bytes().startswith(whole)
    answered_first = {tuple(row["input_ids"][: row["prompt_length"]]) for row in map(json.loads, whole.splitlines())}
    assert len(asked_again) == len(set(asked_again)) == len(prompts) - len(answered_first)
    assert not answered_first & set(asked_again)
    assert rows_by_id(output) == in_process(options)
