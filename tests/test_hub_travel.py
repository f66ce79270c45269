"""A saved drafter works where this package is not installed, and leaves all other decoding as it was."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from conftest import MASK_TOKEN_ID, make_tiny_target
from safetensors.torch import load_file

import dflash_hf
from dflash_hf import DFlashDraftModel, create_drafter, create_drafter_config

PACKAGE = Path(dflash_hf.__file__).parent

# Runs in a process of its own: argv = folder with `target`, `assistant` and `drafter`, and "remote" or "package".
PROBE = '''
import json, sys
from importlib.abc import MetaPathFinder

root, code = sys.argv[1:]


class Blocker(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "dflash_hf":
            raise ImportError(f"{name} is blocked")


blocker = Blocker()
sys.meta_path.insert(0, blocker)

import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.generation.utils import GenerationMixin

torch.set_num_threads(1)
prompt = torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7]])


def load(name):
    return AutoModelForCausalLM.from_pretrained(f"{root}/{name}")


def decode(**kwargs):
    torch.manual_seed(3)
    output = load("target").generate(
        prompt, max_new_tokens=20, return_dict_in_generate=True, output_scores=True, **kwargs
    )
    return output.sequences.tolist(), torch.stack(output.scores).tolist()


def stock_decodes():
    sample = {"do_sample": True, "temperature": 0.8, "top_k": 20}
    found = {}
    for name, how in (("greedy", {"do_sample": False}), ("sample", sample)):
        found[f"{name}"] = decode(**how)
        found[f"{name}, prompt lookup"] = decode(prompt_lookup_num_tokens=3, **how)
        found[f"{name}, assistant"] = decode(assistant_model=load("assistant"), **how)
    found["beams"] = decode(num_beams=2, do_sample=False)
    return found


def drafted(drafter):
    with torch.no_grad():
        torch.manual_seed(4)
        inputs = torch.randn(1, 8, 32), torch.randn(1, 9, 96)
        hidden_states = drafter(*inputs).last_hidden_state.tolist()
    return {
        "hidden_states": hidden_states,
        # A fixed length: one that follows the clock gives the same text, but other last bits of the scores.
        "greedy": decode(assistant_model=drafter, do_sample=False, num_assistant_tokens=7),
        "sample": decode(assistant_model=drafter, do_sample=True, temperature=0.8, num_assistant_tokens=7),
        "greedy, callable": decode(custom_generate=drafter.decode, do_sample=False, num_assistant_tokens=7),
        "greedy, folder": decode(
            custom_generate=f"{root}/drafter", trust_remote_code=True, do_sample=False, num_assistant_tokens=7
        ),
        "greedy, trees": decode(assistant_model=drafter, do_sample=False, num_tree_nodes=12),
        "greedy, trees, folder": decode(
            custom_generate=f"{root}/drafter", trust_remote_code=True, do_sample=False, num_tree_nodes=12
        ),
    }


def dispatch():
    """How often each of the library's methods is wrapped, and by which object."""
    found = []
    for name in (
        "_prepare_generation_config",
        "_validate_generation_mode",
        "_assisted_decoding",
        "_get_candidate_generator",
    ):
        method = getattr(GenerationMixin, name)
        found.append([0, id(method)])
        while hasattr(method, "__wrapped__"):
            method, found[-1][0] = method.__wrapped__, found[-1][0] + 1
    return found


report = {"version": transformers.__version__, "without": stock_decodes(), "wrapped before": dispatch()}
if code == "package":
    sys.meta_path.remove(blocker)
    from dflash_hf import DFlashDraftModel
    drafter = DFlashDraftModel.from_pretrained(f"{root}/drafter")
else:
    drafter = AutoModel.from_pretrained(f"{root}/drafter", trust_remote_code=True)
    report["config class"] = type(AutoConfig.from_pretrained(f"{root}/drafter", trust_remote_code=True)).__name__
