import json
import subprocess

import pytest

from dflash_hf.trainer import provenance
from dflash_hf.trainer.provenance import run_record, write_json


@pytest.mark.parametrize(
    "arguments", [["--hub_token", "hf_abc"], ["--hub_token=hf_abc"], ["--wandb_api_key", "hf_abc"]]
)
def test_secrets_on_the_command_line_are_not_recorded(monkeypatch, arguments):
    monkeypatch.setattr("sys.argv", ["dflash-train", *arguments, "--seed", "3"])
    record = run_record()
    assert "hf_abc" not in json.dumps(record)
    assert record["command"].startswith("dflash-train --") and record["command"].endswith(" --seed 3")


def test_record_has_versions_machine_and_the_given_facts():
    record = run_record(seed=7, data={"fingerprint": "x"})
    assert record["seed"] == 7 and record["data"] == {"fingerprint": "x"}
    assert {"python", "torch", "transformers", "accelerate"} <= set(record["versions"])
    assert record["hardware"]["cpus"] >= 1


def test_git_state_is_that_of_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert provenance._git_state() is None
    environment = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "-q"], check=True)
    (tmp_path / "file").write_text("1")
    subprocess.run(["git", "add", "file"], check=True)
    subprocess.run(["git", *environment, "commit", "-q", "-m", "first"], check=True)
    clean = provenance._git_state()
    assert len(clean["commit"]) == 40 and clean["has_changes"] is False
    (tmp_path / "file").write_text("2")
    assert provenance._git_state() == clean | {"has_changes": True}


def test_json_is_written_whole_or_not_at_all(tmp_path):
    write_json(tmp_path / "run.json", {"a": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "run.json", {("a", "b"): 1})
    assert json.loads((tmp_path / "run.json").read_text()) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
