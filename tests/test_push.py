"""Publishing, against a loopback server that speaks the Hub's protocol to the unmodified `huggingface_hub`."""

import json
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import huggingface_hub.utils._http
import pytest
import torch
from conftest import make_tiny_target
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError
from loopback_hub import Blob, LoopbackHub
from test_card import CARD, REPORT
from tiny_material import make_drafter_config, make_trainer, run_python, run_without_package

from dflash_hf import DFlashDraftModel, create_drafter
from dflash_hf.hub_configs.folder import build_hub_folder
from dflash_hf.hub_configs.push import plan_push, push_drafter, verify_push
from dflash_hf.trainer import DFlashTrainingArguments, dflash_trainer

WRITE, READ = "hf_loopback_write", "hf_loopback_read"


@pytest.fixture(scope="module")
def drafter() -> DFlashDraftModel:
    target = make_tiny_target()
    return create_drafter(target, make_drafter_config(target))


@pytest.fixture
def folder(drafter, tmp_path) -> Path:
    return build_hub_folder(drafter, tmp_path / "drafter", card=CARD)


@pytest.fixture
def sharded(folder, drafter) -> Path:
    """The same drafter with its weights in several files."""
    (folder / "model.safetensors").unlink()
    drafter.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture
def hub(monkeypatch) -> Iterator[LoopbackHub]:
    # The server is on this machine, and it has no Xet storage.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    with LoopbackHub() as hub:
        yield hub


def api(hub: LoopbackHub, token: str | bool = WRITE) -> HfApi:
    return HfApi(endpoint=hub.url, token=token)


def push(folder: Path, hub: LoopbackHub, **options):
    return push_drafter(folder, "user/drafter", api=api(hub), **({"yes": True} | options))


def uploads(hub: LoopbackHub, since: int = 0) -> list[str]:
    """Checksums of the large files sent after request number `since`."""
    return [path.removeprefix("/lfs/") for method, path in hub.requests[since:] if method == "PUT"]


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


# Plan


def test_plan_alone_changes_nothing(folder, hub, capsys):
    result = push(folder, hub, yes=False)
    assert (result.commit, result.revision, result.pull_request) == (None, None, None)
    assert hub.repositories == {} and all(method in ("GET", "HEAD") for method, _ in hub.requests)
    shown = capsys.readouterr().out
    assert f"{folder} -> user/drafter (new, private), branch main" in shown
    assert all(name in shown for name in names(folder))
    assert f"{(folder / 'model.safetensors').stat().st_size / 1e6:9.3f} MB  model.safetensors" in shown
    assert f"MB  in {len(names(folder))} files" in shown


def test_plan_shows_everything_that_would_happen(folder, hub):
    (folder / "optimizer.pt").write_bytes(b"x")
    push(folder, hub, private=False)
    hub.repositories["user/drafter"].files()["old_dflash.py"] = Blob(b"", False)
    plan = plan_push(folder, "drafter", private=False, branch="v2", collection="Drafters", api=api(hub))
    assert plan.deleted == ["old_dflash.py"] and plan.left_out == ["optimizer.pt"]
    shown = str(plan)
    assert "user/drafter (existing, public), branch v2" in shown
    for line in ("stays here: optimizer.pt", "deleted there: old_dflash.py", "added to the collection 'Drafters'"):
        assert line in shown
    assert "a new pull request" in str(plan_push(folder, "drafter", private=False, create_pr=True, api=api(hub)))


