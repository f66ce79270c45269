"""The model card: its text, the table of `dflash-eval` results, and what must be right before it is published."""

import re
from pathlib import Path
from string import Template
from typing import Any

from huggingface_hub import ModelCard

_TEMPLATE = Path(__file__).parent / "card_template.md"
# Stands in a card until the folder has a name on the Hub.
_REPOSITORY = "<this folder or repository>"
_UNFINISHED = (_REPOSITORY, "[More Information Needed]", "TODO")
_RESULTS_SECTION = re.compile(r"(?<=^## Results\n).*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def render_card(config: Any, card: dict[str, Any]) -> str:
    """The model card as Markdown with its YAML header.

    Args:
        config ([`DFlashConfig`]): The drafter's; block size, layers and template mode come from it.
        card (`dict`): `base_model`, `license`, `description`, `data`, `recipe`, `results` and `limits`, each Markdown;
            optional `target_revision`.
    Raises:
        ValueError: If a value is missing; the message names it.
    """
    facts = {
        "block_size": config.block_size,
        "num_proposals": config.block_size - 1,
        "num_hidden_layers": config.num_hidden_layers,
        "num_target_layers": config.num_target_layers,
        "target_layer_ids": config.target_layer_ids,
        "mask_token_id": config.mask_token_id,
        "template_mode": config.dflash_config.get("template_mode", "not recorded"),
        "target_revision": "not recorded",
    }
    try:
        return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(facts | card)
    except KeyError as error:
        raise ValueError(f"The model card needs a value for {error}.") from error


def results_table(report: dict[str, Any] | str | Path) -> str:
    """What `dflash-eval` wrote as a short Markdown table, with a line that says how it was measured.

    Args:
        report (`dict`, `str` or `Path`): The report, its JSON file or the folder it lies in.
    Raises:
        ValueError: If it is no such report, or holds nothing but plain decoding or a server's figures.
    """
    # `dflash_hf.eval` imports this package for the shipped target, so it is not there yet when this file is read.
    from dflash_hf.eval.report import read_report
    from dflash_hf.eval.report_tables import number, percent, rows_at, temperature_name, temperatures, with_interval

    data = read_report(report)
    rows = [
        f"| {row['method']} | {temperature_name(temperature)} | {row['task']} ({row['prompts']}) | "
        f"{with_interval(row['tau'], row['tau_interval'])} | "
        f"{with_interval(row['speedup'], row['speedup_interval'], unit='x')} | "
        f"{number(row['speedup_median'], unit='x')} | {percent(row['identical'])} |"
        for temperature in temperatures(data)
        for row in sorted(rows_at(data, temperature), key=lambda row: data["methods"].index(row["method"]))
        if row["method"] != "plain"
    ]
    if not rows:
        raise ValueError("The report has no results of a drafting method: a model card cannot show it.")
    head = ["| method | sampling | prompts | tau | speed-up, mean | speed-up, median | identical to plain decoding |"]
    return "\n".join([*head, "|---|---|---|---|---|---|---|", *rows, "", _how_measured(data["provenance"])])


def _how_measured(provenance: dict[str, Any]) -> str:
    from dflash_hf.eval.report_tables import plain_text, precision_name

    known = {**(provenance["options"] or {}), **provenance}
    limits = [
        f"{known[name]} {words}"
        for name, words in (("max_new_tokens", "new tokens"), ("num_threads", "CPU thread(s)"))
        if known.get(name) is not None
    ]
    settings = [precision_name(provenance), f"attention {provenance['attention']}", *limits]
    settings += [f"template mode {provenance['template_mode']}", f"seed {provenance['seed']}"]
    return (
        "tau: tokens per verify step, mean over answers; speed-up: over plain decoding in the same run, without the "
        f"prompt's forward; brackets: 95% interval over prompts. `{provenance['command']}`: {', '.join(settings)}. "
        f"{plain_text(provenance['versions'])}; {plain_text(provenance['hardware'])}. Prompts "
        f"`{provenance['prompts_sha256'][:16]}` (SHA-256)."
    )


def card_for_upload(text: str, repo_id: str, results: str | None = None) -> str:
    """The card with the repository's name, and with `results` in place of its section "Results" if given.

    Raises:
        ValueError: If a reader could not find the drafter by its card, or a part of it was never filled in.
    """
    text = text.replace(_REPOSITORY, repo_id)
    if results is not None:
        text, count = _RESULTS_SECTION.subn(lambda _: f"{results.strip()}\n\n", text)
        if count != 1:
            raise ValueError(
                f"README.md has {count} sections `## Results`; exactly one is needed to put results there."
            )
    data = ModelCard(text).data.to_dict()
    problems = [f"it still says {words!r}" for words in _UNFINISHED if words in text]
    blanks = set(re.findall(r"\$\w+", _TEMPLATE.read_text(encoding="utf-8")))
    problems += [f"it still says `{blank}`" for blank in sorted(blanks) if re.search(rf"{re.escape(blank)}\b", text)]
    base_models = data.get("base_model") or ""
    for base_model in base_models if isinstance(base_models, list) else [base_models]:
        if not _HUB_ID.fullmatch(base_model) or Path(base_model).exists():
            problems.append(f"`base_model` is {base_model!r}, not the Hub id of the target, such as 'org/name'")
    if not data.get("license"):
        problems.append("it names no `license`")
    if "dflash" not in (data.get("tags") or []):
        problems.append("its `tags` lack 'dflash'")
    if problems:
        raise ValueError(f"The model card README.md is not ready for the Hub: {'; '.join(problems)}. Edit it first.")
    return text
