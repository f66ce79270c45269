"""One raw row as token ids with a loss mask: 1 on what the target itself would write."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from dflash_hf.trainer.messages import BadRow, is_plain_text, to_messages, tools_of

logger = logging.get_logger(__name__)

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_THINK_TAG = re.compile(r"</?think>")

Messages = Sequence[Mapping[str, Any]]


def encode_row(
    row: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    *,
    template_options: Mapping[str, Any] | None = None,
    max_length: int | None = None,
) -> dict[str, Any]:
    """Token ids and loss mask of a raw row.

    Rows with `input_ids` keep them as they are: they are the very tokens that the target read and wrote. Conversations
    pass the target's chat template, see [`to_messages`] and [`encode_conversation`]; `tools` beside them are given to
    the template. Plain `text` is tokenised as the tokenizer does it, BOS included where it adds one, and every token
    but the first is supervised. Where the tokenizer has no chat template, the strings `prompt` and `completion` are
    one text of which the completion is supervised.

    Args:
        row: One of these formats; other keys are ignored.
        tokenizer: The target's.
        template_options (*optional*): Further variables of the chat template, such as `enable_thinking`.
        max_length (`int`, *optional*): Longer rows are cut at the end, in tokens.
    Returns:
        `input_ids`, `loss_mask`, `is_cut` (whether `max_length` cut the row) and `skipped_turns` (how many assistant
        turns are not supervised).
    Raises:
        BadRow: If nothing of the row can be trained on.
    """
    if row.get("input_ids") is not None:
        encoded = _token_row(row)
    else:
        row = _without_none(row)
        if is_plain_text(row):
            encoded = _text_row("", row["text"], tokenizer)
        elif tokenizer.chat_template is None:
            encoded = _text_row(row.get("prompt"), row.get("completion"), tokenizer)
        else:
            encoded = encode_conversation(
                to_messages(row), tokenizer, tools=tools_of(row), template_options=template_options
            )
    length = len(encoded["input_ids"])
    is_cut = max_length is not None and length > max_length
    input_ids, loss_mask = encoded["input_ids"][:max_length], encoded["loss_mask"][:max_length]
    if not any(first and second for first, second in itertools.pairwise(loss_mask)):
        where = f"the first {max_length} of {length} tokens" if is_cut else f"the {length} tokens"
        raise BadRow("nothing supervised", f"{where} have no two supervised ones in a row")
    skipped_turns = encoded.get("skipped_turns", 0)
    return {"input_ids": input_ids, "loss_mask": loss_mask, "is_cut": is_cut, "skipped_turns": skipped_turns}


def encode_conversation(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools: list[Any] | None = None,
    template_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A conversation as the target reads and writes it: token ids, and a mask of the tokens that it writes.

    Of each assistant turn those tokens are supervised that follow the generation prompt, up to and with the token that
    ends the turn. If the template has `{% generation %}` tags, only tokens inside them (and the end of the turn right
    behind them) are.

    An assistant turn is not supervised if the row does not hold there what the target would have read and written: the
    turn has `weight` 0 or no text; nothing comes before it; the template renders it otherwise once other turns follow
    (Qwen3 drops earlier thoughts), adds to it (an empty think block) or leaves something out (tool calls); a token
    lies across the border of prompt and answer. The other turns of the row still are.

    Args:
        messages: Turns with `role` and `content`, as [`to_messages`] gives them.
        tokenizer: The target's, with a chat template.
        tools (*optional*): Given to the template.
        template_options (*optional*): Further variables of the template, such as `enable_thinking`.
    Returns:
        `input_ids` and `loss_mask`, which end with the last supervised token, and the number of `skipped_turns`.
    Raises:
        BadRow: If no assistant turn can be supervised.
    """
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise BadRow("no assistant turn", f"the roles are {[message['role'] for message in messages]}")
    template = _Template(tokenizer, tools, dict(template_options or {}))
    messages = messages[: turns[-1] + 1]
    full = template.render(messages)
    written = template.tagged(messages, full.ids)
    loss_mask = [0] * len(full.ids)
    problems = []
    for turn in turns:
        try:
            start, end = _answer_span(messages, turn, full, written, template)
            loss_mask[start:end] = written[start:end]
        except BadRow as problem:
            problems.append(problem)
    if len(problems) == len(turns):
        raise problems[-1]
    length = len(loss_mask) - loss_mask[::-1].index(1)
    return {"input_ids": full.ids[:length], "loss_mask": loss_mask[:length], "skipped_turns": len(problems)}


