"""Options of a drafted call that Transformers does not know: their meaning, and their way through `generate`."""

from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

AUTO = "auto"
NAMES = ("num_tree_nodes", "draft_window")
# On the call's own copy of its generation config: which options were given as keywords.
_MARK = "_dflash_keywords"


@dataclass(frozen=True)
class CallOptions:
    """Checked options of one call.

    Args:
        num_tree_nodes (`int` or `"auto"`, *optional*): Nodes beside the anchor that each round verifies as a tree;
            `"auto"`: as many as pay in that round; None or 0: a chain.
        draft_window (`int`, *optional*): The newest tokens before a block that the drafter sees, see [`BlockDrafter`],
            which checks it; None: as many as it was trained with.
    Raises:
        ValueError: If `num_tree_nodes` is not one of these.
    """

    num_tree_nodes: int | str | None = None
    draft_window: int | None = None

    def __post_init__(self):
        nodes = self.num_tree_nodes
        if nodes not in (None, AUTO) and (type(nodes) is not int or nodes < 0):
            raise ValueError(
                f"`num_tree_nodes` is {nodes!r}; it must be a whole number of proposals (1 or more), {AUTO!r}, or "
                "None for a chain."
            )

    @classmethod
    def of_call(cls, generation_config: GenerationConfig, **arguments: Any) -> "CallOptions":
        """Those of `arguments` that are not None, and the others from the call's generation config."""
        given = {name: value for name, value in arguments.items() if value is not None}
        return cls(**{name: given.get(name, getattr(generation_config, name, None)) for name in NAMES})


def take_keywords(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Takes our options out of the keywords of a `generate` call."""
    return {name: kwargs.pop(name) for name in NAMES if name in kwargs}


def put_on_config(generation_config: GenerationConfig, keywords: dict[str, Any]) -> None:
    """Sets options that were given as keywords on the call's own copy of its generation config."""
    for name, value in keywords.items():
        setattr(generation_config, name, value)
    if asked := [name for name, value in keywords.items() if value]:
        setattr(generation_config, _MARK, asked)


def keywords_of(generation_config: GenerationConfig) -> list[str]:
    """Which options were given as keywords and ask for something; says so once."""
    return vars(generation_config).pop(_MARK, [])