def test_folder_that_is_not_fit_never_reaches_the_hub(folder, hub):
    (folder / "weights.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match="pickles"):
        push(folder, hub)
    (folder / "weights.bin").unlink()
    (folder / "tree_dflash.py").unlink()
    with pytest.raises(ValueError, match="lacks the code file 'tree_dflash.py'"):
        push(folder, hub)
    assert hub.requests == []


def test_unfinished_card_never_reaches_the_hub(folder, hub):
    card = folder / "README.md"
    card.write_text(card.read_text().replace("Eight rows.", "TODO"))
    with pytest.raises(ValueError, match="not ready for the Hub: it still says 'TODO'"):
        push(folder, hub)
    assert hub.repositories == {}


# Upload


def test_push_makes_a_private_repository_with_the_folders_files_in_one_commit(folder, hub):
    result = push(folder, hub, message="First")
    repository = hub.repositories["user/drafter"]
    assert repository.is_private and repository.messages == ["initial commit", "First"]
    assert result.commit == repository.refs["main"] and result.revision == "main"
    files = repository.files()
    assert set(files) == names(folder) | {".gitattributes"}
    for name in names(folder) - {"README.md"}:
        assert files[name] == Blob((folder / name).read_bytes(), name == "model.safetensors")


def test_card_on_the_hub_names_its_repository_and_shows_results(folder, hub, tmp_path):
    (tmp_path / "eval.json").write_text(json.dumps(REPORT))
    before = (folder / "README.md").read_text()
    push(folder, hub, results=tmp_path / "eval.json")
    card = hub.repositories["user/drafter"].files()["README.md"].content.decode()
    assert 'from_pretrained("user/drafter"' in card and "| dflash | greedy | all (120) | 3.14 [2.98, 3.30] |" in card
    assert (folder / "README.md").read_text() == before


def test_repository_is_public_only_if_asked_for(folder, hub):
    push(folder, hub, private=False)
    assert not hub.repositories["user/drafter"].is_private


def test_push_into_a_public_repository_needs_the_word_public(folder, hub):
    push(folder, hub, private=False)
    requests = len(hub.requests)
    with pytest.raises(ValueError, match=r"user/drafter is public.*`private=False` \(`--public`\)"):
        push(folder, hub)
    assert all(method == "GET" for method, _ in hub.requests[requests:])


def test_second_push_of_the_same_folder_makes_no_commit(folder, hub):
    first = push(folder, hub)
    assert push(folder, hub).commit == first.commit
    assert hub.repositories["user/drafter"].messages == ["initial commit", "Upload DFlash drafter"]


def test_files_of_an_older_drafter_leave_the_repository(sharded, drafter, hub, tmp_path):
    push(sharded, hub)
    others = {"notes.txt", "scripts/train.py", "scripts/custom_generate/generate.py"}
    hub.repositories["user/drafter"].files().update({name: Blob(b"mine", False) for name in others})
    whole = build_hub_folder(drafter, tmp_path / "whole", card=CARD)
    push(whole, hub)
    assert set(hub.repositories["user/drafter"].files()) == names(whole) | others | {".gitattributes"}


def test_branch_is_made_and_main_stays_as_it_was(folder, hub):
    result = push(folder, hub, branch="trial")
    repository = hub.repositories["user/drafter"]
    assert set(repository.files("main")) == {".gitattributes"}
    assert result.revision == "trial" and repository.refs["trial"] == result.commit
    assert "model.safetensors" in repository.files("trial")


def test_pull_request_is_opened_and_main_stays_as_it_was(folder, hub):
    result = push(folder, hub, create_pr=True)
    repository = hub.repositories["user/drafter"]
    assert set(repository.files("main")) == {".gitattributes"}
    assert result.pull_request == f"{hub.url}/user/drafter/discussions/1" and result.revision == "refs/pr/1"
    assert repository.refs["refs/pr/1"] == result.commit


def test_pull_request_into_a_branch_is_refused(folder, hub):
    with pytest.raises(ValueError, match=r"`branch` \('trial'\) or `create_pr`"):
        push(folder, hub, create_pr=True, branch="trial")
    assert hub.requests == []


@pytest.mark.parametrize("is_title", [True, False])
def test_drafter_joins_a_collection_by_title_or_slug(folder, hub, is_title):
    title = "Tiny drafters"
    slug = "user/tiny-drafters-" + "0" * 24
    if not is_title:
        api(hub).create_collection(title, namespace="user")
    for _ in range(2):
        push(folder, hub, collection=title if is_title else slug)
    assert [item["id"] for item in hub.collections[slug]["items"]] == ["user/drafter"]
    assert hub.collections[slug]["private"] is is_title


# Accounts


def test_wrong_token_is_named_and_leaves_nothing_behind(folder, hub, capsys):
    with pytest.raises(HfHubHTTPError, match="Invalid user token") as error:
        push_drafter(folder, "user/drafter", yes=True, api=api(hub, "hf_loopback_wrong"))
    assert hub.repositories == {} and hub.requests == [("GET", "/api/whoami-v2")]
    assert "hf_loopback_wrong" not in str(error.value) + capsys.readouterr().out


def test_token_that_may_not_write_leaves_nothing_behind(folder, hub):
    with pytest.raises(HfHubHTTPError, match="You don't have the required permissions"):
        push_drafter(folder, "user/drafter", yes=True, api=api(hub, READ))
    assert hub.repositories == {} and hub.storage == {}


def test_missing_token_is_said(folder, hub, monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(LocalTokenNotFoundError, match="hf auth login"):
        push_drafter(folder, "user/drafter", yes=True, api=HfApi(endpoint=hub.url))
    assert hub.requests == []


def test_repository_of_somebody_else_is_refused(folder, hub):
    with pytest.raises(HfHubHTTPError, match="under the namespace 'somebody'"):
        push_drafter(folder, "somebody/drafter", yes=True, api=api(hub))
    assert hub.repositories == {}


# Interruptions


@pytest.fixture
def no_waiting(monkeypatch):
    monkeypatch.setattr(huggingface_hub.utils._http.time, "sleep", lambda _: None)


def test_one_dropped_connection_is_survived(folder, hub, no_waiting):
    dropped = []

    def fault(method, path):
        if method == "PUT" and not dropped:
            dropped.append(path)
            return "drop"

    hub.fault = fault
    push(folder, hub)
    assert len(dropped) == 1 and uploads(hub) == [dropped[0].removeprefix("/lfs/")] * 2


def test_upload_that_breaks_off_is_invisible_and_resumed_by_a_second_push(sharded, hub, no_waiting):
    shards = len(list(sharded.glob("*.safetensors")))
    hub.fault = lambda method, path: "drop" if method == "PUT" and hub.storage else None
    with pytest.raises(Exception, match=r"disconnected|reset|Broken pipe|Error while uploading"):
        push(sharded, hub)
    repository = hub.repositories["user/drafter"]
    assert repository.messages == ["initial commit"] and set(repository.files()) == {".gitattributes"}
    arrived = set(hub.storage)
    assert 0 < len(arrived) < shards

    hub.fault = lambda *_: None
    requests = len(hub.requests)
    result = push(sharded, hub)
    sent = uploads(hub, since=requests)
    assert len(sent) == shards - len(arrived) and not arrived & set(sent)
    assert result.commit == repository.refs["main"] and len(repository.messages) == 2


def test_connection_lost_at_the_commit_costs_no_second_upload(folder, hub, no_waiting):
    hub.fault = lambda method, path: "drop" if "/commit/" in path else None
    with pytest.raises(Exception, match=r"disconnected|reset|Broken pipe"):
        push(folder, hub)
    assert hub.repositories["user/drafter"].messages == ["initial commit"]
    hub.fault = lambda *_: None
    push(folder, hub)
    assert len(uploads(hub)) == 1


# Verification


@pytest.mark.parametrize("name", ["model.safetensors", "tree_dflash.py", "README.md"])
@pytest.mark.parametrize("damage", ["change", "lose"])
def test_file_that_did_not_arrive_as_sent_is_named(folder, hub, name, damage):
    result = push(folder, hub)
    files = hub.repositories["user/drafter"].files()
    blob = files.pop(name)
    if damage == "change":
        files[name] = Blob(blob.content[:-1] + bytes([blob.content[-1] ^ 1]), blob.is_lfs)
    with pytest.raises(RuntimeError, match=rf"does not hold what was sent: \['{name}'\]"):
        verify_push(result.plan, result.commit, api=api(hub))


def test_drafter_that_loads_as_another_one_is_an_error(folder, hub, monkeypatch):
    result = push(folder, hub)
    drafter = DFlashDraftModel.from_pretrained(folder)
    drafter.norm.weight.data[0] += 1
    drafter.save_pretrained(folder)
    monkeypatch.setattr("dflash_hf.hub_configs.push._is_same", lambda *_: True)
    with pytest.raises(RuntimeError, match="that loads from user/drafter at .* differs"):
        verify_push(result.plan, result.commit, api=api(hub))


def test_uploaded_code_runs_only_with_consent(folder, hub, monkeypatch):
    loads = []
    monkeypatch.setattr(
        "dflash_hf.hub_configs.push.AutoModel.from_pretrained",
        lambda path, **kwargs: loads.append(kwargs) or DFlashDraftModel.from_pretrained(path),
    )
    push(folder, hub)
    assert loads == []
    push(folder, hub, trust_remote_code=True)
    assert loads == [{"trust_remote_code": True}]


# Other processes, with the Hub in their environment

ENVIRONMENT = """
import os
os.environ.update({{
    "HF_ENDPOINT": {url!r}, "HF_TOKEN": "hf_loopback_write", "HF_HOME": {home!r}, "HF_HUB_OFFLINE": "0",
    "HF_HUB_DISABLE_XET": "1",
}})
"""

WITHOUT_PACKAGE = """
import json, torch
from transformers import AutoModel, AutoModelForCausalLM

target = AutoModelForCausalLM.from_pretrained({target!r})
prompt = torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7]])
how = {{"max_new_tokens": 20, "do_sample": False}}
report = {{"plain": target.generate(prompt, **how).tolist()}}
for name, revision in (("first", {first!r}), ("newest", None)):
    drafter = AutoModel.from_pretrained("user/drafter", trust_remote_code=True, revision=revision)
    report[name] = drafter.norm.weight.tolist()
    report["class"] = [type(drafter).__module__, type(drafter).__name__]
    report[f"{{name}}, drafted"] = target.generate(prompt, assistant_model=drafter, **how).tolist()
report["custom_generate"] = target.generate(
    prompt, custom_generate="user/drafter", trust_remote_code=True, **how
).tolist()
print(json.dumps(report))
"""

WITH_PACKAGE = """
import sys
from dflash_hf import DFlashDraftModel
from dflash_hf.hub_configs.push import main

for flags in ([], ["--yes"]):
    sys.argv = ["dflash-push", "--folder", {folder!r}, "--repo_id", "command", *flags]
    main()
drafter = DFlashDraftModel.from_pretrained({folder!r})
drafter.push_to_hub("pushed", private=True)
for _ in range(2):
    drafter.save_pretrained({saved!r}, push_to_hub=True, repo_id="saved", private=True)
"""


def environment(hub: LoopbackHub, tmp_path: Path) -> str:
    return ENVIRONMENT.format(url=hub.url, home=str(tmp_path / "home"))


def test_drafter_from_the_hub_drafts_where_the_package_is_missing(folder, hub, tmp_path):
    make_tiny_target().save_pretrained(tmp_path / "target")
    first = push(folder, hub)
    drafter = DFlashDraftModel.from_pretrained(folder)
    with torch.no_grad():
        drafter.norm.weight.fill_(2)
    drafter.save_pretrained(folder)
    assert push(folder, hub).commit != first.commit
    code = WITHOUT_PACKAGE.format(target=str(tmp_path / "target"), first=first.commit)
    report = json.loads(run_without_package(environment(hub, tmp_path) + code, tmp_path).splitlines()[-1])
    assert report["class"][0].startswith("transformers_modules.") and report["class"][1] == "DFlashDraftModel"
    assert report["newest"] == [2] * 32 and report["first"] != report["newest"]
    for way in ("first, drafted", "newest, drafted", "custom_generate"):
        assert report[way] == report["plain"], way


def test_command_and_transformers_own_ways_upload_whole_drafters(folder, hub, tmp_path):
    code = WITH_PACKAGE.format(folder=str(folder), saved=str(tmp_path / "saved"))
    output = run_python("-c", environment(hub, tmp_path) + code)
    assert "Nothing was uploaded. Add --yes to do it." in output and WRITE not in output
    assert f"Uploaded and checked: user/command, revision {hub.repositories['user/command'].refs['main']}" in output
    assert set(hub.repositories) == {"user/command", "user/pushed", "user/saved"}
    for repository in hub.repositories.values():
        assert repository.is_private
        assert names(folder) - set(repository.files()) <= {"generation_config.json"}
        assert b"- speculative-decoding" in repository.files()["README.md"].content


def test_trainer_pushes_the_drafter_and_nothing_of_the_training(hub, monkeypatch, tmp_path):
    monkeypatch.setattr(dflash_trainer, "HfApi", lambda token: api(hub))
    rows = [{"input_ids": list(range(5, 40)), "prompt_length": 3}]
    target = make_tiny_target()
    options = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1, "push_to_hub": True}
    trainer = make_trainer(tmp_path / "run", rows, target=target, hub_model_id="user/drafter", **options)
    assert uploads(hub) == [] and hub.repositories == {}
    trainer.train()
    with pytest.raises(ValueError, match="needs a model card"):
        trainer.push_to_hub()
    trainer.card = CARD
    result = trainer.push_to_hub()
    loaded = DFlashDraftModel.from_pretrained(
        huggingface_hub.snapshot_download("user/drafter", endpoint=hub.url, token=WRITE, cache_dir=tmp_path / "cache")
    )
    expected = {name: tensor.to(torch.bfloat16) for name, tensor in trainer.model.state_dict().items()}
    assert all(torch.equal(tensor.to(torch.bfloat16), expected[name]) for name, tensor in loaded.state_dict().items())
    files = {file.path for file in api(hub).list_repo_tree("user/drafter", revision=result.commit, recursive=True)}
    assert {"README.md", "config.json", "model.safetensors", "modeling_dflash.py"} <= files
    assert not any("training_args" in name or "run.json" in name or "optimizer" in name for name in files)
    assert hub.repositories["user/drafter"].is_private


def test_other_hub_strategies_are_refused(tmp_path):
    with pytest.raises(ValueError, match="`hub_strategy` is .*must be 'end'"):
        DFlashTrainingArguments(output_dir=str(tmp_path), use_cpu=True, push_to_hub=True, hub_strategy="every_save")
