import copy

import pytest
from chat_material import (
    CHATML,
    PHI,
    PLAIN,
    QWEN3,
    gemma_tokenizer,
    qwen3_tokenizer,
    real_tokenizer,
    stock_tokenizer,
    supervised_texts,
)
from tiny_material import make_tokenizer

from dflash_hf.trainer.conversations import encode_conversation, encode_row, template_mode
from dflash_hf.trainer.messages import BadRow

CHAT = [
    {"role": "user", "content": "Hello there"},
    {"role": "assistant", "content": "Hi! One and one is 2."},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "So long."},
]
THOUGHTFUL = [
    {**turn, "reasoning_content": f"I think {number}."} if turn["role"] == "assistant" else turn
    for number, turn in enumerate(CHAT)
]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
TOOL_CHAT = [
    {"role": "user", "content": "How is the sky?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}],
    },
    {"role": "tool", "content": "blue"},
    {"role": "assistant", "content": "It is blue."},
]
TAGGED = {
    "content and end of turn": "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}",
    "content only": "{% generation %}{{ message.content }}{% endgeneration %}{{ '<|im_end|>\\n' }}",
    "line break, too": "{%- generation -%}{{ message.content + '<|im_end|>\\n' }}{%- endgeneration -%}",
}


def reason_of(function, *args, **kwargs) -> BadRow:
    with pytest.raises(BadRow) as error:
        function(*args, **kwargs)
    return error.value


def test_mask_of_one_turn_equals_the_hand_made_one():
    tokenizer = stock_tokenizer()
    row = encode_conversation(CHAT[:2], tokenizer)
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    prompt = (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n"
    )
    prompt_ids, answer_ids = tokenizer(prompt)["input_ids"], tokenizer("Hi! One and one is 2.<|im_end|>")["input_ids"]
    assert row["input_ids"] == prompt_ids + answer_ids
    assert row["loss_mask"] == [0] * len(prompt_ids) + [1] * len(answer_ids)
    assert row["skipped_turns"] == 0


def test_row_equals_what_the_target_reads_and_writes():
    """The prompt's ids are those that generation would begin with, and the answer's follow without a change."""
    tokenizer = stock_tokenizer()
    prompt_ids = tokenizer.apply_chat_template(CHAT[:3], add_generation_prompt=True)["input_ids"]
    written_ids = [*tokenizer("So long.")["input_ids"], tokenizer.eos_token_id]
    row = encode_conversation(CHAT, tokenizer)
    assert row["input_ids"] == prompt_ids + written_ids
    again = encode_row({"input_ids": row["input_ids"], "prompt_length": len(prompt_ids)}, tokenizer)
    assert again["input_ids"] == row["input_ids"]
    assert again["loss_mask"] == [0] * len(prompt_ids) + [1] * len(written_ids)


def test_every_assistant_turn_is_supervised_up_to_its_end_and_no_further():
    tokenizer = stock_tokenizer()
    row = encode_conversation(CHAT, tokenizer)
    assert supervised_texts(row, tokenizer) == ["Hi! One and one is 2.<|im_end|>", "So long.<|im_end|>"]
    # The line break that the template puts behind the last turn is not even read.
    assert row["loss_mask"][-1] == 1 and row["input_ids"][-1] == tokenizer.eos_token_id


def test_turns_behind_the_last_answer_are_left_out():
    assert encode_conversation(CHAT[:3], stock_tokenizer()) == encode_conversation(CHAT[:2], stock_tokenizer())
    # Also where a later question would have made the template drop the answer's thoughts.
    assert encode_conversation(THOUGHTFUL[:3], qwen3_tokenizer()) == encode_conversation(
        THOUGHTFUL[:2], qwen3_tokenizer()
    )


@pytest.mark.parametrize("tags", TAGGED.values(), ids=TAGGED)
def test_mask_from_generation_tags_equals_mask_from_prefixes(tags):
    assert encode_conversation(CHAT, real_tokenizer(CHATML % tags)) == encode_conversation(CHAT, real_tokenizer())


def test_header_inside_the_tags_is_not_supervised():
    tagged = PLAIN.replace("{% for message in messages %}", "{% for message in messages %}{% generation %}", 1)
    tokenizer = real_tokenizer(tagged.replace("{% endfor %}", "{% endgeneration %}{% endfor %}", 1))
    assert encode_conversation(CHAT, tokenizer) == encode_conversation(CHAT, real_tokenizer())


