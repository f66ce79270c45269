import pytest
from regenerate_material import make_chat_tokenizer
from tiny_material import make_tokenizer

from dflash_hf.trainer.messages import BadRow
from dflash_hf.trainer.prompt_rows import ChatRenderer, Conversation, read_prompt

END = 2  # <eos>
USER, ASSISTANT = 4, 5


def word(number: int) -> int:
    return 6 + number


def open_conversation(users: list[str], tokenizer=None, max_prompt_length: int = 100, **settings) -> Conversation:
    turns = [
        turn for text in users for turn in ({"role": "user", "content": text}, {"role": "assistant", "content": "w70"})
    ]
    renderer = ChatRenderer(tokenizer or make_chat_tokenizer())
    return Conversation(read_prompt({"messages": turns}, 0), renderer, max_prompt_length, **settings)


def test_every_format_of_one_chat_is_the_same_prompt():
    messages = [{"role": "system", "content": "w1"}, {"role": "user", "content": "w2"}]
    sharegpt = [{"from": "system", "value": "w1"}, {"from": "human", "value": "w2"}, {"from": "gpt", "value": "w9"}]
    rows = [
        {"messages": messages},
        {"messages": [*messages, {"role": "assistant", "content": "w9"}]},
        {"prompt": messages},
        {"prompt": messages, "completion": [{"role": "assistant", "content": "w9"}]},
        {"prompt": "w2", "system": "w1"},
        {"conversations": sharegpt},
        {"conversations": sharegpt, "prompt": "w5"},
    ]
    prompts = [read_prompt(row, 7) for row in rows]
    assert all(prompt == prompts[0] for prompt in prompts)
    assert prompts[0].turns == messages


def test_prompts_differ_by_row_and_text_and_keep_source_and_tools():
    tools = [{"type": "function", "function": {"name": "look"}}]
    prompt = read_prompt({"prompt": "w1", "source": "s", "tools": tools}, 3)
    assert (prompt.index, prompt.source, prompt.tools) == (3, "s", tools)
    ids = {read_prompt({"prompt": text}, index).id for text in ("w1", "w2") for index in (0, 1)}
    assert len(ids) == 4
    assert read_prompt({"messages": [{"role": "user", "content": "w1"}], "source": None}, 0).source == ""


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({}, "unknown format"),
        ([], "unknown format"),
        ({"messages": []}, "nothing to answer"),
        ({"messages": [{"role": "assistant", "content": "w1"}]}, "nothing to answer"),
        ({"messages": [{"role": "user", "content": "w1"}, {"role": "system", "content": "w1"}]}, "nothing to answer"),
        ({"conversations": [{"from": "alien", "value": "w1"}]}, "unknown role: 'alien'"),
        ({"prompt": 5}, "unknown format"),
    ],
)
def test_rows_without_a_question_are_refused_with_the_reason(row, problem):
    with pytest.raises(BadRow, match=problem):
        read_prompt(row, 0)


def test_last_turn_alone_is_answered_unless_all_are_asked_for():
    conversation = open_conversation(["w1", "w2"])
    assert conversation.input_ids == [0, USER, word(1), ASSISTANT, word(70), END, USER, word(2), ASSISTANT]
    assert not conversation.add_answer([word(3), END], "stop")
    assert conversation.to_row() == {
        "id": conversation.prompt.id,
        "source": "",
        "input_ids": [0, USER, word(1), ASSISTANT, word(70), END, USER, word(2), ASSISTANT, word(3), END],
        "prompt_length": 9,
        "finish_reason": "stop",
    }


def test_answers_of_earlier_turns_are_kept_as_their_ids():
    conversation = open_conversation(["w1", "w2", "w3"], multi_turn=True)
    assert conversation.input_ids == [0, USER, word(1), ASSISTANT]
    # 98 has no text, so a rendered and tokenised answer would lose it.
    assert conversation.add_answer([word(5), 98, END], "stop")
    asked = [0, USER, word(1), ASSISTANT, word(5), 98, END, USER, word(2), ASSISTANT]
    assert conversation.input_ids == asked
    assert conversation.add_answer([word(6), END], "stop")
    assert not conversation.add_answer([word(7)], "length")
    row = conversation.to_row()
    assert row["input_ids"] == [*asked, word(6), END, USER, word(3), ASSISTANT, word(7)]
    assert row["loss_mask"] == [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 1]
    assert (row["prompt_length"], row["finish_reason"]) == (4, "length")


def test_turns_that_the_template_rewrites_are_read_anew_and_not_supervised():
    conversation = open_conversation(["w1", "w2"], make_chat_tokenizer(rewrite=True), multi_turn=True)
    assert conversation.add_answer([word(5), END], "stop")
    assert conversation.input_ids == [0, USER, word(1), ASSISTANT, word(79), END, USER, word(2), ASSISTANT]
    assert not conversation.add_answer([word(6), END], "stop")
    assert conversation.to_row()["loss_mask"] == [0] * 9 + [1, 1]


def test_truncated_and_unusable_answers_end_the_conversation():
    for reason in ("length", "abort", "stop without an end token"):
        conversation = open_conversation(["w1", "w2"], multi_turn=True)
        assert not conversation.add_answer([word(5)], reason)
        assert conversation.finish_reason == reason
        assert conversation.input_ids == [0, USER, word(1), ASSISTANT, word(5)]


@pytest.mark.parametrize(("max_prompt_length", "is_asked"), [(9, True), (8, False)])
def test_later_turn_beyond_the_limit_is_not_asked(max_prompt_length, is_asked):
    conversation = open_conversation(["w1", "w2"], max_prompt_length=max_prompt_length, multi_turn=True)
    assert conversation.add_answer([word(5), END], "stop") == is_asked
    assert conversation.to_row()["loss_mask"][:6] == [0, 0, 0, 0, 1, 1]


def test_later_turn_that_the_template_refuses_is_not_asked():
    tokenizer = make_chat_tokenizer()
    tokenizer.chat_template += "{% if messages | length > 1 %}{{ raise_exception('one turn only') }}{% endif %}"
    conversation = open_conversation(["w1", "w2"], tokenizer, multi_turn=True)
    assert not conversation.add_answer([word(5), END], "stop")
    assert conversation.to_row()["input_ids"] == [0, USER, word(1), ASSISTANT, word(5), END]
    with pytest.raises(BadRow, match="refused by the chat template.*one turn only"):
        open_conversation(["w1", "w2"], tokenizer)


def test_chat_with_tool_turns_is_answered_at_its_end_only():
    turns = [
        {"role": "user", "content": "w1"},
        {"role": "assistant", "content": "w2"},
        {"role": "tool", "content": "w3"},
    ]
    conversation = Conversation(read_prompt({"messages": turns}, 0), ChatRenderer(make_chat_tokenizer()), 100, True)
    assert conversation.renderer.decode(conversation.input_ids).endswith("w1 assistant w2 <eos> <unk> w3 assistant")
    assert not conversation.add_answer([word(5), END], "stop")
    assert conversation.to_row()["loss_mask"] == [0] * 9 + [1, 1]


def test_tokenizer_without_a_chat_template_is_refused_at_once():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chat template|chat_template"):
        ChatRenderer(tokenizer)
