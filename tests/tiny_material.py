"""What several tests need: a tiny target on disk with a tokenizer, and a process that cannot import the package."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from conftest import make_tiny_target
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from dflash_hf import DFlashConfig, create_drafter, create_drafter_config
from dflash_hf.trainer import DFlashTrainer, DFlashTrainingArguments

WORDS = [f"w{number}" for number in range(90)]
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %} {{ message['role'] }} {{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %} assistant{% endif %}"
)
_BLOCK_PACKAGE = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "dflash_hf":
            raise ModuleNotFoundError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
try:
    import dflash_hf
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("the package is not blocked")
"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word: 96 of the tiny target's 100 rows, none of them the mask token 97."""
    special = ["<bos>", "<pad>", "<eos>", "<unk>", "user", "assistant"]
    vocabulary = {word: index for index, word in enumerate(special + WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=_CHAT_TEMPLATE,
    )


def save_tiny_target(folder: str | Path, *, eos_token_id: int | None = None, **overrides) -> LlamaForCausalLM:
    """Writes a tiny target and its tokenizer to `folder` and returns the target."""
    target = make_tiny_target(eos_token_id=eos_token_id, **overrides)
    target.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return target


def make_text_rows(target, num_rows: int, *, prompt_length: int = 6, answer_length: int = 30) -> list[dict]:
    """Rows as `dflash-regenerate` writes them: random prompts with the target's own greedy answers."""
    prompts = torch.randint(4, 96, (num_rows, prompt_length), generator=torch.Generator().manual_seed(2))
    sequences = target.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=answer_length, do_sample=False
    )
    return [{"input_ids": sequence.tolist(), "prompt_length": prompt_length} for sequence in sequences]


def run_python(*arguments: str, timeout: int = 300) -> str:
    """Output of a Python process that inherits this one's paths; its errors are shown if it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as run:
        try:
            output, errors = run.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            run.terminate()  # unlike kill(), this lets a launcher end its workers
            raise
    assert run.returncode == 0, output + errors
    return output


def run_without_package(code: str, tmp_path: Path) -> str:
    """Output of `code` in a process that cannot import `dflash_hf`; remote code is cached below `tmp_path`."""
    head = f"import os\nos.environ['HF_MODULES_CACHE'] = {str(tmp_path / 'modules')!r}\n"
    return run_python("-c", head + _BLOCK_PACKAGE + code)


def make_trainer(
    folder: str | Path,
    rows: Sequence[dict],
    *,
    target=None,
    eval_rows=None,
    init: str = "target",
    config=None,
    **options,
) -> DFlashTrainer:
    """A trainer of a seeded drafter for the tiny target, on the CPU and without reports."""
    target = make_tiny_target() if target is None else target
    if config is None:
        config = make_drafter_config(target)
    torch.manual_seed(3)
    drafter = create_drafter(target, config, init=init)
    defaults = {
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "num_anchors": 4,
    }
    args = DFlashTrainingArguments(output_dir=str(folder), **(defaults | options))
    return DFlashTrainer(drafter, target, args, train_dataset=rows, eval_dataset=eval_rows)


def make_drafter_config(target, **overrides) -> DFlashConfig:
    """One draft layer, two tapped layers, block 8."""
    fields = {"num_hidden_layers": 1, "num_target_features": 2, "block_size": 8, "mask_token_id": 97}
    return create_drafter_config(target.config, **(fields | overrides))


def make_random_rows(lengths: Sequence[int], *, prompt_length: int = 5, vocab_size: int = 96) -> list[dict]:
    """Rows of random tokens, the same ones in every process."""
    generator = torch.Generator().manual_seed(4)
    return [
        {
            "input_ids": torch.randint(vocab_size, (length,), generator=generator).tolist(),
            "loss_mask": [0] * prompt_length + [1] * (length - prompt_length),
        }
        for length in lengths
    ]


def record_batches(trainer: DFlashTrainer) -> list[dict]:
    """A list that grows with every batch that `trainer` computes a loss of: step, rows and their anchors."""
    batches: list[dict] = []
    compute_loss = trainer.compute_loss

    def recording(model, inputs, *args, **kwargs):
        anchors = [row[valid].tolist() for row, valid in zip(inputs["anchors"], inputs["is_valid"], strict=True)]
        if model.training:
            batches.append(
                {"step": trainer.state.global_step, "rows": inputs["rows"].flatten().tolist(), "anchors": anchors}
            )
        return compute_loss(model, inputs, *args, **kwargs)

    trainer.compute_loss = recording
    return batches


def losses(trainer: DFlashTrainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