def test_only_what_the_tags_mark_is_supervised():
    tags = (
        "{% if loop.last %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
        "{% else %}{{ message.content + '<|im_end|>\\n' }}{% endif %}"
    )
    tokenizer = real_tokenizer(CHATML % tags)
    row = encode_conversation(CHAT, tokenizer)
    assert supervised_texts(row, tokenizer) == ["So long.<|im_end|>"] and row["skipped_turns"] == 1


def test_tags_say_where_the_answer_begins_if_the_template_has_no_generation_prompt():
    template = CHATML % TAGGED["content and end of turn"]
    tokenizer = real_tokenizer(template[: template.index("{% if add_generation_prompt")])
    texts = supervised_texts(encode_conversation(CHAT, tokenizer), tokenizer)
    assert texts == ["Hi! One and one is 2.<|im_end|>", "So long.<|im_end|>"]


def test_tags_that_mark_nothing_are_an_error():
    empty = "{% generation %}{% endgeneration %}{{ message.content + '<|im_end|>\\n' }}"
    problem = reason_of(encode_conversation, CHAT, real_tokenizer(CHATML % empty))
    assert problem.reason == "no generation tag" and "turn 3" in problem.detail


def test_end_of_turn_need_not_be_eos():
    tokenizer = gemma_tokenizer()
    assert tokenizer.eos_token == "<|im_end|>"
    chat = [*CHAT[:3], {"role": "assistant", "content": " So long. \n"}]
    row = encode_conversation(chat, tokenizer)
    assert supervised_texts(row, tokenizer) == ["Hi! One and one is 2.<end_of_turn>", "So long.<end_of_turn>"]


def test_eos_behind_the_end_of_turn_is_not_supervised():
    tokenizer = real_tokenizer(PHI, special=("<|user|>", "<|assistant|>", "<|end|>"))
    row = encode_conversation(CHAT, tokenizer)
    assert supervised_texts(row, tokenizer) == ["Hi! One and one is 2.<|end|>", "So long.<|end|>"]
    assert row["skipped_turns"] == 0


def test_special_tokens_side_by_side_all_belong_to_the_answer():
    """As in LFM2 and Command R, where the answer's own end is a special token, too."""
    tokenizer = real_tokenizer(CHATML % "{{ message.content + '<|end|><|im_end|>\\n' }}", special=("<|end|>",))
    row = encode_conversation(CHAT, tokenizer)
    assert supervised_texts(row, tokenizer) == ["Hi! One and one is 2.<|end|><|im_end|>", "So long.<|end|><|im_end|>"]


def test_template_without_an_end_of_turn_supervises_the_text():
    template = "{% for m in messages %}{{ m.role + ':\\t' + m.content + '\\n' }}{% endfor %}"
    tokenizer = real_tokenizer(template + "{% if add_generation_prompt %}{{ 'assistant:\\t' }}{% endif %}")
    assert supervised_texts(encode_conversation(CHAT[:2], tokenizer), tokenizer) == ["Hi! One and one is 2."]


def test_answers_without_thoughts_are_refused_where_the_template_adds_an_empty_think_block():
    problem = reason_of(encode_conversation, CHAT[:2], qwen3_tokenizer())
    assert problem.reason == "changed by the chat template"
    assert "'<think>\\n\\n</think>'" in problem.detail and "`enable_thinking`" in problem.detail


def test_empty_think_block_belongs_to_the_prompt_without_thinking():
    tokenizer = qwen3_tokenizer()
    row = encode_conversation(CHAT, tokenizer, template_options={"enable_thinking": False})
    # The first answer stands in the row without the think block that the target would have read before it.
    assert supervised_texts(row, tokenizer) == ["So long.<|im_end|>"] and row["skipped_turns"] == 1
    text = tokenizer.decode(row["input_ids"])
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\nSo long.<|im_end|>")
    assert text.count("<think>") == 1


@pytest.mark.parametrize("options", [{}, {"enable_thinking": True}])
def test_thoughts_are_supervised_where_the_template_keeps_them(options):
    tokenizer = qwen3_tokenizer()
    row = encode_conversation(THOUGHTFUL, tokenizer, template_options=options)
    assert supervised_texts(row, tokenizer) == ["<think>\nI think 3.\n</think>\n\nSo long.<|im_end|>"]
    assert row["skipped_turns"] == 1 and "I think 1." not in tokenizer.decode(row["input_ids"])


