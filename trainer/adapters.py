"""LoRA by PEFT: on the drafter that is trained, and on the target that it drafts for."""

from typing import Any

from transformers import PreTrainedModel

from dflash_hf.modeling_dflash import DFlashDraftModel

LORA_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc"]


def add_lora(drafter: DFlashDraftModel, *, rank: int, alpha: int, modules: list[str] | None = None) -> Any:
    """A `PeftModel` around the drafter; only the adapter's weights are trained.

    Args:
        rank (`int`): Rank of the adapter's matrices.
        alpha (`int`): The update is scaled by alpha / rank.
        modules (`list[str]`, *optional*): Names of the linear layers that get one; default: all of them.
    Raises:
        ImportError: If PEFT is not installed.
        ValueError: If a name fits no layer.
    """
    from peft import LoraConfig, get_peft_model

    modules = LORA_MODULES if modules is None else modules
    names = {name.rsplit(".", 1)[-1] for name, _ in drafter.named_modules()}
    unknown = sorted(set(modules) - names)
    if unknown:
        raise ValueError(f"The drafter has no layers named {unknown}; choose from {LORA_MODULES}.")
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=modules, lora_dropout=0.0)
    return get_peft_model(drafter, config)


def merged_drafter(model: Any) -> DFlashDraftModel:
    """The drafter with a trained adapter added to its weights; a drafter without one is returned as it is."""
    return model.merge_and_unload() if hasattr(model, "merge_and_unload") else model


def load_target_adapter(target: PreTrainedModel, adapter: str, *, revision: str | None = None) -> PreTrainedModel:
    """`target` with a LoRA adapter from a folder or the Hub in force; its layers keep their places.

    Raises:
        ImportError: If PEFT is not installed.
    """
    target.load_adapter(adapter, adapter_kwargs=None if revision is None else {"revision": revision})
    return target
