"""`dflash-push`: a drafter's folder on the Hub, with its plan shown first and what arrived checked after.

All files go into one commit, so that no reader ever sees a part of a drafter. (`upload_folder` may split a slow upload
into several commits.) An interrupted push is repeated: large files that arrived before are not sent again.
"""

import hashlib
import tempfile
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile
from transformers import AutoModel, PreTrainedModel

from dflash_hf.hub_configs.card import card_for_upload, results_table
from dflash_hf.hub_configs.upload_files import check_code_files, files_to_upload
from dflash_hf.modeling_dflash import DFlashDraftModel

# Files of an older drafter that would be loaded along with, or in place of, the new one's; not those in other folders.
_REPLACED = ("*.py", "*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")


@dataclass
class PushPlan:
    """What a push would do; `print(plan)` shows it.

    Args:
        folder (`Path`): The drafter's folder.
        repo_id (`str`): Repository, with its owner.
        files (`dict`): Path in the repository -> local file, or the text itself if it differs from the local one.
        left_out (`list[str]`): Paths of the folder that stay behind.
        deleted (`list[str]`): Files of an older drafter that leave the repository.
        is_new (`bool`): The repository does not exist yet.
        is_private (`bool`): Only its owner sees it.
        branch (`str`, *optional*): Branch that gets the commit; default: main.
        create_pr (`bool`): The commit goes into a new pull request.
        collection (`str`, *optional*): Slug of a collection, or title of one to make.
    """

    folder: Path
    repo_id: str
    files: dict[str, Path | bytes] = field(repr=False)
    left_out: list[str]
    deleted: list[str]
    is_new: bool
    is_private: bool
    branch: str | None = None
    create_pr: bool = False
    collection: str | None = None

    def __str__(self) -> str:
        sizes = {path: _size(content) for path, content in self.files.items()}
        place = "a new pull request" if self.create_pr else f"branch {self.branch or 'main'}"
        visibility = "private" if self.is_private else "public"
        lines = [
            f"{self.folder} -> {self.repo_id} ({'new' if self.is_new else 'existing'}, {visibility}), {place}",
            *(f"  {size / 1e6:9.3f} MB  {path}" for path, size in sizes.items()),
            f"  {sum(sizes.values()) / 1e6:9.3f} MB  in {len(sizes)} files",
        ]
        lines += [f"  stays here: {', '.join(self.left_out)}"] if self.left_out else []
        lines += [f"  deleted there: {', '.join(self.deleted)}"] if self.deleted else []
        lines += [f"  added to the collection {self.collection!r}"] if self.collection else []
        return "\n".join(lines)


@dataclass
class PushResult:
    """The plan, and once it is carried out its commit, the revision to load and the pull request's address."""

    plan: PushPlan
    commit: str | None = None
    revision: str | None = None
    pull_request: str | None = None


def plan_push(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool = True,
    branch: str | None = None,
    create_pr: bool = False,
    collection: str | None = None,
    results: str | Path | dict[str, Any] | None = None,
    api: HfApi | None = None,
) -> PushPlan:
    """What [`push_drafter`] would do with these arguments; nothing is uploaded.

    Raises:
        ValueError: If the folder is not fit for the Hub, or arguments clash with each other or with the repository.
        HfHubHTTPError: If the Hub refuses the token.
    """
    api = HfApi() if api is None else api
    folder = Path(folder)
    if create_pr and branch is not None:
        raise ValueError(f"A pull request goes to main: leave out `branch` ({branch!r}) or `create_pr`.")
    local_files, left_out = files_to_upload(folder)
    check_code_files(folder)
    DFlashDraftModel.from_pretrained(folder)  # names what is wrong with config or weights
    user = api.whoami()["name"]
    repo_id = repo_id if "/" in repo_id else f"{user}/{repo_id}"
    table = None if results is None else results_table(results)
    card = card_for_upload(local_files["README.md"].read_text(encoding="utf-8"), repo_id, table)
    files: dict[str, Path | bytes] = {**local_files, "README.md": card.encode()}
    try:
        repository = api.model_info(repo_id)
    except RepositoryNotFoundError:
        return PushPlan(folder, repo_id, files, left_out, [], True, private, branch, create_pr, collection)
    if private and not repository.private:
        raise ValueError(
            f"{repo_id} is public, so a push would publish the drafter. Say so with `private=False` (`--public`), or "
            "choose another repository."
        )
    branches = [ref.name for ref in api.list_repo_refs(repo_id).branches]
    present = api.list_repo_files(repo_id, revision=branch if branch in branches else None)
    deleted = sorted(path for path in set(present) - set(files) if _is_part_of_a_drafter(path))
    is_private = bool(repository.private)
    return PushPlan(folder, repo_id, files, left_out, deleted, False, is_private, branch, create_pr, collection)


