"""Where the metric modules for Hugging Face's `evaluate` lie in the installed package."""

from pathlib import Path

_FOLDER = Path(__file__).parent / "metric_modules"


def metric_module(name: str) -> str:
    """The folder of a metric module, for `evaluate.load(metric_module("accepted_length"))`; no network is needed.

    Args:
        name (`str`): `accepted_length`, `decode_speedup` or `identical_output`.
    Raises:
        ValueError: If there is no such module.
    """
    names = sorted(path.parent.name for path in _FOLDER.glob("*/*.py") if path.stem == path.parent.name)
    if name not in names:
        raise ValueError(f"There is no metric module {name!r}; choose from {', '.join(names)}.")
    return str(_FOLDER / name)
