"""Total tokens a second of a batch: with the drafter against plain batched `generate`, alternating.

    OMP_NUM_THREADS=1 python benchmarks/batch_speed.py --batch_size 8

Every batch holds held-out prompts of all kinds, padded on the left. The times include the prompt's forward; the tokens
of a row are counted up to its end. `--right_proposals 3` shows what a better drafter would give: the first three
proposals of every row are accepted whatever the target says.
"""

import statistics
import time
from dataclasses import dataclass, field

import torch
from tqdm import tqdm

from dflash_hf import decoding_dflash
from dflash_hf.eval.prompts import held_out_prompts
from dflash_hf.hub_configs import shipped_drafter_folder
from dflash_hf.hub_configs.embedded_target import EMBEDDED_TARGET, load_target
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.trainer.command_line import parse_options


@dataclass
class BatchSpeedOptions:
    """Options of the benchmark."""

    target: str = field(default=EMBEDDED_TARGET, metadata={"help": "Hub id, folder, or the embedded target."})
    drafter: str | None = field(default=None, metadata={"help": "Folder or Hub id; default: the shipped drafter."})
    dtype: str = field(default="bfloat16", metadata={"help": "Dtype of target and drafter."})
    batch_size: int = field(default=8, metadata={"help": "Rows of a batch."})
    num_batches: int = field(default=4, metadata={"help": "Batches."})
    max_new_tokens: int = field(default=128, metadata={"help": "New tokens of each row at most."})
    right_proposals: int | None = field(default=None, metadata={"help": "Accept so many proposals a round by force."})


class ForcedAcceptance(decoding_dflash.Acceptance):
    """Takes the first proposals for the target's choices, so the text means nothing and its cost does."""

    num_right = 0

    def _choose_at_once(self, rows, tree, logits, draft_scores):
        scores, choices = super()._choose_at_once(rows, tree, logits, draft_scores)
        proposals = tree.tokens[:, 1:].tolist()
        for i in range(len(choices)):
            forced = proposals[i][: self.num_right]
            choices[i][: len(forced)] = forced
        return scores, choices


@torch.inference_mode()
def main() -> None:
    (options,) = parse_options(BatchSpeedOptions, description=__doc__)
    torch.set_num_threads(1)
    dtype = getattr(torch, options.dtype)
    target, tokenizer = load_target(options.target, dtype=dtype)
    drafter = DFlashDraftModel.from_pretrained(options.drafter or shipped_drafter_folder(), dtype=dtype).eval()
    tokenizer.padding_side = "left"
    num_prompts = options.batch_size * options.num_batches
    rows = held_out_prompts(-(-num_prompts // 4))[:num_prompts]
    batches = [rows[i : i + options.batch_size] for i in range(0, num_prompts, options.batch_size)]
    if options.right_proposals is not None:
        ForcedAcceptance.num_right = options.right_proposals
        decoding_dflash.Acceptance = ForcedAcceptance
    methods = {"plain": {}, "dflash": {"assistant_model": drafter}}
    speeds: dict[str, list[float]] = {method: [] for method in methods}
    for batch in tqdm(batches, unit="batch"):
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": row["prompt"]}], tokenize=False, add_generation_prompt=True
            )
            for row in batch
        ]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        for method, kwargs in methods.items():
            start = time.perf_counter()
            output = target.generate(**inputs, **kwargs, max_new_tokens=options.max_new_tokens, do_sample=False)
            seconds = time.perf_counter() - start
            new = output[:, inputs["input_ids"].shape[1] :]
            is_end = torch.isin(new, torch.tensor(target.generation_config.eos_token_id).flatten())
            num_tokens = int((is_end.cumsum(dim=1) - is_end.long() == 0).sum())
            speeds[method].append(num_tokens / seconds)
    for method, found in speeds.items():
        print(f"{method:<8} {statistics.median(found):>8.1f} tokens/s (median of {len(found)} batches)")
    ratios = [a / b for a, b in zip(speeds["dflash"], speeds["plain"], strict=True)]
    print(f"ratio    {statistics.median(ratios):.2f} (median), {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    main()