def test_thoughts_are_refused_without_thinking():
    options = {"enable_thinking": False}
    problem = reason_of(encode_conversation, THOUGHTFUL, qwen3_tokenizer(), template_options=options)
    assert problem.reason == "unstable template" and "</think>" in problem.detail


def test_thoughts_that_the_template_does_not_know_are_refused():
    problem = reason_of(encode_conversation, THOUGHTFUL, real_tokenizer())
    assert problem.reason == "changed by the chat template" and "I think 3." in problem.detail


def test_thoughts_inside_the_content_are_supervised_as_they_are():
    tokenizer = real_tokenizer()
    content = "<think>\n\n</think>\n\nHi."
    row = encode_conversation([CHAT[0], {"role": "assistant", "content": content}], tokenizer)
    assert supervised_texts(row, tokenizer) == [content + "<|im_end|>"]


def test_token_across_the_border_is_named():
    """This tokenizer splits two line breaks before a word, so the prompt's last token is not in the row."""
    tokenizer = real_tokenizer(QWEN3)
    options = {"enable_thinking": False}
    problem = reason_of(encode_conversation, CHAT[:2], tokenizer, template_options=options)
    assert problem.reason == "token across the border" and "the token '\\n' only where" in problem.detail
    indented = [CHAT[0], {"role": "assistant", "content": "   x = 1"}]
    assert reason_of(encode_conversation, indented, real_tokenizer()).reason == "token across the border"


def test_tool_calls_and_the_answer_behind_them_are_supervised_and_tools_reach_the_template():
    tokenizer = qwen3_tokenizer()
    options = {"enable_thinking": False}
    calls = [{**turn, "reasoning_content": "Look."} if "tool_calls" in turn else turn for turn in TOOL_CHAT]
    row = encode_row({"messages": calls[:2], "tools": TOOLS}, tokenizer)
    call = (
        '<think>\nLook.\n</think>\n\n<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call><|im_end|>'
    )
    assert supervised_texts(row, tokenizer) == [call]
    assert '"type": "object"' in tokenizer.decode(row["input_ids"])
    row = encode_row({"messages": TOOL_CHAT, "tools": TOOLS}, tokenizer, template_options=options)
    assert supervised_texts(row, tokenizer) == ["It is blue.<|im_end|>"]


def test_tool_calls_that_the_template_leaves_out_are_refused():
    assert reason_of(encode_conversation, TOOL_CHAT[:2], real_tokenizer()).reason == "changed by the chat template"


def test_empty_keys_that_arrow_adds_change_nothing():
    tokenizer = qwen3_tokenizer()
    options = {"enable_thinking": False}
    filled = copy.deepcopy(TOOL_CHAT)
    filled[2] |= {"name": None, "tool_calls": None}
    filled[1]["tool_calls"][0]["function"]["arguments"]["until"] = None
    row = encode_row({"messages": filled, "prompt": None}, tokenizer, template_options=options)
    assert row == encode_row({"messages": TOOL_CHAT}, tokenizer, template_options=options)


def test_weight_0_keeps_a_turn_as_context_only():
    tokenizer = real_tokenizer()
    chat = [CHAT[0], {**CHAT[1], "weight": 0}, *CHAT[2:]]
    row = encode_conversation(chat, tokenizer)
    assert supervised_texts(row, tokenizer) == ["So long.<|im_end|>"]
    assert row["input_ids"] == encode_conversation(CHAT, tokenizer)["input_ids"]
    assert reason_of(encode_conversation, chat[:2], tokenizer).reason == "weight 0"


def test_answer_that_nothing_comes_before_is_not_supervised():
    tokenizer = real_tokenizer()
    row = encode_conversation([CHAT[1], *CHAT[2:]], tokenizer)
    assert supervised_texts(row, tokenizer) == ["So long.<|im_end|>"] and row["skipped_turns"] == 1
    assert reason_of(encode_conversation, [CHAT[1]], tokenizer).reason == "nothing before the answer"


def test_unusable_conversations_say_why():
    tokenizer = gemma_tokenizer()
    problem = reason_of(encode_conversation, [{"role": "system", "content": "x"}, *CHAT], tokenizer)
    assert problem.reason == "refused by the chat template" and "System role not supported" in problem.detail
    problem = reason_of(encode_conversation, CHAT[:1], tokenizer)
    assert problem.reason == "no assistant turn" and "['user']" in problem.detail
    empty = [CHAT[0], {"role": "assistant", "content": " "}]
    assert reason_of(encode_conversation, empty, tokenizer).reason == "empty answer"


