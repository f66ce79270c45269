"""The two ways to have conversations answered by the target: batches in this process, or a server."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from dflash_hf.trainer.answer_server import AnswerServer, ServerAnswer
from dflash_hf.trainer.prompt_rows import Conversation

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Decoding:
    """How the target decodes.

    Args:
        max_new_tokens (`int`): Longest answer, in tokens.
        temperature (`float`): 0 decodes greedily.
        top_p (`float`): Share of probability that is sampled from; 1 is all.
        top_k (`int`): Number of tokens that are sampled from; 0 is all.
        seed (`int`): Seed of sampled answers.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def for_generate(self) -> dict[str, Any]:
        """Arguments of `generate`."""
        if self.temperature == 0:
            return {"max_new_tokens": self.max_new_tokens, "do_sample": False}
        sampling = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return {"max_new_tokens": self.max_new_tokens, "do_sample": True, **sampling}

    def for_server(self, generation_config: GenerationConfig) -> dict[str, Any]:
        """Sampling parameters by the names that vLLM and SGLang share.

        Everything is named, because a server that is not told may take the value from its own generation config.
        """
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k or -1,
            "min_p": generation_config.min_p or 0.0,
            "repetition_penalty": generation_config.repetition_penalty or 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }


def end_token_ids(*values: int | list[int] | None) -> set[int]:
    """The ids in `values`, as `eos_token_id` holds them in configs and tokenizers."""
    ids: set[int] = set()
    for value in values:
        ids |= set(value) if isinstance(value, list) else set() if value is None else {value}
    return ids


def answer_in_batches(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Iterator[Conversation],
    decoding: Decoding,
    batch_size: int,
) -> Iterator[Conversation]:
    """`conversations` with the target's answers, batch by batch.

    Prompts of like length share a batch, so that little is padding; sorting inside windows of eight batches keeps an
    early part of the output a fair sample of the whole. Sampling is seeded once a batch, so sampled answers depend on
    the batch.
    """
    while window := list(islice(conversations, 8 * batch_size)):
        window.sort(key=lambda conversation: -len(conversation.input_ids))
        for start in range(0, len(window), batch_size):
            yield from answer_batch(target, tokenizer, window[start : start + batch_size], decoding)


def answer_batch(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: list[Conversation], decoding: Decoding
) -> list[Conversation]:
    """`batch` with the target's answers: all first turns together, then all second turns, and so on."""
    set_seed(decoding.seed + batch[0].prompt.index)
    waiting = batch
    while waiting:
        answers = _generate(target, tokenizer, [conversation.input_ids for conversation in waiting], decoding)
        pairs = zip(waiting, answers, strict=True)
        waiting = [conversation for conversation, answer in pairs if conversation.add_answer(*answer)]
    return batch


@torch.inference_mode()
def _generate(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]], decoding: Decoding
) -> list[tuple[list[int], str]]:
    """Token ids and finish reason of the answer to each prompt."""
    inputs = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt").to(target.device)
    sequences = target.generate(**inputs, **decoding.for_generate())
    end_ids = end_token_ids(target.generation_config.eos_token_id)
    answers = []
    for sequence in sequences[:, inputs.input_ids.shape[1] :].tolist():
        length = next((i + 1 for i, token in enumerate(sequence) if token in end_ids), len(sequence))
        answers.append((sequence[:length], "stop" if sequence[length - 1] in end_ids else "length"))
    return answers


def answer_on_server(
    server: AnswerServer,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Iterator[Conversation],
    end_ids: set[int],
    *,
    seed: int,
    concurrency: int,
) -> Iterator[Conversation]:
    """`conversations` with the server's answers, each as soon as it is whole.

    A sampled answer is seeded with `seed` + the prompt's row number, so it does not depend on what else is in flight.
    """
    again: deque[Conversation] = deque()

    def next_conversation() -> Conversation | None:
        return again.popleft() if again else next(conversations, None)

    def ask(conversation: Conversation) -> ServerAnswer:
        return server.answer(conversation.input_ids, seed=seed + conversation.prompt.index)

    for conversation, answer in in_flight(ask, next_conversation, concurrency):
        answer_ids, finish_reason, is_retokenized = final_ids(answer, end_ids, tokenizer)
        conversation.is_retokenized |= is_retokenized
        if conversation.add_answer(answer_ids, finish_reason):
            again.append(conversation)
        else:
            yield conversation


def in_flight(
    function: Callable[[Item], Result], next_item: Callable[[], Item | None], number: int
) -> Iterator[tuple[Item, Result]]:
    """Pairs of an item and `function(item)` as they finish, with up to `number` calls at once.

    `next_item` is called in the caller's thread whenever a place is free; None means that nothing waits now. It is
    asked again after each pair, so the caller may add items while iterating. An exception ends the iteration.
    """
    waiting: queue.SimpleQueue = queue.SimpleQueue()
    finished: queue.SimpleQueue = queue.SimpleQueue()

    def work() -> None:
        for item in iter(waiting.get, None):
            try:
                finished.put((item, function(item), None))
            except BaseException as error:  # raised in the caller's thread
                finished.put((item, None, error))

    for _ in range(number):
        # An interrupt must not wait for the answers in flight, so the threads end with the process.
        threading.Thread(target=work, daemon=True).start()
    running = 0
    try:
        while True:
            while running < number and (item := next_item()) is not None:
                waiting.put(item)
                running += 1
            if running == 0:
                return
            item, result, error = finished.get()
            running -= 1
            if error is not None:
                raise error
            yield item, result
    finally:
        for _ in range(number):
            waiting.put(None)


def final_ids(
    answer: ServerAnswer, end_ids: set[int], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], str, bool]:
    """The ids of an answer, its finish reason, and whether the ids are re-tokenised text.

    An answer that ended by itself ends with the end token that the target wrote: vLLM and SGLang keep it in the ids
    (and drop it from the text); where it is missing, the one that the server reports is put back. Without either, the
    finish reason becomes `"stop without an end token"`.

    Args:
        answer (`ServerAnswer`): The server's answer.
        end_ids (`set[int]`): The target's end tokens.
        tokenizer (`PreTrainedTokenizerBase`): Tokenises answers that came as text only.
    """
    is_retokenized = answer.token_ids is None
    token_ids, end_id = answer.token_ids, answer.stop_token_id
    if token_ids is None:
        token_ids = tokenizer(answer.text, add_special_tokens=False)["input_ids"]
        end_id = tokenizer.eos_token_id if end_id is None else end_id
    if answer.finish_reason != "stop":
        is_empty = answer.finish_reason == "length" and not token_ids
        return token_ids, "empty answer" if is_empty else answer.finish_reason, is_retokenized
    if token_ids and (token_ids[-1] in end_ids or token_ids[-1] == end_id):
        return token_ids, "stop", is_retokenized
    if end_id is None:
        return token_ids, "stop without an end token", is_retokenized
    return [*token_ids, end_id], "stop", is_retokenized
