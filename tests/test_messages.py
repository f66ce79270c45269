import pytest

from dflash_hf.trainer.messages import BadRow, is_plain_text, to_messages, tools_of

QUESTION = {"role": "user", "content": "Why?"}
ANSWER = {"role": "assistant", "content": "Because."}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [QUESTION, ANSWER], "prompt": "not this", "text": "nor this"},
        {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]},
        {"conversations": [QUESTION, ANSWER]},
        {"conversation": [{"from": "User", "value": "Why?"}, {"from": "Assistant", "value": "Because."}]},
        {"instruction": "Why?", "output": "Because.", "text": "rendered by others"},
        {"instruction": "Why?", "input": "", "output": "Because."},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Wh"}, {"type": "text", "text": "y?"}]},
                ANSWER,
            ]
        },
    ],
)
def test_every_format_gives_the_same_turns(row):
    assert to_messages(row) == [QUESTION, ANSWER]


def test_alpaca_input_is_worded_as_in_the_paper():
    row = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
    assert to_messages(row)[0]["content"] == "Add.\n\nInput:\n1 and 2"


def test_share_gpt_roles_become_those_of_templates():
    turns = [("system", "s"), ("human", "h"), ("gpt", "g"), ("tool", "t"), ("function", "f"), ("observation", "o")]
    messages = to_messages({"conversations": [{"from": name, "value": value} for name, value in turns]})
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "tool", "tool"]
    assert [message["content"] for message in messages] == list("shgtfo")


def test_completion_is_learned_and_assistant_turns_of_the_prompt_are_not():
    prompt, answer = [QUESTION, ANSWER, QUESTION], [ANSWER]
    messages = to_messages({"prompt": prompt, "completion": answer})
    assert [message["content"] for message in messages] == ["Why?", "Because.", "Why?", "Because."]
    assert messages[1]["weight"] == 0 and "weight" not in messages[3]
    strings = to_messages({"prompt": "Why?", "completion": "Because."})
    assert [(turn["role"], turn["content"]) for turn in strings] == [("user", "Why?"), ("assistant", "Because.")]


def test_system_text_beside_the_turns_becomes_the_first_turn_unless_there_is_one():
    row = {"system": "Be short.", "conversations": [QUESTION, ANSWER]}
    assert to_messages(row) == [{"role": "system", "content": "Be short."}, QUESTION, ANSWER]
    system = {"role": "system", "content": "Be long."}
    assert to_messages({**row, "conversations": [system, QUESTION, ANSWER]}) == [system, QUESTION, ANSWER]


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": '{"at": "sky"}'}}]},
        {"role": "assistant", "content": "", "tool_calls": [CALL["function"]]},
        {"from": "function_call", "value": '{"name": "look", "arguments": {"at": "sky"}}'},
        {"from": "function_call", "value": '[{"name": "look", "arguments": "{\\"at\\": \\"sky\\"}"}]'},
    ],
)
def test_tool_calls_of_every_form_have_arguments_as_a_dict(turn):
    assert to_messages({"messages": [turn]}) == [{"role": "assistant", "content": "", "tool_calls": [CALL]}]


def test_tool_call_keeps_its_id_and_may_have_no_arguments():
    call = {"id": "c1", "index": 0, "function": {"name": "look", "arguments": ""}}
    (turn,) = to_messages({"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]})
    function = {"name": "look", "arguments": {}}
    assert turn["tool_calls"] == [{"type": "function", "id": "c1", "function": function}]


def test_empty_tool_calls_are_none_and_other_keys_of_a_turn_stay():
    turn = {**ANSWER, "tool_calls": [], "reasoning_content": "Hm."}
    assert to_messages({"messages": [turn]}) == [{**ANSWER, "reasoning_content": "Hm."}]


def test_given_rows_are_not_changed():
    row = {"instruction": "Why?", "input": "x", "output": "Because.", "system": "s"}
    turns = {"messages": [{"role": "assistant", "content": "", "tool_calls": [CALL["function"]]}], "system": "s"}
    before = repr((row, turns))
    to_messages(row), to_messages(turns)
    assert repr((row, turns)) == before


@pytest.mark.parametrize(
    ("row", "reason", "detail"),
    [
        ({"question": "Why?", "chosen": "x"}, "unknown format", r"\['chosen', 'question'\]; known are `messages`"),
        ({"prompt": "Why?", "completion": ["a", "b"]}, "unknown format", r"alternatives.*\['completion', 'prompt'\]"),
        ({"instruction": "Why?", "output": ["a", "b"]}, "unknown format", r"`output`.*\['instruction', 'output'\]"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "unknown role", "'narrator'; known are"),
        ({"messages": [{"content": "x"}]}, "unknown role", "None"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}, "not text", "image"),
        ({"messages": [{"role": "user", "content": 5}]}, "not text", "'5'"),
        ({"conversations": [{"from": "function_call", "value": "look!"}]}, "not valid JSON", "`function_call`.*look!"),
        ({"messages": [{**ANSWER, "tool_calls": ["look"]}]}, "unknown tool call", "look"),
        ({"messages": [{**ANSWER, "tool_calls": [{"function": {}}]}]}, "unknown tool call", "needs a `function`"),
    ],
)
def test_rows_of_no_format_say_why(row, reason, detail):
    with pytest.raises(BadRow, match=detail) as error:
        to_messages(row)
    assert error.value.reason == reason and str(error.value).startswith(f"{reason}: ")


def test_tools_are_a_list_or_its_json():
    assert tools_of({"tools": '[{"name": "look"}]'}) == tools_of({"tools": [{"name": "look"}]}) == [{"name": "look"}]
    assert tools_of({}) is tools_of({"tools": ""}) is tools_of({"tools": []}) is None
    with pytest.raises(BadRow, match="tools is '{'"):
        tools_of({"tools": "{"})


def test_text_beside_a_conversation_is_not_the_row():
    assert is_plain_text({"text": "x", "id": 1})
    assert not is_plain_text({"text": "x", "messages": []}) and not is_plain_text({"text": "x", "output": "y"})