report["class"] = [type(drafter).__module__, type(drafter).__name__]
report["package modules"] = [name for name in sys.modules if name.split(".")[0] == "dflash_hf"]
report["with"] = stock_decodes()
report["drafted"] = drafted(drafter)
report["state"] = {name: tensor.tolist() for name, tensor in drafter.state_dict().items()}
report["buffers"] = {name: tensor.tolist() for name, tensor in drafter.named_buffers()}
report["first wrap"] = dispatch()
if code == "package":
    other = AutoModel.from_pretrained(f"{root}/drafter", trust_remote_code=True)
else:
    sys.meta_path.remove(blocker)
    from dflash_hf import DFlashDraftModel
    other = DFlashDraftModel.from_pretrained(f"{root}/drafter")
report["other class"] = [type(other).__module__, type(other).__name__]
report["second wrap"] = dispatch()
report["other drafted"] = drafted(other)
with open(f"{root}/{code}.json", "w") as file:
    json.dump(report, file)
'''


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A folder with a target, a plain assistant model and a drafter, as their users would save them."""
    root = tmp_path_factory.mktemp("travel")
    target = make_tiny_target()
    target.save_pretrained(root / "target")
    make_tiny_target(num_hidden_layers=2).save_pretrained(root / "assistant")
    config = create_drafter_config(
        target.config, num_hidden_layers=2, num_target_features=3, block_size=8, mask_token_id=MASK_TOKEN_ID
    )
    create_drafter(target, config).save_pretrained(root / "drafter")
    return root


def run_probe(root: Path, code: str, first_on_path: str | None = None) -> dict:
    environment = os.environ | {
        "HF_MODULES_CACHE": str(root / f"modules_{code}_{'old' if first_on_path else 'new'}"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    if first_on_path:
        paths = [first_on_path, os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    command = [sys.executable, "-c", PROBE, str(root), code]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads((root / f"{code}.json").read_text())


@pytest.fixture(scope="module")
def remote(root) -> dict:
    return run_probe(root, "remote")


@pytest.fixture(scope="module")
def package(root) -> dict:
    return run_probe(root, "package")


@pytest.fixture(scope="module")
def old(root) -> dict:
    folder = os.environ.get("DFLASH_OLD_TRANSFORMERS")
    if not folder:
        pytest.skip("DFLASH_OLD_TRANSFORMERS does not name a folder with the oldest supported Transformers")
    report = run_probe(root, "remote", first_on_path=folder)
    if report["version"] == transformers.__version__:
        pytest.skip(f"all tests of this run are on Transformers {transformers.__version__} already")
    return report


# The code files


def travelling_files() -> set[str]:
    """Names of the files that the model's file needs, following relative imports."""
    names, pending = set(), ["modeling_dflash"]
    while pending:
        name = pending.pop()
        if f"{name}.py" not in names:
            names.add(f"{name}.py")
            pending += [node.module for node in relative_imports(PACKAGE / f"{name}.py")]
    return names


def relative_imports(path: Path) -> list[ast.ImportFrom]:
    tree = ast.parse(path.read_text())
    return [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]


def test_folder_holds_weights_config_and_the_files_that_the_model_needs(root):
    files = {path.name for path in (root / "drafter").iterdir() if path.is_file()}
    assert files == {"config.json", "model.safetensors"} | travelling_files()
    for name in travelling_files():
        assert (root / "drafter" / name).read_text() == (PACKAGE / name).read_text()
    written = json.loads((root / "drafter" / "config.json").read_text())
    assert "--" not in json.dumps(written["auto_map"])  # no pointer into another repository


@pytest.mark.parametrize("name", sorted(travelling_files()))
def test_travelling_file_imports_only_torch_transformers_and_flat_siblings(root, name):
    path = root / "drafter" / name
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1 and node.module and "." not in node.module
            assert (root / "drafter" / f"{node.module}.py").is_file()
            continue
        if isinstance(node, ast.Import):
            packages = {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            packages = {node.module.split(".")[0]}
        else:
            continue
        assert packages <= {"torch", "transformers"} | sys.stdlib_module_names


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*_dflash.py")), ids=lambda path: path.name)
def test_no_text_looks_like_a_relative_import(path):
    # Transformers finds the files to copy by this pattern, in docstrings, too.
    lines = re.findall(r"^\s*(?:from\s+\.\S*\s+import|import\s+\.).*$", path.read_text(), flags=re.MULTILINE)
    assert len(lines) == len(relative_imports(path))


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*_dflash.py")), ids=lambda path: path.name)
def test_no_removed_cache_attribute_is_used(path):
    removed = {"key_cache", "value_cache", "from_legacy_cache", "to_legacy_cache", "get_max_length", "seen_tokens"}
    used = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    assert not used & removed


# Without the package


def test_drafter_loads_from_its_folder_alone(remote):
    assert remote["class"][0].startswith("transformers_modules.") and remote["class"][1] == "DFlashDraftModel"
    assert remote["config class"] == "DFlashConfig"
    assert remote["package modules"] == []


def test_weights_and_tables_of_the_remote_drafter_are_those_of_the_file(root, remote):
    saved = {name: tensor.tolist() for name, tensor in load_file(root / "drafter" / "model.safetensors").items()}
    assert remote["state"] == saved
    here = DFlashDraftModel.from_pretrained(root / "drafter")
    assert remote["buffers"] == {name: tensor.tolist() for name, tensor in here.named_buffers()}


def test_remote_drafter_drafts_and_decodes_as_the_packages(remote, package):
    assert remote["drafted"] == package["drafted"]
    assert remote["drafted"]["greedy"][0] == remote["without"]["greedy"][0]


@pytest.mark.parametrize("code", ["remote", "package", "old"])
def test_three_ways_to_the_loop_give_the_same(request, code):
    drafted = request.getfixturevalue(code)["drafted"]
    assert drafted["greedy, callable"] == drafted["greedy, folder"] == drafted["greedy"]
    assert drafted["greedy, trees, folder"] == drafted["greedy, trees"]
    assert drafted["greedy, trees"][0] == drafted["greedy"][0]


def test_remote_drafter_decodes_as_in_this_process(root, remote):
    target = make_tiny_target()
    prompt = torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7]])
    drafter = DFlashDraftModel.from_pretrained(root / "drafter")
    here = target.generate(prompt, max_new_tokens=20, do_sample=False, assistant_model=drafter)
    assert here.tolist() == remote["drafted"]["greedy"][0]


# Everything else stays as it was


@pytest.mark.parametrize("code", ["remote", "package"])
def test_other_decoding_is_bit_identical_with_and_without_our_code(request, code):
    report = request.getfixturevalue(code)
    assert [depth for depth, _ in report["wrapped before"]] == [0] * 4
    assert len(report["without"]) == 7
    for name, decoded in report["without"].items():
        assert report["with"][name] == decoded, name


@pytest.mark.parametrize("code", ["remote", "package"])
def test_package_and_remote_copy_together_wrap_the_dispatch_once(request, code):
    report = request.getfixturevalue(code)
    assert [depth for depth, _ in report["first wrap"]] == [1] * 4
    assert report["second wrap"] == report["first wrap"]
    modules = {report["class"][0].split(".")[0], report["other class"][0].split(".")[0]}
    assert modules == {"dflash_hf", "transformers_modules"}
    assert report["other drafted"] == report["drafted"]


# Oldest supported Transformers


def test_folder_works_on_the_oldest_transformers(old, package):
    assert old["version"] != package["version"]
    assert old["package modules"] == [] and old["class"][1] == "DFlashDraftModel"
    assert old["drafted"]["greedy"][0] == old["without"]["greedy"][0] == package["drafted"]["greedy"][0]
    assert old["state"] == package["state"] and old["buffers"] == package["buffers"]
    expected = torch.tensor(package["drafted"]["hidden_states"])
    torch.testing.assert_close(torch.tensor(old["drafted"]["hidden_states"]), expected, atol=1e-5, rtol=0)


def test_other_decoding_is_bit_identical_on_the_oldest_transformers(old):
    assert old["with"] == old["without"]
    assert old["second wrap"] == old["first wrap"] and [depth for depth, _ in old["first wrap"]] == [1] * 4