def test_token_rows_keep_their_ids():
    tokenizer = real_tokenizer()
    ids = [5, 900, 2, 2, 40000, 7]
    row = encode_row({"input_ids": ids, "prompt_length": 2, "messages": CHAT}, tokenizer)
    assert row == {"input_ids": ids, "loss_mask": [0, 0, 1, 1, 1, 1], "is_cut": False, "skipped_turns": 0}
    mask = [0, 1, 1, 0, 1, 1]
    assert encode_row({"input_ids": ids, "loss_mask": mask, "prompt_length": None}, tokenizer)["loss_mask"] == mask


@pytest.mark.parametrize(
    ("row", "reason", "detail"),
    [
        ({"input_ids": [1, 2], "labels": [1, 2]}, "no loss mask", r"\['input_ids', 'labels'\]"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "wrong loss mask", "1 values for 2 token ids"),
        ({"input_ids": [1, 2], "loss_mask": [1, -100]}, "wrong loss mask", "0 or 1"),
        ({"input_ids": [1, -2], "loss_mask": [1, 1]}, "wrong token ids", r"\[1, -2\]"),
        ({"input_ids": [1, 2, 3], "loss_mask": [1, 0, 1]}, "nothing supervised", "the 3 tokens have no two"),
        ({"input_ids": [], "loss_mask": []}, "nothing supervised", "0 tokens"),
        ({"text": ""}, "nothing supervised", "0 tokens"),
        ({"question": "x"}, "unknown format", r"\['question'\]"),
    ],
)
def test_unusable_rows_say_why(row, reason, detail):
    problem = reason_of(encode_row, row, make_tokenizer())
    assert problem.reason == reason
    with pytest.raises(BadRow, match=detail):
        raise problem


def test_long_rows_are_cut_and_say_so():
    tokenizer = real_tokenizer()
    whole = encode_row({"messages": CHAT}, tokenizer)
    length = len(whole["input_ids"])
    assert not encode_row({"messages": CHAT}, tokenizer, max_length=length)["is_cut"]
    cut = encode_row({"messages": CHAT}, tokenizer, max_length=length - 3)
    assert (
        cut["is_cut"] and cut["input_ids"] == whole["input_ids"][:-3] and cut["loss_mask"] == whole["loss_mask"][:-3]
    )
    problem = reason_of(encode_row, {"messages": CHAT}, tokenizer, max_length=6)
    assert problem.reason == "nothing supervised" and f"first 6 of {length} tokens" in problem.detail


def test_plain_text_is_supervised_from_the_second_token_on():
    tokenizer = stock_tokenizer()
    row = encode_row({"text": "Once upon a time", "id": 3}, tokenizer)
    assert row["input_ids"] == tokenizer("Once upon a time")["input_ids"]
    assert row["loss_mask"] == [0, 1, 1, 1]


def test_prompt_and_completion_are_one_text_without_a_chat_template():
    tokenizer = real_tokenizer(None)
    row = encode_row({"prompt": "The sky is", "completion": " blue and wide."}, tokenizer)
    assert tokenizer.decode(row["input_ids"]) == "The sky is blue and wide."
    assert supervised_texts(row, tokenizer) == [" blue and wide."]
    problem = reason_of(encode_row, {"prompt": "The sk", "completion": "y is blue"}, tokenizer)
    assert problem.reason == "token across the border"
    assert reason_of(encode_row, {"messages": CHAT}, tokenizer).reason == "no chat template"


def test_template_mode_is_a_word_for_the_card(caplog):
    tokenizer = qwen3_tokenizer()
    modes = [template_mode(tokenizer, value) for value in (None, True, False)]
    assert modes == ["template default", "thinking", "no thinking"]


def test_a_mode_that_the_template_does_not_have_is_warned_of_once(monkeypatch):
    from dflash_hf.trainer import conversations

    warnings = []
    monkeypatch.setattr(conversations.logger, "warning", lambda text: warnings.append(text))
    conversations.logger.warning_once.cache_clear()
    assert template_mode(real_tokenizer(), None) == "template default" and not warnings
    assert [template_mode(real_tokenizer(), False) for _ in range(2)] == ["template default"] * 2
    assert len(warnings) == 1 and "`enable_thinking` is False" in warnings[0]
