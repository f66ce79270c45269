"""Real launches of `dflash-train` with two processes: killed in mid-run, resumed, and ended."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file
from tiny_material import make_drafter_config, make_text_rows, run_without_package, save_tiny_target

from dflash_hf.trainer import dflash_trainer
from dflash_hf.trainer.data import write_json_lines

CONFIGS = Path(dflash_trainer.__file__).parent / "accelerate_configs"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def write_recipe(folder: Path, **overrides) -> Path:
    target = save_tiny_target(folder / "target")
    rows = make_text_rows(target, 12)
    write_json_lines(folder / "rows.jsonl", rows)
    make_drafter_config(target).to_json_file(folder / "drafter.json")
    recipe = {
        "target": str(folder / "target"),
        "target_dtype": "float32",
        "drafter_config": str(folder / "drafter.json"),
        "train_data": [str(folder / "rows.jsonl")],
        "eval_rows": 2,
        "output_dir": str(folder / "run"),
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "per_device_train_batch_size": 1,
        "num_anchors": 8,
        "num_threads": 1,
        "max_steps": 24,
        "save_steps": 5,
        "logging_steps": 1,
        "live_prompts": 2,
        "live_max_new_tokens": 10,
        "seed": 1,
    }
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe | overrides))
    return file


def start(recipe: Path, kind: str, *extra: str, processes: int = 2) -> subprocess.Popen:
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / f"{kind}.yaml")]
    command += ["--num_processes", str(processes), "--main_process_port", "0"]
    command += ["-m", "dflash_hf.trainer.train", "--config", str(recipe), *extra]
    return subprocess.Popen(command, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def kill(run: subprocess.Popen) -> None:
    """SIGKILL to the launcher and to its workers, which have sessions of their own."""
    launcher = psutil.Process(run.pid)
    for process in [*launcher.children(recursive=True), launcher]:
        process.kill()


def finish(run: subprocess.Popen) -> str:
    try:
        output, _ = run.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        kill(run)
        raise
    assert run.returncode == 0, output
    return output


def kill_after(run: subprocess.Popen, sign: Path) -> None:
    """SIGKILL to all processes of the launch as soon as `sign` exists."""
    deadline = time.time() + 200
    while not sign.exists() and run.poll() is None and time.time() < deadline:
        time.sleep(0.01)
    is_running = run.poll() is None
    kill(run)
    output = run.communicate()[0]
    assert is_running and sign.exists(), output


def logged_losses(folder: Path) -> dict[int, float]:
    state = json.loads((folder / "trainer_state.json").read_text())
    return {entry["step"]: entry["loss"] for entry in state["log_history"] if "loss" in entry}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_killed_launch_goes_on_and_ends_as_an_unbroken_one(tmp_path, kind):
    recipe = write_recipe(tmp_path)
    run = tmp_path / "run"
    kill_after(start(recipe, kind), run / "checkpoint-10" / "trainer_state.json")
    assert not (run / "drafter").exists()
    # A kill may leave a newer checkpoint that was not written to its end.
    (run / "checkpoint-23").mkdir()
    output = finish(start(recipe, kind))
    assert "checkpoint-23 was not written to its end" in output and "Going on from" in output
    # What only FSDP writes: Accelerate would take DDP on CPUs without a word.
    assert (run / "checkpoint-24" / "pytorch_model_fsdp.bin").exists() == (kind == "fsdp2")
    finish(start(recipe, kind, "--output_dir", str(tmp_path / "unbroken")))
    resumed, unbroken = (logged_losses(folder / "checkpoint-24") for folder in (run, tmp_path / "unbroken"))
    assert set(resumed) == set(range(1, 25))
    assert resumed == pytest.approx(unbroken, abs=1e-5)
    weights, expected = (
        load_file(folder / "drafter" / "model.safetensors") for folder in (run, tmp_path / "unbroken")
    )
    assert all(torch.allclose(weights[name].float(), expected[name].float(), atol=1e-2) for name in expected)
    for folder in (run / "checkpoint-24", run / "drafter"):
        code = f"""
import json, torch
from transformers import AutoModel, AutoModelForCausalLM
drafter = AutoModel.from_pretrained({str(folder)!r}, trust_remote_code=True, dtype=torch.float32)
target = AutoModelForCausalLM.from_pretrained({str(tmp_path / "target")!r})
rows = [json.loads(line) for line in open({str(tmp_path / "rows.jsonl")!r})]
prompt = torch.tensor([rows[0]["input_ids"][:6]])
options = dict(attention_mask=torch.ones_like(prompt), max_new_tokens=30, do_sample=False)
output = target.generate(prompt, assistant_model=drafter, **options)
print(output[0].tolist() == rows[0]["input_ids"])
"""
        assert run_without_package(code, tmp_path).strip().endswith("True")


@pytest.mark.slow
def test_run_goes_on_with_another_number_of_processes(tmp_path):
    recipe = write_recipe(tmp_path, max_steps=12, save_steps=6)
    finish(start(recipe, "ddp"))
    two = logged_losses(tmp_path / "run" / "checkpoint-12")
    (tmp_path / "one").mkdir()
    (tmp_path / "run" / "checkpoint-6").rename(tmp_path / "one" / "checkpoint-6")
    command = [sys.executable, "-m", "dflash_hf.trainer.train", "--config", str(recipe)]
    command += ["--output_dir", str(tmp_path / "one"), "--per_device_train_batch_size", "2"]
    subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True, timeout=240)
    assert logged_losses(tmp_path / "one" / "checkpoint-12") == pytest.approx(two, abs=1e-5)


def test_shipped_launch_configs_name_the_drafters_layer():
    from dflash_hf import DFlashDraftModel

    fsdp = yaml.safe_load((CONFIGS / "fsdp2.yaml").read_text())["fsdp_config"]
    assert fsdp["fsdp_transformer_layer_cls_to_wrap"] in DFlashDraftModel._no_split_modules
    assert fsdp["fsdp_version"] == 2
