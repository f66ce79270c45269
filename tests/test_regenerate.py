import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_material import make_tokenizer, save_tiny_target
from transformers import AutoModelForCausalLM

from dflash_hf.trainer import regenerate as regenerate_module
from dflash_hf.trainer.data import read_json_lines, write_json_lines
from dflash_hf.trainer.regenerate import RegenerateOptions, regenerate

NEW_TOKENS = 12
# Lengths differ, so that batches are padded; two prompts are the same.
PROMPTS = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9 w10 w11", "w12 w13", "w4", "w20 w21 w22 w23", "w30 w31 w32 w33 w34"]


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Path:
    """A folder with prompts and a target that ends some of its answers before the limit."""
    folder = tmp_path_factory.mktemp("material")
    torch.manual_seed(0)
    write_json_lines(
        folder / "prompts.jsonl",
        [
            {"source": f"s{i % 2}", "messages": [{"role": "user", "content": prompt}]}
            for i, prompt in enumerate(PROMPTS)
        ],
    )
    endless = save_tiny_target(folder / "target")
    # One of the tokens that it writes becomes its end token.
    fifth_token = plain_answer(endless, PROMPTS[0], end_id=None)[4]
    save_tiny_target(folder / "target", eos_token_id=fifth_token)
    return folder


@pytest.fixture
def options(material, tmp_path) -> RegenerateOptions:
    return RegenerateOptions(
        prompts=str(material / "prompts.jsonl"),
        output=str(tmp_path / "answers.jsonl"),
        target=str(material / "target"),
        max_new_tokens=NEW_TOKENS,
        batch_size=3,
        dtype="float32",
    )


def prompt_ids(prompt: str) -> list[int]:
    return make_tokenizer()(f"<bos> user {prompt} assistant")["input_ids"]


def plain_answer(target, prompt: str, end_id: int | None) -> list[int]:
    input_ids = torch.tensor([prompt_ids(prompt)])
    sequence = target.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=end_id,
    )
    return sequence[0, input_ids.shape[1] :].tolist()


def rows_by_id(path: str) -> dict[str, dict]:
    rows = list(read_json_lines(path))
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


def test_greedy_batched_answers_equal_plain_generate_of_one_prompt(options):
    assert regenerate(options) == len(PROMPTS)
    target = AutoModelForCausalLM.from_pretrained(options.target)
    assert target.config._attn_implementation == "sdpa"
    end_id = target.generation_config.eos_token_id
    expected = sorted(prompt_ids(prompt) + plain_answer(target, prompt, end_id) for prompt in PROMPTS)
    rows = rows_by_id(options.output).values()
    assert sorted(row["input_ids"] for row in rows) == expected
    for row in rows:
        assert row["input_ids"][: row["prompt_length"]] in [prompt_ids(prompt) for prompt in PROMPTS]
        assert set(row) == {"id", "source", "input_ids", "prompt_length", "finish_reason"}


def test_finish_reason_tells_ended_answers_from_cut_ones(options):
    regenerate(options)
    end_id = AutoModelForCausalLM.from_pretrained(options.target).generation_config.eos_token_id
    reasons = []
    for row in rows_by_id(options.output).values():
        answer = row["input_ids"][row["prompt_length"] :]
        reasons.append(row["finish_reason"])
        if row["finish_reason"] == "stop":
            assert answer[-1] == end_id and end_id not in answer[:-1]
        else:
            assert row["finish_reason"] == "length"
            assert len(answer) == NEW_TOKENS and end_id not in answer
    assert set(reasons) == {"stop", "length"}


def test_rows_keep_source_and_id_and_equal_prompts_stay_two_rows(options):
    regenerate(options)
    rows = rows_by_id(options.output)
    assert sorted(row["source"] for row in rows.values()) == ["s0"] * 4 + ["s1"] * 3
    twice = [row for row in rows.values() if row["input_ids"][: row["prompt_length"]] == prompt_ids("w4")]
    assert len(twice) == 2 and twice[0]["input_ids"] == twice[1]["input_ids"]
    again = replace(options, output=options.output + ".2", batch_size=1)
    regenerate(again)
    assert rows_by_id(again.output) == rows


