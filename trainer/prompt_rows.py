"""Prompt rows as conversations that the target answers, kept as the token ids that it reads and writes."""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from dflash_hf.trainer.conversations import template_mode
from dflash_hf.trainer.messages import BadRow, to_messages, tools_of

# A `prompt` beside one of these is not the row's whole conversation.
_OTHER_FORMATS = {"messages", "conversations", "conversation", "completion", "instruction"}


@dataclass(frozen=True)
class Prompt:
    """A usable prompt row: `turns` end with the user or tool turn to answer."""

    id: str
    index: int
    source: str
    turns: list[dict[str, Any]]
    tools: list[Any] | None


def read_prompt(row: dict[str, Any], index: int) -> Prompt:
    """The prompt in row number `index` of a prompts file.

    A row is in any format of [`to_messages`], or has only a `prompt`: one user turn as a string, or turns. Assistant
    turns at the end are left out, because the target writes them anew. `source` and `tools` are kept.

    Raises:
        BadRow: If there is nothing to answer.
    """
    if not isinstance(row, dict):
        raise BadRow("unknown format", f"a row must be an object, got {str(row)[:60]!r}")
    if "prompt" in row and row.keys().isdisjoint(_OTHER_FORMATS):
        row = {**row, "messages": row["prompt"]}
    turns = to_messages(row)
    turns = [{key: value for key, value in turn.items() if key != "weight"} for turn in turns]
    while turns and turns[-1]["role"] == "assistant":
        turns.pop()
    if not turns or turns[-1]["role"] not in ("user", "tool"):
        roles = [turn["role"] for turn in turns]
        raise BadRow("nothing to answer", f"the turns before the last answer must end with a user's, got {roles}")
    identity = hashlib.sha1(json.dumps([index, turns], sort_keys=True).encode()).hexdigest()[:16]
    return Prompt(identity, index, row.get("source") or "", turns, tools_of(row))


class ChatRenderer:
    """Text and token ids of chats, by the target's own template.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's tokenizer.
        enable_thinking (`bool`, *optional*): The template's variable of that name; None leaves the template's default.
    Raises:
        ValueError: If the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, enable_thinking: bool | None = None):
        tokenizer.get_chat_template()
        template_mode(tokenizer, enable_thinking)
        self.tokenizer = tokenizer
        self.variables = {} if enable_thinking is None else {"enable_thinking": enable_thinking}

    def render(self, turns: list[dict[str, Any]], tools: list[Any] | None) -> str:
        """The text that asks for the turn after `turns`.

        Raises:
            BadRow: If the template refuses the turns.
        """
        try:
            return self.tokenizer.apply_chat_template(
                turns, tools=tools, tokenize=False, add_generation_prompt=True, **self.variables
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise BadRow("refused by the chat template", f"{type(error).__name__}: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with no token added."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def decode(self, token_ids: list[int]) -> str:
        """Text of `token_ids`, special tokens included."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


@dataclass(eq=False)
class Conversation:
    """A prompt while it is answered.

    `input_ids` is what the target reads next or, once answered, what it read and wrote; `loss_mask` is 1 on what it
    wrote. With `multi_turn` every user turn is answered in order, and the row's own assistant turns are not used. An
    answer stays in `input_ids` while the template renders the later chat as a continuation of the same text. Where it
    rewrites earlier turns (Qwen3 drops their thoughts), the row begins again with the new text: it holds what the
    target reads in use, and only answers behind the rewritten part are supervised.

    Args:
        prompt (`Prompt`): The turns to answer.
        renderer (`ChatRenderer`): The target's chat template.
        max_prompt_length (`int`): The conversation ends before a later turn that would make the prompt longer, in
            tokens, or that the template refuses.
        multi_turn (`bool`): Answer every user turn. A prompt with tool turns is answered at its end only.
    Raises:
        BadRow: If the template refuses the turns.
    """

    prompt: Prompt
    renderer: ChatRenderer
    max_prompt_length: int
    multi_turn: bool = False
    input_ids: list[int] = field(init=False)
    loss_mask: list[int] = field(init=False)
    finish_reason: str = field(default="", init=False)
    is_retokenized: bool = field(default=False, init=False)

    def __post_init__(self):
        turns = self.prompt.turns
        first = next(i for i, turn in enumerate(turns) if turn["role"] in ("user", "tool")) + 1
        is_plain = all(turn["role"] in ("user", "assistant") for turn in turns[first:])
        cut = first if self.multi_turn and is_plain else len(turns)
        self._turns, self._later_turns = turns[:cut], [turn for turn in turns[cut:] if turn["role"] == "user"]
        self._text = self.renderer.render(self._turns, self.prompt.tools)
        self.input_ids = self.renderer.encode(self._text)
        self.loss_mask = [0] * len(self.input_ids)

    def add_answer(self, answer_ids: list[int], finish_reason: str) -> bool:
        """Appends the target's answer to `input_ids`; whether there is a further turn to answer.

        Args:
            answer_ids (`list[int]`): The ids that the target wrote, with the end token if it wrote one.
            finish_reason (`str`): `"stop"`, `"length"`, or why there is no usable answer.
        """
        self.input_ids = self.input_ids + answer_ids
        self.loss_mask = self.loss_mask + [1] * len(answer_ids)
        self.finish_reason = finish_reason
        return finish_reason == "stop" and bool(self._later_turns) and self._open_next_turn(answer_ids)

    def _open_next_turn(self, answer_ids: list[int]) -> bool:
        text_so_far = self._text + self.renderer.decode(answer_ids)
        answer = {"role": "assistant", "content": self.renderer.decode(answer_ids[:-1])}
        turns = [*self._turns, answer, self._later_turns[0]]
        try:
            text = self.renderer.render(turns, self.prompt.tools)
        except BadRow:
            return False
        input_ids = self.renderer.encode(text)
        loss_mask = [0] * len(input_ids)
        if text.startswith(text_so_far):
            new_ids = self.renderer.encode(text[len(text_so_far) :])
            # The new turn must read the same behind kept ids as in the whole text.
            if new_ids and new_ids == input_ids[-len(new_ids) :]:
                input_ids = self.input_ids + new_ids
                loss_mask = self.loss_mask + [0] * len(new_ids)
        if len(input_ids) > self.max_prompt_length:
            return False
        self._turns, self._later_turns, self._text = turns, self._later_turns[1:], text
        self.input_ids, self.loss_mask = input_ids, loss_mask
        return True

    def to_row(self) -> dict[str, Any]:
        """The training row: `id`, `source`, `input_ids`, `prompt_length`, `finish_reason`.

        `loss_mask` is added with `multi_turn`, `enable_thinking` if it was set, `retokenized` if it is true.
        """
        row = {
            "id": self.prompt.id,
            "source": self.prompt.source,
            "input_ids": self.input_ids,
            "prompt_length": self.loss_mask.index(1),
            "finish_reason": self.finish_reason,
            **self.renderer.variables,
        }
        if self.multi_turn:
            row["loss_mask"] = self.loss_mask
        if self.is_retokenized:
            row["retokenized"] = True
        return row
