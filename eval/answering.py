"""Answers to all prompts by all methods in turn: alternating, sharded over processes, and resumable."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.utils import logging

from dflash_hf.eval.decode import encode_chat
from dflash_hf.eval.figures import AnswerRecord
from dflash_hf.eval.methods import COMPILED, Decoder
from dflash_hf.eval.rounding import explain_difference
from dflash_hf.eval.tasks import EvalPrompt
from dflash_hf.trainer.answer_file import finished_ids
from dflash_hf.trainer.data import read_json_lines
from dflash_hf.trainer.target_features import input_device

logger = logging.get_logger(__name__)

WARM_UP_TOKENS = 16


@dataclass
class Answering:
    """Answers prompts with several methods.

    Args:
        target ([`PreTrainedModel`]): The target; answers stop at its end tokens, unless the decoders ignore them.
        tokenizer ([`PreTrainedTokenizerBase`]): Its tokenizer, with a chat template.
        decoders (`dict`): Method -> [`Decoder`]; `plain` is the first.
        max_new_tokens (`int`): Longest answer, in tokens.
        template_options (`dict`): Arguments of the chat template, such as `enable_thinking`.
        seed (`int`): Each turn of each prompt is answered from a seed of its own, the same for all methods.
    """

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    decoders: dict[str, Decoder]
    max_new_tokens: int
    template_options: dict[str, Any]
    seed: int

    def warm_up(self, prompts: Sequence[EvalPrompt], temperature: float, optional: set[str]) -> dict[str, str]:
        """One unmeasured answer per method, to the prompt of most tokens; returns why methods were left out.

        A static cache is as long as the longest call so far, and a longer one would be compiled for in mid-run.

        Args:
            optional (`set[str]`): Methods that are left out, with a warning, if they fail here.
        """
        longest = max(prompts, key=self.num_tokens)
        inputs = self._encode([{"role": "user", "content": text} for text in longest.turns])
        left_out = {}
        for method, decode in list(self.decoders.items()):
            length = min(WARM_UP_TOKENS, self.max_new_tokens)
            if method in COMPILED:  # to the length of all that the last turn may follow
                length = self.num_tokens(longest) - inputs["input_ids"].shape[1]
            try:
                decode(inputs, length, temperature)
            except Exception as error:  # other libraries' methods fail in their own ways
                if method not in optional:
                    raise
                first_line = next(iter(str(error).strip().splitlines()), "")
                left_out[method] = f"{type(error).__name__}: {first_line}"
                logger.warning(f"The method {method!r} does not run here and is left out: {left_out[method]}")
                del self.decoders[method]
        return left_out

    def answer(self, prompt: EvalPrompt, temperature: float) -> list[dict[str, Any]]:
        """Fields of an [`AnswerRecord`] for each turn and method; plain answers are what the next turn follows."""
        messages: list[dict[str, str]] = []
        records = []
        for turn, text in enumerate(prompt.turns):
            messages.append({"role": "user", "content": text})
            inputs = self._encode(messages)
            seed = random.Random(f"{self.seed}/{prompt.task}/{prompt.prompt_id}/{turn}").randrange(2**31)
            plain_ids: list[int] = []
            for method in self._order(seed):
                set_seed(seed)
                answer = self.decoders[method](inputs, self.max_new_tokens, temperature, plain_ids or None)
                plain_ids = plain_ids or answer.token_ids
                difference = None
                if temperature == 0 and answer.token_ids != plain_ids:
                    difference = asdict(
                        explain_difference(self.target, inputs["input_ids"], plain_ids, answer.token_ids)
                    )
                records.append(
                    {
                        "task": prompt.task,
                        "prompt_id": prompt.prompt_id,
                        "turn": turn,
                        "temperature": temperature,
                        "method": method,
                        "prompt_tokens": inputs["input_ids"].shape[1],
                        **asdict(answer),
                        "difference": difference,
                    }
                )
            reply = self.tokenizer.decode(plain_ids, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": reply})
        return records

    def num_tokens(self, prompt: EvalPrompt) -> int:
        """Tokens of the longest turn with what may come before it, and an answer, at most."""
        turns = [{"role": "user", "content": text} for text in prompt.turns]
        longest = self._encode(turns[:1])["input_ids"].shape[1]
        for turn in turns[1:]:
            longest += self._encode([turn])["input_ids"].shape[1]
        return longest + len(turns) * self.max_new_tokens

    def _encode(self, messages: list[dict[str, str]]) -> dict[str, torch.Tensor]:
        return encode_chat(self.tokenizer, messages, input_device(self.target), **self.template_options)

    def _order(self, seed: int) -> list[str]:
        """Plain first, since others may need its answer, then the others in an order of this prompt's own."""
        others = list(self.decoders)[1:]
        random.Random(seed).shuffle(others)
        return [next(iter(self.decoders)), *others]


class AnswerFiles:
    """Answers of one run in `answers.<rank>.jsonl`, one line per prompt and temperature; a kill loses no whole line.

    Args:
        folder (`Path`): Where the files lie.
        rank (`int`): This process's.
    """

    def __init__(self, folder: Path, rank: int):
        self.folder = folder
        self.path = folder / f"answers.{rank}.jsonl"

    def finished(self) -> set[str]:
        """Names of what any process of this or an earlier run has answered; half-written lines are cut off."""
        return set().union(*(finished_ids(path) for path in self._paths()))

    def append(self, name: str, records: Sequence[dict[str, Any]]) -> None:
        """Hands one line to the system at once."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"id": name, "answers": list(records)}) + "\n")

    def records(self) -> Iterator[AnswerRecord]:
        """All answers, in the order of the files; of work that two runs did at once, the first answers found."""
        seen = set()
        for path in self._paths():
            for line in read_json_lines(path):
                if line["id"] not in seen:
                    seen.add(line["id"])
                    yield from map(AnswerRecord, line["answers"])

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("answers.*.jsonl"))


def answer_share(
    answering: Answering,
    work: Sequence[tuple[float, EvalPrompt]],
    files: AnswerFiles,
    done: set[str],
    *,
    rank: int = 0,
    world_size: int = 1,
) -> None:
    """Answers this process's share of the work, with progress on the first process.

    Args:
        work: Pairs of temperature and prompt.
        files ([`AnswerFiles`]): Takes the answers.
        done (`set[str]`): Names of work that needs no answer, see [`work_name`].
    """
    share = list(work)[rank::world_size]
    missing = [pair for pair in share if work_name(*pair) not in done]
    progress = tqdm(total=len(share), initial=len(share) - len(missing), unit="prompt", disable=rank > 0)
    with progress:
        for temperature, prompt in missing:
            progress.set_description(f"{prompt.task}, temperature {temperature:g}")
            files.append(work_name(temperature, prompt), answering.answer(prompt, temperature))
            progress.update()


def work_name(temperature: float, prompt: EvalPrompt) -> str:
    """A prompt at a temperature, unique in a run."""
    return f"{temperature}/{prompt.task}/{prompt.prompt_id}"