@pytest.mark.parametrize("garbage", ["", '{"id": "0123", "input_i'])
def test_killed_run_goes_on_without_loss_or_repeats(options, monkeypatch, garbage):
    whole = replace(options, output=options.output + ".whole")
    regenerate(whole)
    answer_batch = regenerate_module.answer_batch
    batches = []

    def killed_in_the_second_batch(target, tokenizer, batch, options):
        batches.append(batch)
        rows = answer_batch(target, tokenizer, batch, options)
        if len(batches) == 2:
            yield next(rows)
            raise KeyboardInterrupt
        yield from rows

    monkeypatch.setattr(regenerate_module, "answer_batch", killed_in_the_second_batch)
    with pytest.raises(KeyboardInterrupt):
        regenerate(options)
    finished = list(read_json_lines(options.output))
    assert 3 <= len(finished) < len(PROMPTS)
    with open(options.output, "a") as file:
        file.write(garbage)

    monkeypatch.setattr(regenerate_module, "answer_batch", answer_batch)
    assert regenerate(options) == len(PROMPTS)
    assert rows_by_id(options.output) == rows_by_id(whole.output)
    assert list(read_json_lines(options.output))[: len(finished)] == finished


def test_finished_run_is_left_alone_without_loading_the_target(options, monkeypatch):
    regenerate(options)
    before = Path(options.output).read_bytes()
    monkeypatch.setattr(regenerate_module, "load_target", None)
    assert regenerate(options) == len(PROMPTS)
    assert Path(options.output).read_bytes() == before


@pytest.mark.parametrize(
    "changed", [{"max_new_tokens": 5}, {"temperature": 1.0}, {"dtype": "bfloat16"}, {"num_shards": 2}, {"seed": 1}]
)
def test_other_settings_than_the_first_runs_are_refused(options, changed):
    regenerate(options)
    before = Path(options.output).read_bytes()
    ((name, value),) = changed.items()
    with pytest.raises(ValueError, match=rf"`{name}` was {getattr(options, name)!r}, now {value!r}"):
        regenerate(replace(options, **changed))
    assert Path(options.output).read_bytes() == before


def test_batch_size_and_number_of_prompts_may_change_between_runs(options):
    assert regenerate(replace(options, max_prompts=3)) == 3
    first = rows_by_id(options.output)
    assert regenerate(replace(options, batch_size=5)) == len(PROMPTS)
    rows = rows_by_id(options.output)
    assert first.items() <= rows.items()
    assert len(rows) == len(PROMPTS)


def test_shards_share_the_prompts_without_overlap(options):
    regenerate(options)
    parts = []
    for shard in range(3):
        part = replace(options, output=f"{options.output}.{shard}", shard=shard, num_shards=3)
        regenerate(part)
        parts.append(rows_by_id(part.output))
    assert [len(part) for part in parts] == [3, 2, 2]
    assert parts[0] | parts[1] | parts[2] == rows_by_id(options.output)


def test_prompts_beyond_the_limit_are_skipped_and_counted(options, capsys):
    limit = len(prompt_ids(PROMPTS[0]))
    assert regenerate(replace(options, max_prompt_length=limit)) == 4
    assert f"3 prompts are longer than --max_prompt_length {limit}" in capsys.readouterr().out
    assert all(row["prompt_length"] <= limit for row in rows_by_id(options.output).values())


def test_sampled_answers_repeat_with_the_seed_and_differ_without(options):
    answers = []
    for run, seed in enumerate((0, 0, 1)):
        sampled = replace(options, output=f"{options.output}.{run}", temperature=1.0, seed=seed)
        regenerate(sampled)
        answers.append(rows_by_id(sampled.output))
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]
    assert answers[0].keys() == answers[2].keys()


@pytest.mark.parametrize("messages", [[], [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]])
def test_prompt_that_does_not_end_with_a_user_turn_is_refused(options, tmp_path, messages):
    path = tmp_path / "bad.jsonl"
    write_json_lines(path, [{"messages": [{"role": "user", "content": "w1"}]}, {"messages": messages}])
    with pytest.raises(ValueError, match=r"bad\.jsonl, row 1: `messages` must end with a user turn"):
        regenerate(replace(options, prompts=str(path)))


def test_tokenizer_without_a_padding_token_will_do(options, tmp_path):
    regenerate(options)
    folder = tmp_path / "target"
    AutoModelForCausalLM.from_pretrained(options.target).save_pretrained(folder)
    tokenizer = make_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    assert json.loads((folder / "tokenizer_config.json").read_text()).get("pad_token") is None
    without = replace(options, output=options.output + ".2", target=str(folder))
    regenerate(without)
    assert rows_by_id(without.output) == rows_by_id(options.output)
