"""The real tokenizer of the embedded target, and small chat templates with the quirks of well-known ones."""

import copy
from functools import cache

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dflash_hf.hub_configs.embedded_target import embedded_target_folder

# ChatML, the embedded target's own format without its default system turn; %s is where a test puts its tags.
CHATML = (
    "{%% for message in messages %%}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{%% if message.role == 'assistant' %%}%s{%% else %%}{{ message.content + '<|im_end|>\\n' }}{%% endif %%}"
    "{%% endfor %%}{%% if add_generation_prompt %%}{{ '<|im_start|>assistant\\n' }}{%% endif %%}"
)
PLAIN = CHATML % "{{ message.content + '<|im_end|>\\n' }}"
# Gemma: the turn ends with another token than EOS, no system role, and contents are trimmed.
GEMMA = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}"
    "{{ message.content | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
# Phi-3: the whole chat ends with EOS, which the target does not write after its own end of turn.
PHI = (
    "{% for message in messages %}{{ '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"
)
# Qwen3: thoughts only behind the last question, an empty think block where there are none, tool calls as JSON.
QWEN3 = (
    "{% if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}"
    "{% set ns = namespace(last=-1) %}"
    "{% for turn in messages %}{% if turn.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.role == 'assistant' and loop.index0 > ns.last and (loop.last or message.reasoning_content) %}"
    "{{ '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{% endif %}"
)


@cache
def real_tokenizer(
    chat_template: str | None = PLAIN, *, special: tuple[str, ...] = (), added: tuple[str, ...] = ()
) -> PreTrainedTokenizerBase:
    """The embedded target's tokenizer with another chat template, more special tokens and more plain ones."""
    tokenizer = copy.deepcopy(stock_tokenizer())
    tokenizer.chat_template = chat_template
    tokenizer.add_tokens(list(special), special_tokens=True)
    tokenizer.add_tokens(list(added))
    return tokenizer


@cache
def stock_tokenizer() -> PreTrainedTokenizerBase:
    """The embedded target's tokenizer as it comes."""
    try:
        return AutoTokenizer.from_pretrained(embedded_target_folder())
    except ImportError as error:
        pytest.skip(str(error))


def gemma_tokenizer() -> PreTrainedTokenizerBase:
    return real_tokenizer(GEMMA, special=("<start_of_turn>", "<end_of_turn>"))


def qwen3_tokenizer() -> PreTrainedTokenizerBase:
    """As in Qwen3's vocabulary, two line breaks are one token, whatever follows."""
    return real_tokenizer(QWEN3, added=("<think>", "</think>", "<tool_call>", "</tool_call>", "\n\n"))


def supervised_texts(row: dict, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text of each run of supervised tokens."""
    texts, run = [], []
    for token, is_supervised in [*zip(row["input_ids"], row["loss_mask"], strict=True), (None, 0)]:
        if is_supervised:
            run.append(token)
        elif run:
            texts.append(tokenizer.decode(run))
            run = []
    return texts
