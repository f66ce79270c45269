"""`dflash-generate`: one prompt, a chat or the demo, streamed, with accepted length and speed."""

import statistics
from dataclasses import dataclass, field
from typing import Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer, set_seed
from transformers.utils import logging

from dflash_hf.eval.decode import Answer, encode_prompt
from dflash_hf.eval.figures import speed_figures
from dflash_hf.eval.methods import decoder
from dflash_hf.eval.metrics import tau_pooled
from dflash_hf.eval.prompts import demo_prompts
from dflash_hf.hub_configs import shipped_drafter_folder
from dflash_hf.hub_configs.embedded_target import EMBEDDED_TARGET, load_target
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.trainer.command_line import parse_options


@dataclass
class GenerateOptions:
    """Options of `dflash-generate`; words without a flag are the prompt, none at all start a chat."""

    target: str = field(default=EMBEDDED_TARGET, metadata={"help": "Hub id, folder, or the embedded target."})
    drafter: str | None = field(default=None, metadata={"help": "Folder or Hub id; default: the shipped drafter."})
    target_revision: str | None = field(default=None, metadata={"help": "Hub revision of the target."})
    drafter_revision: str | None = field(default=None, metadata={"help": "Hub revision of the drafter."})
    demo: bool = field(default=False, metadata={"help": "Answer eight prompts, compared with plain generate."})
    method: Literal["dflash", "tree", "whole_block", "fast"] = field(
        default="dflash", metadata={"help": "How our loop proposes, as in `dflash-eval`."}
    )
    draft_window: int | None = field(
        default=None, metadata={"help": "The newest tokens that the drafter reads; default: all it was made for."}
    )
    max_new_tokens: int = field(default=128, metadata={"help": "Longest answer."})
    temperature: float = field(default=0.0, metadata={"help": "0 decodes greedily."})
    dtype: str = field(
        default="auto", metadata={"help": "Dtype; auto: bfloat16 on a GPU or a CPU with bf16 units, else float32."}
    )
    num_threads: int | None = field(default=None, metadata={"help": "CPU threads of torch."})
    seed: int = field(default=0, metadata={"help": "Seed when the temperature is above 0."})


def fast_dtype() -> torch.dtype:
    """bfloat16 where the hardware multiplies it natively, else float32."""
    if torch.cuda.is_available():
        return torch.bfloat16
    capabilities = torch.backends.cpu.get_cpu_capability() if hasattr(torch.backends.cpu, "get_cpu_capability") else ""
    has_units = any(
        getattr(torch.cpu, name, lambda: False)() for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    )
    return torch.bfloat16 if has_units or "SVE" in capabilities else torch.float32


def run_prompt(
    target: PreTrainedModel,
    drafter: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    options: GenerateOptions,
) -> Answer:
    """Streams the answer to one prompt and prints its accepted length and speed."""
    inputs = encode_prompt(tokenizer, prompt, target.device)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    decode = decoder(options.method, target, drafter, draft_window=options.draft_window)
    answer = decode(inputs, options.max_new_tokens, options.temperature, streamer=streamer)
    print(
        f"[{len(answer.token_ids)} tokens, tau {answer.tau:.2f}, {answer.tokens_per_second:.1f} tokens/s, "
        f"first token after {answer.prefill_seconds * 1000:.0f} ms]"
    )
    return answer


def run_demo(
    target: PreTrainedModel,
    drafter: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    options: GenerateOptions,
) -> bool:
    """Answers the demo prompts with and without the drafter; True if all ids are equal in float32.

    Speed is measured in the target's dtype, identity in float32, where it is exact.
    """
    decode_plain = decoder("plain", target)
    decode_drafted = decoder(options.method, target, drafter, draft_window=options.draft_window)
    warm_up = encode_prompt(tokenizer, "Hello.", target.device)
    for decode in (decode_plain, decode_drafted):
        decode(warm_up, 8, 0.0)
    plain, drafted, inputs = [], [], []
    for row in demo_prompts():
        print(f"\n--- {row['kind']}: {row['prompt']}\n")
        inputs.append(encode_prompt(tokenizer, row["prompt"], target.device))
        drafted.append(run_prompt(target, drafter, tokenizer, row["prompt"], options))
        plain.append(decode_plain(inputs[-1], options.max_new_tokens, 0.0))
    speed_dtype = target.dtype
    target.float()
    drafter.float()
    equal = [
        decode_plain(encoded, options.max_new_tokens, 0.0).token_ids
        == decode_drafted(encoded, options.max_new_tokens, 0.0).token_ids
        for encoded in inputs
    ]
    print(
        f"\n{'kind':<12} {'tokens':>6} {'tau':>5} {'plain tok/s':>12} {'DFlash tok/s':>13}  equal to greedy (float32)"
    )
    for row, slow, fast, is_equal in zip(demo_prompts(), plain, drafted, equal, strict=True):
        print(
            f"{row['kind']:<12} {len(fast.token_ids):>6} {fast.tau:>5.2f} {slow.tokens_per_second:>12.1f} "
            f"{fast.tokens_per_second:>13.1f}  {'yes' if is_equal else 'NO'}"
        )
    means = [statistics.fmean(answer.tokens_per_second for answer in answers) for answers in (plain, drafted)]
    tau = tau_pooled([answer.accepted_lengths for answer in drafted])
    median = speed_figures(drafted, plain, range(len(plain)))["speedup_median"]
    print(
        f"\n{sum(equal)} of {len(equal)} answers identical in float32; in {str(speed_dtype).removeprefix('torch.')}: "
        f"tau {tau:.2f}, {means[0]:.1f} -> {means[1]:.1f} tokens/s, median speed-up {median:.2f}x"
    )
    return all(equal)


def main() -> None:
    options, prompt_words = parse_options(
        GenerateOptions, description="Generate with a DFlash drafter.", with_words="prompt"
    )
    logging.set_verbosity_error()
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    set_seed(options.seed)
    dtype = fast_dtype() if options.dtype == "auto" else getattr(torch, options.dtype)
    device_map = "auto" if torch.cuda.is_available() else None
    target, tokenizer = load_target(
        options.target, dtype=dtype, device_map=device_map, revision=options.target_revision
    )
    drafter = DFlashDraftModel.from_pretrained(
        options.drafter or shipped_drafter_folder(), dtype=dtype, revision=options.drafter_revision
    )
    drafter = drafter.eval().to(target.device)
    if options.demo:
        raise SystemExit(0 if run_demo(target, drafter, tokenizer, options) else 1)
    if prompt_words:
        run_prompt(target, drafter, tokenizer, " ".join(prompt_words), options)
        return
    print("Type a prompt; an empty line ends.")
    while prompt := input("> ").strip():
        run_prompt(target, drafter, tokenizer, prompt, options)


if __name__ == "__main__":
    main()