def push_drafter(
    folder: str | Path,
    repo_id: str,
    *,
    yes: bool = False,
    message: str = "Upload DFlash drafter",
    trust_remote_code: bool = False,
    api: HfApi | None = None,
    **options: Any,
) -> PushResult:
    """Shows the plan and, with `yes`, uploads the folder in one commit and checks what arrived.

    Args:
        folder (`str` or `Path`): A drafter's folder, as [`build_hub_folder`] and `dflash-train` write it.
        repo_id (`str`): `owner/name`, or a name in your own account. It is created if it does not exist.
        yes (`bool`): Upload; without it nothing changes on the Hub.
        message (`str`): The commit's.
        trust_remote_code (`bool`): Also load the uploaded drafter with its own code files, which runs them.
        api ([`HfApi`], *optional*): The Hub and the account; default: those of `hf auth login` or `HF_TOKEN`.
        options: Of [`plan_push`]: `private` (`bool`, default True; `False` publishes), `branch` (`str`, made if
            missing), `create_pr` (`bool`), `collection` (slug of one, or title of one to make or to add to), `results`
            (JSON file of `dflash-eval`, shown in the card).
    Returns:
        [`PushResult`]: Its `commit` is None if nothing was uploaded.
    Raises:
        ValueError: See [`plan_push`].
        RuntimeError: If the repository does not hold what was sent.
    """
    api = HfApi() if api is None else api
    plan = plan_push(folder, repo_id, api=api, **options)
    print(plan)
    if not yes:
        return PushResult(plan)
    if plan.is_new:
        api.create_repo(plan.repo_id, private=plan.is_private, exist_ok=True)
    if plan.branch is not None:
        api.create_branch(plan.repo_id, branch=plan.branch, exist_ok=True)
    operations: list[Any] = [CommitOperationAdd(path, content) for path, content in plan.files.items()]
    operations += [CommitOperationDelete(path) for path in plan.deleted]
    commit = api.create_commit(
        plan.repo_id, operations, commit_message=message, revision=plan.branch, create_pr=plan.create_pr
    )
    verify_push(plan, commit.oid, api=api, trust_remote_code=trust_remote_code)
    if plan.collection is not None:
        _add_to_collection(plan, plan.collection, api)
    revision = commit.pr_revision or plan.branch or "main"
    return PushResult(plan, commit.oid, revision, commit.pr_url)


def verify_push(plan: PushPlan, revision: str, *, api: HfApi, trust_remote_code: bool = False) -> None:
    """Compares sizes and checksums of the repository at `revision` with the plan's files, and loads it back.

    Raises:
        RuntimeError: If a file is missing or different, or the drafter that loads from there is another one.
    """
    tree = api.list_repo_tree(plan.repo_id, recursive=True, revision=revision)
    remote = {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}
    wrong = [path for path, content in plan.files.items() if not _is_same(remote.get(path), content)]
    wrong += [path for path in plan.deleted if path in remote]
    if wrong:
        raise RuntimeError(
            f"{plan.repo_id} at {revision} does not hold what was sent: {wrong} are missing, different or not "
            "deleted. Push again."
        )
    expected = _identity(DFlashDraftModel.from_pretrained(plan.folder))
    with tempfile.TemporaryDirectory() as folder:
        api.snapshot_download(plan.repo_id, revision=revision, local_dir=folder, allow_patterns=list(plan.files))
        is_equal = _identity(DFlashDraftModel.from_pretrained(folder)) == expected
        if trust_remote_code:
            is_equal &= _identity(AutoModel.from_pretrained(folder, trust_remote_code=True)) == expected
    if not is_equal:
        raise RuntimeError(f"The drafter that loads from {plan.repo_id} at {revision} differs from {plan.folder}.")


