"""Conversations of any common format, as the list of turns that chat templates take."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_TURN_LISTS = ("messages", "conversations", "conversation")
_ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")} | {
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "observation": "tool",
}
_FORMATS = (
    "`messages` or `conversations` (turns with `role`/`content` or `from`/`value`), `prompt` + `completion`, "
    "`instruction` (+ `input`) + `output`, `text`, or `input_ids` with `loss_mask` or `prompt_length`"
)


class BadRow(ValueError):
    """A row, or an assistant turn of it, that cannot be trained on.

    Args:
        reason (`str`): One of few fixed texts, by which rows are counted.
        detail (`str`): What is wrong with this one.
    """

    def __init__(self, reason: str, detail: str):
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


def to_messages(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The turns of a row, as dicts with `role` and `content`.

    Formats: turns under `messages`, `conversations` or `conversation`, each with `role`/`content` or, as in ShareGPT,
    `from`/`value`; `prompt` + `completion`, strings or, as in TRL, lists of turns (assistant turns of the prompt get
    `weight` 0, that is, they are not supervised); `instruction` + `input` + `output` of Alpaca. A string `system`
    beside them becomes the first turn. Arguments of tool calls become dicts, as servers give them to templates.

    Raises:
        BadRow: If the row has none of these formats; the message names its keys.
    """
    name = next((name for name in _TURN_LISTS if name in row), None)
    if name is not None:
        messages = _turns(row, name, "user")
    elif "prompt" in row and "completion" in row:
        prompt = [turn | {"weight": 0} for turn in _turns(row, "prompt", "user")]
        messages = prompt + _turns(row, "completion", "assistant")
    elif "instruction" in row and "output" in row:
        # The wording of the paper's Alpaca prompts (arXiv 2602.06036, section 5).
        addition = f"\n\nInput:\n{row['input']}" if row.get("input") else ""
        question = {"role": "user", "content": f"{row['instruction']}{addition}"}
        messages = [question, *_turns(row, "output", "assistant")]
    else:
        raise BadRow("unknown format", f"the row has {sorted(row)}; known are {_FORMATS}")
    if isinstance(row.get("system"), str) and row["system"] and messages and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": row["system"]})
    return messages


def is_plain_text(row: Mapping[str, Any]) -> bool:
    """Whether the row is a `text` without a conversation beside it."""
    return isinstance(row.get("text"), str) and not row.keys() & {*_TURN_LISTS, "completion", "output"}


def tools_of(row: Mapping[str, Any]) -> list[Any] | None:
    """The row's `tools`: a list, or the JSON of one.

    Raises:
        BadRow: If they are no valid JSON.
    """
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = parse_json("tools", tools) if tools.strip() else None
    return tools or None


def parse_json(name: str, text: str) -> Any:
    """`text` read as JSON.

    Raises:
        BadRow: If it is no valid JSON; the message calls it `name`.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise BadRow("not valid JSON", f"{name} is {text[:60]!r} ({error})") from error


def _turns(row: Mapping[str, Any], name: str, role: str) -> list[dict[str, Any]]:
    """`row[name]` as turns; a string is one turn of `role`."""
    value = row[name]
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, Sequence) and all(isinstance(turn, Mapping) for turn in value):
        return [_turn(turn) for turn in value]
    raise BadRow(
        "unknown format",
        f"`{name}` must be a text or a list of turns (of alternatives choose one), not {str(value)[:60]!r}; the row "
        f"has {sorted(row)}",
    )


def _turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    role_key, content_key = ("from", "value") if "from" in turn else ("role", "content")
    name = str(turn.get(role_key)).lower()
    if name not in _ROLES:
        raise BadRow("unknown role", f"{turn.get(role_key)!r}; known are {sorted(_ROLES)}")
    content = _text(turn.get(content_key) or "")
    calls = turn.get("tool_calls")
    if name == "function_call":
        calls, content = parse_json("`function_call`", content), ""
    message = {key: value for key, value in turn.items() if key not in (role_key, content_key, "tool_calls")}
    message |= {"role": _ROLES[name], "content": content}
    if calls:
        message["tool_calls"] = [_tool_call(call) for call in (calls if isinstance(calls, list) else [calls])]
    return message


def _text(content: Any) -> str:
    if isinstance(content, Sequence) and all(isinstance(part, Mapping) and "text" in part for part in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise BadRow("not text", f"a turn's content is {str(content)[:60]!r}; only text can be trained on")
    return content


def _tool_call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "name" not in function:
        raise BadRow("unknown tool call", f"{str(call)[:60]!r}; it needs a `function` with `name` and `arguments`")
    function = dict(function)
    if isinstance(function.get("arguments"), str):
        function["arguments"] = parse_json("a tool call's `arguments`", function["arguments"] or "{}")
    identity = {"id": call["id"]} if "id" in call else {}
    return {"type": "function", **identity, "function": function}
