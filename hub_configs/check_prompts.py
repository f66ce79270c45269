"""The prompts of `dflash-hub check`: four short ones or a file's, in the template mode of the drafter's training."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from dflash_hf.eval.prompts import demo_prompts
from dflash_hf.hub_configs.check_config import SWITCHES, Pair, can_switch
from dflash_hf.trainer.prompt_rows import ChatRenderer, read_prompt

# A user's text, the turns of a chat, or token ids.
Prompt = str | list[dict[str, Any]] | list[int]


def read_prompts(path: str | Path) -> list[Prompt]:
    """The prompts of a file: one text a line, or in a `.jsonl` file one chat a line in any format that training reads.

    Raises:
        ValueError: If the file cannot be read or has no prompts, or a line of JSON has none.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"The prompts cannot be read: {error}") from error
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                prompts.append(read_prompt(json.loads(line), number).turns if path.suffix == ".jsonl" else line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    if not prompts:
        raise ValueError(f"{path} has no prompts: write one on each line.")
    return prompts


def prompts_by_mode(prompts: Sequence[Prompt] | None, pair: Pair) -> dict[str, list[list[int]]]:
    """Token ids of the prompts by template mode: first in that of the drafter's training, then where others differ.

    Args:
        prompts: None: four short ones, or none without a tokenizer.
    Raises:
        ValueError: If prompts in words come without a tokenizer, or the chat template refuses one.
    """
    if prompts is None:
        # One of each kind.
        prompts = [row["prompt"] for row in demo_prompts()[::2]] if pair.tokenizer is not None else []
    switches = {"template default": None} | (SWITCHES if can_switch(pair.tokenizer) else {})
    recorded = pair.values["template_mode"]
    first = recorded if recorded in switches else "template default"
    by_mode: dict[str, list[list[int]]] = {}
    for mode in (first, *switches):
        token_ids = [_encode(prompt, pair.tokenizer, switches[mode]) for prompt in prompts]
        if token_ids not in by_mode.values():
            by_mode[mode] = token_ids
    return by_mode


def _encode(prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None, enable_thinking: bool | None) -> list[int]:
    if not isinstance(prompt, str) and all(isinstance(token, int) for token in prompt):
        return cast(list[int], prompt)
    if tokenizer is None:
        raise ValueError("Prompts in words need a tokenizer. Pass `tokenizer`, or prompts as token ids.")
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else cast(list[dict[str, Any]], prompt)
    if not tokenizer.chat_template:
        return tokenizer("\n\n".join(turn["content"] for turn in turns))["input_ids"]
    renderer = ChatRenderer(tokenizer, enable_thinking)
    return renderer.encode(renderer.render(turns, None))