def _identity(drafter: PreTrainedModel) -> tuple[dict[str, Any], dict[str, str]]:
    """Config and checksums of the tensors."""
    config = drafter.config.to_dict()
    config.pop("_name_or_path")
    contents = {name: tensor.contiguous().flatten().view(torch.uint8) for name, tensor in drafter.state_dict().items()}
    return config, {name: hashlib.sha256(content.numpy()).hexdigest() for name, content in contents.items()}


def _is_part_of_a_drafter(path: str) -> bool:
    name = path.removeprefix("custom_generate/")
    return "/" not in name and any(fnmatch(name, pattern) for pattern in _REPLACED)


def _size(content: Path | bytes) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def _is_same(entry: RepoFile | None, content: Path | bytes) -> bool:
    """Whether the Hub's file has this content: large files are listed by SHA-256, others by git's checksum."""
    if entry is None or entry.size != _size(content):
        return False
    checksum = hashlib.sha256() if entry.lfs else hashlib.sha1(f"blob {entry.size}\0".encode())
    if isinstance(content, bytes):
        checksum.update(content)
    else:
        with content.open("rb") as file:
            while chunk := file.read(1 << 20):
                checksum.update(chunk)
    return checksum.hexdigest() == (entry.lfs.sha256 if entry.lfs else entry.blob_id)


def _add_to_collection(plan: PushPlan, collection: str, api: HfApi) -> None:
    if "/" not in collection:  # a title
        namespace = plan.repo_id.split("/")[0]
        found = api.create_collection(collection, namespace=namespace, private=plan.is_private, exists_ok=True)
        collection = found.slug
    api.add_collection_item(collection, plan.repo_id, "model", exists_ok=True)


@dataclass
class PushOptions:
    """Options of `dflash-push`."""

    folder: str = field(metadata={"help": "A drafter's folder."})
    repo_id: str = field(metadata={"help": "owner/name, or a name in your account; made if it does not exist."})
    public: bool = field(default=False, metadata={"help": "Publish; default: only you see it."})
    branch: str | None = field(default=None, metadata={"help": "Branch that gets the commit; made if missing."})
    create_pr: bool = field(default=False, metadata={"help": "Open a pull request."})
    collection: str | None = field(default=None, metadata={"help": "Slug of a collection, or title of one to make."})
    results: str | None = field(default=None, metadata={"help": "JSON file of dflash-eval, shown in the card."})
    message: str = field(default="Upload DFlash drafter", metadata={"help": "The commit's message."})
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Load the uploaded drafter with its own code files, too, which runs them."}
    )
    yes: bool = field(default=False, metadata={"help": "Upload; without it only the plan is shown."})


def main() -> None:
    # Here, because the trainer's package imports this one.
    from dflash_hf.trainer.command_line import parse_options

    (options,) = parse_options(PushOptions, description="Publish a drafter on the Hugging Face Hub.")
    result = push_drafter(
        options.folder,
        options.repo_id,
        yes=options.yes,
        message=options.message,
        trust_remote_code=options.trust_remote_code,
        private=not options.public,
        branch=options.branch,
        create_pr=options.create_pr,
        collection=options.collection,
        results=options.results,
    )
    if result.commit is None:
        print("Nothing was uploaded. Add --yes to do it.")
    else:
        print(f"Uploaded and checked: {result.plan.repo_id}, revision {result.commit}")
        print(result.pull_request or "Load this very drafter anywhere with `revision=` and that commit.")


if __name__ == "__main__":
    main()
