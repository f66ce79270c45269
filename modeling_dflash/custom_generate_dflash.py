"""`target.generate(custom_generate="<this folder or repository>", trust_remote_code=True)`: decoding with its drafter.

A drafter's folder carries a copy of this file as `custom_generate/generate.py`.
"""

import sys
from types import FrameType
from typing import Any

from transformers import AutoModel

_drafters: dict[tuple[str, Any, Any], Any] = {}


def generate(model, assistant_model=None, **kwargs):
    """What `model.generate(assistant_model=drafter, **kwargs)` returns, with the drafter of this folder.

    Args:
        model ([`PreTrainedModel`]): The target.
        assistant_model ([`DFlashDraftModel`], *optional*): A drafter that is loaded already; default: the folder's,
            loaded in the target's dtype and kept for the next call.
    Raises:
        ValueError: If the folder is not known, because the call did not come from `generate(custom_generate="...")`.
    """
    if assistant_model is None:
        assistant_model = _load_drafter(_folder_of_call(), model)
    return model.generate(assistant_model=assistant_model, **kwargs)


def _folder_of_call() -> str:
    # Transformers tells a custom generate function everything but the name of the folder that it came from.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        folder = frame.f_locals.get("custom_generate")
        if frame.f_code.co_name == "generate" and isinstance(folder, str):
            return folder
        frame = frame.f_back
    raise ValueError(
        "Which drafter? Pass `assistant_model=`, or call `target.generate(custom_generate=<its folder>)`."
    )


def _load_drafter(folder: str, model) -> Any:
    key = (folder, model.dtype, model.device)
    if key not in _drafters:
        drafter = AutoModel.from_pretrained(folder, trust_remote_code=True, dtype=model.dtype)
        _drafters[key] = drafter.to(model.device).eval()
    return _drafters[key]