def template_mode(tokenizer: PreTrainedTokenizerBase, enable_thinking: bool | None) -> str:
    """`"thinking"`, `"no thinking"` or `"template default"`; warns if the chat template cannot switch."""
    if enable_thinking is None:
        return "template default"
    if "enable_thinking" not in str(tokenizer.chat_template):
        logger.warning_once(
            f"`enable_thinking` is {enable_thinking}, but the tokenizer's chat template has no such variable, so it "
            "changes nothing. Leave it out, or choose a target whose template can switch."
        )
        return "template default"
    return "thinking" if enable_thinking else "no thinking"


@dataclass
class _Rendering:
    text: str
    ids: list[int]


@dataclass
class _Template:
    """A tokenizer's chat template with all but the messages filled in."""

    tokenizer: PreTrainedTokenizerBase
    tools: list[Any] | None
    options: dict[str, Any]

    def render(self, messages: Messages, *, add_generation_prompt: bool = False) -> _Rendering:
        text = self._apply(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
        return _Rendering(text, _tokenise(self.tokenizer, text, add_special_tokens=False))

    def tagged(self, messages: Messages, ids: Sequence[int]) -> list[int]:
        """1 for each token inside a generation tag, or a special one right behind it; all 1 if there are no tags."""
        if not _GENERATION_TAG.search(self.tokenizer.get_chat_template(tools=self.tools)):
            return [1] * len(ids)
        mask = list(self._apply(messages, return_dict=True, return_assistant_tokens_mask=True)["assistant_masks"])
        for last in [i for i, (this, behind) in enumerate(itertools.pairwise(mask)) if this and not behind]:
            if self.is_special(ids[last + 1]):
                mask[last + 1] = 1
        return mask

    def is_special(self, token: int) -> bool:
        return self.tokenizer.decode([token], skip_special_tokens=True) != self.tokenizer.decode([token])

    def _apply(self, messages: Messages, **arguments: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(list(messages), tools=self.tools, **self.options, **arguments)
        except (TemplateError, TypeError, ValueError) as error:
            raise BadRow("refused by the chat template", f"{type(error).__name__}: {error}") from error


def _answer_span(
    messages: Messages, turn: int, full: _Rendering, written: Sequence[int], template: _Template
) -> tuple[int, int]:
    """First token that the target writes in an assistant turn, and the one behind the last, if the row holds both.

    Raises:
        BadRow: If the turn cannot be supervised.
    """
    if messages[turn].get("weight", 1) == 0:
        raise BadRow("weight 0", "no other assistant turn of the row can be supervised")
    if turn == 0:
        raise BadRow("nothing before the answer", "the assistant speaks first")
    prompt = template.render(messages[:turn], add_generation_prompt=True)
    answered = full if turn == len(messages) - 1 else template.render(messages[: turn + 1])
    if not answered.text.startswith(prompt.text):
        raise BadRow("unstable template", f"the answer does not follow the generation prompt {prompt.text[-60:]!r}")
    start = len(prompt.ids)
    if answered.ids[:start] != prompt.ids:
        pairs = zip(answered.ids, prompt.ids, strict=False)
        token = next((new for new, old in pairs if new != old), answered.ids[-1])
        raise BadRow(
            "token across the border",
            f"the prompt ends with the token {template.tokenizer.decode([token])!r} only where the answer follows it",
        )
    end = _end_of_turn(answered.ids, start, template)
    if full.ids[:end] != answered.ids[:end]:
        raise BadRow("unstable template", f"turn {turn} is rendered otherwise once other turns follow")
    if not any(written[start:end]):
        raise BadRow("no generation tag", f"the chat template's generation tags leave out turn {turn}")
    _check_answer(messages[turn], answered.text[len(prompt.text) :])
    return start, end


def _end_of_turn(ids: Sequence[int], start: int, template: _Template) -> int:
    """Index behind the token that ends the answer in `ids[start:]`.

    Behind the answer's text a template writes special tokens and white space. The target writes the first special
    tokens of these, then stops: of `<|end|>`, line break, `<|endoftext|>` (Phi-3) the first; of `<|tool_call_end|>`,
    `<|im_end|>`, line break (LFM2) two. Without a special token the answer ends with its text.
    """
    text_end = len(ids)
    while text_end > start:
        last = ids[text_end - 1]
        if not template.is_special(last) and template.tokenizer.decode([last]).strip():
            break
        text_end -= 1
    end = text_end
    while end < len(ids) and not template.is_special(ids[end]):
        end += 1
    if end == len(ids):
        return text_end
    while end < len(ids) and template.is_special(ids[end]):
        end += 1
    return end


def _check_answer(message: Mapping[str, Any], text: str) -> None:
    """Refuses an answer that the template has changed.

    Raises:
        BadRow: If `text` does not hold the message's thoughts, content and tool calls in this order, or has a think
            block that the message has not.
    """
    content = message.get("content") or ""
    thoughts = next((message[key] for key in ("reasoning_content", "reasoning", "thinking") if message.get(key)), "")
    names = [call["function"]["name"] for call in message.get("tool_calls") or ()]
    parts = [part.strip() for part in (thoughts, *_THINK_TAG.split(content), *names) if part.strip()]
    if not parts:
        raise BadRow("empty answer", "an assistant turn has no text")
    position = 0
    for part in parts:
        position = text.find(part, position)
        if position < 0:
            raise BadRow("changed by the chat template", f"it leaves out or alters {part[:60]!r}")
        position += len(part)
    added = text[: text.find(parts[0])]
    if "think>" in added and not thoughts and "think>" not in content:
        raise BadRow(
            "changed by the chat template",
            f"it adds {added.strip()!r} to an answer without thoughts, which the target would not write so; set "
            "`enable_thinking` to false, or let the target answer anew with `dflash-regenerate`",
        )


def _token_row(row: Mapping[str, Any]) -> dict[str, Any]:
    input_ids = list(row["input_ids"])
    if not all(isinstance(token, int) and token >= 0 for token in input_ids):
        raise BadRow("wrong token ids", f"`input_ids` begin with {input_ids[:5]}; each must be a whole number from 0")
    if row.get("loss_mask") is not None:
        loss_mask = list(row["loss_mask"])
    elif row.get("prompt_length") is not None:
        loss_mask = [int(position >= row["prompt_length"]) for position in range(len(input_ids))]
    else:
        raise BadRow("no loss mask", f"`input_ids` need `loss_mask` or `prompt_length`; the row has {sorted(row)}")
    if len(loss_mask) != len(input_ids) or not {0, 1}.issuperset(loss_mask):
        raise BadRow("wrong loss mask", f"{len(loss_mask)} values for {len(input_ids)} token ids; each must be 0 or 1")
    return {"input_ids": input_ids, "loss_mask": loss_mask}


def _text_row(prompt: Any, completion: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise BadRow(
            "no chat template",
            "the tokenizer has none, so only `text` or the strings `prompt` and `completion` will do",
        )
    input_ids = _tokenise(tokenizer, prompt + completion, add_special_tokens=True)
    prompt_ids = _tokenise(tokenizer, prompt, add_special_tokens=True) if prompt else input_ids[:1]
    if input_ids[: len(prompt_ids)] != prompt_ids:
        raise BadRow("token across the border", f"it lies between {prompt[-20:]!r} and {completion[:20]!r}")
    loss_mask = [int(position >= len(prompt_ids)) for position in range(len(input_ids))]
    return {"input_ids": input_ids, "loss_mask": loss_mask}


def _tokenise(tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool) -> list[int]:
    # Without the warning about the target's window: rows are cut later.
    return list(tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])


def _without_none(value: Any) -> Any:
    """`value` without the empty keys that Arrow adds where the rows of a column have different ones."""
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value
