import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from regenerate_material import rows_by_id, save_chat_target
from tiny_material import make_tokenizer, save_tiny_target
from transformers import AutoModelForCausalLM

from dflash_hf.trainer import answers as answers_module
from dflash_hf.trainer import regenerate as regenerate_module
from dflash_hf.trainer.command_line import parse_options
from dflash_hf.trainer.data import read_json_lines, write_json_lines
from dflash_hf.trainer.regenerate import RegenerateOptions, regenerate

NEW_TOKENS = 12
# Lengths differ, so that batches are padded; two prompts are the same.
PROMPTS = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9 w10 w11", "w12 w13", "w4", "w20 w21 w22 w23", "w30 w31 w32 w33 w34"]

OLD_ANSWER = {"role": "assistant", "content": "w77 w78"}


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
    return answer_to(target, prompt_ids(prompt), end_id)


def answer_to(target, prompt_ids: list[int], end_id: int | None) -> list[int]:
    input_ids = torch.tensor([prompt_ids])
    sequence = target.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=end_id,
    )
    return sequence[0, input_ids.shape[1] :].tolist()


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
    answer_batch = answers_module.answer_batch
    batches = []

    def killed_in_the_second_batch(target, tokenizer, batch, decoding):
        batches.append(batch)
        answered = answer_batch(target, tokenizer, batch, decoding)
        if len(batches) == 2:
            yield answered[0]
            raise KeyboardInterrupt
        yield from answered

    monkeypatch.setattr(answers_module, "answer_batch", killed_in_the_second_batch)
    with pytest.raises(KeyboardInterrupt):
        regenerate(options)
    finished = list(read_json_lines(options.output))
    assert len(finished) == 4
    with open(options.output, "a") as file:
        file.write(garbage)

    monkeypatch.setattr(answers_module, "answer_batch", answer_batch)
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
    "changed",
    [
        {"max_new_tokens": 5},
        {"temperature": 1.0},
        {"dtype": "bfloat16"},
        {"num_shards": 2},
        {"seed": 1},
        {"enable_thinking": False},
        {"multi_turn": True},
        {"target_revision": "main"},
    ],
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


def test_settings_of_a_run_without_rows_are_forgotten(options):
    with pytest.raises(ValueError, match="3"):
        regenerate(replace(options, max_prompt_length=3, max_prompts=3))
    assert regenerate(options) == len(PROMPTS)


def test_bad_rows_are_counted_and_named_and_the_others_answered(options, tmp_path, capsys):
    path = tmp_path / "some_bad.jsonl"
    bad = [
        {"messages": []},
        {"text": "w1"},
        {"messages": [{"role": "alien", "content": "w1"}]},
        "w1",
        {"prompt": None},
    ]
    write_json_lines(path, [{"prompt": "w1"}, *bad, {"prompt": "w2"}])
    assert regenerate(replace(options, prompts=str(path))) == 2
    printed = capsys.readouterr().out
    assert f"5 rows of {path} cannot be answered, the first: row 1: nothing to answer" in printed
    assert "row 2: unknown format" in printed and "row 3: unknown role: 'alien'" in printed and "row 4" not in printed
    write_json_lines(path, bad)
    with pytest.raises(ValueError, match="No answer was written.* 5 rows of .* cannot be answered"):
        regenerate(replace(options, prompts=str(path), output=options.output + ".2"))
    write_json_lines(path, [])
    with pytest.raises(ValueError, match="No answer was written.*has no rows"):
        regenerate(replace(options, prompts=str(path), output=options.output + ".3"))


def test_progress_shows_rate_and_truncated_answers(options, capsys):
    regenerate(replace(options, max_prompts=2))
    num_truncated = sum(row["finish_reason"] == "length" for row in rows_by_id(options.output).values())
    assert f"truncated={num_truncated}" in capsys.readouterr().err
    regenerate(options)
    progress = capsys.readouterr().err
    assert "2/7" in progress and "7/7" in progress and "tokens/s=" in progress  # goes on where the first run ended


def test_multi_turn_rows_hold_every_answer_of_the_target(options, tmp_path):
    """Token by token: each supervised part is the target's greedy answer to all ids before it."""
    path = tmp_path / "chats.jsonl"
    users = [[PROMPTS[0], "w2 w3", "w4"], ["w5"], [PROMPTS[0], "w8"], ["w9", "w10"]]
    chats = [[turn for text in chat for turn in ({"role": "user", "content": text}, OLD_ANSWER)] for chat in users]
    write_json_lines(path, [{"messages": chat} for chat in chats])
    folder = save_chat_target(options.target, tmp_path / "target")
    target = AutoModelForCausalLM.from_pretrained(folder)
    end_id = target.generation_config.eos_token_id
    assert regenerate(replace(options, prompts=str(path), target=folder, multi_turn=True)) == 4
    num_answers = []
    for row in rows_by_id(options.output).values():
        ids, mask = row["input_ids"], row["loss_mask"]
        assert len(ids) == len(mask) and mask[-1] == 1 and mask.index(1) == row["prompt_length"]
        starts = [i for i in range(1, len(ids)) if mask[i] and not mask[i - 1]]
        num_answers.append(len(starts))
        for start in starts:
            end = next((i for i in range(start, len(ids)) if not mask[i]), len(ids))
            assert ids[start:end] == answer_to(target, ids[:start], end_id)
            assert (ids[end - 1] == end_id) or end == len(ids)
        assert row["finish_reason"] == ("stop" if ids[-1] == end_id else "length")
    assert max(num_answers) > 1


def test_thinking_is_given_to_the_template_and_kept_in_row_and_settings(options, tmp_path, caplog):
    folder = save_chat_target(options.target, tmp_path / "target", think="{% if enable_thinking %}w80 {% endif %}")
    for enable_thinking in (None, True, False):
        output = f"{options.output}.{enable_thinking}"
        regenerate(replace(options, target=folder, output=output, enable_thinking=enable_thinking))
        for row in rows_by_id(output).values():
            prompt = make_tokenizer().decode(row["input_ids"][: row["prompt_length"]])
            assert prompt.endswith("assistant w80" if enable_thinking else "assistant")
            assert row.get("enable_thinking", "absent") == ("absent" if enable_thinking is None else enable_thinking)
        settings = json.loads(Path(output + ".settings.json").read_text())
        assert settings["enable_thinking"] is enable_thinking
    assert "enable_thinking" not in caplog.text
    regenerate(replace(options, enable_thinking=True))
    assert caplog.text.count("`enable_thinking`") == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -1.0}, "`temperature` -1.0"),
        ({"temperature": 1.0, "top_p": 0.0}, "`top_p` 0.0"),
        ({"top_k": 20}, "`top_p` and `top_k` need a `temperature` above 0"),
        ({"concurrency": 0}, "`concurrency` must be at least 1, got 0"),
        ({"shard": 2, "num_shards": 2}, "`shard` must be 0 to `num_shards` - 1 = 1, got 2"),
        ({"retokenize": True}, "`server_model` and `retokenize` need `server`"),
    ],
)
def test_options_that_cannot_be_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        RegenerateOptions(prompts="p", output="o", **wrong)


def test_flags_and_their_defaults():
    assert parse_options(RegenerateOptions, arguments=["--prompts", "p", "--output", "o"]) == [
        RegenerateOptions(prompts="p", output="o")
    ]
    words = "--prompts p --output o --enable_thinking false --server http://a/v1 --server_api sglang --multi_turn true"
    (options,) = parse_options(RegenerateOptions, arguments=words.split())
    assert (options.enable_thinking, options.server_api, options.multi_turn) == (False, "sglang", True)


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
