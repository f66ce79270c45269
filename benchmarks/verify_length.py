"""The measured number of verified proposals against every fixed number, and a useless drafter against plain decoding.

    OMP_NUM_THREADS=1 python benchmarks/verify_length.py --prompts_per_kind 2

Each prompt is answered by every method in turn; speed is decoded tokens a second without the prompt's forward. The
useless drafter is the shipped one with its final norm's weights shuffled and negated: it costs the same and proposes
noise.
"""

import statistics
from collections import defaultdict
from dataclasses import dataclass, field

import torch
from tqdm import tqdm

from dflash_hf.eval.decode import RoundRecorder, encode_prompt
from dflash_hf.eval.prompts import held_out_prompts
from dflash_hf.hub_configs import shipped_drafter_folder
from dflash_hf.hub_configs.embedded_target import EMBEDDED_TARGET, load_target
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.trainer.command_line import parse_options


@dataclass
class VerifyLengthOptions:
    """Options of the benchmark."""

    target: str = field(default=EMBEDDED_TARGET, metadata={"help": "Hub id, folder, or the embedded target."})
    drafter: str | None = field(default=None, metadata={"help": "Folder or Hub id; default: the shipped drafter."})
    dtype: str = field(default="bfloat16", metadata={"help": "Dtype of target and drafter."})
    prompts_per_kind: int = field(default=4, metadata={"help": "Held-out prompts of each kind."})
    max_new_tokens: int = field(default=128, metadata={"help": "New tokens of each call."})
    fixed: list[int] = field(default_factory=lambda: [1, 2, 3, 5, 7], metadata={"help": "Fixed numbers to compare."})


@torch.inference_mode()
def main() -> None:
    (options,) = parse_options(VerifyLengthOptions, description=__doc__)
    torch.set_num_threads(1)
    dtype = getattr(torch, options.dtype)
    target, tokenizer = load_target(options.target, dtype=dtype)
    folder = options.drafter or shipped_drafter_folder()
    drafter, useless = (DFlashDraftModel.from_pretrained(folder, dtype=dtype).eval() for _ in range(2))
    shuffle = torch.randperm(useless.norm.weight.numel(), generator=torch.Generator().manual_seed(0))
    useless.norm.weight.copy_(-useless.norm.weight[shuffle])
    methods = {"plain": {}, "measured": {"assistant_model": drafter}, "useless": {"assistant_model": useless}}
    methods |= {f"fixed {k}": {"assistant_model": drafter, "num_assistant_tokens": k} for k in options.fixed}

    def tokens_per_second(inputs: dict[str, torch.Tensor], **kwargs) -> float:
        recorder = RoundRecorder()
        target.generate(**inputs, max_new_tokens=options.max_new_tokens, do_sample=False, streamer=recorder, **kwargs)
        return (sum(recorder.sizes[1:]) - 1) / (recorder.times[-1] - recorder.times[1])

    warm_up = encode_prompt(tokenizer, "Hello.", target.device)
    for kwargs in methods.values():
        tokens_per_second(warm_up, **kwargs)
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    prompts = held_out_prompts(options.prompts_per_kind)
    for row in tqdm(prompts, unit="prompt"):
        inputs = encode_prompt(tokenizer, row["prompt"], target.device)
        speeds = {method: tokens_per_second(inputs, **kwargs) for method, kwargs in methods.items()}
        for method, speed in speeds.items():
            for kind in (row["kind"], "all"):
                ratios[kind, method].append(speed / speeds["plain"])
    kinds = [*dict.fromkeys(row["kind"] for row in prompts), "all"]
    print("median speed against plain generate")
    print(f"{'':<12}" + "".join(f"{method:>10}" for method in methods) + f"{'measured / best fixed':>24}")
    for kind in kinds:
        medians = {method: statistics.median(ratios[kind, method]) for method in methods}
        best = max(medians[f"fixed {k}"] for k in options.fixed)
        cells = "".join(f"{medians[method]:>10.2f}" for method in methods)
        print(f"{kind:<12}{cells}{medians['measured'] / best:>24.2f}")


if __name__ == "__main__":
    main()
