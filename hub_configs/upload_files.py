"""Which files of a drafter's folder go to the Hub, and whether its code files work there on their own."""

import ast
import json
import sys
from fnmatch import fnmatch
from pathlib import Path

# What training, downloads and editors leave behind. Trainer's own files hold pickles and paths of the machine.
_LEFTOVERS = (
    ".*",
    "__pycache__",
    "*.tmp",
    "average",
    "average.safetensors",
    "checkpoint-*",
    "optimizer.*",
    "rng_state*",
    "run.json",
    "runs",
    "scaler.*",
    "scheduler.*",
    "trainer_state.json",
    "training_args.bin",
)
_PICKLES = (".bin", ".ckpt", ".joblib", ".npy", ".npz", ".pickle", ".pkl", ".pt", ".pth")
_IMPORTED = sys.stdlib_module_names | {"torch", "transformers"}


def files_to_upload(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """Files by their path in the repository, and paths that stay behind.

    Raises:
        ValueError: If the folder is not that of one drafter, or holds pickles.
    """
    files: dict[str, Path] = {}
    left_out = []
    waiting = [folder]
    while waiting:
        for path in waiting.pop().iterdir():
            name = path.relative_to(folder).as_posix()
            if any(fnmatch(path.name, pattern) for pattern in _LEFTOVERS):
                left_out.append(f"{name}/" if path.is_dir() else name)
            elif path.is_dir():
                waiting.append(path)
            else:
                files[name] = path
    missing = [name for name in ("config.json", "README.md", "custom_generate/generate.py") if name not in files]
    if missing or not any(name.endswith(".safetensors") for name in files):
        raise ValueError(
            f"{folder} lacks {missing or 'weights in safetensors'}. Write a whole folder with `build_hub_folder`, or "
            "push the `drafter` folder that `dflash-train` leaves."
        )
    nested = sorted(name for name in files if "/" in name and name.endswith((".safetensors", "config.json")))
    if nested:
        raise ValueError(f"{folder} holds a second model: {nested}. Push one drafter's folder at a time.")
    pickles = sorted(name for name, path in files.items() if _is_pickle(path))
    if pickles:
        raise ValueError(f"{folder} holds pickles, which run code when loaded: {pickles}. Remove or convert them.")
    return dict(sorted(files.items())), sorted(left_out)


def _is_pickle(path: Path) -> bool:
    if path.suffix == ".safetensors":
        return False
    with path.open("rb") as file:
        head = file.read(4)
    # Protocol 2 and later, and the zip archives of `torch.save`.
    return path.suffix.lower() in _PICKLES or (head[:1] == b"\x80" and head[1:2] in b"\2\3\4\5") or head == b"PK\3\4"


def check_code_files(folder: Path) -> None:
    """Reads the code files, without running them, as `AutoModel.from_pretrained(trust_remote_code=True)` finds them.

    Raises:
        ValueError: If `auto_map` names code of another repository, or a file, a class or a module that is not there.
    """
    auto_map = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("auto_map") or {}
    missing = sorted({"AutoConfig", "AutoModel"} - set(auto_map))
    if missing:
        raise ValueError(
            f"`auto_map` in {folder / 'config.json'} lacks {missing}: save the drafter with this package."
        )
    modules = {}
    for name, reference in auto_map.items():
        repository, is_foreign, _ = reference.partition("--")
        if is_foreign:
            raise ValueError(
                f"`auto_map.{name}` is {reference!r}: the code would come from {repository!r}, whatever is there by "
                "then. Load the drafter with this package and save it again: its code then lies beside the weights."
            )
        module, _, class_name = reference.rpartition(".")
        modules[module] = class_name
    checked: set[str] = set()
    for module, class_name in modules.items():
        tree = _check_module(folder, module, checked)
        if class_name not in [node.name for node in tree.body if isinstance(node, ast.ClassDef)]:
            raise ValueError(f"`auto_map` names the class {class_name!r}, which is not in {folder / f'{module}.py'}.")
    _check_module(folder, "custom_generate/generate", checked)


def _check_module(folder: Path, module: str, checked: set[str]) -> ast.Module:
    """The parsed module, after a check of its imports and those of the files that it needs."""
    path = folder / f"{module}.py"
    if not path.is_file():
        raise ValueError(f"{folder} lacks the code file {path.name!r}, which others in it import or `auto_map` names.")
    checked.add(module)
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    guarded = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.Try) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            if node.level > 1 or not node.module or "." in node.module or "/" in module:
                raise ValueError(f"{path}, line {node.lineno}: only `from .sibling import Name` works on the Hub.")
            if node.module not in checked:
                _check_module(folder, node.module, checked)
        elif isinstance(node, (ast.Import, ast.ImportFrom)) and id(node) not in guarded:
            names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            foreign = sorted({name.split(".")[0] for name in names if name} - _IMPORTED)
            if foreign:
                raise ValueError(
                    f"{path}, line {node.lineno} imports {foreign}, which a user may lack. Code files import torch "
                    "and transformers only, others inside try/except."
                )
    return tree
