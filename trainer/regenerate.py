"""Answers written by the target itself: the on-policy training data that DFlash needs (paper, section 5)."""

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from dflash_hf.hub_configs.embedded_target import EMBEDDED_TARGET, embedded_target_folder, load_target
from dflash_hf.trainer.answer_file import Tally, append_rows, check_settings, finished_ids
from dflash_hf.trainer.answer_server import AnswerServer, Api
from dflash_hf.trainer.answers import Decoding, answer_in_batches, answer_on_server, end_token_ids
from dflash_hf.trainer.command_line import parse_options
from dflash_hf.trainer.data import read_json_lines
from dflash_hf.trainer.grouped_attention import register_grouped_attention
from dflash_hf.trainer.prompt_rows import ChatRenderer, Conversation, Prompt, read_prompt

# May differ from run to run: no greedy answer depends on them.
_MAY_CHANGE = {"output", "max_prompts", "batch_size", "server", "server_api", "concurrency", "request_timeout"}


@dataclass
class RegenerateOptions:
    """Options of `dflash-regenerate`."""

    prompts: str = field(
        metadata={"help": "JSONL file; rows have `messages`, `prompt` or `conversations` (ShareGPT)."}
    )
    output: str = field(metadata={"help": "JSONL file to write; a rerun continues it."})
    target: str = field(default=EMBEDDED_TARGET, metadata={"help": "Hub id, folder, or the embedded target."})
    target_revision: str | None = field(default=None, metadata={"help": "Hub revision of the target."})
    max_new_tokens: int = field(default=160, metadata={"help": "Longest answer, in tokens."})
    max_prompts: int | None = field(default=None, metadata={"help": "Answer only the first prompts of the file."})
    max_prompt_length: int = field(default=320, metadata={"help": "Longer prompts are skipped, in tokens."})
    multi_turn: bool = field(default=False, metadata={"help": "Answer every user turn, not only the last."})
    enable_thinking: bool | None = field(
        default=None, metadata={"help": "Chat template variable; unset: its default."}
    )
    temperature: float = field(default=0.0, metadata={"help": "0 decodes greedily."})
    top_p: float = field(default=1.0, metadata={"help": "Share of probability that is sampled from; 1 is all."})
    top_k: int = field(default=0, metadata={"help": "Number of tokens that are sampled from; 0 is all."})
    seed: int = field(default=0, metadata={"help": "Seed when the temperature is above 0."})
    batch_size: int = field(default=96, metadata={"help": "Prompts decoded together, without a server."})
    dtype: str = field(default="bfloat16", metadata={"help": "Dtype of the target, without a server."})
    server: str | None = field(
        default=None, metadata={"help": "Address of a vLLM or SGLang server of the target, as http://host:8000/v1."}
    )
    server_model: str | None = field(default=None, metadata={"help": "Name of the model, if the server has several."})
    server_api: Api = field(
        default="auto", metadata={"help": "How the server gives token ids: /v1/completions or SGLang's /generate."}
    )
    concurrency: int = field(default=64, metadata={"help": "Requests in flight."})
    request_timeout: float = field(default=1800.0, metadata={"help": "Longest wait for one answer, in seconds."})
    retokenize: bool = field(
        default=False, metadata={"help": "Take text from a server without token ids; rows say `retokenized`."}
    )
    shard: int = field(default=0, metadata={"help": "Which shard of the prompts this process answers."})
    num_shards: int = field(
        default=1, metadata={"help": "Processes that share the prompts, each with its own output."}
    )

    def __post_init__(self):
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError(
                f"`temperature` {self.temperature} and `top_k` {self.top_k} must be at least 0, `top_p` {self.top_p} "
                "above 0 and at most 1."
            )
        if self.temperature == 0 and (self.top_p < 1 or self.top_k > 0):
            raise ValueError("`top_p` and `top_k` need a `temperature` above 0; at 0 the target decodes greedily.")
        for name in ("max_new_tokens", "batch_size", "concurrency", "num_shards"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        if not 0 <= self.shard < self.num_shards:
            raise ValueError(f"`shard` must be 0 to `num_shards` - 1 = {self.num_shards - 1}, got {self.shard}.")
        if self.server is None and (self.server_model is not None or self.retokenize):
            raise ValueError("`server_model` and `retokenize` need `server`.")

    def decoding(self) -> Decoding:
        """The options that say how the target decodes."""
        return Decoding(self.max_new_tokens, self.temperature, self.top_p, self.top_k, self.seed)


def regenerate(options: RegenerateOptions) -> int:
    """Writes one row per prompt to `options.output` and returns how many rows the file has.

    A row is `{"id", "source", "input_ids", "prompt_length", "finish_reason"}` and what [`Conversation.to_row`] adds:
    the very token ids that the target read and wrote, never re-rendered text. `finish_reason` is `"stop"` (the last id
    is the end token) or `"length"`. Rows are in no order. A killed run is continued: finished rows stay, a
    half-written last line is removed, and other settings than the first run's are refused.

    The target answers in this process, in batches, or on the server at `options.server`. It decodes by `temperature`,
    `top_p` and `top_k`; of its generation config a repetition penalty and `min_p` hold, too. With a temperature, a
    server gets the seed `seed` + row number, so that an answer does not depend on the others (SGLang heeds seeds with
    `--enable-deterministic-inference`); in this process one seed serves a batch, so answers depend on the batches.

    Raises:
        ValueError: If the settings differ from those that began `options.output`, or no prompt has an answer.
        AnswerServerError: If the server cannot be reached or refuses the requests; finished rows are kept.
    """
    output = Path(options.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    finished = finished_ids(output)
    settings = {name: value for name, value in asdict(options).items() if name not in _MAY_CHANGE}
    if options.server is not None:
        del settings["server_model"]  # checked when the server has told it
    check_settings(output, settings, is_begun=bool(finished))
    tally = Tally()
    prompts = [prompt for prompt in _read_prompts(options, tally) if prompt.id not in finished]
    if prompts:
        if options.server is None:
            answered = _answer_here(prompts, options, tally)
        else:
            answered = _answer_there(options.server, prompts, options, tally, settings, bool(finished))
        append_rows(output, answered, tally, num_prompts=len(prompts), num_finished=len(finished))
    report = tally.report(options.prompts, options.max_prompt_length)
    if not finished and not tally.num_written:
        raise ValueError(f"No answer was written to {output}. {report or f'{options.prompts} has no rows.'}")
    if report:
        print(report)
    return len(finished) + tally.num_written


def _read_prompts(options: RegenerateOptions, tally: Tally) -> Iterator[Prompt]:
    for index, row in enumerate(itertools.islice(read_json_lines(options.prompts), options.max_prompts)):
        if index % options.num_shards == options.shard:
            try:
                yield read_prompt(row, index)
            except ValueError as error:
                tally.bad.append(f"row {index}: {error}")


def _open_conversations(
    prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase, options: RegenerateOptions, tally: Tally
) -> Iterator[Conversation]:
    renderer = ChatRenderer(tokenizer, options.enable_thinking)
    for prompt in prompts:
        try:
            conversation = Conversation(prompt, renderer, options.max_prompt_length, options.multi_turn)
        except ValueError as error:
            tally.bad.append(f"row {prompt.index}: {error}")
            continue
        if len(conversation.input_ids) > options.max_prompt_length:
            tally.num_too_long += 1
        else:
            yield conversation


def _answer_here(prompts: list[Prompt], options: RegenerateOptions, tally: Tally) -> Iterator[Conversation]:
    dtype = getattr(torch, options.dtype)
    target, tokenizer = load_target(options.target, dtype=dtype, revision=options.target_revision)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # masked in the prompt and cut off behind the answer
    if target.device.type == "cpu" and target.config._attn_implementation == "sdpa":
        target.set_attn_implementation(register_grouped_attention())
    conversations = _open_conversations(prompts, tokenizer, options, tally)
    return answer_in_batches(target, tokenizer, conversations, options.decoding(), options.batch_size)


def _answer_there(
    server_url: str,
    prompts: list[Prompt],
    options: RegenerateOptions,
    tally: Tally,
    settings: dict[str, Any],
    is_begun: bool,
) -> Iterator[Conversation]:
    path = embedded_target_folder() if options.target == EMBEDDED_TARGET else options.target
    tokenizer = AutoTokenizer.from_pretrained(path, revision=options.target_revision)
    try:
        generation_config = GenerationConfig.from_pretrained(path, revision=options.target_revision)
    except OSError:  # the target has none
        config = AutoConfig.from_pretrained(path, revision=options.target_revision)
        generation_config = GenerationConfig.from_model_config(config)
    end_ids = end_token_ids(generation_config.eos_token_id, tokenizer.eos_token_id)
    conversations = _open_conversations(prompts, tokenizer, options, tally)
    first = next(conversations, None)
    if first is None:
        return
    with AnswerServer(
        server_url,
        model=options.server_model,
        api=options.server_api,
        sampling=options.decoding().for_server(generation_config),
        max_new_tokens=options.max_new_tokens,
        timeout=options.request_timeout,
    ) as server:
        longest = options.max_prompt_length + options.max_new_tokens
        server.prepare(first.input_ids, target=options.target, longest=longest, needs_token_ids=not options.retokenize)
        check_settings(Path(options.output), settings | {"server_model": server.model}, is_begun=is_begun)
        conversations = itertools.chain([first], conversations)
        yield from answer_on_server(
            server, tokenizer, conversations, end_ids, seed=options.seed, concurrency=options.concurrency
        )


def main() -> None:
    (options,) = parse_options(RegenerateOptions, description="Let the target answer prompts, as training data.")
    print(f"{regenerate(options)} answers in {options.output}")


if __name__ == "__main__":
    main()
